"""Llama, and what is built like it (TinyLlama, SmolLM2): biases only where config.json asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoapc.models.decoder import CausalLM, Variant


class LlamaForCausalLM(CausalLM):
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""

    model_type = "llama"
    config_defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }

    @classmethod
    def variant(cls, raw: Mapping[str, Any]) -> Variant:
        bias = raw["attention_bias"]
        return Variant(qkv_bias=bias, output_bias=bias, mlp_bias=raw["mlp_bias"])
