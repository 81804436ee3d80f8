"""Sequence: one stream of tokens; SequenceTable: the running ones as rows of persistent arrays.

Five counts never blur:

    num_tokens            all known tokens, prompt and output
    num_prompt_tokens     the prompt's
    num_computed_tokens   their K/V is in the cache
    num_cached_tokens     of those, found in the cache at (first) admission
    num_scheduled_tokens  to be computed in this step

Which phase a sequence is in follows from them: it prefills while num_computed_tokens < num_prompt_tokens.

While a sequence runs, its counts and tokens live in its row of the SequenceTable, so that a decode step is a
few vector operations however many sequences run; `SequenceTable.remove` brings them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoapc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoapc.engine.block_pool import Block
    from nanoapc.engine.detokenizer import Detokenizer


@dataclass(eq=False)
class Sequence:
    """One stream of tokens (a request with n > 1 has n of them).

    seq_id: unique, ascending in the order of arrival.
    prompt: [num_prompt_tokens] int32.
    index: which of its request's n outputs it is.
    max_tokens: output tokens at most, already cut to what max_model_len allows.
    stop_token_ids: ids that end it besides the model's own end-of-text ids.
    extra: encoded extra keys of its first block (see `block_hash.encode_extra_keys`).
    row: its row in the SequenceTable, -1 while it does not run.
    blocks: its block table; labels and keys: content and key of each full block known so far.
    num_indexed_blocks: leading blocks that stand in the prefix index.
    num_cached_tokens: prompt tokens whose prefill was skipped at first admission; -1 before it.
    """

    seq_id: int
    prompt: np.ndarray
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    index: int = 0
    extra: bytes = b""
    stop_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    sampler_state: Any = None
    request: Any = None

    row: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    labels: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_indexed_blocks: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    num_computed_before_preemption: int = 0
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """All known tokens (of a sequence that does not run; else see the table)."""
        return len(self.prompt) + len(self.output_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probs of its prompt are wanted, for which all of it is computed: once for n sequences."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be looked up in the prefix cache."""
        return not (self.params.skip_reading_prefix_cache or self.scores_prompt)

    @property
    def needs_every_token(self) -> bool:
        """Whether something looks at each of its tokens in Python (a stop string, a stop token of its own)."""
        return self.detokenizer is not None or bool(self.stop_token_ids)

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must know its last token before the next can be sampled (penalties, bad words, ...)."""
        params = self.params
        return self.sampler_state is not None and bool(params.has_penalties or params.bad_words or params.min_tokens)

    def all_tokens(self) -> np.ndarray:
        """[num_tokens] int32 (of a sequence that does not run)."""
        return np.concatenate([self.prompt, np.asarray(self.output_token_ids, np.int32)])


class SequenceTable:
    """The running sequences as columns of arrays; a row belongs to one sequence while it runs.

    tokens        [rows, max_model_len] int32      num_tokens, num_prompt_tokens, num_computed_tokens,
    block_table   [rows, max_blocks] int32         num_scheduled_tokens, num_blocks  [rows] int64
    admission       [rows]: which admission the row belongs to, ascending; NEVER while it is unused
    first_writable  [rows]: positions before it lie in shared blocks and are not written again
    length_limit    [rows]: num_tokens at which it ends with "length"
    eos_after       [rows]: num_tokens from which an end-of-text id ends it (never, with ignore_eos)
    needs_every_token, needs_last_token  [rows] bool, see Sequence

    The last tokens of a row are negative while the steps that sample them run: -1 - i is the token of sample i of
    the step that was started last. Their place is known, so that the next step can be planned; their value is not.
    """

    NEVER = 2**62

    def __init__(self, num_rows: int, max_model_len: int, block_size: int):
        self.num_rows = num_rows
        max_blocks = -(-max_model_len // block_size) + 1
        try:  # np.zeros: pages that nobody touches cost nothing
            self.tokens = np.zeros((num_rows, max_model_len + 1), np.int32)
            self.block_table = np.zeros((num_rows, max_blocks), np.int32)
        except MemoryError:
            raise ValueError(
                f"max_num_seqs={num_rows} sequences of max_model_len={max_model_len} tokens are more than this "
                "machine can keep account of; lower one of them"
            ) from None
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_computed_tokens = np.zeros(num_rows, np.int64)
        self.num_scheduled_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.admission = np.full(num_rows, self.NEVER)
        self.first_writable = np.zeros(num_rows, np.int64)
        self.length_limit = np.zeros(num_rows, np.int64)
        self.eos_after = np.zeros(num_rows, np.int64)
        self.needs_every_token = np.zeros(num_rows, bool)
        self.needs_last_token = np.zeros(num_rows, bool)
        self._num_admissions = 0
        self.clear()

    def clear(self) -> None:
        """No row belongs to anybody."""
        self.admission[:] = self.NEVER
        self.length_limit[:] = 0
        self._unused = list(range(len(self.admission)))[::-1]

    def add(self, seq: Sequence, num_computed_tokens: int, first_writable: int) -> int:
        """Gives a sequence (with its blocks) a row; returns it."""
        row = seq.row = self._unused.pop()
        self.admission[row] = self._num_admissions
        self._num_admissions += 1
        num_tokens = seq.num_tokens
        self.tokens[row, : len(seq.prompt)] = seq.prompt
        if seq.output_token_ids:
            self.tokens[row, len(seq.prompt) : num_tokens] = seq.output_token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = seq.num_prompt_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_scheduled_tokens[row] = 0
        self.first_writable[row] = first_writable
        self.length_limit[row] = seq.num_prompt_tokens + seq.max_tokens
        least = min(seq.params.min_tokens + 1, seq.max_tokens)  # no room for more
        self.eos_after[row] = self.NEVER if seq.params.ignore_eos else seq.num_prompt_tokens + least
        self.needs_every_token[row] = seq.needs_every_token
        self.needs_last_token[row] = seq.needs_last_token
        self.num_blocks[row] = len(seq.blocks)
        self.block_table[row, : len(seq.blocks)] = [block.block_id for block in seq.blocks]
        return row

    def append_blocks(self, rows: np.ndarray, block_ids: list[int]) -> None:
        """Enters one more block for each of the rows."""
        self.block_table[rows, self.num_blocks[rows]] = block_ids
        self.num_blocks[rows] += 1

    def remove(self, seq: Sequence) -> None:
        """Takes the row back; the sequence gets its output tokens, as far as their values are known."""
        row = seq.row
        start, end = self.num_prompt_tokens[row], self.num_tokens[row]
        while end > start and self.tokens[row, end - 1] < 0:
            end -= 1
        seq.output_token_ids = self.tokens[row, start:end].tolist()
        self.admission[row] = self.NEVER
        self.length_limit[row] = 0  # nothing more to compute
        self.num_scheduled_tokens[row] = 0
        self._unused.append(row)
        seq.row = -1
