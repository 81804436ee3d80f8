"""Qwen2 (and 2.5): q, k and v have a bias though no key of config.json says so; o has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoapc.models.decoder import CausalLM, Variant

QWEN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The window, if any layer uses it: Qwen configs carry one that `use_sliding_window` turns off."""
    used = raw["use_sliding_window"] and raw["max_window_layers"] < raw["num_hidden_layers"]
    return raw["sliding_window"] if used else None


class Qwen2ForCausalLM(CausalLM):
    """Llama's shape with q/k/v biases."""

    model_type = "qwen2"
    config_defaults: ClassVar[dict[str, Any]] = QWEN_DEFAULTS

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        return Variant(qkv_bias=True, sliding_window=qwen_sliding_window(raw))
