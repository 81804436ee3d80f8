"""Launching a step before the results of the one before are known changes nothing that a user sees.

The device of these tests is late: a step that was launched runs when somebody waits for it, after all those launched
before. So whatever the host does too early - reads a token, gives a block away whose writer has not run - shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MakeLLM
from host_helpers import NullEngine, NullModel, solo
from llm_helpers import assert_idle, greedy, observe, script_tokens
from test_scheduler import outputs, random_prompts, run_random_cases
from tiny_models import random_ids, tiny_tokenizer

from nanoapc import LLM, RequestOutput, SamplingParams
from nanoapc.engine.block_pool import Block
from nanoapc.engine.engine import Engine
from nanoapc.engine.metrics import PhaseStats
from nanoapc.engine.sequence import Sequence
from nanoapc.engine.step_batch import StepBatch

NO_TILES = np.zeros((0, 6), np.int32)


class LateDevice:
    """Runs what is launched when it is waited for, in order. fail: where the next step fails ("launch", "wait")."""

    def __init__(self, launch: Callable[[StepBatch], Callable[[], np.ndarray]]):
        self._start = launch
        self._queue: deque[LateStep] = deque()
        self.fail = ""

    def launch(self, batch: StepBatch) -> LateStep:
        self._raise("launch")
        self._queue.append(LateStep(self, batch, self._start(batch)))
        return self._queue[-1]

    def run_until(self, step: LateStep) -> None:
        self._raise("wait")
        while step.result is None:
            first = self._queue.popleft()
            first.result = first.run()

    def _raise(self, place: str) -> None:
        if self.fail == place:
            self.fail = ""
            raise RuntimeError(f"failed at {place}")


class LateStep:
    tiles = NO_TILES

    def __init__(self, device: LateDevice, batch: StepBatch, run: Callable[[], np.ndarray]):
        self.device, self.batch, self.run = device, batch, run
        self.result: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        self.device.run_until(self)
        assert self.result is not None
        return self.result


class LateEngine(NullEngine):
    """NullEngine's scheduler and model, in the loop of the real Engine, with overlap, on a late device."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.rng = random.Random(0)
        self.device = LateDevice(self._start)
        self._taken: list[Block] = []
        self._tokens = np.zeros(0, np.int64)
        self.model.forget = self._taken.extend  # type: ignore[method-assign]
        self._preempt = self.scheduler._preempt
        self.scheduler._preempt = self._checked_preempt  # type: ignore[method-assign]
        self.engine = engine = Engine.__new__(Engine)
        engine.scheduler, engine.manager, engine.runner = self.scheduler, self.manager, self.device  # type: ignore[assignment]
        engine.overlap, engine.dead, engine.events, engine.metrics_file = True, None, None, None
        engine.device = torch.device("cpu")
        engine.phases = {phase: PhaseStats() for phase in ("prefill", "decode", "mixed")}
        engine._in_flight, engine._settled_at = None, 0.0

    def _start(self, batch: StepBatch) -> Callable[[], np.ndarray]:
        self.num_steps += 1
        self._check_batch(batch)
        for seq, last in zip(batch.sequences, np.cumsum(batch.counts) - 1, strict=True):
            assert batch.token_ids[last] >= 0 or not seq.needs_last_token
        unknown = batch.token_ids < 0
        self.seen["a step launched ahead"] += unknown.any()
        taken, self._taken[:] = list(self._taken), []
        return lambda: self._run(batch, taken)

    def _run(self, batch: StepBatch, taken: list[Block]) -> np.ndarray:
        """In the order of launches, so that blocks are forgotten after the surplus rows of their last owner."""
        NullModel.forget(self.model, taken)
        ids = batch.token_ids.copy()
        ids[ids < 0] = self._tokens[-1 - ids[ids < 0]]
        self._tokens = self.model.run(replace(batch, token_ids=ids))
        return self._tokens

    def _checked_preempt(self, seq: Sequence) -> None:
        assert self.scheduler._unsettled is None, "a victim loses a token that is on its way"
        self._preempt(seq)

    def queue(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            seq.request = SimpleNamespace(finished=False, first_token_time=None)
            if seq.params.min_tokens:
                seq.sampler_state = object()  # so its last token is needed
        super().queue(sequences)

    def step(self) -> list[Sequence]:
        before = self.engine._in_flight
        self.engine.step()
        self.check()
        after = self.engine._in_flight
        assert after is None or self.scheduler.has_unfinished, "an idle engine has nothing in flight"
        if after is not None:
            batch = after[0].batch
            self.seen["a surplus row"] += sum(seq.row == -1 for seq in batch.sequences)
            self.seen["a step after settling"] += before is None
        return []

    def fail(self) -> bool:
        if not self.scheduler.has_unfinished:
            return False
        self.device.fail = self.rng.choice(("launch", "wait"))
        while self.scheduler.has_unfinished:
            in_flight = self.engine._in_flight is not None
            try:
                self.engine.step()
            except RuntimeError:
                self.seen["a failure with another step in flight"] += in_flight
                self.check()
                return True
        self.device.fail = ""
        return False


def test_random_engines_give_every_sequence_what_it_gets_alone() -> None:
    seen = run_random_cases(LateEngine)
    assert set(seen) >= {
        "a step launched ahead",
        "a surplus row",
        "a failure with another step in flight",
        "an abort while running",
        "several preemptions of one sequence",
        "an end by stop",
        "an end by length",
        "a hit",
        "a copied token",
        "an eviction",
    }
    assert min(seen.values()) >= 5, seen


def cached_content(engine: NullEngine) -> set[tuple[bytes, ...]]:
    """What can be found in the pool, each content as its path from the root."""
    paths = set()
    for prefix in engine.pool.prefixes():
        path, at = [], prefix
        while at.parent is not None:
            path.append(at.label)
            at = at.parent
        paths.add(tuple(path[::-1]))
    return paths


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_counts_and_cached_blocks_are_those_of_the_plain_loop(block_size: int) -> None:
    prompts = [*random_prompts(1, 6, 9), *random_prompts(2, 2, 30)]
    prompts += [[*prompts[0], 7], prompts[1]]
    eos = solo(prompts[0], 9)[0][6:8]
    engines = [engine_class(400, block_size, eos=eos) for engine_class in (NullEngine, LateEngine)]
    for engine in engines:
        first = engine.add(prompts, max_tokens=20)
        engine.run()
        second = engine.add(prompts, max_tokens=24, stop_token_ids=(3,))
        engine.run()
        assert outputs(first) == [solo(prompt, 20, eos=eos)[0] for prompt in prompts]
        assert outputs(second) == [solo(prompt, 24, eos=eos, stop_token_ids=(3,))[0] for prompt in prompts]
        assert {seq.finish_reason for seq in first} == {"stop", "length"}
    plain, late = engines
    assert late.seen["a surplus row"] > 3 and late.seen["a step launched ahead"] > 20
    assert vars(plain.stats) == vars(late.stats)
    assert cached_content(plain) == cached_content(late)


def test_a_block_that_a_sampled_token_fills_is_found_by_the_step_after_next() -> None:
    engine = LateEngine(64, 4)
    prompt = random_prompts(3, 1, 6)[0]
    (first,) = engine.add([prompt], max_tokens=20)
    for _ in range(3):  # the third step computes token 7 (from 0), and is in flight
        engine.step()
    ids = solo(prompt, 20)[0]
    (second,) = engine.add([[*prompt, *ids[:3]]], max_tokens=4)
    assert first.num_indexed_blocks == 2
    engine.run()
    assert second.num_cached_tokens == 8 and second.output_token_ids == ids[3:7]


def test_a_step_that_needs_what_is_unknown_waits_for_it() -> None:
    engine = LateEngine(64, 4)
    engine.add(random_prompts(4, 3, 5), max_tokens=9, min_tokens=2)  # see `queue`
    engine.run()
    assert engine.seen["a step launched ahead"] == 0 and engine.num_steps == 9
    engine = LateEngine(64, 4)
    engine.add(random_prompts(4, 3, 5), max_tokens=9)
    engine.run()
    assert engine.seen["a step launched ahead"] == 8 and engine.num_steps == 9, "none for those that end by length"


# -- a real model ------------------------------------------------------------------------------------------


def make_late(llm: LLM) -> None:
    """From now on a launch starts nothing; see the top of the file."""
    runner = llm.engine.runner
    launch = runner.launch

    def start(batch: StepBatch) -> Callable[[], np.ndarray]:
        return lambda: launch(batch).wait()

    runner.launch = LateDevice(start).launch  # type: ignore[assignment, method-assign]


def visible(output: RequestOutput) -> list[Any]:
    """All that a user sees of an output, except times and what the cache had."""
    return [
        output.index,
        output.prompt_logprobs,
        [
            (c.index, c.text, c.token_ids, c.cumulative_logprob, c.logprobs, c.finish_reason, c.stop_reason)
            for c in output.outputs
        ],
    ]


def mixed_work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share starts, and each way to sample and to end."""
    base = random_ids(40, 1)
    prompts = [base[: 3 + 2 * i] + random_ids(i % 5, i) for i in range(18)]
    text = tiny_tokenizer().decode(list(range(3, 320)))
    stops = [text[i] for i in range(0, len(text), 3)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "logprobs": None},
        {"temperature": 1.0, "n": 3, "seed": 5, "stop_token_ids": list(range(3, 40))},
        {"temperature": 1.5, "stop": stops[:40], "include_stop_str_in_output": True},
        {"temperature": 1.2, "stop_token_ids": list(range(3, 60))},
        {"logprobs": 2, "temperature": 0.8},
        {"prompt_logprobs": 1, "max_tokens": 3},
        {"ignore_eos": True},
        {"temperature": 3.0, "stop": stops[:9]},
    ]
    common = {"temperature": 0, "max_tokens": 20, "logprobs": 1}
    params = [SamplingParams(**{**common, **kinds[i % len(kinds)]}) for i in range(18)]
    return prompts, params


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"num_kv_blocks": 40, "max_num_seqs": 8}, {"max_num_batched_tokens": 8}])
def test_outputs_are_those_of_the_plain_loop(sizes: dict[str, int], late: bool, make_llm: MakeLLM) -> None:
    prompts, params = mixed_work()
    plain, overlapped = (make_llm(async_scheduling=ahead, **sizes) for ahead in (False, True))
    if late:
        make_late(overlapped)
    log = observe(overlapped)
    expected = [visible(output) for output in plain.generate(prompts, params, use_tqdm=False)]
    assert [visible(output) for output in overlapped.generate(prompts, params, use_tqdm=False)] == expected
    reasons = {completion[5] for _, _, completions in expected for completion in completions}
    assert reasons == {"stop", "length"} and any(type(c[6]) is str for _, _, cs in expected for c in cs)
    assert (len(log.victims) > 0) == ("num_kv_blocks" in sizes)
    expected = [visible(output) for output in plain.generate(prompts, params, use_tqdm=False)]  # other seeds, warm
    streamed = sorted(overlapped.stream(prompts, params), key=lambda output: output.index)
    assert [visible(output) for output in streamed] == expected


@pytest.mark.parametrize(
    "kind",
    [{"repetition_penalty": 1.3}, {"min_tokens": 9}, {"presence_penalty": 0.7}, {"bad_words": ["the", "a b"]}, {}],
)
def test_sampling_that_needs_the_last_token_gets_it(kind: dict[str, Any], make_llm: MakeLLM) -> None:
    prompts = [random_ids(6, seed) for seed in range(6)]
    params = SamplingParams(temperature=1.2, max_tokens=16, **kind)
    plain, overlapped = (make_llm(async_scheduling=ahead) for ahead in (False, True))
    ahead: list[bool] = []
    launch = overlapped.engine.runner.launch

    def spy(batch: StepBatch) -> Any:
        ahead.append(bool((batch.token_ids < 0).any()))
        return launch(batch)

    overlapped.engine.runner.launch = spy  # type: ignore[method-assign]
    expected = [visible(output) for output in plain.generate(prompts, params, use_tqdm=False)]
    assert [visible(output) for output in overlapped.generate(prompts, params, use_tqdm=False)] == expected
    assert any(ahead) == (not kind)
    biased = SamplingParams(temperature=1.2, max_tokens=16, logit_bias={7: 2.0})
    overlapped.generate(prompts, biased, use_tqdm=False)
    assert any(ahead), "a bias needs no token"


@pytest.mark.parametrize("late", [False, True])
def test_aborts_and_arrivals_between_steps(late: bool, make_llm: MakeLLM) -> None:
    """At each step the same requests are known, aborted and finished as in the plain loop."""
    histories = []
    for ahead in (False, True):
        llm = make_llm(async_scheduling=ahead)
        if ahead and late:
            make_late(llm)
        script_tokens(llm, range(3, 60))
        rng, history = random.Random(4), []
        ids: list[str] = []
        for _ in range(40):
            if rng.random() < 0.4:
                ids.append(llm.add_request(random_ids(rng.randrange(1, 12), len(ids)), greedy(rng.randrange(1, 9))))
            if ids and rng.random() < 0.3:
                history.append(("abort", llm.abort_request(rng.choice(ids))))
            history += [(output.request_id, visible(output)) for output in llm.step()]
        while llm.has_unfinished_requests():
            history += [(output.request_id, visible(output)) for output in llm.step()]
        assert_idle(llm)
        histories.append(history)
    plain, overlapped = histories
    assert ("abort", True) in plain and ("abort", False) in plain
    assert sorted(map(str, plain)) == sorted(map(str, overlapped))


def test_weights_cache_and_close_wait_for_nothing_in_flight(make_llm: MakeLLM, model_dir: Any) -> None:
    llm = make_llm(async_scheduling=True)
    make_late(llm)
    request_id = llm.add_request(random_ids(9), greedy(9))
    llm.step()
    assert llm.engine._in_flight is not None
    assert llm.abort_request(request_id) and llm.engine._in_flight is not None, "the device still runs it"
    assert llm.reset_prefix_cache()
    other = llm.add_request(random_ids(9, 1), greedy(9))
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert [output.request_id for output in outputs] == [other] and llm.engine._in_flight is None
    expected = make_llm(async_scheduling=False).generate([random_ids(9, 1)], greedy(9), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    llm.add_request(random_ids(9), greedy(9))
    llm.step()
    llm.close()


@pytest.mark.parametrize("place", ["launch", "wait"])
def test_a_step_that_fails_takes_the_one_behind_it_along(place: str, make_llm: MakeLLM) -> None:
    llm = make_llm(async_scheduling=True, max_num_batched_tokens=8)
    runner = llm.engine.runner
    launch = runner.launch
    device = LateDevice(lambda batch: lambda: launch(batch).wait())
    runner.launch = device.launch  # type: ignore[assignment, method-assign]
    prompts = [random_ids(21, seed) for seed in range(3)]
    for prompt in prompts:
        llm.add_request(prompt, greedy(9))
    llm.step()
    device.fail = place
    with pytest.raises(RuntimeError, match=f"failed at {place}"):
        llm.step()
    assert_idle(llm)
    assert len(list(llm.engine.manager.pool.prefixes())) == 2, "of the first chunk, which had been settled"
    runner.launch = launch  # type: ignore[method-assign]
    again = llm.generate(prompts, greedy(9), use_tqdm=False)
    expected = make_llm(async_scheduling=False).generate(prompts, greedy(9), use_tqdm=False)
    assert [visible(output) for output in again] == [visible(output) for output in expected]


def test_overlap_is_for_cuda_and_not_for_traces(make_llm: MakeLLM, tmp_path: Any) -> None:
    assert not make_llm().engine.overlap and make_llm(async_scheduling=True).engine.overlap
    assert not make_llm(async_scheduling=True, trace=str(tmp_path / "trace.jsonl")).engine.overlap
    with pytest.raises(ValueError, match="async_scheduling must be True or False or None, not 1"):
        make_llm(async_scheduling=1)


@pytest.mark.parametrize("late", [False, True])
def test_who_has_no_id_left_ends_alone_as_in_the_plain_loop(late: bool, make_llm: MakeLLM) -> None:
    prompts, params = mixed_work()
    prompts = [[*prompts[0], 5], *prompts, prompts[1]]  # they share blocks with the others
    excluding = SamplingParams(allowed_token_ids=[96], bad_words="~~~", max_tokens=9, logprobs=1)
    params = [excluding, *params, replace(excluding, temperature=0)]
    plain, overlapped = (make_llm(async_scheduling=ahead, num_kv_blocks=40, max_num_seqs=8) for ahead in (False, True))
    if late:
        make_late(overlapped)
    expected = [visible(output) for output in plain.generate(prompts, params, use_tqdm=False)]
    assert [visible(output) for output in overlapped.generate(prompts, params, use_tqdm=False)] == expected
    assert [expected[i][2][0][5] for i in (0, -1)] == ["error"] * 2


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_surplus_row_behind_a_token_that_is_none_harms_nobody(block_size: int) -> None:
    engine = LateEngine(64, block_size)
    first, *others = prompts = random_prompts(5, 3, 9)
    ended, *going_on = engine.add(prompts, max_tokens=12)
    run = engine.model.run

    def run_without_an_id(batch: StepBatch) -> np.ndarray:
        token_ids = run(batch)
        position = len(first) + 3  # of the output's fourth token
        for i, (seq, row) in enumerate(zip(batch.sampled, batch.sample_rows, strict=True)):
            token_ids[i] = -1 if seq is ended and batch.positions[row] + 1 == position else token_ids[i]
        return token_ids

    engine.model.run = run_without_an_id  # type: ignore[method-assign]
    engine.run()
    assert ended.finish_reason == "error" and ended.output_token_ids == solo(first, 3)[0]
    assert outputs(going_on) == [solo(prompt, 12)[0] for prompt in others]
    assert engine.seen["a surplus row"] == 1 and engine.stats.generated_tokens == 3 + 12 + 12
    again = engine.add(prompts, max_tokens=12)
    engine.model.run = run  # type: ignore[method-assign]
    engine.run()
    assert outputs(again) == [solo(prompt, 12)[0] for prompt in prompts], "nothing wrong is cached"


def test_that_no_token_can_be_sampled_is_an_error_for_who_goes_on_and_nobody_else(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    llm = make_llm(async_scheduling=True)
    (eos,) = llm.engine.model_config.eos_token_ids
    script_tokens(llm, [5, 6, eos, -1])  # the last one is a surplus row's
    (output,) = llm.generate([random_ids(5)], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [5, 6, eos] and output.outputs[0].finish_reason == "stop"
    script_tokens(llm, [5, -1, 7, 8])
    with pytest.raises(RuntimeError, match="no token can be sampled"):  # and not what the step behind makes of it
        llm.generate([random_ids(5, 1)], params, use_tqdm=False)
    assert_idle(llm)
