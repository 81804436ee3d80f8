"""Qwen2 (and 2.5): q, k and v have a bias though no key of config.json says so; o has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoapc.models.decoder import CausalLM, Variant


def qwen_sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The window, if any layer uses it: Qwen configs carry one that `use_sliding_window` turns off."""
    first_layer = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
    used = raw.get("use_sliding_window") and first_layer < raw["num_hidden_layers"]
    return raw.get("sliding_window", 4096) if used else None


class Qwen2ForCausalLM(CausalLM):
    """Llama's shape with q/k/v biases."""

    model_type = "qwen2"

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        return Variant(qkv_bias=True, sliding_window=qwen_sliding_window(raw))
