"""RMSNorm, fused with the residual connection that comes before it.

Invariant: the residual stream is only ever added to, in the model's dtype; norms read it and never change it.
"""

from __future__ import annotations

from torch import Tensor

from nanoapc.kernels import Kernels
from nanoapc.layers import Layer, declare_parameter


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension, with weight [size]."""

    def __init__(self, size: int, eps: float, kernels: Kernels):
        super().__init__()
        self.weight = declare_parameter(size)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual); without a residual (norm(x), x)."""
        return self.kernels.rms_norm(x, residual, self.weight, self.eps)
