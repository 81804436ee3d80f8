"""What a request gives back, with vLLM's names and shapes.

Invariant: plain host data. `outputs[i].logprobs[t]` belongs to `outputs[i].token_ids[t]`, and
`prompt_logprobs[t]` to `prompt_token_ids[t]`; the first prompt token follows nothing, so its entry is None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

MAX_NAMED = 20
"""Prompts that a warning names."""
BROKEN_LOGITS = "its logits are NaN or infinite"
"""How the error of an output begins that the model is to blame for, not the request's parameters."""
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token id at one position, from the raw logits (before any bias)."""

    logprob: float
    rank: int | None = None  # 1 for the best: one more than the number of ids with a greater logit
    decoded_token: str | None = None  # the token's own text; None without a tokenizer


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int  # which of the n sequences of its request
    text: str
    token_ids: list[int]  # the generated ids, with the stop token if one ended it
    cumulative_logprob: float | None = None  # sum of the chosen tokens' log-probs, if log-probs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # per token: k or k + 1 entries, the chosen id's first
    finish_reason: FinishReason | None = None  # "stop": a stop string or token, or an end-of-sequence id;
    # "length": max_tokens or no room; "abort"; "error": there was no token id to choose
    stop_reason: str | int | None = None  # the stop string or stop token id (None for an end-of-sequence id), or what
    # the error is

    def finished(self) -> bool:
        """Whether it has ended (one that `generate` returns has)."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`."""

    arrival_time: float
    first_token_time: float  # of any of its outputs
    finished_time: float


@dataclass
class RequestOutput:
    """A request and its n outputs."""

    request_id: str
    prompt: str | None  # the prompt's text; None if the request came as token ids
    prompt_token_ids: list[int]  # what was run, special tokens included
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # if asked for: one entry per token, the first None
    outputs: list[CompletionOutput] = field(default_factory=list)  # ordered by index
    finished: bool = False
    num_cached_tokens: int = 0  # how many prompt tokens were found in the prefix cache
    index: int = 0  # the place of the prompt in the call's list (`stream` yields in another order)
    metrics: RequestMetrics | None = None

    @property
    def error(self) -> str | None:
        """What ended the first of the outputs that ended with an error; None if none did."""
        return next((str(output.stop_reason) for output in self.outputs if output.finish_reason == "error"), None)


def warn_of_errors(outputs: Sequence[RequestOutput]) -> None:
    """Logs which of a call's prompts ended with an error, if any did: nobody looks at each finish reason."""
    errors = [f"prompt {output.index}: {output.error}" for output in outputs if output.error is not None]
    if errors:
        more = f"; and {len(errors) - MAX_NAMED} more" if len(errors) > MAX_NAMED else ""
        named = "; ".join(errors[:MAX_NAMED])
        logger.warning("%d of %d prompts ended with an error: %s%s", len(errors), len(outputs), named, more)


def logprob_entries(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    decode: Callable[[int], str] | None = None,
) -> dict[int, Logprob]:
    """One position's entries, as in vLLM: the chosen id, then the best of the others in order (ties share a rank)."""
    entries = {token_id: Logprob(logprob, rank, decode(token_id) if decode else None)}
    best_rank, previous = 1, None
    for place, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        if top_logprob != previous:
            best_rank, previous = place, top_logprob
        if top_id != token_id:
            entries[top_id] = Logprob(top_logprob, best_rank, decode(top_id) if decode else None)
    return entries
