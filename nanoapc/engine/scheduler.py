"""Scheduler: which tokens run in this step. Pure host code: imports no torch.

    add -> waiting -> running -> finished
             ^-- preempted (newest first) --'

One token budget a step. Running sequences come first, oldest first; what is left of the budget admits waiting ones,
whose prompts run in chunks that fill it, mixed with the decodes of the others. A sequence is admitted only when its
whole prompt finds blocks (and, while others run, a small watermark stays free), so none lacks blocks for its prompt.

When a running sequence finds no block, the newest running one is preempted: its blocks go back (its full ones stay
cached), it waits at the head of the queue with its output, and is computed again from what is still cached.
The oldest is never the victim of a newer one, so every step brings the oldest nearer to its end.

A step may be scheduled while the one before it runs, so that the device never waits for the host:

    schedule N -> advance N     -> schedule N+1 -> advance N+1 -> settle N           -> schedule N+2 -> ...
                  counts move on   feeds on tokens                tokens become known,
                                   whose value is unknown         sequences end

A sequence that `settle` finds ended has a surplus row in the step that runs already: its result is dropped. The blocks
go back at once, because whoever gets them writes in a later step, and steps run in order. A step that would have to
preempt, or a sequence whose sampling needs its last token on the host, waits until everything is settled.

Invariant: a sequence is in exactly one of waiting and running; what a step has indexed is either computed once it is
settled, or withdrawn by `step_failed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from nanoapc.engine.block_manager import BlockManager, Match
from nanoapc.engine.metrics import PrefixCacheStats
from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.engine.step_batch import StepBatch, build_step_batch

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for those that run."""


class Scheduler:
    """Decides, step by step, for one engine.

    Args:
        table: its rows are the sequences that may run at once.
        max_num_batched_tokens: the token budget of a step.
        eos_token_ids: what ends a text.
        main_eos_id: the one of them that is no `stop_reason`; None: none of them is.
    """

    def __init__(
        self,
        manager: BlockManager,
        table: SequenceTable,
        max_num_batched_tokens: int,
        eos_token_ids: Iterable[int] = (),
        main_eos_id: int | None = None,
    ):
        self.manager = manager
        self.table = table
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.stats = PrefixCacheStats()
        self.events = manager.events
        self._eos = np.asarray(sorted(eos_token_ids), np.int64)
        self._main_eos_id = main_eos_id
        self._watermark_blocks = int(WATERMARK * len(manager.pool.blocks))
        self._composition = 0  # which sequences run, as a number: while it stays, so does the attention forest
        # Table rows with something to compute, sorted by block table; None: to be sorted.
        self._rows: np.ndarray | None = None
        self._sorted: list[Sequence] = []
        self._unsettled: StepBatch | None = None  # the step that was started last, while its tokens are unknown
        self._blocked_at = -1  # free blocks when the head of the queue last found too few

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequences: list[Sequence]) -> None:
        """Appends new sequences to the queue."""
        for seq in sequences:
            self.manager.start_waiting(seq)
            self.waiting.append(seq)
        if self.events is not None:
            self.events.added(sequences)
        self._blocked_at = -1

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences, whether they run, wait or have not been added yet; finished ones are left alone."""
        dropped = {id(seq): seq for seq in sequences if seq.finish_reason is None}
        waiting, self.waiting = self.waiting, deque()
        for seq in waiting:
            if id(seq) in dropped:
                self.manager.stop_waiting(seq)
            else:
                self.waiting.append(seq)
        self._stop_running([seq for seq in dropped.values() if seq.row >= 0])
        for seq in dropped.values():
            seq.finish_reason = "abort"
        if self.events is not None:
            self.events.finished(dropped.values())
        self._blocked_at = -1

    # -- one step ----------------------------------------------------------------------------------------

    def schedule(self) -> StepBatch | None:
        """The next step. None: nothing is left to do, or nothing before the last step is settled."""
        table, size = self.table, self.manager.block_size
        rows, sequences = self._running_rows(), self._sorted
        todo = table.num_tokens[rows] - table.num_computed_tokens[rows]
        if int(todo.sum()) > self.max_num_batched_tokens:
            todo = self._share_budget(rows, todo)
        ends = table.num_computed_tokens[rows] + todo
        short = np.flatnonzero(ends > table.num_blocks[rows] * size)  # of one block: prompts have theirs
        fits = len(short) <= self.manager.num_free_blocks
        ahead = self._unsettled is not None
        if ahead and not (fits and self._can_sample_ahead(rows)):
            return None
        self.manager.begin_step(in_flight=ahead)
        table.num_scheduled_tokens[rows] = todo
        if not fits:
            self._grow_or_preempt()
        elif len(short):
            block_ids = self.manager.grow_each([sequences[i] for i in short.tolist()])
            table.append_blocks(rows[short], block_ids)
        self._index_filled(rows, sequences, ends)
        copies = self._admit(self.max_num_batched_tokens - int(todo.sum())) if fits else []
        assert ahead or self.running or not self.waiting, "an empty pool must hold any single sequence"
        rows, sequences, key = self._scheduled_rows()
        if not sequences:
            return None
        batch = build_step_batch(table, rows, sequences, size, copies, key)
        if batch.num_tokens > len(batch.counts):
            self._blocked_at = -1  # a prompt moves on: the head of the queue may find more in the cache
        return batch

    def _running_rows(self) -> np.ndarray:
        """Table rows with something to compute, sorted so that sequences that share blocks are neighbours."""
        if self._rows is None:
            table = self.table
            tables = {seq.row: table.block_table[seq.row, : table.num_blocks[seq.row]] for seq in self.running}
            self._sorted = sorted(self.running, key=lambda seq: tables[seq.row].tobytes())
            self._rows = np.array([seq.row for seq in self._sorted], np.int64)
            self._composition += 1
            self._prune_rows()
        return self._rows

    def _prune_rows(self) -> None:
        """Takes out rows that have nothing more to compute; the others stay in their order."""
        if self._rows is not None:
            kept = self.table.num_tokens[self._rows] < self.table.length_limit[self._rows]
            if not kept.all():
                self._rows = self._rows[kept]
                self._sorted = [self._sorted[i] for i in np.flatnonzero(kept).tolist()]
                self._composition += 1

    def _scheduled_rows(self) -> tuple[np.ndarray, list[Sequence], int | None]:
        rows = self._running_rows()
        scheduled = self.table.num_scheduled_tokens[rows] > 0
        if scheduled.all():
            return rows, self._sorted, self._composition
        kept = np.flatnonzero(scheduled)
        return rows[kept], [self._sorted[i] for i in kept.tolist()], None

    def _share_budget(self, rows: np.ndarray, todo: np.ndarray) -> np.ndarray:
        """Tokens for each of the rows when the budget does not suffice: the oldest take theirs first."""
        order = np.argsort(self.table.admission[rows])
        wanted, granted = todo[order], np.zeros_like(todo)
        granted[order] = np.clip(self.max_num_batched_tokens - (np.cumsum(wanted) - wanted), 0, wanted)
        return granted

    def _can_sample_ahead(self, rows: np.ndarray) -> bool:
        """Whether no sampling needs a token on the host that is not there yet."""
        needing = rows[self.table.needs_last_token[rows]]
        return not (self.table.tokens[needing, self.table.num_tokens[needing] - 1] < 0).any()

    def _index_filled(self, rows: np.ndarray, sequences: list[Sequence], ends: np.ndarray) -> None:
        """Indexes the blocks that this step fills with known tokens; `settle` does so for the others."""
        table, size = self.table, self.manager.block_size
        num_filled = ends // size - table.num_computed_tokens[rows] // size
        if num_filled.any():
            filled = np.flatnonzero(num_filled)
            running = table.admission[rows[filled]] != table.NEVER  # not preempted meanwhile
            filled = filled[running & (table.tokens[rows[filled], ends[filled] - 1] >= 0)]
            for i, row, end in zip(filled.tolist(), rows[filled].tolist(), ends[filled].tolist(), strict=True):
                self.manager.index_blocks(sequences[i], table.tokens[row], end)

    def _grow_or_preempt(self) -> None:
        """Blocks for everyone, oldest first, at the cost of the newest."""
        table, size = self.table, self.manager.block_size
        for seq in list(self.running):
            while seq.row >= 0:
                end = int(table.num_computed_tokens[seq.row] + table.num_scheduled_tokens[seq.row])
                if end <= len(seq.blocks) * size:
                    break
                if self.manager.num_free_blocks:
                    table.append_blocks(np.array([seq.row]), self.manager.grow_each([seq]))
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, seq: Sequence) -> None:
        seq.num_computed_before_preemption = int(self.table.num_computed_tokens[seq.row])
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        if self.events is not None:
            self.events.preempted(seq)
        self._stop_running([seq])
        self.manager.start_waiting(seq)
        self.waiting.appendleft(seq)

    def _stop_running(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.table.remove(seq)
            self.manager.free(seq)
        if sequences:
            self.running = [seq for seq in self.running if seq.row >= 0]
            self._prune_rows()
            self._blocked_at = -1

    # -- admission ---------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> list[tuple[int, int, int]]:
        """Admits waiting sequences while budget, rows and blocks last; returns the copies to run first."""
        copies: list[tuple[int, int, int]] = []
        if not self.waiting or self.manager.num_free_blocks == self._blocked_at:
            return copies
        while self.waiting and budget > 0 and len(self.running) < self.table.num_rows:
            seq = self.waiting[0]
            match = self._fitting_match(seq)
            if match is None:
                self._blocked_at = self.manager.num_free_blocks
                break
            self.waiting.popleft()
            copy = self.manager.admit(seq, match)
            self.manager.stop_waiting(seq)
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
        if self.manager.enable_caching and not seq.params.skips_cache:
            self.stats.count_query(
                num_tokens=seq.num_prompt_tokens,
                num_blocks=seq.num_prompt_tokens // self.manager.block_size,
                hit_tokens=match.num_cached_tokens,
                hit_blocks=len(match.shared),
                copied_tokens=match.copy[1] if match.copy else 0,
            )

    # -- the end of a step -------------------------------------------------------------------------------

    def advance(self, batch: StepBatch) -> None:
        """The step has been started: its tokens are computed, and those it samples have a place but no value."""
        table = self.table
        table.num_computed_tokens[batch.table_rows] += batch.counts
        table.num_scheduled_tokens[batch.table_rows] = 0
        self.manager.end_step()
        rows = batch.table_rows[batch.samples]
        lengths = table.num_tokens[rows]
        table.tokens[rows, lengths] = -1 - np.arange(len(rows))
        lengths += 1
        table.num_tokens[rows] = lengths
        if (lengths >= table.length_limit[rows]).any():
            self._prune_rows()
        self._unsettled = batch

    def settle(self, batch: StepBatch, token_ids: np.ndarray) -> list[Sequence]:
        """Enters a step's results (see `InFlight.wait`); returns the sequences that have ended, their blocks freed.

        Steps are settled in their order.
        """
        table, samples = self.table, batch.samples
        live = table.admission[batch.table_rows[samples]] == batch.admissions[samples]
        if not live.all():
            samples, token_ids = samples[live], token_ids[live]
        rows = batch.table_rows[samples]
        lengths = batch.starts[samples] + batch.counts[samples] + 1
        table.tokens[rows, lengths - 1] = token_ids
        if self._unsettled is batch:
            self._unsettled = None
        self.stats.computed_tokens += batch.num_tokens - (len(live) - len(samples))  # without surplus rows
        self.stats.computed_prompt_tokens += batch.num_prompt_rows
        self.stats.generated_tokens += int((token_ids >= 0).sum())
        ended = (lengths >= table.length_limit[rows]) | (token_ids < 0)
        ended |= (lengths >= table.eos_after[rows]) & (token_ids[:, None] == self._eos).any(axis=1)
        ended |= table.needs_every_token[rows]
        finished = []
        for i in np.flatnonzero(ended).tolist():
            seq = batch.sequences[samples[i]]
            if self._ends(seq, int(lengths[i]), int(token_ids[i])):
                finished.append(seq)
        self._stop_running(finished)
        if self._unsettled is not None:
            self._index_settled(batch, samples, rows, lengths)
        if self.events is not None:
            self.events.finished(finished)
        return finished

    def _index_settled(self, batch: StepBatch, samples: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Indexes the blocks that became full with tokens known just now.

        The next step, which runs already, computes these tokens: who has sampled goes on, as older ones want no more.
        """
        full = np.flatnonzero(lengths % self.manager.block_size == 0)
        for i in full[self.table.admission[rows[full]] != self.table.NEVER].tolist():
            self.manager.index_blocks(batch.sequences[samples[i]], self.table.tokens[rows[i]], int(lengths[i]))

    def _ends(self, seq: Sequence, length: int, token_id: int) -> bool:
        """Whether the token, the last of `length`, ends the sequence; sets its finish and stop reason."""
        num_output = length - seq.num_prompt_tokens
        if token_id < 0:
            seq.finish_reason, seq.stop_reason = "error", seq.stop_reason or seq.params.exclusion(num_output - 1)
            return True
        stop_string = seq.detokenizer.append(token_id) if seq.detokenizer is not None else None
        if num_output > seq.params.min_tokens:
            if not seq.params.ignore_eos and token_id in self._eos:
                seq.finish_reason = "stop"
                seq.stop_reason = None if self._main_eos_id in (None, token_id) else token_id
            elif token_id in seq.stop_token_ids:
                seq.finish_reason, seq.stop_reason = "stop", token_id
            elif stop_string is not None:
                seq.finish_reason, seq.stop_reason = "stop", stop_string
        if seq.finish_reason is None and num_output >= seq.max_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def step_failed(self, host_is_whole: bool = True) -> None:
        """A step has not run: withdraws what it and the one behind it would have filled; aborts everything.

        host_is_whole: False if a change of what is kept here and in the pool was interrupted: all is forgotten then.
        """
        self._unsettled = None
        if host_is_whole:
            self.manager.withdraw()
            self.abort([*self.running, *self.waiting])
            return
        for seq in (*self.running, *self.waiting):
            seq.row, seq.blocks, seq.finish_reason = -1, [], seq.finish_reason or "abort"
        self.running, self.waiting = [], deque()
        self.table.clear()
        self._rows, self._blocked_at = None, -1
        self.manager.start_over()
