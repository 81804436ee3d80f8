"""Attention over the tiles of a plan, in Triton: prefill, chunks, decode, split decode, shared prefixes - one kernel.

A program takes an item: some rows of a tile and a part of its KV range, for one KV head. The query heads that
share this head lie in the rows of one matrix tile, so that its K and V are read once for all of them:

    matrix row     0        1        2        3        4        5
    query row      0        0        1        1        2        2      a group of 2 query heads
    query head     2h       2h + 1   2h       2h + 1   2h       2h + 1

A row whose range is one item gets its result at once. The others leave partial states (peak, mass, acc), and a
second kernel folds them in ascending order:

    positions   0             F           F + 256     F + 512
    parts       | 0: any span | 1: a span | 2: a span | ...        out = fold(fold(fold(0, 1), 2), ...) / mass

Invariant (absolute spans): whatever the cuts, a row's result is state(span 0), then span 1 folded into it, then
span 2, ... Only a part that starts at position 0 holds several spans: it folds them itself, in that order and with
the same instructions. So tiles, splits and neighbours change nothing; only another `Shape` may.

Sources: "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581) for packing a group and splitting by context
length; FlashAttention-2 (arXiv 2307.08691); cascade inference (FlashInfer) for the merge.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoapc.engine.attention_plan import SPAN, AttentionPlan
from nanoapc.kernels.attention_work import NARROW_ROWS, AttentionWork

LOG2_E = 1.4426950408889634


class Shape(NamedTuple):
    """rows x positions that a program works on at once, warps, and tiles of K and V that are in flight (+ 1)."""

    rows: int
    positions: int
    warps: int
    stages: int


# Padded head size (0: float32 of any) -> narrow; wide on sm_80 (163 KiB of shared memory), on sm_90 (227 KiB).
# Narrow (decode) is bound by reading K and V: few rows, two programs or more on a multiprocessor, their tiles of K
# and V in flight. Wide (prefill, shared prefixes) is bound by the matrix unit: 128 rows use a tile of K 128 times; the
# state is there twice (span and row), so a head of 256 has to halve the tile to stay in the registers.
# float32 is for checking, not for speed: exact products, no matrix unit, tiles that fit every head.
_SHAPES = {
    64: (Shape(NARROW_ROWS, 64, 4, 4), Shape(128, 64, 8, 3), Shape(128, 64, 8, 3)),
    128: (Shape(NARROW_ROWS, 32, 4, 4), Shape(128, 64, 8, 3), Shape(128, 64, 8, 3)),
    256: (Shape(NARROW_ROWS, 32, 4, 3), Shape(64, 32, 8, 3), Shape(64, 64, 8, 2)),
    0: (Shape(NARROW_ROWS, 16, 4, 3), Shape(32, 16, 8, 2), Shape(32, 16, 8, 2)),
}


def attention_shape(wide: bool, dtype: torch.dtype, head_dim: int, group: int, capability: int) -> Shape:
    """The shape for a device of compute capability 8.0 (80) or 9.0 (90) and up; all heads of a group fit in."""
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim}: the CUDA kernels take at most 256; run this model on the CPU")
    shapes = _SHAPES[0 if dtype is torch.float32 else max(64, triton.next_power_of_2(head_dim))]
    shape = shapes[wide * (1 + (capability >= 90))]
    return shape._replace(rows=max(shape.rows, triton.next_power_of_2(group)))


# ---- the kernels ----


@triton.jit
def _fold(peak, mass, acc, next_peak, next_mass, next_acc):
    """A state with what follows folded in. With fma: left to the compiler, two kernels could round differently."""
    new_peak = tl.maximum(peak, next_peak)
    top = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: mass and acc stay 0
    scale, next_scale = tl.exp2(peak - top), tl.exp2(next_peak - top)
    mass = tl.fma(mass, scale, next_mass * next_scale)
    acc = tl.fma(acc, tl.broadcast_to(scale[:, None], acc.shape), next_acc * next_scale[:, None])
    return new_peak, mass, acc


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    q, kv, out,  # [T, H, D]; [NB, 2, Hkv, B, D], strided; [T, H, D]
    part_acc, part_sums,  # [parts, H, D] and [parts, H, 2] float32
    items, first_part, positions,  # [grid 0, 8] int32; [T + 1] int32; [T] int64
    tables, table_stride,  # [num_tables, table_stride] int32
    block_stride, value_stride, head_stride,  # of kv
    scale,  # of the scores, times log2(e)
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, POSITIONS: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One item (program axis 0) for one KV head (axis 1)."""
    item = items + tl.program_id(0) * 8
    num_rows = tl.load(item + 1)
    if num_rows == 0:  # a place that this step does not use
        return
    row_start, table, kv_start = tl.load(item), tl.load(item + 2), tl.load(item + 3)
    kv_end, part = tl.load(item + 4), tl.load(item + 5)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    matrix_row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    column = tl.arange(0, POSITIONS).to(tl.uint32)
    is_row, is_dim = matrix_row < num_rows * GROUP, dim < HEAD_DIM
    place = matrix_row // GROUP * num_heads + kv_head * GROUP + matrix_row % GROUP  # (row - row_start, head)
    first_place = row_start.to(tl.int64) * num_heads * HEAD_DIM
    mask = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + first_place + (place[:, None] * HEAD_DIM + dim[None, :]), mask=mask, other=0.0)
    position = tl.load(positions + row_start + matrix_row // GROUP, mask=is_row, other=0).to(tl.int32)
    first_position = tl.load(positions + row_start).to(tl.int32)
    block_table = tables + table.to(tl.int64) * table_stride
    keys = kv + kv_head * head_stride

    peak = tl.full([ROWS], float("-inf"), tl.float32)  # of the row
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    span_peak, span_mass, span_acc = peak, mass, acc  # of the span that is being read
    # Block ids are loaded a turn ahead: an address that waits for a load of its own turn would not be prefetched.
    kv_position = kv_start + column
    block = tl.load(block_table + kv_position // BLOCK_SIZE, mask=kv_position < kv_end, other=0)
    for at in tl.range(kv_start, kv_end, POSITIONS):
        kv_position = at + column
        slot = block.to(tl.int64) * block_stride + (kv_position % BLOCK_SIZE) * HEAD_DIM
        following = kv_position + POSITIONS
        block = tl.load(block_table + following // BLOCK_SIZE, mask=following < kv_end, other=0)
        here = keys + slot[:, None] + dim[None, :]
        k = tl.load(here, mask=is_dim[None, :], other=0.0)  # what lies past the end gets no weight below
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if at + POSITIONS > first_position + 1:
            scores = tl.where(kv_position[None, :] <= position[:, None], scores, float("-inf"))
        new_peak = tl.max(scores, 1) * scale
        if at % SPAN == 0:
            peak, mass, acc = _fold(peak, mass, acc, span_peak, span_mass, span_acc)
            span_peak = tl.full([ROWS], float("-inf"), tl.float32)  # takes what the span has left times 0
        else:
            new_peak = tl.maximum(new_peak, span_peak)
        top = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale - top[:, None])
        rescale = tl.exp2(span_peak - top)
        span_mass = span_mass * rescale + tl.sum(weights, 1)
        readable = (kv_position < kv_end)[:, None] & is_dim[None, :]
        v = tl.load(here + value_stride, mask=readable, other=0.0)  # weight 0 * NaN would be NaN
        span_acc = tl.dot(weights.to(v.dtype), v, span_acc * rescale[:, None], input_precision=PRECISION)
        span_peak = new_peak
    peak, mass, acc = _fold(peak, mass, acc, span_peak, span_mass, span_acc)

    if part < 0:
        result = (acc / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + first_place + (place[:, None] * HEAD_DIM + dim[None, :]), result, mask=mask)
    else:
        row = row_start + matrix_row // GROUP
        first = tl.load(first_part + row, mask=is_row, other=0)
        is_row &= tl.load(first_part + row + 1, mask=is_row, other=0) > first  # others get their result elsewhere
        part_place = (first + part).to(tl.int64) * num_heads + kv_head * GROUP + matrix_row % GROUP
        tl.store(part_acc + part_place[:, None] * HEAD_DIM + dim[None, :], acc, mask=is_row[:, None] & is_dim[None, :])
        tl.store(part_sums + 2 * part_place, peak, mask=is_row)
        tl.store(part_sums + 2 * part_place + 1, mass, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["merged"])  # where it starts depends on the number of rows
def merge_kernel(out, part_acc, part_sums, first_part, merged, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Folds the parts of one of the merged rows (program axis 0) and head (axis 1)."""
    row, head, num_heads = tl.load(merged + tl.program_id(0)), tl.program_id(1), tl.num_programs(1)
    if row < 0:  # a place that this step does not use
        return
    first, end = tl.load(first_part + row).to(tl.int64), tl.load(first_part + row + 1).to(tl.int64)
    one, dim = tl.arange(0, 1), tl.arange(0, PADDED_DIM)[None, :]
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, PADDED_DIM], tl.float32)
    for part in tl.range(first, end, num_stages=4):
        place = part * num_heads + head + one
        part_peak, part_mass = tl.load(part_sums + 2 * place), tl.load(part_sums + 2 * place + 1)
        values = tl.load(part_acc + place[:, None] * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        peak, mass, acc = _fold(peak, mass, acc, part_peak, part_mass, values)
    place = row.to(tl.int64) * num_heads + head + one
    result = (acc / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * HEAD_DIM + dim, result, mask=dim < HEAD_DIM)


def launch_attention(
    q: Tensor, kv_cache: Tensor, plan: AttentionPlan, work: AttentionWork, scale: float, shapes: tuple[Shape, Shape]
) -> Tensor:
    """q [T, H, D], kv_cache [NB, 2, Hkv, B, D] -> [T, H, D]; shapes for narrow and for wide items."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    padded = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q)
    *num_items, num_merged, num_parts = work.capacity
    *items, first_part, merged = work.buffer.tensor_split(work.sections())
    part_acc = q.new_empty((num_parts, num_heads, head_dim), dtype=torch.float32)
    part_sums = q.new_empty((num_parts, num_heads, 2), dtype=torch.float32)
    for n, some, shape in zip(num_items, items, shapes):
        if n:
            attend_kernel[n, num_kv_heads](
                *(q, kv_cache, out, part_acc, part_sums, some, first_part, plan.positions, plan.block_tables),
                *(plan.block_tables.stride(0), *kv_cache.stride()[:3], scale * LOG2_E),
                *(num_heads // num_kv_heads, head_dim, block_size, SPAN, shape.rows, shape.positions, padded),
                "ieee" if q.dtype is torch.float32 else None,
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
    if num_merged:
        merge_kernel[num_merged, num_heads](out, part_acc, part_sums, first_part, merged, head_dim, padded, num_warps=1)
    return out
