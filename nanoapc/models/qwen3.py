"""Qwen3: q and k are normalised per head before rope; heads are 128 wide unless the config says more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoapc.models.decoder import CausalLM, Variant
from nanoapc.models.qwen2 import QWEN_DEFAULTS, qwen_sliding_window


class Qwen3ForCausalLM(CausalLM):
    """`attention_bias` covers q, k, v and o, as in Llama."""

    model_type = "qwen3"
    config_defaults: ClassVar[dict[str, Any]] = {**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False}

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        bias, window = raw["attention_bias"], qwen_sliding_window(raw)
        return Variant(qkv_bias=bias, output_bias=bias, qk_norm=True, sliding_window=window)
