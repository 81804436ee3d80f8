"""Every implementation of the kernels gives the reference's results, and the reference those of naive loops.

The attention cases are random ragged batches over a paged cache whose unused slots hold NaN, planned by the
real AttentionPlanner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoapc.engine.attention_plan import SPAN, AttentionPlan, AttentionPlanner
from nanoapc.kernels import Kernels
from nanoapc.kernels.reference import ReferenceKernels, gumbel_noise

REFERENCE = ReferenceKernels()


def make_plan(
    tables: list[list[int]], starts: list[int], counts: list[int], block_size: int, *, rows: int = 64,
    share: bool = True,
) -> AttentionPlan:
    """The plan of a step in which sequence i runs positions [starts[i], starts[i] + counts[i])."""
    width = max(map(len, tables))
    padded = np.zeros((len(tables), width), np.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
    planner = AttentionPlanner(block_size, max_tile_rows=rows, share=share)
    tiles, level_starts = planner.tiles(padded, np.array(starts), np.array(counts))
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    return AttentionPlan(
        torch.from_numpy(tiles.copy()), torch.from_numpy(positions), torch.from_numpy(padded), tiles, level_starts
    )


@dataclass
class Batch:
    """A step over a cache: what attention gets, and what the naive loop needs to check it."""

    q: Tensor
    kv_cache: Tensor
    tables: list[list[int]]
    starts: list[int]
    counts: list[int]
    block_size: int

    def plan(self, **options: bool | int) -> AttentionPlan:
        return make_plan(self.tables, self.starts, self.counts, self.block_size, **options)

    def only(self, index: int, start: int, count: int) -> tuple[Tensor, AttentionPlan]:
        """The rows of sequence `index` at positions [start, start + count), alone in a step."""
        row = sum(self.counts[:index]) + start - self.starts[index]
        return self.q[row : row + count], make_plan([self.tables[index]], [start], [count], self.block_size)


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    shared: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Sequences of (first position, rows); all share the blocks of their first `shared` positions."""
    generator = torch.Generator().manual_seed(seed)
    common = shared // block_size
    num_blocks = common + sum(-(-(start + count) // block_size) for start, count in lengths) + 1
    free = torch.randperm(num_blocks, generator=generator).tolist()
    prefix = [free.pop() for _ in range(common)]
    # A layer's strided view of a block-major memory; everything that no row may see is NaN.
    memory = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    kv_cache = memory[:, 1]
    tables = []
    for start, count in lengths:
        total = start + count
        table = prefix[: total // block_size]
        table = table + [free.pop() for _ in range(-(-total // block_size) - len(table))]
        for i, block in enumerate(table):
            used = min(total - i * block_size, block_size)
            shape = (2, num_kv_heads, used, head_dim)
            if i >= common:
                kv_cache[block, :, :, :used] = torch.randn(shape, generator=generator).to(dtype)
        tables.append(table)
    for block in prefix:
        kv_cache[block] = torch.randn(kv_cache.shape[1:], generator=generator).to(dtype)
    num_rows = sum(count for _, count in lengths)
    q = torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype)
    starts, counts = [a for a, _ in lengths], [b for _, b in lengths]
    return Batch(q, kv_cache, tables, starts, counts, block_size)


def naive_attention(batch: Batch, scale: float) -> Tensor:
    """One softmax per row and head over a dense copy of what it may see, in float64."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    group = batch.q.shape[1] // batch.kv_cache.shape[2]
    row = 0
    for table, start, count in zip(batch.tables, batch.starts, batch.counts, strict=True):
        blocks = batch.kv_cache[table].double()  # [blocks, 2, Hkv, B, D]
        k, v = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [Hkv, positions, D]
        for position in range(start, start + count):
            for head in range(batch.q.shape[1]):
                seen_k, seen_v = k[head // group, : position + 1], v[head // group, : position + 1]
                weights = torch.softmax(seen_k @ batch.q[row, head].double() * scale, dim=0)
                out[row, head] = weights @ seen_v
            row += 1
    return out


RAGGED = [(0, 37), (5, 1), (255, 1), (256, 1), (250, 20), (600, 1), (0, 1), (511, 2), (300, 130)]
DECODE = [(7, 1), (255, 1), (256, 1), (700, 1), (30, 1), (31, 1), (1023, 1)]
FOREST = [(1024, 1), (1030, 1), (600, 70), (1100, 3), (2303, 1)]
"""(first position, rows) of each sequence."""

GEOMETRIES = [  # num_heads, num_kv_heads, head_dim, block_size
    (4, 2, 64, 16),
    (9, 3, 64, 16),
    (4, 4, 32, 8),
    (5, 1, 80, 3),
    (4, 2, 96, 1),
    (16, 8, 128, 16),
    (8, 1, 256, 256),
    (2, 1, 72, 48),
]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("geometry", GEOMETRIES[:6:2])
def test_reference_attention_equals_a_softmax_per_row(geometry: tuple[int, ...], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, block_size = geometry
    for lengths, shared in ((RAGGED, 0), (DECODE, 0), (FOREST, 528)):
        batch = make_batch(
            lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
            shared=shared, dtype=dtype,
        )  # fmt: skip
        scale = head_dim**-0.5
        plan = batch.plan()
        assert (len(plan.level_starts) > 2) == (shared > 0)
        out = REFERENCE.attention(batch.q, batch.kv_cache, plan, scale)
        torch.testing.assert_close(out.double(), naive_attention(batch, scale), **tolerance(dtype))
