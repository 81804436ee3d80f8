"""ModelConfig: what the engine needs to know of config.json and generation_config.json.

Read by hand from the JSON, in the spellings of transformers 4 and 5: every key that matters is seen here.
Invariant: a ModelConfig describes a model that runs here as it does in transformers; what would make it
differ (quantisation, sliding windows, unknown activations or rope types) is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanoapc.config import DTYPE_ALIASES
from nanoapc.layers.rotary import read_rope
from nanoapc.models.checkpoint import check_directory, read_headers, read_json, tensor_files
from nanoapc.models.registry import find_family

COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What transformers takes for keys that config.json lacks; `config_defaults` has those of one family alone."""
NULL_IS_A_VALUE = ("num_key_value_heads", "head_dim", "sliding_window", "eos_token_id")
"""Keys for which null says something; any other that is null counts as missing."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json -> the fields of SamplingParams that they are about."""
KINDS = {
    **dict.fromkeys(("architectures", "layer_types"), list),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), bool),
    "max_window_layers": int,
}
"""What some keys hold unless they are missing or null. ("false" in quotes would count as true.)"""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Sizes count elements, `max_position_embeddings` counts tokens.

    dtype               of weights and KV cache: the caller's wish, else config.json's, else the first tensor's
    eos_token_ids       the ids that end a text: generation_config.json's, else config.json's
    suggested_sampling  fields of SamplingParams for requests that bring none: generation_config.json's
    vocab_size          rows of the embedding and of the head; may exceed what the tokenizer knows
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    suggested_sampling: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the repr is of what computes

    @property
    def max_len(self) -> int:
        """Tokens that a sequence may have.

        Configs with linear or YaRN rope often leave `max_position_embeddings` at the length before it was stretched.
        """
        stretched = self.rope["rope_type"] in ("linear", "yarn")  # llama3's factor says nothing about lengths
        factor = self.rope["factor"] if stretched else 0
        return max(self.max_position_embeddings, int(self.rope["original_max_position_embeddings"] * factor))

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def from_directory(cls, directory: str | Path, dtype: str = "auto") -> ModelConfig:
        """Reads a model directory; its weights are needed only for a dtype that neither `dtype` nor config.json names.

        Raises:
            ValueError: no model directory, or a model that is not supported; names file, key and value.
        """
        directory = Path(directory)
        check_directory(directory)
        raw = read_json(directory / "config.json")
        file = directory / "generation_config.json"
        generation = read_json(file) if file.exists() else {}
        sampling = {SAMPLING[key]: generation[key] for key in SAMPLING if generation.get(key) is not None}
        if generation.get("eos_token_id") is not None:
            with _naming(file):
                raw["eos_token_id"] = list(_token_ids(generation["eos_token_id"]))
        with _naming(directory / "config.json"):
            config = cls.from_json(raw, _stored_dtype(directory, raw) if dtype == "auto" else DTYPES[dtype])
        return replace(config, suggested_sampling=sampling)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], dtype: torch.dtype) -> ModelConfig:
        """The config for a parsed config.json."""
        for key, kind in KINDS.items():
            if raw.get(key) is not None and type(raw[key]) is not kind:
                raise ValueError(f"{key} must be a {kind.__name__} or null, got {raw[key]!r}")
        family = find_family(raw)
        given = {key: value for key, value in raw.items() if value is not None or key in NULL_IS_A_VALUE}
        raw = {**COMMON_DEFAULTS, **family.config_defaults, **given}
        hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        num_layers = _size(raw, "num_hidden_layers")
        variant = family.variant(raw)._asdict()
        _refuse_unsupported(raw, variant.pop("sliding_window"))
        num_kv_heads = num_heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads")
        head_dim = hidden_size // num_heads if raw.get("head_dim") is None else _size(raw, "head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        eps = raw["rms_norm_eps"]
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
            raise ValueError(f"rms_norm_eps must be a positive number, got {eps!r}")
        if head_dim % 2 or head_dim == 0:
            raise ValueError(f"head_dim must be a positive even number (rotary embeddings need pairs), got {head_dim}")
        return cls(
            architecture=family.__name__,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(eps),
            max_position_embeddings=_size(raw, "max_position_embeddings"),
            rope=read_rope(raw),
            tie_word_embeddings=raw["tie_word_embeddings"],
            dtype=dtype,
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            **variant,
        )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """A ValueError raised within names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _stored_dtype(directory: Path, raw: Mapping[str, Any]) -> torch.dtype:
    """What a checkpoint is stored in: config.json's word for it, else the first tensor's dtype."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "auto"
    if name == "auto":
        first, file = min(tensor_files(directory).items())
        name = read_headers({first: file})[first][1]
    name = str(name).removeprefix("torch.")
    if (name := DTYPE_ALIASES.get(name, name)) not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; pass dtype=... to convert it to {', '.join(DTYPES)}")
    return DTYPES[name]


def _refuse_unsupported(raw: Mapping[str, Any], sliding_window: int | None) -> None:
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise ValueError(f"quantised checkpoints are not supported, use the unquantised model ({key}: {raw[key]})")
    others = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if sliding_window is not None or "sliding_attention" in others:
        raise ValueError(f"sliding-window attention is not supported (sliding_window: {raw.get('sliding_window')})")
    if others:
        raise ValueError(f"layer_types has {others[0]!r}, which is not supported; only 'full_attention' is")
    if raw.get("is_causal") is False:
        raise ValueError("is_causal: false is not supported; a text is generated from what stands before")
    if raw["hidden_act"] not in ("silu", "swish"):
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive whole number, got {value!r}")
    return value


def _token_ids(eos: Any) -> tuple[int, ...]:
    """Nothing, one id or a list of them -> the ids in order, each once."""
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
    return tuple(dict.fromkeys(ids))
