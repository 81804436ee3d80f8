"""AttentionWork: the tiles of a plan cut into what each program of the attention kernel does, laid out for the device.

A tile's rows are cut into groups that fit a program, a group's KV range into parts. A part is an item:

    positions   0             F           F + 256     F + 512
    parts       | 0: any span | 1: a span | 2: a span | ...        a row whose range is one part has no states to fold

Invariant: cuts change no row's result, because only a part that starts at position 0 holds several spans; so they are
free to follow how much work there is. From step to step the cut is kept while no group's range enters another span:
then only the ends of the groups' last items move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoapc.engine.attention_plan import KV_END, SPAN, TABLE, AttentionPlan
from nanoapc.engine.step_batch import places
from nanoapc.kernels import upload

ITEM_COLUMNS = 8
"""row_start, num_rows, table, kv_start, kv_end, part (-1: the rows' only one), and two that keep items aligned."""

NARROW_ROWS = 16
"""Matrix rows of the narrow shape, the fewest that tensor cores take."""

PROGRAMS_PER_SM = 4
"""Long KV ranges of narrow items are split until this many programs of the longest part's length, all that a
multiprocessor holds at once, would fill the card; of wide items, one. More would cost more in states than they balance.
"""

SPLIT_PARTS = 1 << 15
"""Parts that the rows of split wide tiles have at most: bounds their states, 16 KiB each for 32 heads of 128."""


class Cut(NamedTuple):
    """narrow, wide: items [n, ITEM_COLUMNS] int32, longest first; first_part [rows + 1]; merged: rows with parts."""

    narrow: np.ndarray
    wide: np.ndarray
    first_part: np.ndarray
    merged: np.ndarray


class TileCutter:
    """Cuts tiles (`AttentionPlan.host_tiles`: [num_tiles, 6] int32 sorted by level) into items.

    A tile that fits the narrow shape and ends its rows (decode) continues what the tiles before it have left. Many
    rows that end together (prefill) are bound by arithmetic and read all of their sequence's range in one go, unless
    they are so few that most of the card would look on (a small chunk of a long prompt).

    Args:
        group: query heads for one KV head.
        wide_rows: matrix rows of the wide shape.
        num_programs: groups of rows that give each multiprocessor a program, for one KV head.
    """

    def __init__(self, group: int, wide_rows: int, num_programs: float):
        self.cutting = self.group, self.wide_rows, self.num_programs = group, wide_rows, num_programs
        self._fixed = b""  # the tiles that the groups are of, without their ends
        self._spans = np.zeros(0, np.int64)

    def cut(self, tiles: np.ndarray) -> Cut:
        """The items of these tiles; the arrays are valid until the next call."""
        fixed = tiles.copy()
        fixed[:, KV_END] = 0
        same = fixed.tobytes() == self._fixed
        if not same:
            self._fixed = fixed.tobytes()
            self._set_groups(tiles)
        end = tiles[self._tile, KV_END] - self._behind
        spans = -(-end // SPAN)
        if not same or not np.array_equal(spans, self._spans):
            self._spans = spans
            self._set_items(end)
        self._items[self._moving, 4] = end[self._moving_group]
        return self._cut

    def _set_groups(self, tiles: np.ndarray) -> None:
        """Groups of rows: what does not depend on where tiles end."""
        row_start, count, table, start = tiles[:, : TABLE + 2].T.astype(np.int64)
        narrow = count <= max(1, NARROW_ROWS // self.group)
        step = np.where(narrow, count, self.wide_rows // self.group)
        per_tile = -(-count // step)
        tile = self._tile = np.repeat(np.arange(len(tiles)), per_tile)
        self._row = row_start[tile] + places(per_tile) * step[tile]
        self._stop = np.minimum(self._row + step[tile], (row_start + count)[tile])
        self._table, self._start, self._narrow = table[tile], start[tile] // SPAN, narrow[tile]
        rows = self._stop - self._row
        self._of_rows = np.repeat(np.arange(len(tile)), rows)  # groups,
        self._rows = self._row[self._of_rows] + places(rows)  # and their rows
        self._last = np.zeros(int(self._stop.max()), np.int64)
        self._last[self._rows] = self._of_rows  # levels ascend: the deepest wins
        self._is_last = self._last[self._row] == np.arange(len(tile))
        self._behind = np.where(self._is_last, (row_start + count)[tile] - self._stop, 0)

    def _set_items(self, end: np.ndarray) -> None:
        """Parts of the groups' ranges, and which of a row's parts each is."""
        spans, start = self._spans, self._start
        ends_wide = self._is_last & ~self._narrow
        num_rows = (self._stop - self._row)[ends_wide].sum()
        few = 2 * ends_wide.sum() <= self.num_programs and num_rows * spans.max() <= SPLIT_PARTS
        in_one_go = ends_wide & (not few)
        start = np.where(in_one_go, 0, start)
        # A chain's first part: F spans, or what its first tile has.
        own = spans - start
        longest = np.ceil(own[self._narrow].sum() / self.num_programs / PROGRAMS_PER_SM)
        longest_wide = np.ceil(own[~self._narrow].sum() / self.num_programs)
        first = np.minimum(own, np.where(self._narrow, longest, longest_wide).astype(np.int64))
        first[start > 0] = 0
        first_of_row = np.zeros(len(self._last), np.int64)
        np.maximum.at(first_of_row, self._rows, np.where(in_one_go, 0, first)[self._of_rows])
        first[in_one_go] = own[in_one_go]
        num_parts = spans[self._last] - first_of_row + 1
        num_parts[(num_parts == 1) & (start == 0)[self._last] | in_one_go[self._last]] = 0
        first_part = np.concatenate([[0], np.cumsum(num_parts)])
        # Items: for each group its parts, which are runs of spans.
        parts = own - first + (start == 0)
        group = np.repeat(np.arange(len(own)), parts)
        part = places(parts)
        is_first = (part == 0) & (start[group] == 0)
        first_span = np.where(is_first, 0, start[group] + part + first[group] - (start[group] == 0))
        num_spans = np.where(is_first, first[group], 1)
        row, stop = self._row[group], self._stop[group]
        part_of_row = np.where(is_first, 0, first_span - first_of_row[row] + 1)
        part_of_row[in_one_go[group] | (num_parts[row] == 0) & self._is_last[group]] = -1
        wanted = (part_of_row < 0) | (first_part[stop] > first_part[row])
        order = np.lexsort((-num_spans, ~self._narrow[group]))
        order = order[wanted[order]]
        end_span, zero = first_span + num_spans, np.zeros_like(row)
        rows = (row, stop - row, self._table[group])
        columns = (*rows, first_span * SPAN, end_span * SPAN, part_of_row, zero, zero)
        self._items = np.stack(columns, axis=1, dtype=np.int32, casting="unsafe")[order]
        group = group[order]
        self._moving = np.flatnonzero(end_span[order] == spans[group])
        self._moving_group = group[self._moving]
        num_narrow = int(self._narrow[group].sum())
        narrow, wide = self._items[:num_narrow], self._items[num_narrow:]
        self._cut = Cut(narrow, wide, first_part.astype(np.int32), np.flatnonzero(num_parts))


@dataclass(frozen=True)
class AttentionWork:
    """A cut plan on the device, in fixed numbers of places so that a captured graph can replay.

    buffer      int32: narrow items, wide items [.., ITEM_COLUMNS], first_part [rows + 1], merged rows. A row that is
                merged owns the parts first_part[row] ... first_part[row + 1] - 1.
    capacity    (narrow items, wide items, merged rows, parts); the scratch memory has the last's partial states
    """

    buffer: Tensor
    capacity: tuple[int, ...]
    cutter: TileCutter

    @classmethod
    def build(cls, plan: AttentionPlan, cutter: TileCutter, capacity: tuple[int, ...] | None = None) -> AttentionWork:
        """The work of a plan, with the places that `capacity` gives or just enough. ValueError: too few."""
        cut = cutter.cut(plan.host_tiles)
        needed = _needed(cut)
        capacity = capacity or needed
        size = (capacity[0] + capacity[1]) * ITEM_COLUMNS + len(plan.positions) + 1 + capacity[2]
        work = cls(torch.empty(size, dtype=torch.int32, device=plan.positions.device), capacity, cutter)
        packed = work.pack(cut)
        if packed is None:
            raise ValueError(f"the plan needs {needed} narrow items, wide items, merged rows, parts; not {capacity}")
        work.buffer.copy_(upload(torch.from_numpy(packed), work.buffer.device))
        return work

    def cut(self, tiles: np.ndarray) -> Cut:
        """Cuts the tiles of a plan of at most as many rows, as this work's own were."""
        return self.cutter.cut(tiles)

    def pack(self, cut: Cut) -> np.ndarray | None:
        """What the buffer must hold for these items to be done; None where they do not fit."""
        if any(n > most for n, most in zip(_needed(cut), self.capacity)):
            return None
        packed = np.zeros(len(self.buffer), np.int32)
        wide, first_part, merged = self.sections()
        packed[first_part:merged], packed[merged:] = cut.first_part[-1], -1  # rows that this plan lacks have no parts
        for place, values in zip((0, wide, first_part, merged), (cut.narrow, cut.wide, cut.first_part, cut.merged)):
            packed[place : place + values.size] = values.reshape(-1)
        return packed

    def sections(self) -> list[int]:
        """Where wide items, first_part and merged rows start in the buffer."""
        narrow, wide, merged, _ = self.capacity
        return [narrow * ITEM_COLUMNS, (narrow + wide) * ITEM_COLUMNS, len(self.buffer) - merged]


def _needed(cut: Cut) -> tuple[int, ...]:
    return len(cut.narrow), len(cut.wide), len(cut.merged), int(cut.first_part[-1])
