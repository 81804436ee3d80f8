"""Sampler: logits [n, V] -> one token id per row, and the log-probs that the rows ask for.

    raw logits -+-> bias, allowed ids, bad words, -+-> / temperature -> min_p -> top_k -> top_p -> draw
                |   min_tokens, penalties          +-> max (greedy rows)
                +-> log_softmax (log-probs)

Invariant: a row's result is a function of its own logits, parameters and tokens, bit for bit, whichever rows
share the batch and however many they are. Hence only row-wise operations are used. On CUDA the host never waits
for the device between logits and `SampledTokens`: what is done depends on parameters alone.

A `SamplerState` belongs to a sequence and outlives batches; `SamplingRows` belongs to one composition of
the batch and is reused as long as that does not change.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoapc.kernels import Kernels, upload
from nanoapc.sampling_params import SamplingParams

NEG_INF = float("-inf")


def request_seed(engine_seed: int, name: object) -> int:
    """The signed 64-bit seed of a request that brings none; its name is its number, or what else tells it apart."""
    data = f"{engine_seed}/{name}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def sequence_seed(seed: int, index: int) -> int:
    """The signed 64-bit seed of sequence `index` of a request: 0 keeps `seed`, others are mixed with it."""
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) % 2**64  # the mix of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


class SamplerState:
    """One sequence's output so far (`output_ids` grows by each token), and what its parameters change in its logits."""

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Sequence[int],
        bad_words_ids: Sequence[Sequence[int]],
    ) -> None:
        bias = params.logit_bias or {}
        self.sees_prompt = params.repetition_penalty != 1
        self._begin(())
        self.bias_ids, self.bias_values = _ids(list(bias)), np.array(list(bias.values()), np.float32)
        self.allowed_ids = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        self.banned_ids = _ids([words[0] for words in bad_words_ids if len(words) == 1])
        self.bad_phrases: dict[int, list[tuple[array[int], int]]] = {}  # by their last id but one
        for words in bad_words_ids:
            if len(words) > 1:
                self.bad_phrases.setdefault(words[-2], []).append((array("q", words[:-1]), words[-1]))
        self.stop_ids = list(stop_ids)
        self.min_tokens = params.min_tokens

    def _begin(self, prompt_token_ids: Sequence[int] | np.ndarray) -> None:
        self.output_ids = array("q")
        self.prompt_ids = np.unique(_ids(prompt_token_ids if self.sees_prompt else ()))

    def for_prompt(self, prompt_token_ids: Sequence[int] | np.ndarray) -> SamplerState:
        """The state of a new sequence with the same parameters; it shares all that does not change."""
        twin = copy.copy(self)
        twin._begin(prompt_token_ids)
        return twin

    def passing_bans(self) -> list[int]:
        """The ids forbidden at the next position because of what the output is now."""
        banned = list(self.stop_ids) if len(self.output_ids) < self.min_tokens else []
        for start, last in self.bad_phrases.get(self.output_ids[-1], ()) if self.output_ids else ():
            if self.output_ids[-len(start) :] == start:
                banned.append(last)
        return banned

    def leaves_none(self, num_valid_ids: int) -> bool:
        """Whether all ids below num_valid_ids are excluded at the next position, whatever the logits are."""
        allowed = range(num_valid_ids) if self.allowed_ids is None else self.allowed_ids.tolist()
        return {*self.banned_ids.tolist(), *self.passing_bans()}.issuperset(allowed)


def make_state(
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
) -> SamplerState | None:
    """The state of a sequence before it has a prompt (see `for_prompt`); None if its logits are used as they are.

    eos_token_ids: the model's; bad_words_ids: `params.bad_words_ids(tokenizer)`.
    """
    stop_ids = [*params.stop_token_ids, *eos_token_ids]  # with ignore_eos, too, as in vLLM
    edits = (params.logit_bias, params.allowed_token_ids, bad_words_ids, params.min_tokens and stop_ids)
    if params.has_penalties or any(edits):
        return SamplerState(params, stop_ids, bad_words_ids)
    return None


Row = tuple[SamplingParams, "SamplerState | None", int]  # a sequence's parameters, state, signed 64-bit seed


class SamplingRows:
    """The parameters of a step's n rows, as tensors on the device. The batch's owner sets before each step:

    positions [n] int64: where in its sequence each row's new token goes
    """

    positions: Tensor

    def __init__(self, rows: Sequence[Row], num_valid_ids: int, device: torch.device | str = "cpu") -> None:
        self.device, self.num_rows, self.num_valid_ids = torch.device(device), len(rows), num_valid_ids
        self.num_logprobs = [params.logprobs for params, _, _ in rows]
        self.logprob_rows = self.tensor([i for i, k in enumerate(self.num_logprobs) if k is not None])
        self.max_logprobs = max((k or 0 for k in self.num_logprobs), default=0)
        self.has_edits = any(state is not None for _, state, _ in rows)
        self._set_draws([(i, p, seed) for i, (p, _, seed) in enumerate(rows) if not p.is_greedy])
        if self.has_edits:
            self._set_edits([(i, p, state) for i, (p, state, _) in enumerate(rows) if state is not None])

    def _set_draws(self, rows: list[tuple[int, SamplingParams, int]]) -> None:
        """The m rows that draw, and those of them that have to be ranked (top_k, top_p)."""
        V = self.num_valid_ids
        params = [p for _, p, _ in rows]
        self.draw_rows = self.tensor([i for i, _, _ in rows])  # [m]
        self.seeds = self.tensor([seed for _, _, seed in rows])  # [m]
        self.temperature = self.tensor([p.temperature for p in params], torch.float32)[:, None]  # [m, 1]
        min_p = [math.log(p.min_p) if p.min_p > 0 else NEG_INF for p in params]
        self.log_min_p = self.tensor(min_p, torch.float32)[:, None] if any(p.min_p for p in params) else None
        top_k = [p.top_k if 0 < p.top_k < V else V for p in params]
        ranked = [j for j, p in enumerate(params) if top_k[j] < V or p.top_p < 1]
        self.ranked_rows = self.tensor(ranked)  # indices into the rows that draw
        self.top_k = self.tensor([top_k[j] for j in ranked])
        self.top_p = self.tensor([params[j].top_p for j in ranked], torch.float64)

    def _set_edits(self, rows: list[tuple[int, SamplingParams, SamplerState]]) -> None:
        self.bias_at = self.flat([(i, s.bias_ids) for i, _, s in rows])
        biases = [s.bias_values[s.bias_ids < self.num_valid_ids] for _, _, s in rows]
        self.bias = self.upload(np.concatenate([np.zeros(0, np.float32), *biases]))
        allowed = [(i, s.allowed_ids) for i, _, s in rows if s.allowed_ids is not None]
        self.restricted_rows, self.allowed_at = self.tensor([i for i, _ in allowed]), self.flat(allowed)
        self.banned_at = self.flat([(i, s.banned_ids) for i, _, s in rows])
        self.passing = [(i, s) for i, _, s in rows if s.bad_phrases or len(s.output_ids) < s.min_tokens]
        penalised = [row for row in rows if row[1].has_penalties]
        self.penalties = _Penalties(penalised, self) if penalised else None

    def tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host values -> a vector on the device."""
        return upload(torch.tensor(values, dtype=dtype, device="cpu"), self.device)

    def upload(self, values: np.ndarray) -> Tensor:
        """A host array -> the same on the device."""
        return upload(torch.from_numpy(values), self.device)

    def flat(self, ids_of_rows: Sequence[tuple[int, np.ndarray]]) -> Tensor:
        """(row, ids) pairs -> indices row * V + id; ids that cannot be emitted anyway (>= V) are left out."""
        V = self.num_valid_ids
        parts = [row * V + ids[ids < V] for row, ids in ids_of_rows]
        return self.upload(np.concatenate([_ids(()), *parts]))

    def edit(self, logits: Tensor) -> Tensor:
        """logits [n, V] -> the same, or an edited float32 copy: bias, allowed ids, bans, then penalties."""
        if not self.has_edits:
            return logits
        logits = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        flat = logits.view(-1)
        flat.index_add_(0, self.bias_at, self.bias)
        if self.restricted_rows.numel():
            kept = flat[self.allowed_at]
            logits.index_fill_(0, self.restricted_rows, NEG_INF)
            flat[self.allowed_at] = kept
        flat.index_fill_(0, self.banned_at, NEG_INF)
        if self.passing:
            bans = [(i, _ids(state.passing_bans())) for i, state in self.passing]
            flat.index_fill_(0, self.flat(bans), NEG_INF)
        if self.penalties is not None:
            self.penalties.apply(logits)
        return logits


class _Penalties:
    """Which ids the p penalised rows have seen, kept up as their states grow (never counted again).

    Only these logits are touched: each (row, id) that has been seen has a place in the vectors [s]. `slots` says which
    (from 1; 0: not seen); its memory is touched only near ids that have been seen.
    """

    def __init__(self, rows: list[tuple[int, SamplingParams, SamplerState]], owner: SamplingRows) -> None:
        self.owner, self.states, self.num_taken = owner, [state for _, _, state in rows], [0] * len(rows)
        self.rows = np.array([i for i, _, _ in rows])  # [p] of the logits
        strengths = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in rows]
        self.strengths = owner.upload(np.array(strengths, np.float32))  # [p, 3]
        self.slots = np.zeros(len(rows) * owner.num_valid_ids, np.int32)  # [p * V]
        self.places = owner.tensor([])  # [s] row * V + id
        self.of_places = self.strengths[:0]  # [s, 3]
        self.counts = owner.tensor([], torch.float32)  # [s] in the output
        self._enter([(j, state.prompt_ids) for j, state in enumerate(self.states)])

    def _enter(self, ids_of_rows: list[tuple[int, np.ndarray]]) -> np.ndarray:
        """Gives ids of the rows places, if they have none; returns the place of each."""
        V = self.owner.num_valid_ids
        seen = np.concatenate([j * V + ids[ids < V] for j, ids in ids_of_rows])
        new = np.sort(seen[self.slots[seen] == 0])
        new = new[np.diff(new, prepend=-1) > 0]  # each once (np.unique hashes, which takes 40 times as long)
        if len(new):
            self.slots[new] = np.arange(len(self.places), len(self.places) + len(new)) + 1
            row, token_id = np.divmod(new, V)
            places, rows = (self.owner.upload(array) for array in (self.rows[row] * V + token_id, row))
            self.places = torch.cat([self.places, places])
            self.of_places = torch.cat([self.of_places, self.strengths[rows]])
            self.counts = torch.cat([self.counts, torch.zeros_like(places, dtype=torch.float32)])
        return self.slots[seen].astype(np.int64) - 1

    def apply(self, logits: Tensor) -> None:
        """logits [n, V], in place: repetition (prompt and output), then frequency and presence (output)."""
        new = []
        for j, state in enumerate(self.states):
            new.append((j, _ids(state.output_ids[self.num_taken[j] :])))
            self.num_taken[j] = len(state.output_ids)
        taken = self.owner.upload(self._enter(new))
        self.counts.index_add_(0, taken, torch.ones_like(taken, dtype=torch.float32))  # whole numbers: sums are exact
        flat = logits.view(-1)
        repetition, frequency, presence = self.of_places.unbind(1)
        x = flat[self.places]
        x = torch.where(x > 0, x / repetition, x * repetition)
        flat[self.places] = x - frequency * self.counts - presence * (self.counts > 0)


class TokenLogprobs(NamedTuple):
    """Log-probs of r rows: of the chosen id, its rank (1 is the best), and the k best ids in order."""

    chosen: Tensor  # [r] float32
    rank: Tensor  # [r] int64
    top_ids: Tensor  # [r, k] int64
    top_logprobs: Tensor  # [r, k] float32


class SampledTokens(NamedTuple):
    """A step's result, still on the device."""

    token_ids: Tensor  # [n] int64; -1 where the edited logits are NaN or infinite, or exclude every id
    logprobs: TokenLogprobs | None  # of the rows with `num_logprobs`, in their order


class Sampler:
    """Samples one id per row. Ids from num_valid_ids on (a padded vocabulary) are never emitted."""

    def __init__(self, kernels: Kernels, num_valid_ids: int) -> None:
        self.kernels = kernels
        self.num_valid_ids = num_valid_ids

    def forward(self, logits: Tensor, rows: SamplingRows) -> SampledTokens:
        """logits [n, V] of any float dtype, left as they are; V >= num_valid_ids."""
        x = rows.edit(logits[:, : self.num_valid_ids])
        peak, token_ids = self.kernels.argmax(x)
        drawing = rows.draw_rows
        if drawing.numel() == rows.num_rows:
            token_ids = self._draw(x, peak, rows, rows.positions)
        elif drawing.numel():
            token_ids[drawing] = self._draw(x[drawing], peak[drawing], rows, rows.positions[drawing])
        logprobs = None
        if rows.logprob_rows.numel():
            asking = rows.logprob_rows
            logprobs = self.gather_logprobs(logits[asking], token_ids[asking], rows.max_logprobs)
        return SampledTokens(token_ids.masked_fill(peak - peak != 0, -1), logprobs)  # where it is not finite

    def _draw(self, x: Tensor, peak: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
        """The rows that draw, x [m, V] -> ids [m]. The peak (float32) is taken off first: no temperature overflows."""
        x = (x - peak[:, None]).div_(rows.temperature)
        if rows.log_min_p is not None:
            x = x.masked_fill(x < rows.log_min_p, NEG_INF)
        ranked = rows.ranked_rows
        if len(ranked) == len(x):
            x = self.kernels.keep_top(x, rows.top_k, rows.top_p)
        elif len(ranked):
            x[ranked] = self.kernels.keep_top(x[ranked], rows.top_k, rows.top_p)
        return self.kernels.gumbel_argmax(x, rows.seeds, positions)

    def gather_logprobs(self, logits: Tensor, chosen: Tensor, num_top: int) -> TokenLogprobs:
        """logits [r, V] raw, chosen [r] int64 -> log-probs over all V; ranks and best among valid ids."""
        logits = logits.float()
        top_ids = self.kernels.largest(logits[:, : self.num_valid_ids], num_top)[1]
        logprobs, rank = self.kernels.logprobs(logits, torch.cat([chosen[:, None], top_ids], 1), self.num_valid_ids)
        return TokenLogprobs(logprobs[:, 0], rank, top_ids, logprobs[:, 1:])


def _ids(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.array(values, dtype=np.int64)
