"""Rotary position embedding: from a model's rope parameters to one table of cosines and sines.

    table [max_len, D] float32      row p:  cos(p * f_0) ... cos(p * f_{D/2-1}) | sin(p * f_0) ...

Invariant: a row depends on its position alone, never on how long a sequence is, so cached keys stay right
while a sequence grows; rope types that break this ("dynamic", "longrope") are refused. The values are
those of transformers 5, bit for bit in float32.

Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "attention_factor", "original_max_position_embeddings"),
}
"""The supported rope types and the numbers that each needs."""


@dataclass(frozen=True)
class RopeConfig:
    """The rope parameters of a model, in transformers' names.

    original_max_position_embeddings  the context length before `factor` stretched it (llama3, yarn)
    attention_factor                  scales cosines and sines (yarn; 1 for the other types)
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    original_max_position_embeddings: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RopeConfig:
        """Reads both spellings of config.json: rope_theta + rope_scaling (4), or rope_parameters (5).

        Raises:
            ValueError: an unsupported rope type, partial or per-layer rotation, a missing or bad number.
        """
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        params = {"rope_theta": raw.get("rope_theta", 10000.0)}
        params |= {key: value for key, value in given.items() if value is not None}
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if any(isinstance(value, Mapping) for value in params.values()):
            raise ValueError(f"rope parameters for each layer type are not supported: {params}")
        if rope_type not in REQUIRED:
            raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(REQUIRED)}")
        if (partial := params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")

        max_positions, original = raw["max_position_embeddings"], "original_max_position_embeddings"
        params[original] = raw.get(original) or params.get(original) or max_positions
        if rope_type == "yarn":
            params.setdefault("factor", max_positions / _positive(params, original, rope_type))
            factor = _positive(params, "factor", rope_type)
            params.setdefault("attention_factor", _yarn_attention_factor(factor, params))
        needed = ("rope_theta", *REQUIRED[rope_type])
        optional = tuple(key for key in ("beta_fast", "beta_slow") if rope_type == "yarn" and params.get(key))
        numbers: dict[str, Any] = {key: _positive(params, key, rope_type) for key in needed + optional}
        return cls(rope_type, truncate=params.get("truncate", True), **numbers)


def _positive(params: Mapping[str, Any], key: str, rope_type: str) -> float:
    value = params.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"rope type {rope_type!r} needs a positive number {key!r}, got {value!r}")
    return value


def _yarn_attention_factor(factor: float, params: Mapping[str, Any]) -> float:
    """YaRN's temperature of the attention scores, as a factor on cosines and sines (section 3.4)."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return temperature(params["mscale"]) / temperature(params["mscale_all_dim"])
    return temperature(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions: [head_dim / 2] float32, from fast to slow."""
    periods = rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return 1.0 / periods / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, 1.0 / periods)
    if rope.rope_type == "yarn":
        return _yarn(rope, periods, head_dim)
    return 1.0 / periods


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow pairs are stretched by `factor`, fast ones stay, those between are blended."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    fast, slow = wavelengths < original / high, wavelengths > original / low
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def _yarn(rope: RopeConfig, periods: Tensor, head_dim: int) -> Tensor:
    """As llama3, with a blend linear in the pair's index, between beta_fast and beta_slow turns."""

    def pair_with_turns(turns: float) -> float:
        """The (fractional) index of the pair that turns so often within the original context."""
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    first, last = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep


def cos_sin_table(rope: RopeConfig, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """[max_len, head_dim] float32: cosines, then sines, of each position, times the attention factor."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor).to(device)
