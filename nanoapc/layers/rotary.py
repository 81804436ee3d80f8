"""Rotary position embedding: from a model's rope parameters to one table of cosines and sines.

    table [max_len, D] float32      row p:  cos(p * f_0) ... cos(p * f_{D/2-1}) | sin(p * f_0) ...

Invariant: a row depends on its position alone, never on how long a sequence is, so cached keys stay right
while a sequence grows; rope types that break this ("dynamic", "longrope") are refused. How a type stretches the
frequencies is transformers' own code, so the values are its, bit for bit in float32.

Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The supported rope types and the numbers that each needs."""
OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Numbers that YaRN may have, where 0 is the same as none."""
MAX_LEN = 2**24
"""Positions that a table can have: from here on float32 does not tell neighbours apart."""


def read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of a config.json in the spelling of transformers 5, with "rope_type" and all that it needs.

    Where a file has both spellings the older one, rope_scaling, counts alone, as in transformers.

    Raises:
        ValueError: an unsupported rope type, partial or per-layer rotation, a missing or bad number.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = {"rope_theta": raw.get("rope_theta", 10000.0)}
    rope |= {key: value for key, value in given.items() if value is not None and (value or key not in OPTIONAL)}
    rope_type = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if not isinstance(rope_type, str):
        raise ValueError(f"rope_type must be a text, got {rope_type!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope parameters for each layer type are not supported: {rope}")
    if rope_type not in REQUIRED:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(REQUIRED)}")
    if (partial := rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    if not isinstance(rope.get("truncate", True), bool):
        raise ValueError(f"truncate must be true or false, got {rope['truncate']!r}")

    max_positions, original = raw["max_position_embeddings"], "original_max_position_embeddings"
    rope[original] = raw.get(original) or rope.get(original) or max_positions
    numbers = (
        "rope_theta",
        original,
        *REQUIRED[rope_type],
        *(key for key in ("attention_factor", *OPTIONAL) if key in rope),
    )
    for key in numbers:
        if key == "factor" and rope_type == "yarn":
            rope.setdefault("factor", max_positions / rope[original])
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"rope type {rope_type!r} needs a positive number {key!r}, got {value!r}")
    return {key: rope[key] for key in ("rope_type", "truncate", *numbers) if key in rope}


def cos_sin_table(rope: Mapping[str, Any], head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """[max_len, head_dim] float32: cosines, then sines, of each position, times YaRN's attention factor.

    ValueError for a max_len beyond MAX_LEN.
    """
    if max_len > MAX_LEN:
        raise ValueError(
            f"max_model_len={max_len} (without one: config.json's max_position_embeddings) is more than the {MAX_LEN} "
            "positions that float32 tells apart; pass a smaller max_model_len"
        )
    with torch.device("cpu"):  # whatever PyTorch's default device is
        if rope["rope_type"] == "default":
            periods = rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
            # The angle per position of each pair of dimensions, from fast to slow.
            frequencies, scale = 1.0 / periods, 1.0
        else:
            from transformers import LlamaConfig  # here: it takes seconds
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            config = LlamaConfig(head_dim=head_dim)
            config.rope_parameters = dict(rope)
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scale).to(device)
