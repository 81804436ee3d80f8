"""DecodeGraphs: decode steps as captured graphs, so that the host starts a step with a few calls instead of hundreds.

    bucket   1   2   4   8   16   24  ...  max_num_seqs        a step of 19 sequences replays the graph for 24:

    rows     0 .. 18                        19 .. 23
             the step's                     padding: slot -1 (writes nothing), position 0, no attention item

A graph replays what was captured: the same kernels on the same memory. So the step's inputs are copied into static
tensors first, and attention's work has a fixed number of places, of which a step uses some (`AttentionWork`). How many
it needs depends on lengths and sharing; a bucket has a graph for each of a few capacities, the smallest that fits is
replayed, and where none fits the step runs eagerly.

Invariant: a row's result is that of the eager step, whatever the padding: rows never mix, and padding writes nothing.
Captured from the largest down, all graphs share one memory pool: only one of them runs at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoapc.engine.attention_plan import AttentionPlan
from nanoapc.engine.step_batch import StepBatch
from nanoapc.kernels import FixedWorkKernels
from nanoapc.kernels.attention_work import AttentionWork
from nanoapc.models.config import ModelConfig

Forward = Callable[[Tensor, AttentionPlan], Tensor]
"""token_ids [R], plan -> hidden [R, h]."""

GRAPH_BYTES = 4 * 2**20
"""What the driver and the allocator keep for a graph, roughly, besides the shared pool."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Rows that graphs are captured for, ascending: fine where a row counts, at most a fifth of padding above 64."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + 2 ** (sizes[-1].bit_length() - 3))  # 64 + 16 ... 128 + 32 ... 256 + 64 ...
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_bytes(kernels: FixedWorkKernels, model: ModelConfig, max_num_seqs: int, max_len: int) -> int:
    """Device memory to leave for the graphs: each one's own, and the pool, which is as large as the largest needs."""
    of_rows = [(n, kernels.decode_capacities(n, model.num_kv_heads, max_len, True)) for n in bucket_sizes(max_num_seqs)]
    num_parts = max(capacity[-1] for _, capacities in of_rows for capacity in capacities)
    states = num_parts * model.num_heads * (model.head_dim + 2) * 4
    activations = max_num_seqs * 8 * (model.hidden_size + model.intermediate_size) * 4
    return states + activations + GRAPH_BYTES * sum(len(capacities) for _, capacities in of_rows)


class CudaBackend:
    """How a function becomes a CUDA graph."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], None], new_pool: bool) -> Callable[[], None]:
        """Records what `run` does on the device; the result does it again, on the same memory.

        Memory comes from the pool of the graphs before, or from a new one. The first run is eager, because kernels are
        compiled and libraries set up then; the second is captured.
        """
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if new_pool else self._pool):
            run()
        self._pool = graph.pool()
        return graph.replay


@dataclass
class Graph:
    """A captured decode step, its rows, and its attention work."""

    num_rows: int
    work: AttentionWork
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of one model runner.

    Args:
        forward: computes a step; the same function as of eager steps.
        kv_memory: [NB, L, 2, Hkv, B, D].
        max_num_seqs: rows of the largest bucket.
        max_blocks: width of a block table.
        forest: whether plans may have tiles that are shared by many rows.
    """

    def __init__(
        self,
        forward: Forward,
        kernels: FixedWorkKernels,
        backend: CudaBackend,
        model: ModelConfig,
        kv_memory: Tensor,
        max_num_seqs: int,
        max_blocks: int,
        forest: bool,
    ):
        device, dtype = kv_memory.device, kv_memory.dtype
        self.forward, self.kernels, self.backend, self.forest = forward, kernels, backend, forest
        self.kv_cache = kv_memory[:, 0]
        self.query = torch.empty(max_num_seqs, model.num_heads, model.head_dim, dtype=dtype, device="meta")
        self.max_len = max_blocks * kv_memory.shape[-2]
        self.rows = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)  # token ids, positions, slots
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(max_num_seqs, model.hidden_size, dtype=dtype, device=device)
        self.sizes = bucket_sizes(max_num_seqs)
        self.buckets: dict[int, list[Graph]] = {}
        self._num_captured = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all graphs; again after the weights have moved."""
        self.buckets, self._num_captured = {}, 0
        self.rows[2] = -1
        for num_rows in reversed(self.sizes):
            capacities = self.kernels.decode_capacities(num_rows, self.kv_cache.shape[2], self.max_len, self.forest)
            self.buckets[num_rows] = [self._capture(num_rows, capacity) for capacity in reversed(capacities)][::-1]

    def _capture(self, num_rows: int, capacity: tuple[int, ...]) -> Graph:
        host_tiles = np.array([[0, 1, 0, 0, 1, 0]], np.int32)  # one row that sees one position
        tiles = torch.from_numpy(host_tiles).to(self.rows.device)
        token_ids, positions, slots = self.rows[:, :num_rows]
        plan = AttentionPlan(tiles, positions, slots, self.block_tables, host_tiles, [0, 1])
        work = self.kernels.prepare(self.query[:num_rows], self.kv_cache, plan, capacity)
        plan = replace(plan, work=work)

        def run() -> None:
            self.hidden[:num_rows].copy_(self.forward(token_ids, plan))

        graph = Graph(num_rows, work, self.backend.capture(run, new_pool=not self._num_captured))
        self._num_captured += 1
        return graph

    def find(self, batch: StepBatch, tiles: np.ndarray) -> ReadyGraph | None:
        """The graph for a step and what is to be sent for it; None if the step is no decode, or fits no graph."""
        num_rows = len(batch.counts)
        if batch.num_tokens > num_rows:
            return None
        graphs = self.buckets[self.sizes[bisect_left(self.sizes, num_rows)]]
        cut = graphs[0].work.cut(tiles)
        for graph in graphs:
            packed = graph.work.pack(cut)
            if packed is not None:
                return ReadyGraph(self, graph, batch, packed)
        return None


@dataclass(frozen=True)
class ReadyGraph:
    """A graph with a step's inputs, still on the host. work: what goes into the buffer of its attention work."""

    owner: DecodeGraphs
    graph: Graph
    batch: StepBatch
    work: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """To be sent to the device."""
        batch, num_rows = self.batch, len(self.batch.counts)
        rows = np.zeros((3, self.graph.num_rows), np.int64)
        rows[2] = -1
        rows[:, :num_rows] = batch.token_ids, batch.positions, batch.slots
        return [rows, batch.block_tables, self.work]

    def run(self, sent: list[Tensor]) -> Tensor:
        """`arrays` on the device -> hidden [n, h] of the step's rows, there until the next replay."""
        rows, block_tables, work = sent
        owner, graph, num_rows = self.owner, self.graph, len(self.batch.counts)
        owner.rows[:, : graph.num_rows].copy_(rows)
        owner.block_tables[:num_rows, : block_tables.shape[1]].copy_(block_tables)
        graph.work.buffer.copy_(work)
        graph.replay()
        return owner.hidden[:num_rows]
