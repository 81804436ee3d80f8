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

from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.kernels import Kernels
from nanoapc.kernels.cpu import CpuKernels
from nanoapc.kernels.reference import ReferenceKernels, gumbel_noise
from nanoapc.kernels.reference_sampling import fixed_weights
from nanoapc.layers.sampler import Sampler, SamplingRows
from nanoapc.sampling_params import SamplingParams

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["cpu", "cpu without matrix unit"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that runs here, besides the reference."""
    built = CpuKernels(matrix_unit=request.param == "cpu")
    if request.param == "cpu" and not built.matrix_unit:
        pytest.skip("this processor has no matrix unit")
    return built


@pytest.fixture(autouse=True, scope="module")
def random_numbers() -> None:
    torch.manual_seed(0)


def make_plan(
    tables: list[list[int]],
    starts: list[int],
    counts: list[int],
    block_size: int,
    *,
    rows: int = 64,
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
        torch.from_numpy(tiles.copy()),
        torch.from_numpy(positions),
        torch.full((len(positions),), -1),
        torch.from_numpy(padded),
        tiles,
        level_starts,
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
        num_shared = len(table)
        table = table + [free.pop() for _ in range(-(-total // block_size) - len(table))]
        for i, block in enumerate(table):
            used = min(total - i * block_size, block_size)
            shape = (2, num_kv_heads, used, head_dim)
            if i >= num_shared:
                kv_cache[block, :, :, :used] = torch.randn(shape, generator=generator).to(dtype)
        tables.append(table)
    for block in prefix:
        kv_cache[block] = torch.randn(kv_cache.shape[1:], generator=generator).to(dtype)
    num_rows = sum(count for _, count in lengths)
    q = torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype)
    starts, counts = [a for a, _ in lengths], [b for _, b in lengths]
    return Batch(q, kv_cache, tables, starts, counts, block_size)


def naive_attention(batch: Batch, scale: float) -> Tensor:
    """One softmax per row over a dense copy of what it may see, in float64."""
    num_heads = batch.q.shape[1]
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    row = 0
    for table, start, count in zip(batch.tables, batch.starts, batch.counts, strict=True):
        dense = batch.kv_cache[table].double().permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, Hkv, positions, D]
        k, v = dense.repeat_interleave(num_heads // dense.shape[1], dim=1)  # [H, positions, D]
        for end in range(start + 1, start + count + 1):
            scores = torch.einsum("hkd,hd->hk", k[:, :end], batch.q[row].double()) * scale
            out[row] = torch.einsum("hk,hkd->hd", torch.softmax(scores, dim=1), v[:, :end])
            row += 1
    return out


RAGGED = [(0, 37), (5, 1), (255, 1), (256, 1), (250, 20), (600, 1), (0, 1), (511, 2), (300, 130)]
DECODE = [(7, 1), (255, 1), (256, 1), (700, 1), (30, 1), (31, 1), (1023, 1)]
FOREST = [(1024, 1), (1030, 1), (600, 70), (1100, 3), (1303, 1), (511, 1)]
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
LARGE = (48, 1, 64, 16)  # more columns than a task of the C++ kernels holds


def batch_of(geometry: tuple[int, ...], lengths: list[tuple[int, int]], dtype: torch.dtype, shared: int = 0) -> Batch:
    num_heads, num_kv_heads, head_dim, block_size = geometry
    return make_batch(
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        shared=shared,
        dtype=dtype,
    )


def close(dtype: torch.dtype, exact: float = 2e-5, rounded: float = 2e-2) -> dict[str, float]:
    """Tolerances: float32 sums in another order, or one rounding of the result."""
    error = exact if dtype is torch.float32 else rounded
    return {"rtol": error, "atol": error}


# ---- attention ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES[:6:2])
def test_reference_attention_equals_a_softmax_per_row(geometry: tuple[int, ...], dtype: torch.dtype) -> None:
    scale = geometry[2] ** -0.5
    for lengths, shared in ((RAGGED, 0), (DECODE, 0), (FOREST, 528)):
        batch = batch_of(geometry, lengths, dtype, shared)
        plan = batch.plan()
        assert (len(plan.level_starts) > 2) == (shared > 0)
        out = REFERENCE.attention(batch.q, batch.kv_cache, plan, scale)
        torch.testing.assert_close(out.double(), naive_attention(batch, scale), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [*GEOMETRIES, LARGE])
def test_attention_equals_the_reference(kernels: Kernels, geometry: tuple[int, ...], dtype: torch.dtype) -> None:
    scale = geometry[2] ** -0.5
    for lengths, shared in ((RAGGED, 0), (DECODE, 0), (FOREST, 528)):
        batch = batch_of(geometry, lengths, dtype, shared)
        out = kernels.attention(batch.q, batch.kv_cache, batch.plan(), scale)
        expected = REFERENCE.attention(batch.q, batch.kv_cache, batch.plan(), scale)
        torch.testing.assert_close(out, expected, **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_bits_of_a_row_do_not_depend_on_its_tiles_or_company(
    kernels: Kernels, geometry: tuple[int, ...], dtype: torch.dtype
) -> None:
    scale = geometry[2] ** -0.5
    batch = batch_of(geometry, FOREST, dtype, shared=528)

    def run(q: Tensor, plan: AttentionPlan) -> Tensor:
        return kernels.attention(q, batch.kv_cache, plan, scale)

    whole = run(batch.q, batch.plan())
    assert len(batch.plan().level_starts) > 2
    for rows in (1, 5, 64, 1000):
        for share in (True, False):
            assert torch.equal(run(batch.q, batch.plan(rows=rows, share=share)), whole)
    row = 0
    for index, (start, count) in enumerate(FOREST):  # alone: at once, in chunks, one by one
        for chunk in {count, 33, 1} if count <= 70 else {count}:
            for first in range(start, start + count, chunk):
                rows_here = min(chunk, start + count - first)
                alone = run(*batch.only(index, first, rows_here))
                at = row + first - start
                assert torch.equal(alone, whole[at : at + rows_here])
        row += count


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(kernels: Kernels, threads: int) -> None:
    batch = batch_of(GEOMETRIES[5], RAGGED, torch.bfloat16)
    linear = kernels.pack_linear(torch.randn(96, 128).bfloat16(), None)

    def run() -> tuple[Tensor, Tensor]:
        return kernels.attention(batch.q, batch.kv_cache, batch.plan(), 0.1), linear(batch.q.flatten(0, 1))

    expected = run()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, run(), expected))
    finally:
        torch.set_num_threads(before)


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels: Kernels) -> None:
    batch = batch_of(GEOMETRIES[0], RAGGED, torch.float32)
    batch.q.mul_(1e4)
    expected = REFERENCE.attention(batch.q, batch.kv_cache, batch.plan(), 1.0)
    out = kernels.attention(batch.q, batch.kv_cache, batch.plan(), 1.0)
    torch.testing.assert_close(out, expected, **close(torch.float32, exact=1e-2))


# ---- linear ----

SHAPES = [(64, 64), (96, 576), (100, 70), (32, 1), (1, 33), (320, 1024), (2049, 96)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_reference(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_outputs, num_inputs = shape
    weight, bias = torch.randn(shape).to(dtype) / num_inputs**0.5, torch.randn(num_outputs).to(dtype)
    for num_rows in (0, 1, 17, 90):
        x = torch.randn(num_rows, num_inputs).to(dtype)
        for b in (None, bias):
            out, expected = kernels.pack_linear(weight, b)(x), REFERENCE.pack_linear(weight, b)(x)
            torch.testing.assert_close(out, expected, **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [64, 70])
def test_linear_takes_columns_of_a_wider_tensor(kernels: Kernels, num_inputs: int, dtype: torch.dtype) -> None:
    linear = kernels.pack_linear(torch.randn(100, num_inputs).to(dtype), None)
    for num_rows in (1, 2, 31, 33, 47, 64):
        x = torch.randn(num_rows, num_inputs + 9).to(dtype)[:, 3 : 3 + num_inputs]
        assert torch.equal(linear(x), linear(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("num_exponents", [1, 15, 16, 254])
@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (2080, 96)])
def test_any_weight_is_kept_exactly(kernels: Kernels, shape: tuple[int, int], num_exponents: int) -> None:
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16) & ~0x7F80
    weight = (bits | torch.randint(1, 1 + num_exponents, shape, dtype=torch.int16) << 7).view(torch.bfloat16)
    weight[torch.rand(shape) < 0.1] = 0
    linear = kernels.pack_linear(weight, None)
    eye = torch.eye(shape[1], dtype=torch.bfloat16)
    for num_rows in (1, 20, 33, shape[1]):  # each reads some of the weight, those from 33 on more than once
        assert torch.equal(linear(eye[:num_rows]), weight.T[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (96, 576), (100, 70), (2, 33), (2050, 96)])
def test_gated_linear_equals_the_reference(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = (3 * torch.randn(s) / s[-1] ** 0.5 for s in (shape, shape[:1]))
    for num_rows in (0, 1, 17, 90):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        for b in (None, bias.to(dtype)):
            out, expected = (k.pack_linear(weight.to(dtype), b, gated=True)(x) for k in (kernels, REFERENCE))
            # A gate that rounds to its neighbour moves the result by as much.
            torch.testing.assert_close(out, expected, **close(dtype))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [*SHAPES[:4], *SHAPES[5:6], (2050, 96), (64, 3072), (8192, 64)])
def test_linear_bits_of_a_row_do_not_depend_on_the_other_rows(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, gated: bool
) -> None:
    linear = kernels.pack_linear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), gated)
    x = torch.randn(700, shape[1]).to(dtype)
    whole = linear(x)
    for num_rows in (
        1,
        2,
        3,
        4,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        127,
        128,
        129,
        255,
        500,
        512,
        699,
    ):
        for first in {0, 700 - num_rows, 13 % (701 - num_rows)}:
            assert torch.equal(linear(x[first : first + num_rows]), whole[first : first + num_rows])


# ---- element-wise steps ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 72, 576, 1024])
def test_norms_equal_the_reference(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    for num_rows in (0, 1, 5, 130):
        x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
        for added in (None, residual):
            normed, total = kernels.rms_norm(x, added, weight, 1e-5)
            expected_normed, expected_total = REFERENCE.rms_norm(x, added, weight, 1e-5)
            assert torch.equal(total, expected_total)
            torch.testing.assert_close(normed, expected_normed, **close(dtype, 1e-5))


@pytest.mark.parametrize("value", [-200.0, -88.0, -87.0, 0.0, 88.0, 200.0, float("nan"), float("inf")])
def test_activation_at_the_ends_of_its_range(kernels: Kernels, value: float) -> None:
    bias = torch.tensor([value, 2.0])  # of gate and up
    gated, expected = (k.pack_linear(torch.zeros(2, 3), bias, True)(torch.zeros(1, 3)) for k in (kernels, REFERENCE))
    torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rope_and_store_equals_the_reference(kernels: Kernels, geometry: tuple[int, ...], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, block_size = geometry
    num_rows, num_blocks = 21, 24
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    positions = torch.randint(0, 500, (num_rows,))
    angles = torch.arange(500).unsqueeze(1) * torch.rand(head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = torch.randperm(num_blocks * block_size)[:num_rows]
    slots[::7] = -1
    weights = torch.randn(2, head_dim).to(dtype)
    for norms in ((None, None), tuple(weights)):
        empty = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        expected_memory, memory = empty.clone(), empty.clone()

        def run(implementation: Kernels, kv_memory: Tensor, norms: tuple[Tensor | None, ...] = norms) -> Tensor:
            cache = kv_memory[:, 1]
            return implementation.rope_and_store(qkv, positions, cos_sin, *norms, 1e-6, cache, slots)

        expected_q, q = run(REFERENCE, expected_memory), run(kernels, memory)
        assert q.shape == (num_rows, num_heads, head_dim)
        torch.testing.assert_close(q, expected_q, **close(dtype, 1e-5))
        torch.testing.assert_close(memory, expected_memory, equal_nan=True, **close(dtype, 1e-5))
        stored = torch.zeros(num_blocks * block_size, dtype=torch.bool)
        stored[slots[slots >= 0]] = True
        is_nan = memory.isnan().all(dim=(3, 5))[:, 1].all(dim=1).flatten()
        assert torch.equal(is_nan, ~stored) and memory[:, [0, 2]].isnan().all()


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    """Position 1, one frequency of a quarter turn: (a, b) -> (-b, a)."""
    cos_sin = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    kv_cache = torch.zeros(1, 2, 1, 4, 2)
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    q = REFERENCE.rope_and_store(qkv, torch.tensor([1]), cos_sin, None, None, 1e-6, kv_cache, torch.tensor([2]))
    assert q.tolist() == [[[-2.0, 1.0]]]
    assert kv_cache[0, :, 0, 2].tolist() == [[-4.0, 3.0], [5.0, 6.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_copies_prefixes_in_list_order(kernels: Kernels, dtype: torch.dtype) -> None:
    memory = torch.randn(6, 2, 2, 3, 4, 8).to(dtype)
    expected = memory.clone()
    copies = [(0, 1, 4), (1, 2, 3), (2, 5, 1), (3, 4, 0)]  # the second copies what the first has written
    for source, destination, num_tokens in copies:
        for token in range(num_tokens):
            expected[destination, :, :, :, token] = expected[source, :, :, :, token]
    for implementation in (REFERENCE, kernels):
        copied = memory.clone()
        implementation.copy_blocks(copied, copies)
        assert torch.equal(copied, expected)


# ---- sampling ----


def test_noise_is_gumbel_distributed_and_a_function_of_seed_position_and_id() -> None:
    seeds, positions = torch.tensor([3, 3, 2**62 + 5, -1]), torch.tensor([0, 1, 0, 0])
    noise = gumbel_noise(seeds, positions, 100_000)
    assert torch.isfinite(noise).all()
    assert noise.mean(1).sub(0.5772).abs().max() < 0.02
    assert noise.var(1).sub(torch.pi**2 / 6).abs().max() < 0.05
    assert torch.corrcoef(noise).sub(torch.eye(4)).abs().max() < 0.02
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1000)
        assert torch.equal(alone[0], noise[row, :1000])


def naive_noise(seed: int, position: int, token_id: int) -> float:
    """The noise of one id in Python's integers and floats."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    k0 = mix(mix(position) ^ seed % 2**32)
    k1 = mix(k0 ^ (seed >> 32) % 2**32 ^ 0x9E3779B9)
    u = ((mix(mix((token_id + k0) % 2**32) ^ k1) >> 8) + 0.5) / 2**24
    return -math.log(-math.log(u))


def test_noise_follows_its_specification() -> None:
    for seed, position in ((0, 0), (12345678901234567, 77), (-5, 2**31)):
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 50)
        expected = torch.tensor([[naive_noise(seed, position, i) for i in range(50)]])
        torch.testing.assert_close(noise, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ids", [1, 15, 256, 1000, 50_003])
def test_argmax_equals_the_reference(kernels: Kernels, num_ids: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, num_ids + 5).mul(3).round().to(dtype)  # many ties, and rows with a stride of their own
    logits[1] = -torch.inf
    logits[2, num_ids // 2] = torch.nan
    logits[3, -6] = torch.inf
    logits[4, num_ids - 1] = 100.0
    logits[:, num_ids:] = 1000.0
    peak, ids = kernels.argmax(logits[:, :num_ids])
    expected, expected_ids = REFERENCE.argmax(logits[:, :num_ids])
    assert peak.dtype == torch.float32
    torch.testing.assert_close(peak, expected, rtol=0, atol=0, equal_nan=True)
    known = expected.isfinite()  # where there is no token to sample, the id says nothing
    assert torch.equal(ids[known], expected_ids[known])


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("num_ids", [1, 15, 128, 1000, 151_936])
def test_gumbel_argmax_equals_the_reference(kernels: Kernels, num_ids: int, scale: float) -> None:
    num_rows = 8
    logits = torch.randn(num_rows, num_ids) * scale
    logits[torch.rand(num_rows, num_ids) < 0.3] = -torch.inf
    logits[0] = -torch.inf
    seeds, positions = torch.randint(-(2**62), 2**62, (num_rows,)), torch.randint(0, 100_000, (num_rows,))
    ids = kernels.gumbel_argmax(logits, seeds, positions)
    assert torch.equal(ids, REFERENCE.gumbel_argmax(logits, seeds, positions))
    assert ids[0] == 0


def test_gumbel_argmax_draws_from_the_softmax(kernels: Kernels) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    num_draws = 20_000
    logits = probabilities.log().expand(num_draws, -1).contiguous()
    ids = kernels.gumbel_argmax(logits, torch.arange(num_draws), torch.full((num_draws,), 9))
    assert (ids.bincount(minlength=5) / num_draws - probabilities).abs().max() < 0.015


def rows_of_logits(num_ids: int) -> Tensor:
    """[7, num_ids]: flat and peaked rows, ties, holes, zeros of both signs, far below the peak, nothing left."""
    x = torch.randn(7, num_ids) * torch.tensor([0.1, 3.0, 3.0, 3.0, 1.0, 3.0, 1.0])[:, None]
    x[1] = 3.0 - torch.arange(num_ids) % 5
    x[2] = x[2].bfloat16().float()
    x[3, torch.rand(num_ids) < 0.5] = -torch.inf
    x[4] = torch.where(x[4] > 0, 0.0, -0.0)
    x[5, 1:] -= 1000
    x[6] = -torch.inf
    return x


@pytest.mark.parametrize("num_ids", [1, 5, 300, 5000, 151_936])
def test_keep_top_equals_the_reference(kernels: Kernels, num_ids: int) -> None:
    x = rows_of_logits(num_ids)
    off, one = [num_ids] * 7, [1] * 7
    some = [min(k, num_ids) for k in (50, 3 * num_ids // 10 + 1, 7, num_ids, 1000, 3, num_ids)]
    for ks, share in ((off, 0.9), (off, 1 - 1e-16), (off, 1e-9), (one, 0.5), (some, 1.0), (some, 0.9)):
        top_k, top_p = torch.tensor(ks), torch.full((7,), share, dtype=torch.float64)
        top_p[5:] = 1.0
        assert torch.equal(kernels.keep_top(x, top_k, top_p), REFERENCE.keep_top(x, top_k, top_p))


def test_keep_top_cuts_at_the_reference_s_masses(kernels: Kernels) -> None:
    """Shares that end exactly at a value's mass: a mass that differs by one keeps one value more or less."""
    x = (torch.randn(1, 3000) * 3).expand(400, -1)
    masses = fixed_weights(x[0] - x[0].max()).sort(descending=True).values.cumsum(0)
    counts = torch.linspace(1, 1500, 400).round().long()
    share = masses[counts - 1].double() / masses[-1].double()
    exact = (share * masses[-1].double()).ceil().long() == masses[counts - 1]
    assert exact.float().mean() > 0.3
    kept = kernels.keep_top(x, torch.full((400,), 3000), share)
    assert ((kept > -torch.inf).sum(dim=1) == counts)[exact].all()


def test_keep_top_passes_over_rows_without_a_greatest(kernels: Kernels) -> None:
    x = torch.randn(6, 3000)
    expected = kernels.keep_top(x[::2], torch.tensor([9, 3000, 9]), torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64))
    x[1, ::3], x[3, 5], x[5] = torch.nan, torch.inf, torch.nan
    top_k, top_p = torch.tensor([9, 9, 3000, 3000, 9, 9]), torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert torch.equal(kernels.keep_top(x, top_k, top_p.double())[::2], expected)


@pytest.mark.parametrize("num_ids", [1, 5, 300, 5000, 151_936])
def test_largest_equals_the_reference(kernels: Kernels, num_ids: int) -> None:
    x = rows_of_logits(num_ids)[:3]
    for k in {0, 1, min(20, num_ids), min(300, num_ids)}:
        for found, expected in zip(kernels.largest(x, k), REFERENCE.largest(x, k), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_rows_without_an_id_to_choose_make_no_difference_to_others(kernels: Kernels, value: float) -> None:
    kinds = [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.7, "logprobs": 2}, {"top_k": 40, "top_p": 0.9}]
    rows = [(SamplingParams(**kind), None, seed) for seed, kind in enumerate(3 * kinds)]
    batch, logits = SamplingRows(rows, 300), torch.randn(15, 300)
    batch.positions = torch.arange(15)
    alone = Sampler(REFERENCE, 300).forward(logits, batch)
    logits[5:10] = value
    found = Sampler(kernels, 300).forward(logits, batch)
    others = torch.tensor([*range(5), *range(10, 15)])
    assert torch.equal(found.token_ids[others], alone.token_ids[others])
    assert found.logprobs is not None and alone.logprobs is not None
    for column, expected in zip(found.logprobs, alone.logprobs, strict=True):
        torch.testing.assert_close(column[[0, 2]], expected[[0, 2]])
    assert (found.token_ids[5:10] == -1).all()


@pytest.mark.parametrize("num_ids", [1, 5, 300, 10_000])
def test_logprobs_equal_the_reference(kernels: Kernels, num_ids: int) -> None:
    logits = rows_of_logits(num_ids)[:5]
    logits[1] += 1000
    logits[3, 0] = 2.0
    num_valid = -(-num_ids * 2 // 3)
    ids = torch.randint(0, num_valid, (5, 3))
    (found, rank), (expected, true_rank) = (k.logprobs(logits, ids, num_valid) for k in (kernels, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(rank, true_rank)
    assert rank.tolist() == [1 + int((row[:num_valid] > row[i[0]]).sum()) for row, i in zip(logits, ids, strict=True)]
    assert kernels.logprobs(logits[:0], ids[:0], num_valid)[0].shape == (0, 3)


def test_weights_are_exponentials_in_fixed_point_up_to_the_rounding_of_float32() -> None:
    x = -torch.linspace(0, 26, 10_001)
    expected = x.double().exp() * 2.0**40
    weights = fixed_weights(x)
    assert weights[0] in (2**40, 2**40 - 2**16)
    assert ((weights - expected).abs() <= expected * 2e-6 + 1).all()
    assert fixed_weights(torch.tensor([-29.0, -1e30, -torch.inf])).tolist() == [0, 0, 0]
