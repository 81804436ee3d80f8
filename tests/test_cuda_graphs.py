"""A replayed decode step is the eager one, to the bit, whatever the padding; what fits no graph runs eagerly.

There is no CUDA here: a "graph" is a recorded call, and its replay calls the same function on the same static tensors.
All else - buckets, capacities, filling, padding, the fallback - is the code that runs on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MakeLLM
from llm_helpers import greedy, observe
from safetensors.torch import load_file
from test_overlap import mixed_work, visible
from tiny_models import load_tiny, make_tiny_model, random_ids

from nanoapc import LLM, SamplingParams
from nanoapc.engine import cuda_graphs
from nanoapc.engine import engine as engine_module
from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.engine.cuda_graphs import DecodeGraphs, Graph, bucket_sizes, graph_bytes
from nanoapc.engine.model_runner import ModelRunner
from nanoapc.engine.sequence import Sequence
from nanoapc.engine.step_batch import StepBatch
from nanoapc.engine.transfer import Transfer
from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.layers.sampler import Sampler


class RecordedCalls:
    """A backend without CUDA. new_pools: for each capture, whether it began a memory pool."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.new_pools: list[bool] = []
        self.num_replays = 0

    def capture(self, run: Callable[[], None], new_pool: bool) -> Callable[[], None]:
        run()
        self.num_captures += 1
        self.new_pools.append(new_pool)

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


class TilesInABuffer:
    """The simplest fixed work: the tiles themselves, with their number before them."""

    def __init__(self, capacity: int):
        self.buffer = torch.zeros(1 + 6 * capacity, dtype=torch.int32)

    def cut(self, tiles: np.ndarray) -> np.ndarray:
        return tiles

    def pack(self, tiles: np.ndarray) -> np.ndarray:
        packed = np.zeros(len(self.buffer), np.int32)
        packed[0], packed[1 : 1 + tiles.size] = len(tiles), tiles.reshape(-1)
        return packed

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        tiles = self.buffer[1 : 1 + 6 * int(self.buffer[0])].view(-1, 6)
        levels = np.searchsorted(tiles[:, 5].numpy(), np.arange(int(tiles[-1, 5]) + 2)).tolist()
        return replace(plan, tiles=tiles, host_tiles=tiles.numpy(), level_starts=levels)


def give_fixed_work(kernels: Any) -> None:
    """Makes CPU kernels FixedWorkKernels."""
    attention = kernels.attention

    def attend(q: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        return attention(q, kv_cache, plan if plan.work is None else plan.work.plan(plan), scale)

    def prepare(q: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, capacity: tuple[int]) -> TilesInABuffer:
        work = TilesInABuffer(*capacity)
        work.buffer.copy_(torch.from_numpy(work.pack(plan.host_tiles)))
        return work

    kernels.attention, kernels.prepare = attend, prepare
    kernels.decode_capacities = lambda num_rows, *sizes: [(4 * num_rows,)]


def with_graphs(llm: LLM) -> tuple[LLM, DecodeGraphs, RecordedCalls]:
    backend = RecordedCalls()
    give_fixed_work(llm.engine.runner.kernels)
    llm.engine.runner.capture_graphs(backend, llm.engine.scheduler.table.block_table.shape[1])
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    return llm, graphs, backend


def spy_on_replays(graphs: DecodeGraphs) -> Counter[tuple[int, int]]:
    """Counts (rows, bucket) and checks the static tensors at each replay."""
    seen: Counter[tuple[int, int]] = Counter()
    find = graphs.find

    def checked(batch: Any, tiles: np.ndarray) -> Any:
        ready = find(batch, tiles)
        if ready is not None:
            graph: Graph = ready.graph
            num_rows, replay = len(batch.counts), graph.replay

            def check() -> None:
                ids, positions, slots = graphs.rows[:, :num_rows].tolist()
                assert (positions, slots) == (batch.positions.tolist(), batch.slots.tolist())
                assert ids == batch.token_ids.tolist()
                width = batch.block_tables.shape[1]
                assert graphs.block_tables[:num_rows, :width].tolist() == batch.block_tables.tolist()
                padding = graphs.rows[:, num_rows : graph.num_rows]
                assert (padding[2] == -1).all() and not padding[:2].any(), "padding writes, or reads out of place"
                graph.replay = replay
                seen[num_rows, graph.num_rows] += 1
                replay()

            graph.replay = check
        return ready

    graphs.find = checked  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 65, 100, 256, 257, 512, 1000, 1024])
def test_every_number_of_rows_has_a_bucket_near_above_it(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for num_rows in range(1, most + 1):
        bucket = min(size for size in sizes if size >= num_rows)
        assert bucket - num_rows < max(8, bucket / 4) and (bucket <= 64 or bucket - num_rows <= num_rows / 4)
    assert len(sizes) <= 40


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 7}, {"num_kv_blocks": 40, "max_num_seqs": 13}])
def test_replayed_steps_equal_eager_ones_to_the_bit(sizes: dict[str, int], overlap: bool, make_llm: MakeLLM) -> None:
    prompts, params = mixed_work()
    eager = make_llm(**sizes)
    llm, graphs, backend = with_graphs(make_llm(async_scheduling=overlap, **sizes))
    seen = spy_on_replays(graphs)
    log = observe(llm)
    expected = [visible(output) for output in eager.generate(prompts, params, use_tqdm=False)]
    assert [visible(output) for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    decodes = [len(step.counts) for step in log.steps if set(step.counts.values()) == {1}]
    assert sum(seen.values()) == backend.num_replays == len(decodes) > 15, "each decode step is a replay, no other is"
    assert all(bucket == min(size for size in graphs.sizes if size >= rows) for rows, bucket in seen)
    assert any(bucket > rows for rows, bucket in seen) and any(bucket == rows for rows, bucket in seen)
    if not overlap:  # the pools went the same way
        assert torch.equal(llm.engine.runner.kv_memory, eager.engine.runner.kv_memory)


def test_graphs_are_captured_from_the_largest_down(make_llm: MakeLLM) -> None:
    llm, graphs, backend = with_graphs(make_llm(max_num_seqs=20))
    assert list(graphs.buckets) == [20, 16, 8, 4, 2, 1] and backend.new_pools == [True, *[False] * 5]
    assert not llm.engine.runner.kv_memory.any(), "a capture writes nothing"


def test_new_weights_need_new_graphs(make_llm: MakeLLM, model_dir: Any) -> None:
    llm, _, backend = with_graphs(make_llm(max_num_seqs=4))
    model = llm.engine.runner.model
    tensors = list(load_file(model_dir / "model.safetensors").items())
    before = backend.num_captures
    first = llm.generate([random_ids(9)], greedy(5), use_tqdm=False)
    llm.load_weights(tensors)
    assert backend.new_pools == [True, *[False] * (before - 1)] * 2 and model is llm.engine.runner.model
    assert visible(llm.generate([random_ids(9)], greedy(5), use_tqdm=False)[0]) == visible(first[0])


# -- attention work of fixed capacity (the Triton kernels, in their interpreter) ------------------------------


def triton_kernels(**options: Any) -> Any:
    pytest.importorskip("triton")
    from nanoapc.kernels.cuda import TritonKernels

    return TritonKernels(**options)


def decode_batch(tables: list[list[int]], lengths: list[int], block_size: int) -> StepBatch:
    """A decode step of sequences that have `lengths` tokens, the last of them not computed yet."""
    starts = np.array(lengths) - 1
    every = np.arange(len(lengths))
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    sequences = [Sequence(i, np.zeros(1, np.int32), greedy(9, logprobs=4), 9) for i in every.tolist()]
    return StepBatch(
        table_rows=every,
        admissions=every,
        starts=starts,
        counts=np.ones_like(every),
        token_ids=7 + 3 * every,
        positions=starts,
        slots=block_tables[every, starts // block_size].astype(np.int64) * block_size + starts % block_size,
        block_tables=block_tables,
        samples=every,
        sample_rows=every,
        num_prompt_rows=0,
        num_decodes=len(every),
        copies=[],
        key=None,
        sequences=sequences,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without CUDA")
def test_work_of_every_capacity_is_replayed_and_what_fits_none_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "bucket_sizes", lambda most: [1, most])  # the interpreter is slow
    make_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=1024)
    kernels = triton_kernels(num_sms=2, deterministic=True)  # few items fill such a device
    model = load_tiny(tmp_path, 1024, kernels=kernels)
    torch.manual_seed(0)
    kv_memory = torch.randn(80, 1, 2, 2, 16, 16)

    def make_runner() -> ModelRunner:
        planner = AttentionPlanner(16, kernels.max_tile_rows, min_saved_tokens=1)
        return ModelRunner(model, Sampler(kernels, 320), planner, kv_memory.clone(), Transfer(), 10)

    def run(runner: ModelRunner, batch: StepBatch) -> tuple[list[int], list[Any]]:
        token_ids = runner.launch(batch).wait().tolist()
        return token_ids, [seq.logprobs.copy() and seq.logprobs.pop() for seq in batch.sequences]

    eager, replaying, backend = make_runner(), make_runner(), RecordedCalls()
    replaying.capture_graphs(backend, 65)
    graphs = replaying.graphs
    assert graphs is not None
    long, shared = list(range(60)), list(range(32))
    used = []
    for tables, lengths in (
        ([[3], [5], [7]], [9, 16, 3]),  # an item each; the bucket has seven rows more
        ([long], [900]),  # a long range, split
        ([long, [61], [62]], [900, 4, 5]),
        ([[*shared, 64 + i] for i in range(10)], [515 + i for i in range(10)]),  # a tile of many rows
    ):
        batch = decode_batch(tables, lengths, 16)
        tiles, _ = replaying.planner.tiles(batch.block_tables, batch.starts, batch.counts)
        ready = graphs.find(batch, tiles)
        assert ready is not None
        used.append(ready.graph.work.capacity)
        assert run(replaying, batch) == run(eager, batch)
        assert torch.equal(replaying.kv_memory, eager.kv_memory), "K and V"
    assert backend.num_replays == 4
    assert used[0] == (10, 0, 0, 0) and used[1][2] > 0 and used[3][1] > 0 == used[2][1]

    for graph in graphs.buckets[1]:
        object.__setattr__(graph.work, "capacity", (0, 0, 0, 0))  # nothing fits any more
    batch = decode_batch([long], [901], 16)
    assert run(replaying, batch) == run(eager, batch) and backend.num_replays == 4


@pytest.mark.parametrize(
    ("num_rows", "length", "shared", "chosen"),
    [
        *((256, 1040, 0, 0), (256, 3000, 0, 0), (64, 4000, 0, 0), (40, 1040, 0, 1), (1, 1040, 0, 1), (40, 4000, 0, 2)),
        *((256, 2230, 2048, 3), (40, 2230, 2048, 3), (256, 3500, 2048, 4)),
    ],
)
def test_usual_decode_steps_fit_a_capacity_that_is_not_far_too_large(
    num_rows: int, length: int, shared: int, chosen: int
) -> None:
    """On a device of 132 multiprocessors, 8 KV heads: few rows have to be split, a shared range has wide items."""
    kernels = triton_kernels(num_sms=132)
    from nanoapc.kernels.attention_work import TileCutter, _needed

    width = 4096 // 16
    tables = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    tables[:, : shared // 16] = np.arange(shared // 16)
    starts = np.full(num_rows, length - 1)
    tiles, _ = AttentionPlanner(16, kernels.max_tile_rows).tiles(tables, starts, np.ones(num_rows, np.int64))
    needed = _needed(TileCutter(2, 128, 132 / 8).cut(tiles))
    capacities = kernels.decode_capacities(num_rows, 8, 4096, True)
    fits = [all(n <= most for n, most in zip(needed, capacity, strict=True)) for capacity in capacities]
    assert fits.index(True) == chosen
    assert capacities[0] == (num_rows, 0, 0, 0) and len(capacities) <= 5
    assert all(wide == 0 for _, wide, _, _ in kernels.decode_capacities(num_rows, 8, 4096, False))


def test_memory_for_graphs_is_stated(make_llm: MakeLLM) -> None:
    model = make_llm().engine.model_config
    few, many = (graph_bytes(triton_kernels(num_sms=132), model, n, 4096) for n in (8, 256))
    assert 2**20 < few < many < 2**30


def test_kernels_without_fixed_work_get_the_plan_of_the_step(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "select_kernels", lambda *_: ReferenceKernels())
    prompts, params = [random_ids(5 + i, i) for i in range(3)], SamplingParams(temperature=0, max_tokens=6)
    eager, (llm, _, backend) = make_llm(), with_graphs(make_llm())
    ids = [[o.outputs[0].token_ids for o in each.generate(prompts, params, use_tqdm=False)] for each in (eager, llm)]
    assert ids[0] == ids[1] and backend.num_replays > 3
