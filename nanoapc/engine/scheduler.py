"""Scheduler: which tokens run in this step. Pure host code: imports no torch.

    add -> waiting (in prefix order) -> running -> finished
                 ^-- preempted (newest first) --'

One token budget a step. Running sequences come first, oldest first; what is left of the budget admits waiting ones,
whose prompts run in chunks that fill it, mixed with the decodes of the others. A sequence is admitted only when its
whole prompt finds blocks (and a small watermark stays free), so a prefill is never preempted half way by itself.

When a running sequence finds no block, the newest running one is preempted: its blocks go back (its full ones stay
cached), it waits at the head of the queue with its output, and is computed again from what is still cached.
The oldest is never the victim of a newer one, so every step brings the oldest nearer to its end.

Invariant: a sequence is in exactly one of waiting and running; what a step has indexed is either computed by
`update` or withdrawn by `step_failed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from nanoapc.engine.block_manager import BlockManager, Match
from nanoapc.engine.metrics import PrefixCacheStats
from nanoapc.engine.prefix_order import prefix_order
from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.engine.step_batch import StepBatch, build_step_batch

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for those that run."""


class Scheduler:
    """Decides, step by step, for one engine.

    Args:
        manager: the blocks.
        max_num_seqs, max_num_batched_tokens, max_model_len: see EngineConfig.
        eos_token_ids: the model's end-of-text ids.
        policy: "prefix" or "fcfs".
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        policy: str = "prefix",
    ):
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.table = SequenceTable(max_num_seqs, max_model_len, manager.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.stats = PrefixCacheStats()
        self.events = manager.events
        self._eos = np.asarray(sorted(eos_token_ids), np.int64)
        self._watermark_blocks = int(WATERMARK * len(manager.pool.blocks))
        self._composition = 0
        self._rows: np.ndarray | None = None  # running table rows sorted by block table; None: to be sorted
        self._sorted: list[Sequence] = []
        self._blocked_at = -1  # free blocks when the head of the queue last found too few

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequences: list[Sequence]) -> None:
        """Appends new sequences to the queue, in the order of the policy."""
        for seq in prefix_order(sequences) if self.policy == "prefix" else sequences:
            self.manager.enqueue(seq)
            self.waiting.append(seq)
        if self.events is not None:
            self.events.added(sequences)
        self._blocked_at = -1

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences, whether they run, wait or have not been added yet; between steps only.

        Finished ones are left alone.
        """
        dropped = {id(seq): seq for seq in sequences if seq.finish_reason is None}
        waiting, self.waiting = self.waiting, deque()
        for seq in waiting:
            if id(seq) in dropped:
                self.manager.dequeue(seq)
            else:
                self.waiting.append(seq)
        for seq in dropped.values():
            if seq.row >= 0:
                self._stop_running(seq)
            seq.finish_reason = "abort"
        if self.events is not None:
            self.events.finished(dropped.values())
        self._blocked_at = -1

    # -- one step ----------------------------------------------------------------------------------------

    def schedule(self) -> StepBatch | None:
        """The next step, or None when nothing is left to do."""
        self.manager.begin_step()
        copies: list[tuple[int, int, int]] = []
        if not self._schedule_running():
            copies = self._admit()
        if not self.running:
            assert not self.waiting, "an empty pool must hold any single sequence"
            return None
        rows, sequences, key = self._scheduled_rows()
        batch = build_step_batch(self.table, rows, sequences, self.manager.block_size, copies, key)
        self.stats.computed_tokens += batch.num_tokens
        self.stats.computed_prompt_tokens += batch.num_prompt_rows
        if batch.num_tokens > len(batch.counts):
            self._blocked_at = -1  # a prompt moves on: the head of the queue may find more in the cache
        return batch

    def _running_rows(self) -> np.ndarray:
        """Running table rows, sorted so that sequences that share blocks are neighbours."""
        if self._rows is None:
            table = self.table
            tables = {seq.row: table.block_table[seq.row, : table.num_blocks[seq.row]] for seq in self.running}
            self._sorted = sorted(self.running, key=lambda seq: tables[seq.row].tobytes())
            self._rows = np.array([seq.row for seq in self._sorted], np.int64)
            self._composition += 1
        return self._rows

    def _scheduled_rows(self) -> tuple[np.ndarray, list[Sequence], int | None]:
        rows = self._running_rows()
        scheduled = self.table.num_scheduled_tokens[rows] > 0
        if scheduled.all():
            return rows, self._sorted, self._composition
        kept = np.flatnonzero(scheduled)
        return rows[kept], [self._sorted[i] for i in kept.tolist()], None

    def _schedule_running(self) -> bool:
        """Gives running sequences their tokens and blocks; True if one had to be preempted."""
        if not self.running:
            return False
        table, size = self.table, self.manager.block_size
        rows = self._running_rows()
        todo = table.num_tokens[rows] - table.num_computed_tokens[rows]
        if int(todo.sum()) > self.max_num_batched_tokens:
            todo = self._share_budget(rows)
        table.num_scheduled_tokens[rows] = todo
        ends = table.num_computed_tokens[rows] + todo
        missing = -(-ends // size) - table.num_blocks[rows]
        short = np.flatnonzero(missing > 0)
        preempted = False
        if len(short):
            if int(missing[short].sum()) > self.manager.num_free_blocks:
                preempted = self._grow_or_preempt()
            else:
                for i in short.tolist():
                    self._grow(self._sorted[i], int(missing[i]))
        self._index_filled(rows, ends)
        return preempted

    def _share_budget(self, rows: np.ndarray) -> np.ndarray:
        """Tokens for each of the rows when the budget does not suffice: the oldest take theirs first."""
        table, left = self.table, self.max_num_batched_tokens
        for seq in self.running:
            todo = int(table.num_tokens[seq.row] - table.num_computed_tokens[seq.row])
            table.num_scheduled_tokens[seq.row] = min(todo, left)
            left -= min(todo, left)
        return table.num_scheduled_tokens[rows]

    def _index_filled(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Indexes the blocks that this step fills."""
        size = self.manager.block_size
        filled = ends // size > self.table.num_computed_tokens[rows] // size
        for i in np.flatnonzero(filled).tolist():
            seq = self._sorted[i]
            if seq.row == rows[i]:  # not preempted meanwhile
                self.manager.index_blocks(seq, self.table.tokens[seq.row], int(ends[i]))

    def _grow(self, seq: Sequence, num_blocks: int) -> None:
        self.manager.grow(seq, num_blocks)
        self.table.sync_blocks(seq)

    def _grow_or_preempt(self) -> bool:
        """Blocks for everyone, oldest first, at the cost of the newest; True if one was preempted."""
        table, size = self.table, self.manager.block_size
        preempted = False
        for seq in list(self.running):
            while seq.row >= 0:
                end = int(table.num_computed_tokens[seq.row] + table.num_scheduled_tokens[seq.row])
                missing = -(-end // size) - len(seq.blocks)
                if missing <= self.manager.num_free_blocks:
                    self._grow(seq, max(missing, 0))
                    break
                self._preempt(self.running[-1])
                preempted = True
        return preempted

    def _preempt(self, seq: Sequence) -> None:
        seq.num_computed_before_preemption = int(self.table.num_computed_tokens[seq.row])
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        if self.events is not None:
            self.events.preempted(seq)
        self._stop_running(seq)
        self.manager.enqueue(seq)
        self.waiting.appendleft(seq)

    def _stop_running(self, seq: Sequence) -> None:
        self.table.remove(seq)
        self.running.remove(seq)
        self.manager.free(seq)
        self._rows = None
        self._blocked_at = -1

    # -- admission ---------------------------------------------------------------------------------------

    def _admit(self) -> list[tuple[int, int, int]]:
        """Admits waiting sequences while budget, rows and blocks last; returns the copies to run first."""
        copies: list[tuple[int, int, int]] = []
        if not self.waiting or self.manager.num_free_blocks == self._blocked_at:
            return copies
        budget = self.max_num_batched_tokens
        if self.running:
            budget -= int(self.table.num_scheduled_tokens[self._running_rows()].sum())
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            match = self._fitting_match(seq)
            if match is None:
                self._blocked_at = self.manager.num_free_blocks
                break
            self.waiting.popleft()
            copy = self.manager.admit(seq, match)
            self.manager.dequeue(seq)
            if copy is not None:
                copies.append(copy)
            budget -= self._start_running(seq, match, budget)
        return copies

    def _fitting_match(self, seq: Sequence) -> Match | None:
        """What the cache has for seq, or None if the rest of it does not fit now."""
        match = self.manager.match(seq)
        if self.events is not None:
            self.events.looked_up(seq, match)
        free = self.manager.num_free_blocks
        if self.running:
            free -= self._watermark_blocks
        if self.manager.blocks_needed(seq, match) <= free:
            return match
        match = self.manager.without_copy(match)
        return match if self.manager.blocks_needed(seq, match) <= free else None

    def _start_running(self, seq: Sequence, match: Match, budget: int) -> int:
        """Enters an admitted sequence; returns the tokens it computes in this step."""
        num_tokens, num_cached = seq.num_tokens, match.num_cached_tokens
        row = self.table.add(seq, num_cached, len(match.shared) * self.manager.block_size)
        scheduled = min(num_tokens - num_cached, budget)
        self.table.num_scheduled_tokens[row] = scheduled
        self.running.append(seq)
        self._rows = None
        self.manager.index_blocks(seq, self.table.tokens[row], num_cached + scheduled)
        self._count_admission(seq, match)
        return scheduled

    def _count_admission(self, seq: Sequence, match: Match) -> None:
        if seq.num_cached_tokens >= 0:  # it comes back from preemption
            lost = seq.num_computed_before_preemption - match.num_cached_tokens
            self.stats.recomputed_tokens += max(lost, 0)
            return
        seq.num_cached_tokens = match.num_cached_tokens
        if self.manager.enable_caching and seq.reads_cache:
            self.stats.count_query(
                num_tokens=seq.num_prompt_tokens,
                num_blocks=seq.num_prompt_tokens // self.manager.block_size,
                hit_tokens=match.num_cached_tokens,
                hit_blocks=len(match.shared),
                copied_tokens=match.copy[1] if match.copy else 0,
            )

    # -- the end of a step -------------------------------------------------------------------------------

    def update(self, batch: StepBatch, token_ids: np.ndarray) -> list[Sequence]:
        """Enters a step's results (token_ids [num_samples], in the order of batch.sample_rows); returns
        the sequences that have ended, their blocks freed."""
        table = self.table
        table.num_computed_tokens[batch.table_rows] += batch.counts
        table.num_scheduled_tokens[batch.table_rows] = 0
        self.manager.end_step()
        rows = batch.table_rows[batch.samples]
        lengths = table.num_tokens[rows]
        table.tokens[rows, lengths] = token_ids
        self.stats.generated_tokens += len(token_ids)
        lengths = lengths + 1
        table.num_tokens[rows] = lengths
        ended = lengths >= table.length_limit[rows]
        ended |= (lengths >= table.eos_after[rows]) & (token_ids[:, None] == self._eos).any(axis=1)
        ended |= table.needs_every_token[rows]
        finished = []
        for i in np.flatnonzero(ended).tolist():
            seq = batch.sequences[batch.samples[i]]
            if self._ends(seq, int(token_ids[i])):
                self._stop_running(seq)
                finished.append(seq)
        if self.events is not None:
            self.events.finished(finished)
        return finished

    def _ends(self, seq: Sequence, token_id: int) -> bool:
        """Whether the token just entered ends the sequence; sets its finish and stop reason."""
        table, row = self.table, seq.row
        num_output = int(table.num_tokens[row]) - seq.num_prompt_tokens
        stop_string = seq.detokenizer.append(token_id) if seq.detokenizer is not None else None
        if num_output >= seq.params.min_tokens:
            if not seq.params.ignore_eos and token_id in self._eos:
                seq.finish_reason = "stop"
            elif token_id in seq.stop_token_ids:
                seq.finish_reason, seq.stop_reason = "stop", token_id
            elif stop_string is not None:
                seq.finish_reason, seq.stop_reason = "stop", stop_string
        if seq.finish_reason is None and num_output >= seq.max_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def step_failed(self) -> None:
        """The scheduled step has not run: withdraws what it would have filled and aborts everything."""
        self.manager.withdraw()
        self.abort([*self.running, *self.waiting])
