"""LLM: offline batch inference, the public face of the engine. Names and arguments follow vLLM's `LLM`.

    generate / chat / stream -> Prompts -> Requests -> scheduler (in prefix order) -> step, step, ... -> RequestOutputs

Everything is checked before anything runs; results come back in the caller's order (stream: as they finish).

Threads: any number may call at once. The requests of all calls share the batch; whoever holds the lock runs the next
step for everybody and puts finished outputs where their callers find them. A signal's handler or a callback that comes
in the middle of that may call what runs no step; generate, chat, step and a stream's `next` are refused.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from nanoapc.config import EngineConfig
from nanoapc.engine.engine import Engine
from nanoapc.engine.explain import Explanation, explain
from nanoapc.engine.metrics import Metrics
from nanoapc.engine.request import Call, OutputStream, Request, make_output
from nanoapc.engine.sequence import Sequence as EngineSequence
from nanoapc.fair_lock import FairLock
from nanoapc.inputs import Prompt, PromptType, as_conversations, as_prompt_list, groups, pair_as_they_come, until_error
from nanoapc.outputs import BROKEN_LOGITS, RequestOutput, warn_of_errors
from nanoapc.progress import Speed, make_bar
from nanoapc.sampling_params import SamplingParams


class LLM:
    """A model, its KV cache and a scheduler in this process.

    Args:
        model: a directory with config.json, safetensors and tokenizer, or a name on the Hugging Face hub.
        arguments: the fields of `EngineConfig` (dtype, device, max_model_len, block_size, ...); an unknown one is an
            error. See there for meanings and defaults.

    Raises:
        ValueError: an argument, the model directory or the sizes do not work; the message says what to change.

    Use it as a context manager or call `close()` to give the memory back early.
    """

    def __init__(self, model: str | os.PathLike[str], **arguments: Any):
        self.engine = Engine(EngineConfig.from_arguments(model, **arguments))
        self.inputs = self.engine.inputs
        self._lock = FairLock()
        weakref.finalize(self, _close, self.engine, self._lock)  # files are written, also without `close`
        self._calls: list[Call] = []
        self._steps = Call()
        self._deferred: list[Callable[[], None]] = []  # what was asked for in the middle of a step

    # -- whole batches -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs stand in the order of the prompts.

        Args:
            prompts: one or many; each a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and
                optionally "cache_salt" (only requests with the same salt share cached prefixes). Texts get the
                tokenizer's special tokens (BOS); a rendered chat template has them already, so use `chat` for messages.
            sampling_params: one for all or one for each; None: `get_default_sampling_params`.
            use_tqdm: show progress on standard error; or what makes the bars: a tqdm class, or a function like it.

        Raises:
            ValueError: a prompt or a parameter does not work (it names the index); nothing has run then.
            RuntimeError: the LLM is closed, this thread is in the middle of a step, or logits are NaN or infinite.

        A request whose own parameters leave it no token id ends alone, with what it has: finish_reason "error".
        """
        return self._run_all(as_prompt_list(prompts), self.inputs.prompts, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations: one list of {"role", "content"} messages, or a list of such lists.

        The model's chat template (or `chat_template`) makes the prompt; it brings the BOS token, if there is one.
        """
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise ValueError(f"chat_template_kwargs={chat_template_kwargs!r}: must be a dict, {{'name': value}}")
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        tokenize = partial(self.inputs.conversations, template=chat_template, options=options, cache_salt=cache_salt)
        return self._run_all(as_conversations(messages), tokenize, sampling_params, use_tqdm, lora_request)

    def _run_all(
        self, raw: list[Any], tokenize: Callable[..., list[Prompt]], params: Any, use_tqdm: Any, lora: None
    ) -> list[RequestOutput]:
        if lora is not None and not (isinstance(lora, list) and not any(lora)):
            raise ValueError(f"lora_request={lora!r}: LoRA adapters are not supported; merge it into the weights")
        self._check_no_step()
        self.engine.check_usable()
        params = self.inputs.params(raw, self._or_default(params))
        with make_bar(use_tqdm, total=len(raw), desc="Tokenizing", leave=False) as bar:
            ready = tokenize(raw, progress=bar.update)
        call = Call()
        requests = [Request(i, *pair, call) for i, pair in enumerate(zip(ready, params, strict=True))]
        with self._lock:
            sequences = self.engine.prepare(requests)
        call.source = groups(sequences, 2 * self.engine.config.max_num_seqs)
        call.pending = {request.request_id: request for request in requests}
        outputs: list[RequestOutput] = []
        served = self._serve(call)
        with make_bar(use_tqdm, total=len(requests), desc="Processed prompts") as bar, closing(served):
            speed = Speed(bar)
            for output in served:
                if (output.error or "").startswith(BROKEN_LOGITS):
                    raise RuntimeError(f"no token can be sampled for prompt {output.index}: {output.error}")
                outputs.append(output)
                speed.count(output)
        outputs.sort(key=attrgetter("index"))
        warn_of_errors(outputs)
        return outputs

    # -- streams -----------------------------------------------------------------------------------------

    def stream(
        self,
        prompts: str | Mapping[str, Any] | Iterable[PromptType],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields each RequestOutput as it finishes (`output.index` is the place of its prompt).

        Takes any iterable (or one text or dict) and reads it as it goes: at most a few times max_num_seqs requests
        exist at once, however many prompts there are. Each such window runs in prefix order. A bad prompt is a
        ValueError once everything before it has been yielded; one with NaN or infinite logits ends alone, as an output
        with finish_reason "error".
        """
        call = Call()
        call.source = self._windows(pair_as_they_come(prompts, self._or_default(sampling_params)), call)
        return OutputStream(self._check_no_step, self._serve(call))

    def _windows(self, pairs: Iterable[tuple[Any, SamplingParams]], call: Call) -> Iterator[list[EngineSequence]]:
        """Reads the pairs window by window; what precedes a bad one still runs before its error is raised."""
        index = 0
        for window in groups(until_error(pairs), 2 * self.engine.config.max_num_seqs):
            requests, error = self._window(window, index, call)
            with self._lock:
                sequences = self.engine.prepare(requests)
                call.pending.update((request.request_id, request) for request in requests)
            index += len(window)
            yield sequences
            if error is not None:
                while call.pending or call.finished:
                    yield []
                raise error

    def _window(self, window: list[Any], index: int, call: Call) -> tuple[list[Request], BaseException | None]:
        with suppress(Exception):
            return self._requests(window, index, call), None
        requests: list[Request] = []
        for i, item in enumerate(window):  # find out which one it is, and keep those before it
            try:
                requests += self._requests([item], index + i, call)
            except Exception as error:
                return requests, error
        return requests, None

    def _requests(self, window: list[Any], index: int, call: Call) -> list[Request]:
        for item in window:
            if isinstance(item, BaseException):
                raise item
        self.engine.check_usable()
        prompts = [prompt for prompt, _ in window]
        params = self.inputs.params(prompts, [item for _, item in window], index)
        ready = self.inputs.prompts(prompts, index)
        return [Request(i, *pair, call) for i, pair in enumerate(zip(ready, params, strict=True), index)]

    # -- step by step ------------------------------------------------------------------------------------

    def add_request(self, prompt: PromptType, sampling_params: SamplingParams | None = None) -> str:
        """Queues one prompt for `step`; returns its request_id."""
        with self._between_steps() as deferred:
            (request,) = self._requests([(prompt, self._or_default(sampling_params))], 0, self._steps)
            deferred.append(partial(self.engine.scheduler.add, self.engine.prepare([request])))
            self._steps.pending[request.request_id] = request
            return request.request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step for everything queued; returns the outputs of `add_request` finished since the last."""
        self._check_no_step()
        with self._lock:
            self._step(self._steps)
            finished, self._steps.finished = self._steps.finished, []
            return finished

    def has_unfinished_requests(self) -> bool:
        """Whether requests of `add_request` are unfinished or not yet fetched."""
        return self._steps.unfinished

    def abort_request(self, request_id: str) -> bool:
        """Drops an unfinished request of `add_request`; False if there is none of this id."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r}; pass one text at a time, as add_request has returned it")
        with self._between_steps() as deferred:
            request = self._steps.pending.pop(request_id, None)
            if request is not None:
                deferred.append(partial(self.engine.abort, [request]))
            return request is not None

    @contextmanager
    def _between_steps(self) -> Iterator[list[Callable[[], None]]]:
        """What is put into the list is done at the end; in the middle of a step, which is not to be torn, after it."""
        in_step = self._lock.is_mine
        with self._lock:
            yield self._deferred
            if not in_step:
                self._catch_up()

    # -- the loop ----------------------------------------------------------------------------------------

    def _serve(self, call: Call) -> Generator[RequestOutput, None, None]:
        """Feeds and steps the engine until the call is done; yields its outputs as they finish."""
        self._check_open()
        with self._lock:
            self._calls.append(call)
        try:
            while call.unfinished:
                self._feed(call)
                with self._lock:
                    if not call.finished:
                        self._step(call)
                    done, call.finished = call.finished, []
                yield from done
        finally:
            call.left = True
            if not self._lock.is_mine:  # a stream may be collected anywhere, even inside a step of this thread
                with self._lock:
                    self._catch_up()

    def _catch_up(self) -> None:
        """Does what waits for the end of a step, and ends the calls whose callers have gone (the lock is held)."""
        while self._deferred:
            act = self._deferred.pop(0)
            if self.engine.dead is None:
                act()
        for call in [call for call in self._calls if call.left]:
            self._calls.remove(call)
            if self.engine.dead is None:
                self.engine.abort(call.pending.values())
            call.pending.clear()

    def _feed(self, call: Call) -> None:
        """Keeps enough sequences waiting; the lock is not held while the caller's iterable is read."""
        while call.source is not None and len(self.engine.scheduler.waiting) < self.engine.config.max_num_seqs:
            sequences = next(call.source, None)
            if sequences is None:
                call.source = None
            if not sequences:
                return
            with self._lock:
                if call.error is None:
                    self.engine.scheduler.add(sequences)

    def _step(self, caller: Call) -> None:
        """One step for everybody, run by `caller` (the lock is held)."""
        self._catch_up()
        if caller.error is not None:
            error, caller.error = caller.error, None
            self._check_open()
            raise RuntimeError("a step that these requests shared with others has failed") from error
        try:
            for request in self.engine.step():
                if request.call.pending.pop(request.request_id, None) is not None:  # else it was aborted meanwhile
                    request.call.finished.append(make_output(request, self.inputs))
                request.sequences.clear()  # they refer to it: a circle, which is freed late
        except BaseException as error:
            self._catch_up()
            self.engine.abort_all()  # what was just added; all, if it was no step of the engine that has failed
            for call in (*self._calls, self._steps):
                if call.pending and call is not caller:
                    call.error = error
                call.pending.clear()
            raise

    # -- the rest ----------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer (None with skip_tokenizer_init)."""
        return self.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without SamplingParams get: the model's own suggestions (generation_config.json)."""
        try:
            return SamplingParams(**self.engine.model_config.suggested_sampling)
        except ValueError as error:
            remedy = "correct it, or pass SamplingParams"
            raise ValueError(f"generation_config.json of the model: {error}; {remedy}") from None

    def _or_default(self, params: Any) -> Any:
        return self.get_default_sampling_params() if params is None else params

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing changes, while requests are running."""
        in_step = self._lock.is_mine
        with self._lock:
            self._check_open()
            return not in_step and self.engine.manager.reset()

    def save_prefix_cache(self) -> int:
        """Writes the cached prefixes to prefix_cache_file now, not only in `close`; returns the number of blocks."""
        with self._lock:
            self._check_open()
            return self.engine.save_prefix_cache()

    def metrics(self) -> Metrics:
        """This moment's numbers: hits, evictions, savings, step times (see `engine/metrics.py`)."""
        with self._lock:
            return self.engine.metrics()

    def explain(
        self, prompt: PromptType, cache_salt: str | None = None, sampling_params: SamplingParams | None = None
    ) -> Explanation:
        """How much of a prompt the prefix cache holds now, and why no more. Changes nothing.

        Args:
            prompt: as for `generate`; a dict may bring its own cache_salt.
            cache_salt: otherwise the salt.
            sampling_params: what the prompt would run with (some of them skip the cache).
        """
        if cache_salt is not None:
            key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            prompt = {**(prompt if isinstance(prompt, Mapping) else {key: prompt}), "cache_salt": cache_salt}
        (ready,) = self.inputs.prompts([prompt])
        with self._lock:
            self._check_open()
            params = sampling_params or SamplingParams()
            seq = EngineSequence(-1, ready.token_ids, params, max_tokens=1, extra=ready.extra)
            return explain(self.engine.manager, seq)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights by (name, tensor) pairs with the checkpoint's names, and resets the prefix cache.

        Weights that are changed behind the engine's back need `reset_prefix_cache()`, and no prefix_cache_file: it
        would pass what they have computed for the work of the weights that were loaded.
        """
        with self._lock:
            self._check_open()
            self.engine.load_weights(tensors)

    def close(self) -> None:
        """Drops unfinished requests and gives model and KV cache back; a second call does nothing.

        In the middle of a step (in a signal's handler) it takes effect after the step.
        """
        self._steps.pending.clear()
        if self._lock.is_mine:
            self._deferred.append(self.engine.close)
        else:
            _close(self.engine, self._lock)

    def _check_open(self) -> None:
        if self.engine.dead is not None:
            raise RuntimeError(self.engine.dead)

    def _check_no_step(self) -> None:
        """RuntimeError where a signal's handler or a callback has interrupted what must not be torn."""
        if self._lock.is_mine:
            raise RuntimeError("a step of this LLM (or a change of it) is running in this thread; call this afterwards")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(engine: Engine, lock: FairLock) -> None:
    """Closes an engine between two steps; a forked child leaves it, and its files, to the parent."""
    if lock.process == os.getpid():
        with lock:
            engine.close()
