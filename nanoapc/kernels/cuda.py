"""TritonKernels: the kernels for CUDA devices; also in Triton's interpreter, on the CPU.

Invariant: attention's bits of a row depend on that row and its KV alone, within one `Shape`. With deterministic=True
one shape serves all, products have one configuration for each weight, and so do the bits of everything.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.engine.attention_plan import SPAN
from nanoapc.kernels import PackedLinear
from nanoapc.kernels.attention_work import PROGRAMS_PER_SM, AttentionWork, TileCutter
from nanoapc.kernels.reference_sampling import argmax
from nanoapc.kernels.triton_attention import Shape, attention_shape, launch_attention
from nanoapc.kernels.triton_elementwise import copy_blocks, fixed_linear, rms_norm, rope_and_store, silu_and_mul
from nanoapc.kernels.triton_sampling import gumbel_argmax, keep_top, largest, logprobs

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan


class TritonKernels:
    """The Triton kernels; see the protocol `Kernels` for shapes and dtypes (bfloat16, float16 or float32).

    Args:
        capability: compute capability of the device, 80 for 8.0; picks the tile shapes.
        num_sms: its multiprocessors; how finely long KV ranges are split.
        deterministic: a row's result never depends on the other rows of its step. Costs time: decode runs in the
            tiles of prefill, and products in the one tile of `fixed_linear` instead of the library's best.
    """

    max_tile_rows = 1 << 20  # `TileCutter` cuts them to the shapes it has
    copy_blocks = staticmethod(copy_blocks)
    rms_norm = staticmethod(rms_norm)
    rope_and_store = staticmethod(rope_and_store)
    argmax = staticmethod(argmax)
    gumbel_argmax = staticmethod(gumbel_argmax)
    keep_top = staticmethod(keep_top)
    largest = staticmethod(largest)
    logprobs = staticmethod(logprobs)

    def __init__(self, capability: int = 80, num_sms: int = 108, deterministic: bool = False):
        self.capability = capability
        self.num_sms = num_sms
        self.deterministic = deterministic
        self.name = f"triton sm_{capability}" + ", deterministic" * deterministic
        self._prepared: tuple[AttentionPlan, AttentionWork] | None = None
        self._cutter = TileCutter(1, 1, 1)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedLinear:
        linear = fixed_linear(weight, bias) if self.deterministic else partial(F.linear, weight=weight, bias=bias)
        return (lambda x: silu_and_mul(linear(x))) if gated else linear

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        work = plan.work
        if work is None:
            if self._prepared is None or self._prepared[0] is not plan:
                self._prepared = plan, self.prepare(q, kv_cache, plan)
            work = self._prepared[1]
        return launch_attention(q.contiguous(), kv_cache, plan, work, scale, self._shapes(q, kv_cache))

    def prepare(
        self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, capacity: tuple[int, ...] | None = None
    ) -> AttentionWork:
        """Cuts a plan for `attention`, which does so itself when it meets a plan without work that is not the last one.

        To capture a graph, give a capacity (see `AttentionWork`) and make the result the plan's work. Before a replay,
        fill the plan's tensors with the step's arrays and the work's buffer with what `pack` makes of its tiles. Of q
        and kv_cache only shapes count.
        """
        num_kv_heads = kv_cache.shape[2]
        cutting = (q.shape[1] // num_kv_heads, self._shapes(q, kv_cache)[1].rows, self.num_sms / num_kv_heads)
        if capacity is not None:
            return AttentionWork.build(plan, TileCutter(*cutting), capacity)
        self._cutter = self._cutter if self._cutter.cutting == cutting else TileCutter(*cutting)
        return AttentionWork.build(plan, self._cutter)

    def decode_capacities(self, num_rows: int, num_kv_heads: int, max_len: int, shared: bool) -> list[tuple[int, ...]]:
        """Capacities worth a graph of their own for decode steps of `num_rows` rows, the smallest first.

        A program without an item still costs its launch, so rows that need no splitting get no spare places. Very long
        ranges need more than the largest capacity; such a step is bound by reading them, and may run eagerly.
        """
        programs = int(self.num_sms * PROGRAMS_PER_SM / num_kv_heads)
        most = num_rows * -(-max_len // SPAN)  # each span an item of its own
        sizes = sorted({num_rows + min(most, spare * programs) for spare in (2, 24)})
        parts = min(most + num_rows, 16 * num_rows + sizes[-1])
        capacities: list[tuple[int, ...]] = [(num_rows, 0, 0, 0)]
        capacities += [(size, 0, num_rows, size) for size in sizes]
        if shared and num_rows > 1:
            capacities += [(size, min(most, programs), num_rows, parts) for size in sizes]
        return capacities

    def _shapes(self, q: Tensor, kv_cache: Tensor) -> tuple[Shape, Shape]:
        """For narrow items and for wide ones."""
        about = (q.dtype, q.shape[2], q.shape[1] // kv_cache.shape[2], self.capability)
        return attention_shape(self.deterministic, *about), attention_shape(True, *about)


def cuda_kernels(device: torch.device, deterministic: bool = False) -> TritonKernels:
    """TritonKernels for a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonKernels(10 * major + minor, num_sms, deterministic)
