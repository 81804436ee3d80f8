"""ModelRunner: weights, KV memory, forward, sampling. Runs what the scheduler has decided, decides nothing.

    StepBatch -> copy blocks -> plan -> forward -> logits of the sampled rows -> tokens (+ logprobs)

Invariant: a step reads and writes only the KV blocks that its batch names; everything that attention needs is an
argument of the forward. Two runners never share state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.engine.sequence import Sequence
from nanoapc.engine.step_batch import StepBatch
from nanoapc.kernels import Kernels
from nanoapc.layers.sampler import Sampler, SamplingRows, TokenLogprobs
from nanoapc.models.decoder import CausalLM

LogprobEntry: TypeAlias = tuple[float, int, list[int], list[float]]
"""A position's log-prob and rank of its token, and the best ids with theirs."""

PROMPT_LOGPROB_ROWS = 256
"""Rows whose logits over the vocabulary exist at once when prompt_logprobs asks for all of them."""


@dataclass(frozen=True)
class StepResult:
    """token_ids [num_samples] int64 in the order of batch.sample_rows; tiles [num_tiles, 6] that attention ran."""

    token_ids: np.ndarray
    tiles: np.ndarray


class ModelRunner:
    """Runs steps of one model on one device.

    Args:
        model: the loaded model.
        kernels: the device's functions.
        sampler: turns logits into tokens.
        planner: turns block tables into tiles.
        kv_memory: [NB, L, 2, Hkv, B, D].
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        sampler: Sampler,
        planner: AttentionPlanner,
        kv_memory: torch.Tensor,
    ):
        self.model = model
        self.kernels = kernels
        self.sampler = sampler
        self.planner = planner
        self.kv_memory = kv_memory
        self.device = kv_memory.device
        self._rows: tuple[int, SamplingRows] | None = None  # of the last named composition

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Runs a step. Sampled tokens' logprobs are entered into their sequences."""
        if batch.copies:
            self.kernels.copy_blocks(self.kv_memory, batch.copies)
        plan = self._plan(batch)
        hidden = self.model(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            self.kv_memory,
            self._tensor(batch.slots),
            plan,
        )
        self._enter_prompt_logprobs(batch, hidden)
        if not len(batch.samples):
            return StepResult(np.zeros(0, np.int64), plan.host_tiles)
        logits = self.model.compute_logits(hidden[self._tensor(batch.sample_rows)])
        return StepResult(self._sample(batch, logits), plan.host_tiles)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _plan(self, batch: StepBatch) -> AttentionPlan:
        tiles, level_starts = self.planner.tiles(batch.block_tables, batch.starts, batch.counts, batch.key)
        return AttentionPlan(
            tiles=self._tensor(tiles),
            positions=self._tensor(batch.positions),
            block_tables=self._tensor(batch.block_tables),
            host_tiles=tiles,
            level_starts=level_starts,
        )

    # -- sampling ----------------------------------------------------------------------------------------

    def _sampling_rows(self, batch: StepBatch) -> SamplingRows:
        """The rows' parameters; kept while the same sequences sample in the same order."""
        key = batch.key if len(batch.samples) == len(batch.counts) else None
        if key is not None and self._rows is not None and self._rows[0] == key:
            return self._rows[1]
        rows = SamplingRows(
            [(seq.params, seq.sampler_state, seq.seed) for seq in batch.sampled],
            self.sampler.num_valid_ids,
            self.device,
        )
        self._rows = None if key is None else (key, rows)
        return rows

    def _sample(self, batch: StepBatch, logits: torch.Tensor) -> np.ndarray:
        rows = self._sampling_rows(batch)
        # A draw depends on (seed, position of the new token) alone.
        rows.positions = self._tensor(batch.positions[batch.sample_rows] + 1)
        sampled = self.sampler.forward(logits, rows)
        token_ids = sampled.to_list()
        if sampled.logprobs is not None:
            asking = [i for i, count in enumerate(rows.num_logprobs) if count is not None]
            entries = split_logprobs(sampled.logprobs)
            for i, entry in zip(asking, entries, strict=True):
                batch.sequences[batch.samples[i]].logprobs.append(entry)
        if rows.has_edits:
            for seq, token_id in zip(batch.sampled, token_ids, strict=True):
                if seq.sampler_state is not None:
                    seq.sampler_state.append(token_id)
        return np.asarray(token_ids, np.int64)

    def _enter_prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """For sequences that ask: the logprob of each prompt token under the row before it."""
        first = 0
        for seq, start, count in zip(batch.sequences, batch.starts.tolist(), batch.counts.tolist(), strict=True):
            if seq.params.prompt_logprobs is not None and start < seq.num_prompt_tokens - 1:
                last = min(start + count, seq.num_prompt_tokens - 1)
                self._score(seq, hidden[first : first + last - start], start)
            first += count

    def _score(self, seq: Sequence, hidden: torch.Tensor, start: int) -> None:
        """hidden [n, h] of the prompt positions start ... start + n - 1, which predict the tokens after them."""
        known = max(len(seq.prompt_logprobs) - start, 0)  # scored before a preemption
        for at in range(known, len(hidden), PROMPT_LOGPROB_ROWS):
            rows = hidden[at : at + PROMPT_LOGPROB_ROWS]
            first = start + at + 1
            targets = self._tensor(seq.prompt[first : first + len(rows)].astype(np.int64))
            logits = self.model.compute_logits(rows)
            scored = self.sampler.gather_logprobs(logits, targets, seq.params.prompt_logprobs or 0)
            seq.prompt_logprobs.extend(split_logprobs(scored))


def split_logprobs(scored: TokenLogprobs) -> list[LogprobEntry]:
    """A batch of log-probs -> one plain entry for each row."""
    columns = (scored.chosen, scored.rank, scored.top_ids, scored.top_logprobs)
    return list(zip(*(column.tolist() for column in columns), strict=True))
