"""Mistral: Llama without biases, with a sliding window unless config.json sets it to null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoapc.models.decoder import CausalLM, Variant


class MistralForCausalLM(CausalLM):
    """A config.json without `sliding_window` means a window of 4096, as in transformers."""

    model_type = "mistral"
    config_defaults: ClassVar[dict[str, int]] = {"sliding_window": 4096}

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        return Variant(sliding_window=raw["sliding_window"])
