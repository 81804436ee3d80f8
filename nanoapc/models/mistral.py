"""Mistral: Llama without biases, with a sliding window unless config.json sets it to null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoapc.models.decoder import CausalLM, Variant


class MistralForCausalLM(CausalLM):
    """A config.json without `sliding_window` means a window of 4096, one without `num_key_value_heads` 8 of them."""

    model_type = "mistral"
    config_defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "eos_token_id": 2,
        "sliding_window": 4096,
    }

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        return Variant(sliding_window=raw["sliding_window"])
