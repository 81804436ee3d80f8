"""EngineConfig: every knob of the engine, its default and its check.

Invariant: an EngineConfig that exists is valid in itself; what depends on the model (lengths, memory) is settled by
`LLM` when the model is known. Unknown names are an error that suggests the nearest known one; what vLLM knows and this
engine does not is in vllm_arguments.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoapc.vllm_arguments import changes_nothing

HASH_ALGORITHMS = ("xxhash", "xxhash_cbor", "sha256", "sha256_cbor")
SCHEDULE_POLICIES = ("prefix", "fcfs")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "dummy")
ALIASES = {"dtype": DTYPE_ALIASES, "load_format": {"safetensors": "auto"}}
MAX_NUM_SEQS = 2**16
"""Each has a row in the table of what runs, as long as the longest sequence, and they share a step's token budget."""
FILES = ("prefix_cache_file", "metrics_file", "trace")


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `LLM`, as vLLM names them.

    model: a directory, or a name on the Hugging Face hub.
    tokenizer: the same for the tokenizer; None takes the model's.
    dtype: of weights and KV cache; "auto" keeps the checkpoint's.
    device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1".
    seed: the root of all random draws of requests that bring no seed of their own.
    max_model_len: tokens a sequence may hold, prompt and output; None takes the model's limit.
    max_num_seqs: sequences that run at once, at most.
    max_num_batched_tokens: the token budget of a step; None: 2048 on the CPU, 8192 on CUDA.
    block_size: tokens a KV block.
    num_kv_blocks: size of the KV cache in blocks; None: from kv_cache_memory_bytes.
    kv_cache_memory_bytes: size of the KV cache in bytes; None: a share of what is free (see `engine/kv_memory.py`).
    gpu_memory_utilization: share of a GPU's memory that this process may use.
    enable_prefix_caching: reuse the KV of equal prefixes, within a call and between calls.
    prefix_caching_hash_algo: how a block's key is made (see `engine/block_hash.py`).
    prefix_cache_file: where cached prefixes outlive the process: read at the start if it exists, written by `close`,
        which also runs when the program ends (see `engine/prefix_store.py`). It holds prompts as they are.
    schedule_policy: "prefix" runs a batch in the order of its prefix tree, "fcfs" in the order given.
    enable_forest_attention: read a shared prefix once for all rows that share it.
    deterministic: the same bits whatever the batch, on CUDA, too; costs time there (see `kernels/cuda.py`). On the CPU
        it is so in any case.
    enforce_eager: no CUDA graphs: every step is launched kernel by kernel (see `engine/cuda_graphs.py`).
    async_scheduling: start a step before the results of the one before are known, so that the device never waits for
        the host; None: on CUDA. Results are the same. Off while a trace or the debug log is written.
    metrics_file: keep the metrics in this file, in Prometheus' text format (see `engine/metrics.py`).
    trace: write what happens to every block to this file, one JSON line a step (see `engine/events.py`).
    load_format: "auto" reads the weights, "dummy" makes random ones (only config.json is needed).
    trust_remote_code: let the tokenizer run code from its directory.
    skip_tokenizer_init: no tokenizer at all: prompts and outputs are token ids.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "xxhash"
    prefix_cache_file: str | None = None
    schedule_policy: str = "prefix"
    enable_forest_attention: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    metrics_file: str | None = None
    trace: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False

    @classmethod
    def from_arguments(cls, model: str | os.PathLike[str], **arguments: Any) -> EngineConfig:
        """Checks the names and the values; ValueError names the argument, the value and what is allowed.

        None stands for an argument's default.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in arguments.items():
            if name not in known and not changes_nothing(name, value):
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known arguments: {', '.join(sorted(known))}"
                raise ValueError(f"LLM got an unknown argument {name!r}; {hint}")
        arguments = {name: value for name, value in arguments.items() if name in known and value is not None}
        for name, spellings in ALIASES.items():
            if name in arguments:
                word = str(arguments[name]).removeprefix("torch.")
                arguments[name] = spellings.get(word, word)
        arguments["model"] = model
        for name, value in arguments.items():
            if isinstance(value, os.PathLike):
                arguments[name] = os.fspath(value)
            elif isinstance(value, np.integer):
                arguments[name] = int(value)
        return cls(**arguments)

    def __post_init__(self) -> None:
        self._check_choice("dtype", DTYPES)
        self._check_choice("prefix_caching_hash_algo", HASH_ALGORITHMS)
        self._check_choice("schedule_policy", SCHEDULE_POLICIES)
        self._check_choice("load_format", LOAD_FORMATS)
        for name in ("max_num_seqs", "block_size"):
            self._check_int(name, optional=False)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(
                f"max_num_seqs must be at most {MAX_NUM_SEQS}, not {self.max_num_seqs}; "
                "lower it: any number of requests may wait for their turn"
            )
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_memory_bytes"):
            self._check_int(name, optional=True)
        self._check_int("seed", optional=False, least=-(2**63), most=2**64 - 1)
        for field in dataclasses.fields(self):
            value, optional = getattr(self, field.name), field.type == "bool | None"
            if (field.type == "bool" or optional) and not (isinstance(value, bool) or (optional and value is None)):
                raise ValueError(f"{field.name} must be True or False{' or None' * optional}, not {value!r}")
        self._check_files()
        if self.prefix_cache_file is not None and not self.enable_prefix_caching:
            raise ValueError(
                f"prefix_cache_file={self.prefix_cache_file!r} needs the cache; leave out enable_prefix_caching=False"
            )
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], not {utilization!r}")
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if (value is not None or name == "model") and (not isinstance(value, str) or not value):
                given = "empty" if value == "" else repr(value)
                raise ValueError(f"{name} is {given}; give a directory or a hub name such as 'Qwen/Qwen3-0.6B'")

    def _check_files(self) -> None:
        users: dict[str, str] = {}
        for name in FILES:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value or "\0" in value:
                raise ValueError(f"{name} must be the name of a file or None, not {value!r}")
            if (other := users.setdefault(os.path.realpath(value), name)) != name:
                raise ValueError(f"{name} and {other} are the same file {value!r}; give each its own")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")

    def _check_int(self, name: str, optional: bool, least: int = 1, most: int = 2**62) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = "a positive whole number" if least == 1 else "a whole number of at most 64 bits"
            raise ValueError(f"{name} must be {kind}{' or None' if optional else ''}, not {value!r}")
