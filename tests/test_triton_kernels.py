"""The Triton kernels give the reference's results; attention's bits do not depend on tiles, splits or company.

Without a GPU they run in Triton's interpreter, whose bfloat16 does not round: float32 and float16 then. With one, they
run on it, and the CPU keeps the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import test_kernels as suite
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from nanoapc.engine.attention_plan import SPAN, AttentionPlan, AttentionPlanner
from nanoapc.kernels import Kernels
from nanoapc.kernels.cuda import TritonKernels, cuda_kernels
from nanoapc.kernels.triton_attention import NARROW_ROWS, AttentionWork, cut_tiles
from nanoapc.kernels.triton_elementwise import _independent

GPU = torch.cuda.is_available()  # if not, conftest.py has chosen Triton's interpreter
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
pytestmark = pytest.mark.filterwarnings("ignore:.*(encountered in|FP_FUSION).*")

MANY_SMS, ONE_SM = 10_000, 1
"""Ranges in parts of one span; ranges in as few parts as possible."""


class OnTheGpu:
    """Kernels that take and give CPU tensors and run on the GPU; arguments come back as they are left there."""

    def __init__(self, kernels: TritonKernels):
        self._kernels = kernels

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        linear = self._kernels.pack_linear(weight.cuda(), None if bias is None else bias.cuda())
        return lambda x: linear(x.cuda()).cpu()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            there = [move(argument, "cuda") for argument in arguments]
            result = getattr(self._kernels, name)(*there)
            for argument, moved in zip(arguments, there, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(moved)
            return tuple(move(r, "cpu") for r in result) if isinstance(result, tuple) else move(result, "cpu")

        return call


def move(value: Any, device: str) -> Any:
    if isinstance(value, AttentionPlan):
        tensors = {f.name: move(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return AttentionPlan(**tensors)
    return value.to(device) if isinstance(value, Tensor) else value


def make_kernels(num_sms: int = MANY_SMS, deterministic: bool = False) -> Any:
    if not GPU:
        return TritonKernels(num_sms=num_sms, deterministic=deterministic)
    kernels = cuda_kernels(torch.device("cuda"), deterministic)
    kernels.num_sms = num_sms
    return OnTheGpu(kernels)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return make_kernels()


@pytest.fixture(autouse=True)
def random_numbers() -> None:
    torch.manual_seed(0)


# ---- attention ----

MIXED = [(700, 1), (528, 20), (600, 1), (255, 1), (0, 3)]
"""(first position, rows): decodes that share a prefix, chunks, a row that ends with a span, a short prompt."""

CASES = [  # dtype, num_heads, num_kv_heads, head_dim, block_size
    (torch.float32, 4, 2, 64, 16),
    (torch.float16, 8, 1, 80, 8),
    (torch.float32, 3, 3, 96, 48),
    (torch.float16, 7, 1, 128, 11),
    (torch.float32, 5, 1, 256, 256),
    (torch.float16, 20, 1, 64, 32),  # a group that the narrow shape has to grow for
    *([(torch.bfloat16, 32, 8, 128, 16), (torch.bfloat16, 9, 3, 64, 16)] if GPU else []),
]


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_the_reference(case: tuple[Any, ...]) -> None:
    dtype, *geometry = case
    batch = suite.batch_of(tuple(geometry), MIXED, dtype, shared=528)
    plan = batch.plan()
    assert len(plan.level_starts) > 2
    expected = suite.REFERENCE.attention(batch.q, batch.kv_cache, plan, 0.1)
    out = make_kernels().attention(batch.q, batch.kv_cache, plan, 0.1)
    torch.testing.assert_close(out, expected, **suite.close(dtype, rounded=2e-3 if dtype is torch.float16 else 2e-2))


@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[:1])
def test_bits_of_a_row_do_not_depend_on_its_cuts_or_company(dtype: torch.dtype) -> None:
    batch = suite.batch_of((4, 2, 64, 16), MIXED, dtype, shared=528)

    def run(q: Tensor, plan: AttentionPlan, num_sms: int = MANY_SMS) -> Tensor:
        return make_kernels(num_sms, deterministic=True).attention(q, batch.kv_cache, plan, 0.1)

    whole = run(batch.q, batch.plan())
    assert torch.equal(run(batch.q, batch.plan(), ONE_SM), whole)
    assert torch.equal(run(batch.q, batch.plan(rows=7, share=False)), whole)
    row = 0
    for index, (start, count) in enumerate(MIXED):  # alone, in chunks
        for first in range(0, count, 13):
            rows = min(13, count - first)
            alone = run(*batch.only(index, start + first, rows))
            assert torch.equal(alone, whole[row + first : row + first + rows])
        row += count


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_items_cover_each_row_once_in_the_order_of_spans(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 16, 100, 256]))
    tables: list[list[int]] = []
    starts, counts = [], []
    free = iter(range(1 << 20))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, 1500))
        count = data.draw(st.sampled_from([1, 1, 1, 2, 5, 40, 300]))
        num_blocks = -(-(start + count) // block_size)
        kept = data.draw(st.integers(0, min(start // block_size, len(tables[-1])))) if tables else 0
        tables.append([*(tables[-1][:kept] if tables else []), *(next(free) for _ in range(num_blocks - kept))])
        starts.append(start)
        counts.append(count)
    rows = data.draw(st.sampled_from([3, 64, 100_000]))
    plan = suite.make_plan(tables, starts, counts, block_size, rows=rows)
    group = data.draw(st.sampled_from([1, 2, 7, 16, 20]))
    wide_rows = 128
    narrow, wide, first_part = cut_tiles(plan.host_tiles, group, wide_rows, data.draw(st.sampled_from([0.1, 2, 1e9])))

    found: list[list[tuple[int, int, int]]] = [[] for _ in plan.positions]
    for items, limit in ((narrow, max(NARROW_ROWS, group)), (wide, wide_rows)):
        for row_start, num_rows, table, kv_start, kv_end, part, *_ in items.tolist():
            assert 0 < num_rows * group <= limit and kv_start % SPAN == 0 and kv_start < kv_end
            assert part <= 0 or kv_end <= kv_start + SPAN  # only what starts at 0 may fold spans by itself
            for row in range(row_start, row_start + num_rows):
                own = int(np.searchsorted(np.cumsum(counts), row, side="right"))
                num_blocks = -(-kv_end // block_size)
                assert tables[own][:num_blocks] == tables[table][:num_blocks]
                if part < 0 or first_part[row + 1] > first_part[row]:
                    found[row].append((part, kv_start, kv_end))
    for row, position in enumerate(plan.positions.tolist()):
        parts = sorted(found[row])
        if first_part[row] == first_part[row + 1]:
            assert [(p, s) for p, s, _ in parts] == [(-1, 0)]
        else:
            assert [p for p, _, _ in parts] == list(range(first_part[row + 1] - first_part[row]))
        assert parts[0][1] == 0 and parts[-1][2] > position
        assert all(a[2] == b[1] for a, b in pairwise(parts))


def test_work_of_fixed_capacity_takes_other_plans_until_they_do_not_fit() -> None:
    planner = AttentionPlanner(16)

    def tiles(*starts: int) -> np.ndarray:
        tables = np.arange(len(starts) * 100, dtype=np.int32).reshape(len(starts), 100)
        return planner.tiles(tables, np.array(starts), np.ones(len(starts), np.int64))[0]

    plan = AttentionPlan(torch.zeros(0), torch.zeros(4, dtype=torch.int64), torch.zeros(0), tiles(9, 600, 5, 5), [])
    work = AttentionWork.build(plan, (2, 128, 1e9), (8, 1, 3, 6))
    items, _, first_part, merged = (part.clone() for part in work.buffer.split([64, 8, 5, 3]))
    assert items.view(8, 8)[:, 1].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # rows of each item; 0: place not used
    assert first_part.tolist() == [0, 0, 3, 3, 3]
    assert merged.tolist() == [1, -1, -1]  # rows; -1: place not used
    assert not work.refill(tiles(2000, 9))
    assert torch.equal(work.buffer[:64], items)
    assert work.refill(tiles(300, 9))  # fewer rows than the plan had
    assert work.buffer[72:].tolist() == [0, 2, 2, 2, 2, 0, -1, -1]
    with pytest.raises(ValueError, match="not \\(8, 1, 3, 2\\)"):
        AttentionWork.build(plan, (2, 128, 1e9), (8, 1, 3, 2))


def test_a_head_larger_than_the_kernels_take_is_named() -> None:
    batch = suite.batch_of((1, 1, 512, 16), [(0, 1)], torch.float32)
    with pytest.raises(ValueError, match="head_dim 512"):
        make_kernels().attention(batch.q, batch.kv_cache, batch.plan(), 0.1)


# ---- products ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_linear_equals_the_reference_and_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((100, 70), *([(5000, 64), (20_000, 64)] if GPU else [])):
        weight, bias = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
        linear = make_kernels(deterministic=True).pack_linear(weight, bias)
        x = torch.randn(70, num_inputs).to(dtype)
        whole = linear(x)
        torch.testing.assert_close(whole, suite.REFERENCE.pack_linear(weight, bias)(x), **suite.close(dtype))
        for first, end in ((0, 1), (3, 36), (6, 70)):
            assert torch.equal(linear(x[first:end]), whole[first:end])
    assert linear(x[:0]).shape == (0, num_outputs)


# ---- element-wise steps and sampling: the suite that holds every implementation ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 72, *([4096] if GPU else [])])
def test_norms_and_activation(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    suite.test_norms_and_activation_equal_the_reference(kernels, size, dtype)


@pytest.mark.parametrize("value", [-200.0, -88.0, 0.0, 88.0, 200.0, float("nan"), float("inf")])
def test_activation_at_the_ends_of_its_range(kernels: Kernels, value: float) -> None:
    suite.test_activation_at_the_ends_of_its_range(kernels, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [(9, 3, 64, 16), (5, 1, 80, 3), (12, 4, 256, 32)])
def test_rope_and_store(kernels: Kernels, geometry: tuple[int, ...], dtype: torch.dtype) -> None:
    suite.test_rope_and_store_equals_the_reference(kernels, geometry, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(kernels: Kernels, dtype: torch.dtype) -> None:
    suite.test_copy_blocks_copies_prefixes_in_list_order(kernels, dtype)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.just(1)), max_size=12))
def test_copies_that_run_at_once_do_not_touch_each_other(copies: list[tuple[int, int, int]]) -> None:
    groups = _independent(copies)
    assert [copy for group in groups for copy in group] == copies
    for group in groups:
        written = [copy[1] for copy in group]
        assert len(set(written)) == len(written)
        assert all(a[0] != b[1] for a in group for b in group if a is not b)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("num_ids", [1, 1000, 10_000])
def test_gumbel_argmax(kernels: Kernels, num_ids: int, scale: float) -> None:
    suite.test_gumbel_argmax_equals_the_reference(kernels, num_ids, scale)
