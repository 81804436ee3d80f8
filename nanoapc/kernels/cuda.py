"""TritonKernels: the kernels for CUDA devices; also in Triton's interpreter, on the CPU.

Invariant: attention's bits of a row depend on that row and its KV alone, within one `Shape`. With deterministic=True
one shape serves all, products have one configuration for each weight, and so do the bits of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.kernels.triton_attention import (
    PROGRAMS_PER_SM,
    AttentionWork,
    Shape,
    attention_shape,
    launch_attention,
)
from nanoapc.kernels.triton_elementwise import copy_blocks, fixed_linear, rms_norm, rope_and_store, silu_and_mul
from nanoapc.kernels.triton_sampling import gumbel_argmax

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

    name = "triton"

    def __init__(self, capability: int = 80, num_sms: int = 108, deterministic: bool = False):
        self.capability = capability
        self.num_sms = num_sms
        self.deterministic = deterministic
        self.copy_blocks: Callable[[Tensor, Sequence[tuple[int, int, int]]], None] = copy_blocks
        self.silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
        self.rope_and_store: Callable[..., Tensor] = rope_and_store
        self.gumbel_argmax: Callable[[Tensor, Tensor, Tensor], Tensor] = gumbel_argmax
        self._prepared: tuple[AttentionPlan, AttentionWork] | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """weight [out, in], bias [out] -> a function from x [T, in] to [T, out]."""
        if self.deterministic:
            return fixed_linear(weight, bias)
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, h] -> x / rms(x) * weight."""
        return rms_norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual [T, h] -> (rms_norm(x + residual), x + residual)."""
        return rms_norm(x, residual, weight, eps)

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q [T, H, D], kv_cache [NB, 2, Hkv, B, D] -> [T, H, D]."""
        (num_heads, head_dim), num_kv_heads = q.shape[1:], kv_cache.shape[2]
        if self._prepared is None or self._prepared[0] is not plan:
            self.prepare(plan, num_heads, num_kv_heads, head_dim, q.dtype)
        assert self._prepared is not None
        shapes = self._shapes(num_heads // num_kv_heads, head_dim, q.dtype)
        return launch_attention(q.contiguous(), kv_cache, plan, self._prepared[1], scale, shapes)

    def prepare(
        self,
        plan: AttentionPlan,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        capacity: tuple[int, int, int] | None = None,
    ) -> AttentionWork:
        """Cuts a plan for `attention`, which does so itself when it meets a plan other than the last.

        To capture a graph, give the capacity and keep the result; before a replay, put the step's arrays into the
        plan's tensors and its tiles into `AttentionWork.refill`.
        """
        group = num_heads // num_kv_heads
        wide_rows = self._shapes(group, head_dim, dtype)[1].rows
        work = AttentionWork.build(plan, (group, wide_rows, self.num_sms * PROGRAMS_PER_SM / num_kv_heads), capacity)
        self._prepared = plan, work
        return work

    def _shapes(self, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        """For narrow items and for wide ones."""
        wide = attention_shape(True, dtype, head_dim, group, self.capability)
        return (wide if self.deterministic else attention_shape(False, dtype, head_dim, group, self.capability)), wide


def cuda_kernels(device: torch.device, deterministic: bool = False) -> TritonKernels:
    """TritonKernels for a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonKernels(10 * major + minor, num_sms, deterministic)
