"""GatedMLP: the feed-forward half of a layer, down(silu(gate(x)) * up(x)).

Invariant: gate and up are one product, gate's rows first, as `Kernels.pack_linear` expects them.
"""

from __future__ import annotations

from torch import Tensor

from nanoapc.layers import Layer
from nanoapc.layers.linear import Linear


class GatedMLP(Layer):
    """SwiGLU feed-forward; `bias` applies to all three projections."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, (intermediate_size, intermediate_size), bias, gated=True)
        self.down_proj = Linear(intermediate_size, (hidden_size,), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.down_proj(self.gate_up_proj(x))
