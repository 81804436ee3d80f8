"""Request: what a caller asked for (one prompt, n outputs), and how its sequences become a RequestOutput.

Invariant: a request is finished when all of its n sequences are; its output lists them by index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanoapc.engine.detokenizer import Detokenizer, output_text
from nanoapc.engine.sequence import Sequence
from nanoapc.inputs import InputProcessor, Prompt
from nanoapc.layers.sampler import SamplerState, sequence_seed
from nanoapc.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, logprob_entries
from nanoapc.sampling_params import SamplingParams


@dataclass(eq=False)
class Call:
    """One call of generate, chat or stream (or the step interface): its requests and where their outputs arrive."""

    source: Iterator[list[Sequence]] | None = None  # sequences still to be submitted
    pending: dict[str, Request] = field(default_factory=dict)
    finished: list[RequestOutput] = field(default_factory=list)
    error: BaseException | None = None  # what ended a step of another caller, and our requests with it
    left: bool = False  # its caller has gone

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be submitted, run, fetched or raised."""
        return bool(self.source is not None or self.pending or self.finished or self.error is not None)


class OutputStream:
    """The outputs of `LLM.stream`; a `next` that `check` refuses leaves them as they are, to be fetched afterwards."""

    def __init__(self, check: Callable[[], None], outputs: Generator[RequestOutput, None, None]):
        self._check, self._outputs = check, outputs
        self.close = outputs.close

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        self._check()
        return next(self._outputs)


@dataclass(eq=False)
class Request:
    """One prompt and its n sequences."""

    index: int  # the place of its prompt in the caller's list
    prompt: Prompt
    params: SamplingParams
    call: Call  # whom the finished output is for
    request_id: str = ""  # unique in the engine, which gives it
    sequences: list[Sequence] = field(default_factory=list)
    arrival_time: float = 0.0  # as in RequestMetrics
    first_token_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(seq.finish_reason is not None for seq in self.sequences)


def make_sequences(
    request: Request, first_seq_id: int, max_model_len: int, seed: int, state: SamplerState | None, tokenizer: Any
) -> list[Sequence]:
    """The n sequences of a request; the i-th has a seed of its own, the first the request's.

    state: of any sequence with these parameters.
    """
    prompt, params = request.prompt, request.params
    room = max_model_len - len(prompt.token_ids)
    return [
        Sequence(
            seq_id=first_seq_id + i,
            prompt=prompt.token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=sequence_seed(seed, i),
            index=i,
            extra=prompt.extra,
            stop_token_ids=frozenset(params.stop_token_ids),
            detokenizer=Detokenizer(tokenizer, prompt.token_ids, params) if params.stop else None,
            sampler_state=state and state.for_prompt(prompt.token_ids),
            request=request,
        )
        for i in range(params.n)
    ]


def make_output(request: Request, inputs: InputProcessor) -> RequestOutput:
    """The request, finished just now, as the caller gets it."""
    now = time.perf_counter()
    first = request.sequences[0]
    prompt_token_ids = request.prompt.token_ids.tolist()
    prompt_logprobs = None
    if request.params.prompt_logprobs is not None:
        scored = _logprobs(prompt_token_ids[1:], first.prompt_logprobs, inputs.token_text)
        prompt_logprobs = [None, *scored]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(seq, inputs) for seq in request.sequences],
        finished=True,
        num_cached_tokens=max(first.num_cached_tokens, 0),
        index=request.index,
        metrics=RequestMetrics(request.arrival_time, request.first_token_time or now, now),
    )


def _completion(seq: Sequence, inputs: InputProcessor) -> CompletionOutput:
    logprobs, total = None, None
    if seq.params.logprobs is not None:
        logprobs = _logprobs(seq.output_token_ids, seq.logprobs, inputs.token_text)
        total = sum(entry[0] for entry in seq.logprobs)
    return CompletionOutput(
        index=seq.index,
        text=_text(seq, inputs.tokenizer),
        token_ids=seq.output_token_ids,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=seq.finish_reason,  # type: ignore[arg-type]
        stop_reason=seq.stop_reason,
    )


def _text(seq: Sequence, tokenizer: Any) -> str:
    """The output's text; the token that stopped it is left out unless it is asked for."""
    if tokenizer is None or not seq.params.detokenize:
        return ""
    if seq.finish_reason == "stop" and isinstance(seq.stop_reason, str) and seq.detokenizer is not None:
        return seq.detokenizer.text
    return output_text(tokenizer, seq.prompt, seq.output_token_ids, seq.params, seq.finish_reason == "stop")


def _logprobs(
    token_ids: list[int], entries: list[Any], decode: Callable[[int], str] | None
) -> list[dict[int, Logprob]]:
    return [
        logprob_entries(token_id, chosen, rank, top_ids, top_logprobs, decode)
        for token_id, (chosen, rank, top_ids, top_logprobs) in zip(token_ids, entries, strict=True)
    ]
