"""ModelRunner: weights, KV memory, forward, sampling. Runs what the scheduler has decided, decides nothing.

    StepBatch -> copy blocks -> plan -> forward, or the replay of a graph -> logits of the sampled rows -> tokens

`launch` queues a step on the device and returns at once; `InFlight.wait` gives its result. On the CPU all happens in
`launch`. Steps run in the order of their launches, and the tokens of one feed the next on the device: where a batch
has the token id -1 - i, sample i of the step before is taken.

Invariant: a step reads and writes only the KV blocks that its batch names; everything that attention needs is an
argument of the forward. Two runners never share state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.engine.cuda_graphs import CudaBackend, DecodeGraphs
from nanoapc.engine.sequence import Sequence
from nanoapc.engine.step_batch import StepBatch
from nanoapc.engine.transfer import Transfer
from nanoapc.kernels import FixedWorkKernels
from nanoapc.layers.sampler import SampledTokens, Sampler, SamplingRows, TokenLogprobs
from nanoapc.models.decoder import CausalLM
from nanoapc.outputs import BROKEN_LOGITS

LogprobEntry: TypeAlias = tuple[float, int, list[int], list[float]]
"""A position's log-prob and rank of its token, and the best ids with theirs."""

PROMPT_LOGPROB_ROWS = 256
"""Rows whose logits over the vocabulary exist at once when prompt_logprobs asks for all of them."""


@dataclass(frozen=True)
class InFlight:
    """A step that the device runs, or has run.

    tiles: of its attention [num_tiles, 6]. rows: of its sampling, None if nothing is sampled.
    sampled, prompt_scores: its results, on the host once `arrived` (None: already).
    dtype: of the logits.
    """

    batch: StepBatch
    tiles: np.ndarray
    rows: SamplingRows | None
    sampled: SampledTokens | None
    prompt_scores: list[tuple[Sequence, TokenLogprobs]]
    arrived: torch.cuda.Event | None
    dtype: torch.dtype

    def wait(self) -> np.ndarray:
        """[num_samples] int64 in the order of batch.sample_rows, -1 where there is no token to choose.

        Log-probs are entered into the sequences, except those that have ended meanwhile.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        for seq, scored in self.prompt_scores:
            seq.prompt_logprobs.extend(split_logprobs(scored, repeat(seq.params.prompt_logprobs or 0)))
        if self.sampled is None or self.rows is None:
            return np.zeros(0, np.int64)
        token_ids = self.sampled.token_ids.numpy()
        for i in np.flatnonzero(token_ids < 0).tolist():
            _blame(self.batch.sampled[i], self.rows.num_valid_ids, self.dtype)
        if self.sampled.logprobs is not None:
            rows = zip(self.batch.sampled, token_ids.tolist(), self.rows.num_logprobs, strict=True)
            asking = [(seq, token_id, count) for seq, token_id, count in rows if count is not None]
            entries = split_logprobs(self.sampled.logprobs, (count for *_, count in asking))
            for (seq, token_id, _), entry in zip(asking, entries, strict=True):
                if seq.finish_reason is None and token_id >= 0:
                    seq.logprobs.append(entry)
        if self.rows.has_edits:
            for seq, token_id in zip(self.batch.sampled, token_ids.tolist(), strict=True):
                if seq.sampler_state is not None and token_id >= 0:
                    seq.sampler_state.output_ids.append(token_id)
        return token_ids


def _blame(seq: Sequence, num_valid_ids: int, dtype: torch.dtype) -> None:
    """Sets the stop reason of a sequence without a token, unless its parameters are to blame or it has ended anyway."""
    is_excluded = seq.sampler_state is not None and seq.sampler_state.leaves_none(num_valid_ids)
    if seq.finish_reason is None and not is_excluded:
        cause = "the dtype overflows; use dtype='bfloat16' or 'float32' instead of 'float16'"
        if dtype is not torch.float16:
            name = str(dtype).removeprefix("torch.")
            cause = f"a weight of the checkpoint is NaN or infinite, or exceeds the range of {name}; check the weights"
        seq.stop_reason = f"{BROKEN_LOGITS}: {cause}"


class ModelRunner:
    """Runs steps of one model on one device.

    Args:
        kv_memory: [NB, L, 2, Hkv, B, D].
        max_num_seqs: samples of a step, at most.

    Attributes:
        graphs: replays decode steps, if there is one.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        planner: AttentionPlanner,
        kv_memory: Tensor,
        transfer: Transfer,
        max_num_seqs: int,
    ):
        self.model = model
        self.kernels = model.kernels
        self.sampler = sampler
        self.planner = planner
        self.kv_memory = kv_memory
        self.device = kv_memory.device
        self.transfer = transfer
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self.graphs: DecodeGraphs | None = None
        self._rows: tuple[int, SamplingRows] | None = None  # of the last named composition

    def capture_graphs(self, backend: CudaBackend, max_blocks: int) -> None:
        """From now on decode steps are replayed; max_blocks: width of the widest block table."""
        assert isinstance(self.kernels, FixedWorkKernels), "attention must be able to replay with other work"
        sizes = (len(self.last_tokens), max_blocks)
        self.graphs = DecodeGraphs(
            self.forward, self.kernels, backend, self.model.config, self.kv_memory, *sizes, self.planner.share
        )
        self.graphs.capture()

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> InFlight:
        """Starts a step, after all that have been launched before."""
        if batch.copies:
            self.kernels.copy_blocks(self.kv_memory, batch.copies)
        tiles, level_starts = self.planner.tiles(batch.block_tables, batch.starts, batch.counts, batch.key)
        graph = None if self.graphs is None else self.graphs.find(batch, tiles)
        # A draw depends on (seed, position of the new token) alone.
        draws = [batch.sample_rows, batch.positions[batch.sample_rows] + 1]
        if graph is not None:
            sample_rows, draw_positions, *inputs = self.transfer.send([*draws, *graph.arrays])
            hidden = graph.run(inputs)
        else:
            arrays = [batch.token_ids, batch.positions, batch.slots, batch.block_tables, tiles]
            sample_rows, draw_positions, *inputs = self.transfer.send([*draws, *arrays])
            token_ids, positions, slots, block_tables, sent_tiles = inputs
            plan = AttentionPlan(sent_tiles, positions, slots, block_tables, tiles, level_starts)
            if (batch.token_ids < 0).any():
                token_ids = self._known(token_ids)
            hidden = self.model(token_ids, self.kv_memory, plan)
        prompt_scores = self._score_prompts(batch, hidden)
        rows, sampled = None, None
        if len(batch.samples):
            rows = self._sampling_rows(batch)
            rows.positions = draw_positions
            everyone = len(batch.samples) == batch.num_tokens
            logits = self.model.compute_logits(hidden if everyone else hidden[sample_rows])
            sampled = self.sampler.forward(logits, rows)
            # Where there is no token (-1) the sequence ends, or `wait` raises, but the next step may run until then.
            torch.clamp(sampled.token_ids, min=0, out=self.last_tokens[: len(batch.samples)])
        (sampled, prompt_scores), arrived = self.transfer.fetch((sampled, prompt_scores))
        return InFlight(batch, tiles, rows, sampled, prompt_scores, arrived, self.kv_memory.dtype)

    def forward(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """A step's hidden states [T, h], as graphs capture it; token_ids may take the tokens of the step before."""
        return self.model(self._known(token_ids), self.kv_memory, plan)

    def _known(self, token_ids: Tensor) -> Tensor:
        """[T] with the tokens of the step before put in, see above."""
        last = self.last_tokens[(-1 - token_ids).clamp(min=0)]
        return torch.where(token_ids < 0, last, token_ids)

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

    def _score_prompts(self, batch: StepBatch, hidden: Tensor) -> list[tuple[Sequence, TokenLogprobs]]:
        """For sequences that ask: the logprob of each prompt token under the row before it."""
        scored: list[tuple[Sequence, TokenLogprobs]] = []
        if batch.num_prompt_rows == 0:
            return scored
        first = 0
        for seq, start, count in zip(batch.sequences, batch.starts.tolist(), batch.counts.tolist(), strict=True):
            if seq.scores_prompt and start < seq.num_prompt_tokens - 1:
                last = min(start + count, seq.num_prompt_tokens - 1)
                scored += self._score(seq, hidden[first : first + last - start], start)
            first += count
        return scored

    def _score(self, seq: Sequence, hidden: Tensor, start: int) -> list[tuple[Sequence, TokenLogprobs]]:
        """hidden [n, h] of the prompt positions start ... start + n - 1, which predict the tokens after them."""
        known = max(len(seq.prompt_logprobs) - start, 0)  # scored before a preemption
        scored = []
        for at in range(known, len(hidden), PROMPT_LOGPROB_ROWS):
            rows = hidden[at : at + PROMPT_LOGPROB_ROWS]
            first = start + at + 1
            (targets,) = self.transfer.send([seq.prompt[first : first + len(rows)].astype(np.int64)])
            logits = self.model.compute_logits(rows)
            scored.append((seq, self.sampler.gather_logprobs(logits, targets, seq.params.prompt_logprobs or 0)))
        return scored


def split_logprobs(scored: TokenLogprobs, counts: Iterable[int]) -> list[LogprobEntry]:
    """A batch of log-probs -> one plain entry for each row, with as many of the best as its request wants."""
    rows = zip(
        scored.chosen.tolist(), scored.rank.tolist(), scored.top_ids.numpy(), scored.top_logprobs.numpy(), counts
    )
    return [(logprob, rank, ids[:n].tolist(), best[:n].tolist()) for logprob, rank, ids, best, n in rows]
