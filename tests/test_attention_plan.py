"""Attention plans cover every (row, visible KV position) pair exactly once, whatever is shared and however it is cut.

The oracle walks the tiles one by one and compares positions and physical blocks with the sequences' own tables.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from nanoapc.engine.attention_plan import (
    KV_END,
    KV_START,
    LEVEL,
    NUM_ROWS,
    ROW_START,
    SPAN,
    TABLE,
    AttentionPlanner,
)

BLOCK_SIZES = (1, 3, 4, 16, 256, 1024)
MAX_TILE_ROWS = 64


@dataclass
class Step:
    """A step's sequences, sorted by block table as the scheduler sorts them.

    tables: the blocks of each; starts, counts: as the planner gets them.
    """

    tables: list[list[int]]
    starts: np.ndarray
    counts: np.ndarray
    block_size: int

    @property
    def padded(self) -> np.ndarray:
        """[num, max_blocks]: what lies behind a table's end is left over, and the same for all."""
        width = max(map(len, self.tables)) + 1
        return np.array([table + [77] * (width - len(table)) for table in self.tables], np.int32)

    @property
    def positions(self) -> np.ndarray:
        """[T] the position of each row."""
        return np.concatenate([np.arange(s, s + c) for s, c in zip(self.starts, self.counts, strict=True)])

    @property
    def sequence_of_row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def plan(self, planner: AttentionPlanner | None = None, key: int | None = None) -> tuple[np.ndarray, list[int]]:
        planner = planner or AttentionPlanner(self.block_size, MAX_TILE_ROWS)
        return planner.tiles(self.padded, self.starts, self.counts, key)


def make_step(
    rng: np.random.Generator,
    num: int,
    block_size: int,
    *,
    max_len: int = 1400,
    max_count: int = 150,
    decode: bool = False,
) -> Step:
    """Sequences that fork from each other at random depths; each has a random number of rows at its end."""
    next_block = iter(rng.permutation(200_000).tolist())
    forest: list[tuple[list[int], int, int]] = []
    for _ in range(num):
        total = int(rng.integers(1, max_len))
        shared: list[int] = []
        if forest and rng.random() < 0.75:
            parent, parent_total, _ = forest[rng.integers(len(forest))]
            # Only full blocks are shared; a decoding parent has filled them, another one perhaps in this very step.
            shared = parent[: int(rng.integers(0, parent_total // block_size + 1))]
            total = len(shared) * block_size + int(rng.integers(0 if shared else 1, 300))
        table = shared + [next(next_block) for _ in range(-(-total // block_size) - len(shared))]
        if not decode and rng.random() < 0.2:
            table += [next(next_block) for _ in range(3)]  # a prompt has blocks for all of it while it runs in chunks
        # At least one row; the last token of a sequence that is shared whole is computed again.
        most = max(1, total - len(shared) * block_size)
        count = 1 if decode or rng.random() < 0.5 else int(rng.integers(1, min(most, max_count) + 1))
        forest.append((table, total, count))
    forest.sort(key=lambda entry: np.array(entry[0], np.int32).tobytes())
    totals, counts = np.array([entry[1] for entry in forest]), np.array([entry[2] for entry in forest])
    return Step([entry[0] for entry in forest], totals - counts, counts, block_size)


def check_plan(step: Step, tiles: np.ndarray, level_starts: list[int], max_tile_rows: int = MAX_TILE_ROWS) -> None:
    """Everything that the module's docstring promises."""
    positions, sequence_of_row, size = step.positions, step.sequence_of_row, step.block_size
    assert tiles.dtype == np.int32 and tiles.shape[1] == 6
    # Levels: sorted, none empty, and no row twice in one.
    assert level_starts[0] == 0 and level_starts[-1] == len(tiles)
    for level, (first, end) in enumerate(itertools.pairwise(level_starts)):
        assert first < end and (tiles[first:end, LEVEL] == level).all()
        rows = np.concatenate([np.arange(t[ROW_START], t[ROW_START] + t[NUM_ROWS]) for t in tiles[first:end]])
        assert len(np.unique(rows)) == len(rows)

    covered = np.zeros(len(positions), np.int64)  # each row's positions before it are covered exactly once
    for tile in tiles:
        rows = slice(tile[ROW_START], tile[ROW_START] + tile[NUM_ROWS])
        assert 1 <= tile[NUM_ROWS] <= max_tile_rows and rows.stop <= len(positions)
        assert tile[KV_START] % SPAN == 0
        assert (covered[rows] == tile[KV_START]).all(), "a row's ranges are not adjacent"
        sequences = np.unique(sequence_of_row[rows])
        is_shared, is_last = len(sequences) > 1, tile[KV_END] == positions[rows].max() + 1
        if is_shared:
            assert tile[KV_END] % SPAN == 0 and tile[KV_END] > tile[KV_START]
            assert (tile[KV_END] <= positions[rows] + 1).all(), "a row does not see all of a shared tile"
        assert is_shared or is_last or tile[KV_END] % SPAN == 0
        covered[rows] = np.minimum(tile[KV_END], positions[rows] + 1)
        # The tile's table leads to the same physical blocks as the sequence's own.
        columns = slice(tile[KV_START] // size, -(-tile[KV_END] // size))
        for sequence in sequences:
            own = step.tables[sequence][columns]
            assert own == step.tables[tile[TABLE]][columns] and len(own) == columns.stop - columns.start
    assert (covered == positions + 1).all(), "a row does not see all that it should"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_visible_position_is_covered_exactly_once(block_size: int) -> None:
    num_shared = num_levels = 0
    for seed in range(25):
        rng = np.random.default_rng([block_size, seed])
        step = make_step(rng, int(rng.integers(1, 24)), block_size, decode=seed % 3 == 0)
        for max_tile_rows in (MAX_TILE_ROWS, 5, 1):
            planner = AttentionPlanner(block_size, max_tile_rows, min_saved_tokens=(256, 0, 1000)[seed % 3])
            tiles, level_starts = step.plan(planner)
            check_plan(step, tiles, level_starts, max_tile_rows)
            num_levels = max(num_levels, len(level_starts) - 1)
            num_shared += sum(
                len(set(step.sequence_of_row[t[ROW_START] : t[ROW_START] + t[NUM_ROWS]])) > 1 for t in tiles
            )
    assert num_shared > 10 and num_levels > (1 if block_size > 256 else 2), "there was little to share"


def test_the_check_sees_what_it_is_for() -> None:
    # Two sequences that share two blocks of a span each, a third alone.
    step = Step([[1, 2, 3], [1, 2, 4], [5]], np.array([600, 530, 3]), np.array([1, 3, 5]), 256)
    tiles, level_starts = step.plan()
    check_plan(step, tiles, level_starts)
    assert tiles[:, :5].tolist() == [[0, 4, 0, 0, 512], [4, 5, 2, 0, 8], [0, 1, 0, 512, 601], [1, 3, 1, 512, 533]]
    damages = [(0, NUM_ROWS, 5), (0, TABLE, 2), (0, KV_END, 768), (2, KV_START, 256), (3, KV_END, 532), (1, LEVEL, 1)]
    for tile, column, value in damages:
        broken = tiles.copy()
        broken[tile, column] = value
        with pytest.raises(AssertionError):
            check_plan(step, broken, level_starts)
    with pytest.raises(AssertionError):
        check_plan(step, tiles[:3], [0, 2, 3])


# -- what is shared ----------------------------------------------------------------------------------------


def num_reads(tiles: np.ndarray) -> int:
    """KV positions that are read, each tile once."""
    return int((tiles[:, KV_END] - tiles[:, KV_START]).sum())


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_a_decode_step_reads_each_shared_span_once(block_size: int) -> None:
    """The oracle counts the different runs of blocks that lead to the end of each span."""
    num_saved = 0
    for seed in range(20):
        rng = np.random.default_rng([7, block_size, seed])
        step = make_step(rng, 30, block_size, decode=True)
        tiles, level_starts = step.plan()
        check_plan(step, tiles, level_starts)
        spans = set()
        for table, position in zip(step.tables, step.positions.tolist(), strict=True):
            for k in range((position + 1) // SPAN):
                spans.add((*table[: -(-(k + 1) * SPAN // block_size)], k))
        rests = int(((step.positions + 1) % SPAN).sum())
        assert num_reads(tiles) == len(spans) * SPAN + rests
        num_saved += int((step.positions + 1).sum()) - num_reads(tiles)
    assert num_saved > 10_000


def test_sharing_is_found_at_any_depth() -> None:
    """One span for four sequences, the next for three, one more for two: a chain of levels."""
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 8, 9, 10]]
    step = Step(tables, np.array([1000, 1001, 1002, 1003]), np.array([1, 1, 1, 1]), 256)
    tiles, level_starts = step.plan()
    shared = [[0, 4, 0, 0, 256, 0], [0, 3, 0, 256, 512, 1], [0, 2, 0, 512, 768, 2]]
    own = [[3, 1, 3, 256, 1004, 1], [2, 1, 2, 512, 1003, 2], [0, 1, 0, 768, 1001, 3], [1, 1, 1, 768, 1002, 3]]
    assert sorted(tiles.tolist()) == sorted(shared + own)
    assert level_starts == [0, 1, 3, 5, 7]


def test_a_prompts_rows_share_what_all_of_them_see() -> None:
    tables = [[1, 2, 3], [1, 2, 4]]
    for start, end in ((300, 256), (511, 512), (510, 256), (254, 0), (255, 256)):
        step = Step(tables, np.array([start, 700]), np.array([60, 1]), 256)
        tiles, level_starts = step.plan()
        check_plan(step, tiles, level_starts)
        shared = [tile[KV_END] for tile in tiles if tile[NUM_ROWS] == 61]
        assert shared == ([end] if end else []), f"rows from position {start}"


def test_a_shared_range_is_cut_into_tiles_of_max_tile_rows() -> None:
    step = Step([[1, 100 + i] for i in range(10)], np.full(10, 300), np.full(10, 1), 256)
    tiles, _ = step.plan(AttentionPlanner(256, max_tile_rows=4))
    shared = tiles[tiles[:, LEVEL] == 0]
    assert shared.tolist() == [[0, 4, 0, 0, 256, 0], [4, 4, 0, 0, 256, 0], [8, 2, 0, 0, 256, 0]]
    assert len(tiles) == 3 + 10


@pytest.mark.parametrize("max_tile_rows", [1, 7, 64])
def test_sequences_that_share_nothing_get_one_tile_for_each_group_of_rows(max_tile_rows: int) -> None:
    rng = np.random.default_rng(5)
    counts = np.array([1, 200, 1, 64, 65, 3, 1])
    starts = np.array([0, 100, 2000, 0, 255, 256, 511])
    lengths = starts + counts
    next_block = iter(rng.permutation(2000).tolist())
    tables = sorted(([next(next_block) for _ in range(-(-int(n) // 16))] for n in lengths), key=len)
    order = np.argsort(lengths, kind="stable")
    step = Step(tables, starts[order], counts[order], 16)
    planner = AttentionPlanner(16, max_tile_rows)
    tiles, level_starts = step.plan(planner)
    check_plan(step, tiles, level_starts, max_tile_rows)
    assert level_starts == [0, len(tiles)] and len(tiles) == (-(-counts // max_tile_rows)).sum()
    assert (tiles[:, KV_START] == 0).all()
    # A tile reads no further than its last row sees.
    assert (tiles[:, KV_END] == step.positions[tiles[:, ROW_START] + tiles[:, NUM_ROWS] - 1] + 1).all()


def test_share_off_plans_every_sequence_for_itself() -> None:
    rng = np.random.default_rng(6)
    step = make_step(rng, 20, 16)
    tiles, level_starts = step.plan(AttentionPlanner(16, MAX_TILE_ROWS, share=False))
    check_plan(step, tiles, level_starts)
    assert len(level_starts) == 2 and len(tiles) == (-(-step.counts // MAX_TILE_ROWS)).sum()
    assert len(step.plan()[1]) > 2, "there was something to share"


def test_left_over_block_ids_behind_a_table_are_not_taken_for_sharing() -> None:
    """Rows of the sequence table are reused; what lies behind their end is arbitrary."""
    padded = np.array([[1, 5, 6, 7], [1, 5, 6, 7], [1, 5, 6, 7]], np.int32)
    tiles, _ = AttentionPlanner(16).tiles(padded, np.array([15, 12, 40]), np.array([1, 1, 1]))
    assert tiles.tolist() == [[0, 1, 0, 0, 16, 0], [1, 1, 1, 0, 13, 0], [2, 1, 2, 0, 41, 0]]


# -- what sharing must be worth ----------------------------------------------------------------------------


def shares(planner: AttentionPlanner, num: int, num_spans: int) -> bool:
    """Whether `num` decoding sequences with so many common spans get a shared tile."""
    tables = [[*range(num_spans), 1000 + i] for i in range(num)]
    step = Step(tables, np.full(num, num_spans * SPAN + 10), np.full(num, 1), SPAN)
    tiles, level_starts = step.plan(planner)
    check_plan(step, tiles, level_starts)
    return len(level_starts) > 2


def test_a_shared_tile_must_save_min_saved_tokens() -> None:
    planner = AttentionPlanner(SPAN, min_saved_tokens=1000)
    for num in range(1, 7):
        for num_spans in range(7):
            assert shares(planner, num, num_spans) == ((num - 1) * num_spans * SPAN >= 1000), (num, num_spans)
    assert shares(AttentionPlanner(SPAN), 2, 1), "by default a whole span for two is worth it"


def test_a_range_not_worth_sharing_hides_no_deeper_one_that_is() -> None:
    """Three share one span; two of them share five, in one tile from 0."""
    tables = [[0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 11], [0, 12, 13, 14, 15, 16]]
    step = Step(tables, np.full(3, 1400), np.full(3, 1), SPAN)
    tiles, level_starts = step.plan(AttentionPlanner(SPAN, min_saved_tokens=1000))
    check_plan(step, tiles, level_starts)
    assert tiles[tiles[:, NUM_ROWS] > 1].tolist() == [[0, 2, 0, 0, 5 * SPAN, 0]]


# -- the kept plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [3, 16, 256])
def test_a_kept_plan_equals_a_fresh_one_in_every_step(block_size: int) -> None:
    for seed in range(3):
        rng = np.random.default_rng([11, block_size, seed])
        step = make_step(rng, int(rng.integers(1, 16)), block_size, decode=True)
        planner = AttentionPlanner(block_size, MAX_TILE_ROWS)
        next_block = iter(range(300_000, 400_000))
        num_levels = set()
        for _ in range(2 * SPAN + 20):  # every row passes at least two edges between spans
            kept, kept_levels = step.plan(planner, key=1)
            fresh, fresh_levels = step.plan()
            assert np.array_equal(kept, fresh) and kept_levels == fresh_levels
            num_levels.add(len(kept_levels))
            step.starts = step.starts + 1
            for table, start in zip(step.tables, step.starts.tolist(), strict=True):
                if start // block_size == len(table):
                    table.append(next(next_block))
        check_plan(step, *step.plan(planner, key=1))
        assert len(num_levels) == 1


def test_a_plan_is_kept_only_for_the_same_key_and_pure_decode() -> None:
    shared = Step([[1, 2], [1, 3]], np.array([300, 301]), np.array([1, 1]), SPAN)
    alone = Step([[1, 2], [4, 3]], np.array([300, 301]), np.array([1, 1]), SPAN)
    prefill = Step([[1, 2], [4, 3]], np.array([300, 301]), np.array([9, 1]), SPAN)
    three = Step([[1, 2], [4, 3], [5, 6]], np.array([300, 301, 302]), np.array([1, 1, 1]), SPAN)
    for first_key, second_key, second in (
        (1, 2, alone),
        (1, None, alone),
        (None, None, alone),
        (1, 1, prefill),
        (1, 1, three),
    ):
        planner = AttentionPlanner(SPAN)
        shared.plan(planner, first_key)
        tiles, level_starts = second.plan(planner, second_key)
        check_plan(second, tiles, level_starts)
        assert len(level_starts) == 2
    planner = AttentionPlanner(SPAN)
    assert shared.plan(planner, 1)[1] == alone.plan(planner, 1)[1], "the same key means the same batch"
    prefill.plan(planner, 1)
    check_plan(alone, *alone.plan(planner, 1))


def test_a_plan_in_use_is_not_changed_by_the_next() -> None:
    step = Step([[1, 2], [1, 3]], np.array([300, 301]), np.array([1, 1]), SPAN)
    planner = AttentionPlanner(SPAN)
    plans = []
    for _ in range(3):
        tiles, _ = step.plan(planner, key=1)
        plans.append((tiles, tiles.copy()))
        step.starts = step.starts + 1
    for tiles, copy in plans:
        assert (tiles == copy).all()
    assert len({tuple(copy[:, KV_END]) for _, copy in plans}) == 3
