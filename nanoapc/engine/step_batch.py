"""StepBatch: what runs in one step, as flat arrays.

A row is a query token. Sequences stand in the order of their block tables, so that those that share blocks are
neighbours (see attention_plan.py). Prefill, a chunk of it and decode differ only in their counts:

    sequences      s0 (decode)   s1 (prefill chunk)     s2 (decode)
    counts         1             5                      1
    rows           0             1 2 3 4 5              6
    sample_rows    0             - (chunk not the last) 6

Invariant: token_ids, positions and slots have one entry a row; a slot is the place of the row's own K/V, or -1
where that stands already in a shared block. A token id may be negative: -1 - i is the token that sample i of the step
before gives, which still runs (see `SequenceTable`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.sampling_params import SamplingParams


@dataclass(frozen=True)
class StepBatch:
    """One step.

    table_rows     [num_sequences] rows of the SequenceTable
    admissions     [num_sequences] which admissions they belonged to when the step was made
    starts, counts [num_sequences] position of each sequence's first row; its number of rows
    token_ids, positions, slots   [T] int64
    block_tables   [num_sequences, max_blocks] int32
    samples        [num_samples] which of the sequences sample a token
    sample_rows    [num_samples] their rows whose logits are needed
    num_prompt_rows, num_decodes   rows that are prompt tokens; sequences that get one token after their last
    copies         (source block, destination block, tokens) to run before the forward, in order
    key            names the composition (which sequences, in which order); None when it is a passing one
    """

    table_rows: np.ndarray
    admissions: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    samples: np.ndarray
    sample_rows: np.ndarray
    num_prompt_rows: int
    num_decodes: int
    copies: list[tuple[int, int, int]]
    key: int | None
    sequences: list[Sequence]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return len(self.token_ids)

    @property
    def phase(self) -> str:
        """ "prefill", "decode" or "mixed"."""
        if self.num_decodes == 0:
            return "prefill"
        return "decode" if self.num_decodes == len(self.counts) else "mixed"

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample, in the order of `sample_rows`."""
        return [self.sequences[i] for i in self.samples.tolist()]


def places(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def build_step_batch(
    table: SequenceTable,
    table_rows: np.ndarray,
    sequences: list[Sequence],
    block_size: int,
    copies: list[tuple[int, int, int]],
    key: int | None,
) -> StepBatch:
    """Gathers the scheduled tokens of `table_rows` (sorted by block table) out of the table."""
    counts = table.num_scheduled_tokens[table_rows]
    starts = table.num_computed_tokens[table_rows]
    ends = starts + counts
    if int(counts.max()) == 1:  # decode, which nothing may slow down
        row_of, positions = table_rows, starts
        last_rows = np.arange(len(counts))
    else:
        row_of = np.repeat(table_rows, counts)
        last_rows = np.cumsum(counts) - 1
        positions = np.repeat(starts, counts) + places(counts)
    block_ids = table.block_table[row_of, positions // block_size].astype(np.int64)
    slots = block_ids * block_size + positions % block_size
    slots[positions < table.first_writable[row_of]] = -1
    samples = np.flatnonzero(ends == table.num_tokens[table_rows])
    width = -(-int(ends.max()) // block_size)
    prompts = table.num_prompt_tokens[table_rows]
    num_decodes = int(np.count_nonzero((counts == 1) & (starts >= prompts)))
    num_prompt_rows = 0
    if num_decodes < len(counts):
        num_prompt_rows = int(np.maximum(np.minimum(ends, prompts) - starts, 0).sum())
    return StepBatch(
        table_rows=table_rows,
        admissions=table.admission[table_rows],
        starts=starts,
        counts=counts,
        token_ids=table.tokens[row_of, positions].astype(np.int64),
        positions=positions,
        slots=slots,
        block_tables=table.block_table[table_rows, :width],
        samples=samples,
        sample_rows=last_rows[samples],
        num_prompt_rows=num_prompt_rows,
        num_decodes=num_decodes,
        copies=copies,
        key=key,
        sequences=sequences,
    )


def largest_batch(num_tokens: int, max_num_seqs: int, block_size: int, params: SamplingParams) -> StepBatch:
    """A step as large as any: num_tokens rows, max_num_seqs of them sampled; it reads block 0 and writes nothing."""
    num_seqs = min(max_num_seqs, num_tokens)
    counts = np.full(num_seqs, num_tokens // num_seqs)
    counts[: num_tokens % num_seqs] += 1
    table = SequenceTable(num_seqs, int(counts[0]), block_size)
    for column in (table.num_tokens, table.num_prompt_tokens, table.num_scheduled_tokens, table.first_writable):
        column[:] = counts
    sequences = [Sequence(i, np.zeros(count, np.int32), params, 1) for i, count in enumerate(counts.tolist())]
    return build_step_batch(table, np.arange(num_seqs), sequences, block_size, [], None)
