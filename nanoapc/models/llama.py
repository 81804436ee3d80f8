"""Llama, and what is built like it (TinyLlama, SmolLM2): biases only where config.json asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoapc.models.decoder import CausalLM, Variant


class LlamaForCausalLM(CausalLM):
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""

    model_type = "llama"

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        bias = bool(raw.get("attention_bias"))
        return Variant(qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias")))
