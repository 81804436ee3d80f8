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
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanoapc.engine.attention_plan import SPAN, AttentionPlan, AttentionPlanner
from nanoapc.kernels import Kernels, triton_sampling
from nanoapc.kernels.attention_work import NARROW_ROWS, AttentionWork, TileCutter
from nanoapc.kernels.cuda import TritonKernels, cuda_kernels
from nanoapc.kernels.reference_sampling import fixed_weights
from nanoapc.kernels.triton_elementwise import _independent
from nanoapc.layers import sampler
from nanoapc.layers.sampler import Sampler, SamplingRows, make_state
from nanoapc.sampling_params import SamplingParams

GPU = torch.cuda.is_available()  # if not, conftest.py has chosen Triton's interpreter
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
pytestmark = pytest.mark.filterwarnings("ignore:.*(encountered in|FP_FUSION).*")

MANY_SMS, ONE_SM = 10_000, 1
"""Ranges in parts of one span; ranges in as few parts as possible."""


class OnTheGpu:
    """Kernels that take and give CPU tensors and run on the GPU; arguments come back as they are left there."""

    def __init__(self, kernels: TritonKernels):
        self._kernels = kernels

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Callable[[Tensor], Tensor]:
        linear = self._kernels.pack_linear(weight.cuda(), None if bias is None else bias.cuda(), gated)
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
    num_programs = data.draw(st.sampled_from([0.1, 2, 20, 1e9]))
    narrow, wide, first_part, merged = TileCutter(group, wide_rows, num_programs).cut(plan.host_tiles)
    assert merged.tolist() == [row for row in range(len(plan.positions)) if first_part[row] < first_part[row + 1]]

    found: list[list[tuple[int, int, int]]] = [[] for _ in plan.positions]
    for items, limit in ((narrow, max(NARROW_ROWS, group)), (wide, wide_rows)):
        for row_start, num_rows, table, kv_start, kv_end, part, *_ in items.tolist():
            assert 0 < num_rows * group <= limit and kv_start % SPAN == 0 and kv_start < kv_end
            assert part <= 0 or kv_end <= kv_start + SPAN  # only what starts at 0 may fold spans by itself
            rows_of_item = range(row_start, row_start + num_rows)
            assert kv_end <= max(plan.positions[row] for row in rows_of_item) + 1
            assert part < 0 or any(first_part[row + 1] > first_part[row] for row in rows_of_item)  # nothing in vain
            for row in rows_of_item:
                own = int(np.searchsorted(np.cumsum(counts), row, side="right"))
                num_blocks = -(-kv_end // block_size)
                assert tables[own][:num_blocks] == tables[table][:num_blocks]
                if part < 0 or first_part[row + 1] > first_part[row]:
                    found[row].append((part, kv_start, kv_end))
        lengths = (items[:, 3] - items[:, 4]) // SPAN
        assert (np.diff(lengths) >= 0).all()  # the longest first
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

    rows = torch.zeros(4, dtype=torch.int64)
    plan = AttentionPlan(torch.zeros(0), rows, rows, torch.zeros(0), tiles(9, 600, 5, 5), [])
    work = AttentionWork.build(plan, TileCutter(2, 128, 1e9), (8, 1, 3, 6))
    items, _, first_part, merged = (part.clone() for part in work.buffer.split([64, 8, 5, 3]))
    assert items.view(8, 8)[:, 1].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # rows of each item; 0: place not used
    assert first_part.tolist() == [0, 0, 3, 3, 3]
    assert merged.tolist() == [1, -1, -1]  # rows; -1: place not used
    assert work.pack(work.cut(tiles(2000, 9))) is None
    packed = work.pack(work.cut(tiles(300, 9)))  # fewer rows than the plan had
    assert packed is not None and len(packed) == len(work.buffer)
    assert packed[72:].tolist() == [0, 2, 2, 2, 2, 0, -1, -1]
    with pytest.raises(ValueError, match="not \\(8, 1, 3, 2\\)"):
        AttentionWork.build(plan, TileCutter(2, 128, 1e9), (8, 1, 3, 2))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_cutter_that_keeps_its_last_cut_gives_what_a_new_one_gives(data: st.DataObject) -> None:
    cutting = data.draw(st.sampled_from([1, 4])), 128, data.draw(st.sampled_from([0.1, 1, 16.5]))
    cutter, planner = TileCutter(*cutting), AttentionPlanner(16)
    tables = np.zeros((6, 200), np.int32)
    rows = np.zeros(0, np.int64)
    for step in range(data.draw(st.integers(1, 12))):
        change = data.draw(st.sampled_from(["batch", "decode", "decode", "jump", "chunk"]))
        if step == 0 or change == "batch":
            rows = np.array(data.draw(st.lists(st.integers(0, 2000), min_size=1, max_size=6)))
            shared = data.draw(st.sampled_from([0, 16, 48]))
            tables[:] = 1 + np.arange(tables.size).reshape(tables.shape)
            tables[:, :shared] = tables[0, :shared]
        counts = np.ones(len(rows), np.int64)
        rows += data.draw(st.integers(100, 600)) if change == "jump" else 1
        if change == "chunk":
            counts[-1] = 70
        tiles, _ = planner.tiles(tables[: len(rows)], rows, counts)
        for kept, new in zip(cutter.cut(tiles), TileCutter(*cutting).cut(tiles), strict=True):
            assert np.array_equal(kept, new)
        rows += counts - 1


def test_tiles_are_cut_anew_only_when_a_row_enters_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[np.ndarray] = []
    set_items = TileCutter._set_items
    monkeypatch.setattr(TileCutter, "_set_items", lambda self, end: cuts.append(end) or set_items(self, end))
    cutter, planner = TileCutter(2, 128, 16.5), AttentionPlanner(16)
    tables, counts = np.arange(300).reshape(3, 100), np.ones(3, np.int64)
    for step in range(SPAN):
        cutter.cut(planner.tiles(tables, step + np.array([0, 100, 600]), counts)[0])
    assert [end.tolist() for end in cuts] == [[1, 101, 601], [157, 257, 757], [169, 269, 769]]


def test_few_rows_at_a_long_context_are_split_for_the_whole_card() -> None:
    plan = suite.make_plan([list(range(2048))], [32_704], [64], 16, rows=1 << 20)
    _, wide, first_part, _ = TileCutter(4, 128, 132 / 8).cut(plan.host_tiles)
    spans = -(-(wide[:, 4] - wide[:, 3]) // SPAN)
    assert spans.max() == 16  # 2 * 128 spans, for 16.5 programs at once
    assert len(wide) == 2 * (128 - 16 + 1) and first_part[-1] == 64 * (128 - 16 + 1)
    _, wide, first_part, _ = TileCutter(4, 128, 1).cut(plan.host_tiles)  # a card that is small enough
    assert len(wide) == 2 and first_part[-1] == 0
    plan = suite.make_plan([list(range(8192))], [130_000], [512], 16)
    assert TileCutter(4, 16, 1e9).cut(plan.host_tiles).first_part[-1] == 0  # it would be too many states


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
def test_norms(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    suite.test_norms_equal_the_reference(kernels, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 33), (2050, 96)])
def test_gated_linear(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    suite.test_gated_linear_equals_the_reference(kernels, shape, dtype)


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


@pytest.mark.parametrize("num_ids", [1, 300, 5000, *([151_936] if GPU else [])])
def test_keep_top(kernels: Kernels, num_ids: int) -> None:
    suite.test_keep_top_equals_the_reference(kernels, num_ids)


@triton.jit
def weigh(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, triton_sampling._weight(tl.load(x + at)))


@pytest.mark.parametrize("smallest", [1e-6, 1.0, 70.0])
def test_weights_are_those_of_the_reference_bit_for_bit(smallest: float) -> None:
    x = -smallest * torch.rand(4096)
    there = x.cuda() if GPU else x
    weights = torch.empty(4096, dtype=torch.int64, device=there.device)
    weigh[1,](there, weights, 4096, enable_fp_fusion=False)
    assert torch.equal(weights.cpu(), fixed_weights(x))


@pytest.mark.parametrize("num_ids", [1, 300, 5000])
def test_largest(kernels: Kernels, num_ids: int) -> None:
    suite.test_largest_equals_the_reference(kernels, num_ids)


@pytest.mark.parametrize("num_ids", [1, 300, 10_000])
def test_logprobs(kernels: Kernels, num_ids: int) -> None:
    suite.test_logprobs_equal_the_reference(kernels, num_ids)


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a value, shapes that depend on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(word in name for word in self.WAITING), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype == torch.int64 for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(GPU, reason="torch.cuda.set_sync_debug_mode says it there: tools/gpu_check_kernels.py")
def test_the_sampler_never_waits_for_the_device_and_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ids = 3000
    logits = torch.randn(12, num_ids + 9).bfloat16().float() * 3
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, logprobs=n, logit_bias=b, allowed_token_ids=a)
        for t, k, p, m, n, b, a in [
            (0, 0, 1.0, 0.0, None, None, None),
            (1.0, 0, 1.0, 0.0, 0, None, None),
            (0.7, 40, 1.0, 0.0, 5, {7: 4.0}, None),
            (1.3, 0, 0.8, 0.0, None, None, range(0, 900, 2)),
            (2.0, 500, 0.95, 0.001, 20, None, None),
            (1.0, 0, 0.999, 0.0, 3, None, None),
        ]
    ]
    for chosen in (params, params[3:5], params[:1]):  # some rows draw and some are ranked, all, none
        rows = [(p, make_state(p), seed) for seed, p in enumerate(2 * chosen)]
        batch = SamplingRows(rows, num_ids)
        batch.positions = torch.arange(len(rows))
        monkeypatch.setattr(sampler, "upload", None)  # nothing goes to the device, either
        with NoWaiting():
            found = Sampler(TritonKernels(), num_ids).forward(logits[: len(rows)], batch)
        monkeypatch.undo()
        expected = Sampler(suite.REFERENCE, num_ids).forward(logits[: len(rows)], batch)
        assert torch.equal(found.token_ids, expected.token_ids)
        for column, reference in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            torch.testing.assert_close(column, reference)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_rows_without_an_id_to_choose_make_no_difference_to_others(kernels: Kernels, value: float) -> None:
    suite.test_rows_without_an_id_to_choose_make_no_difference_to_others(kernels, value)


def test_logits_that_are_nan_choose_an_id_of_the_vocabulary(kernels: Kernels) -> None:
    logits = torch.full((2, 10), torch.nan)
    logits[0] = -logits[1]  # both signs
    ids = kernels.gumbel_argmax(logits, torch.arange(2), torch.arange(2))
    assert ids.max() < 10
    assert kernels.keep_top(logits, torch.tensor([3, 10]), torch.tensor([0.5, 0.5]).double()).shape == (2, 10)
