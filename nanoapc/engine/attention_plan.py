"""AttentionPlan: block tables -> tiles of (query rows x KV span), over the forest of shared prefixes.

A step's rows are its query tokens, sequence after sequence. Sequences come sorted by block table, so those that
share a run of blocks are neighbours, and a shared run belongs to one contiguous range of rows:

    KV position   0        256       512       768
    seq 0  row 0  |  A A A A | B B B B | c c        A: one tile, rows 0-3, level 0
    seq 1  row 1  |  A A A A | B B B B | d d d      B: one tile, rows 0-1, level 1
    seq 2  row 2  |  A A A A | e                    c, d, e, f: one tile each,
    seq 3  row 3  |  A A A A | f f f                the last one of its row

Invariant: for each row the tiles that hold it have ascending levels and adjacent KV ranges that start at 0 and
end after the row's own position, so every (row, visible KV position) pair is covered exactly once.

Absolute spans: a tile starts at a multiple of SPAN, whatever the batch, the chunking or the sharing. Kernels work
span by span in ascending order and carry a row's state (max, sum, accumulator) from tile to tile; a row's
result is the same arithmetic in the same order however its range was cut and whoever shares its tiles.

Sharing is detected by block id at any depth (not by reference counts, which cannot tell who shares with whom).
Sources: Hydragen (arXiv 2402.05099), cascade inference (FlashInfer), fixed split sizes as in "Defeating
Nondeterminism in LLM Inference" (Thinking Machines, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoapc.engine.step_batch import places

if TYPE_CHECKING:
    from nanoapc.kernels.attention_work import AttentionWork

SPAN = 256
"""KV positions a span: tiles start at multiples of it, kernels reduce in units of it."""

ROW_START, NUM_ROWS, TABLE, KV_START, KV_END, LEVEL = range(6)
"""Columns of a tile."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a step's attention has to do; the same for every layer. Tensors live on the model's device.

    tiles         [num_tiles, 6] int32: row_start, num_rows, table, kv_start, kv_end, level; sorted by level
    positions     [T] int64: a row sees the KV positions 0 .. positions[row] of its own sequence
    slots         [T] int64: where its own K/V goes, block_id * B + offset; -1 writes nothing
    block_tables  [num_sequences, max_blocks] int32: position t lives in block block_tables[table, t // B]
    host_tiles    the numpy twin of `tiles`
    level_starts  level i is host_tiles[level_starts[i]:level_starts[i + 1]]; its tiles have disjoint rows
    work          the tiles as the kernels want them, if they have been prepared (see cuda_graphs.py)
    """

    tiles: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    host_tiles: np.ndarray
    level_starts: list[int]
    work: AttentionWork | None = None


class AttentionPlanner:
    """Builds the tiles of a step and keeps them while the batch stays the same.

    From one pure decode step to the next only the end of each row's last tile moves; the forest itself is
    rebuilt when sequences join, leave or prefill.

    Args:
        max_tile_rows: rows a tile at most (a kernel's preference).
        min_saved_tokens: the cost model: a shared range is worth a tile of its own when it saves reading at
            least this many KV positions, (sequences - 1) * length; below that, each reads it for itself.
        share: False plans every sequence for itself (to measure what sharing is worth).
    """

    def __init__(self, block_size: int, max_tile_rows: int = 128, min_saved_tokens: int = SPAN, share: bool = True):
        self.block_size = block_size
        self.max_tile_rows = max_tile_rows
        self.min_saved_tokens = min_saved_tokens
        self.share = share
        self._key: tuple[int, int] | None = None
        self._tiles = np.zeros((0, 6), np.int32)
        self._last = np.zeros(0, np.int64)  # index of each row's last tile, in row order (pure decode only)
        self._level_starts = [0]

    def tiles(
        self, block_tables: np.ndarray, starts: np.ndarray, counts: np.ndarray, key: int | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """The tiles of a step, sorted by level, and where each level starts.

        Args:
            block_tables: [num_sequences, max_blocks] int32, sorted so that sharers are neighbours.
            starts: [num_sequences] position of each sequence's first row.
            counts: [num_sequences] rows of each sequence, at least 1.
            key: names the batch's composition; the same key and only single rows: the forest is kept.
        """
        if key is not None and self._key == (key, len(starts)) and int(counts.max()) == 1:
            tiles = self._tiles.copy()
            tiles[self._last, KV_END] = starts + 1
            return tiles, self._level_starts
        shared, depth, level = self._shared_tiles(block_tables, starts, counts)
        own = self._own_tiles(starts, counts, depth, level)
        tiles = np.concatenate([np.array(shared, np.int32).reshape(-1, 6), own])
        order = np.argsort(tiles[:, LEVEL], kind="stable")
        tiles = tiles[order]
        num_levels = int(tiles[-1, LEVEL]) + 1
        self._level_starts = np.searchsorted(tiles[:, LEVEL], np.arange(num_levels + 1)).tolist()
        self._key = None
        if key is not None and int(counts.max()) == 1:
            # Each row has one tile of its own; find where the sort has put it.
            place = np.argsort(order)
            self._last = place[len(shared) :]
            self._tiles, self._key = tiles, (key, len(counts))
        return tiles, self._level_starts

    def _own_tiles(self, starts: np.ndarray, counts: np.ndarray, depth: np.ndarray, level: np.ndarray) -> np.ndarray:
        """What each sequence reads for itself: from where its shared part ends to each row group's last position."""
        limit = self.max_tile_rows
        per_sequence = -(-counts // limit)
        table = np.repeat(np.arange(len(counts)), per_sequence)
        first_row = np.cumsum(counts) - counts
        group = places(per_sequence)
        rows = np.minimum(counts[table] - group * limit, limit)
        end = starts[table] + group * limit + rows
        columns = (first_row[table] + group * limit, rows, table, depth[table] * SPAN, end, level[table])
        return np.stack(columns, axis=1).astype(np.int32)

    def _shared_tiles(
        self, block_tables: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
        """Tiles shared by neighbours, and per sequence how many spans and levels they cover."""
        num = len(starts)
        depth, level = np.zeros(num, np.int64), np.zeros(num, np.int64)
        tiles: list[tuple[int, ...]] = []
        if not self.share or num == 1:
            return tiles, depth, level
        common = self._common_spans(block_tables, starts)
        if not common.any():
            return tiles, depth, level
        row_end = np.cumsum(counts)
        row_start = row_end - counts
        # (first, end, depth so far, level): walk the forest from its roots, neighbours with common > 0 together.
        groups = [(a, b, 0, 0) for a, b in _runs(common, 0, num, 0)]
        while groups:
            a, b, done, lev = groups.pop()
            length = int(common[a : b - 1].min()) - done
            if (b - a - 1) * length * SPAN >= self.min_saved_tokens:
                tiles += self._split(int(row_start[a]), int(row_end[b - 1]), a, done, done + length, lev)
                depth[a:b], level[a:b] = done + length, lev + 1
                lev += 1
                done += length
                groups += [(c, d, done, lev) for c, d in _runs(common, a, b, done)]
            else:  # too little in common: drop the shortest common range, keep the groups below it
                groups += [(c, d, done, lev) for c, d in _runs(common, a, b, done + length)]
        return tiles, depth, level

    def _split(self, row: int, end: int, table: int, first: int, last: int, level: int) -> list[tuple[int, ...]]:
        limit = self.max_tile_rows
        return [(r, min(limit, end - r), table, first * SPAN, last * SPAN, level) for r in range(row, end, limit)]

    def _common_spans(self, block_tables: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[num - 1] whole spans that neighbours have in common and that all rows of both see entirely."""
        full = (starts + 1) // SPAN
        most = int(full.max())
        if most == 0:
            return np.zeros(len(starts) - 1, np.int64)
        width = -(-most * SPAN // self.block_size)
        same = block_tables[:-1, :width] == block_tables[1:, :width]
        blocks = np.where(same.all(axis=1), width, np.argmin(same, axis=1))
        return np.minimum(blocks * self.block_size // SPAN, np.minimum(full[:-1], full[1:]))


def _runs(common: np.ndarray, first: int, end: int, depth: int) -> list[tuple[int, int]]:
    """Maximal runs [a, b) of two or more sequences in [first, end) whose neighbours share more than `depth` spans."""
    inside = np.concatenate([[False], common[first : end - 1] > depth, [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    return [(first + int(a), first + int(b) + 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
