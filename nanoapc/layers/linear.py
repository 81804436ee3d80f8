"""Linear: a projection whose weight the kernels may keep in a form of their own.

    declared (shape only) -> loaded (weight in memory) -> packed (the kernels own it) -> loaded -> packed ...

Invariant: a Linear holds at most one copy of its weight. `pack` hands the weight to the kernels and leaves
its shape behind, so that a new weight is checked and loaded like the first.

Several projections of one input are merged into one product (q, k, v; gate, up): `output_sizes` are the rows
of each part, in order.
"""

from __future__ import annotations

from torch import Tensor

from nanoapc.kernels import Kernels, PackedLinear
from nanoapc.layers import Layer, declare_parameter


class Linear(Layer):
    """y = x W^T + b, with W [sum(output_sizes), in_features].

    Args:
        in_features: columns of the weight.
        output_sizes: rows of each merged part, in order; one entry for a plain projection.
        bias: whether there is a bias [sum(output_sizes)].
        gated: the outputs' first half gates the second: silu(first) * second is what comes out.
    """

    def __init__(self, in_features: int, output_sizes: tuple[int, ...], bias: bool, gated: bool = False):
        super().__init__()
        self.gated = gated
        self.output_sizes = output_sizes
        self.weight = declare_parameter(sum(output_sizes), in_features)
        self.bias = declare_parameter(sum(output_sizes)) if bias else None
        self._packed: PackedLinear | None = None

    def pack(self, kernels: Kernels) -> None:
        """Hands the loaded weight and bias to the kernels; the parameters keep shapes without memory."""
        bias = None if self.bias is None else self.bias.data
        self._packed = kernels.pack_linear(self.weight.data, bias, self.gated)
        self.weight = declare_parameter(*self.weight.shape)
        if self.bias is not None:
            self.bias = declare_parameter(*self.bias.shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, sum(output_sizes)], half as wide if gated."""
        assert self._packed is not None, "pack() comes before forward()"
        return self._packed(x)
