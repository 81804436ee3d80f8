"""Attention: project, rotate and store, attend over the paged cache, project back.

                 +-> q (norm, rope) ------------------+
    x -> qkv ----+-> k (norm, rope) -> KV cache --+   v
                 +-> v --------------> KV cache --+-> attention(plan) -> o_proj

Invariant: a step's own K and V are written before anything attends, and attention reads K and V from the
cache alone: it makes no difference whether a position was computed now, earlier or by another sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nanoapc.kernels import Kernels
from nanoapc.layers import Layer
from nanoapc.layers.linear import Linear
from nanoapc.layers.norm import RMSNorm

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan
    from nanoapc.models.config import ModelConfig


class Attention(Layer):
    """Grouped-query attention with rotary positions and, where the model has it, q/k norm."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, (q_size, kv_size, kv_size), config.qkv_bias)
        self.o_proj = Linear(q_size, (config.hidden_size,), config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, kernels) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, kernels) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.kernels = kernels

    def forward(self, x: Tensor, cos_sin: Tensor, kv_cache: Tensor, plan: AttentionPlan) -> Tensor:
        """x [T, hidden_size] -> the same; writes this layer's kv_cache [NB, 2, Hkv, B, D] at `plan.slots`."""
        qkv = self.qkv_proj(x)  # [T, (H + 2 * Hkv) * D]
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        q = self.kernels.rope_and_store(qkv, plan.positions, cos_sin, q_norm, k_norm, self.eps, kv_cache, plan.slots)
        out = self.kernels.attention(q, kv_cache, plan, self.scale)  # [T, H, D]
        return self.o_proj(out.flatten(1))
