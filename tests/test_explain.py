"""`explain` says what a request would find in the cache, and gives the true reason why it finds no more."""

from __future__ import annotations

import logging

import pytest
from conftest import MakeLLM
from llm_helpers import cached, greedy, run
from test_trace import pool_state
from tiny_models import random_ids

from nanoapc import SamplingParams

P = random_ids(14, seed=3)  # three blocks of four, and two tokens


def test_an_unknown_prompt(make_llm: MakeLLM) -> None:
    explanation = make_llm().explain(P)
    assert explanation.num_cached_tokens == 0 and explanation.num_prompt_tokens == 14
    assert explanation.reason == "no_such_block"


def test_a_known_prompt_stops_at_its_last_token(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [P])
    explanation = llm.explain(P)
    assert explanation.reason == "last_token"
    assert explanation.num_cached_tokens == 13
    assert explanation.shared_blocks == [0, 1, 2] and explanation.num_copied_tokens == 1
    assert "13 of 14" in str(explanation) and explanation.text in str(explanation)


def test_a_prompt_that_leaves_the_known_path(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [P])
    explanation = llm.explain([*P[:6], 9, 9, 9, 9, 9])
    assert explanation.reason == "no_such_block" and "position 6" in explanation.text
    assert (explanation.shared_blocks, explanation.num_copied_tokens) == ([0], 2)
    explanation = llm.explain([*P[:8], 9, 9, 9, 9, 9])
    assert explanation.reason == "no_such_block" and explanation.num_cached_tokens == 8


def test_a_rest_that_fills_no_block(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [P[:10]], max_tokens=1)
    explanation = llm.explain(P[:10])
    assert explanation.reason == "below_one_block" and explanation.num_cached_tokens == 8
    assert llm.explain(random_ids(3)).reason == "below_one_block"


def test_an_evicted_block_and_how_long_ago(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=12, max_model_len=48)
    run(llm, [P], max_tokens=1)
    # Ten blocks at once: nine free ones and P's last. An eleventh in the second of five steps: P's second.
    run(llm, [random_ids(40, 1)], max_tokens=5)
    explanation = llm.explain(P)
    assert explanation.reason == "evicted" and explanation.shared_blocks == [0]
    assert explanation.evicted_steps_ago == 4
    assert explanation.text == "block 1 of the prompt was cached, but evicted 4 steps ago"
    run(llm, [[7, 7]], max_tokens=1)
    explanation = llm.explain(P)
    assert explanation.text == "block 0 of the prompt was cached, but evicted 1 step ago"
    assert explanation.num_cached_tokens == cached(run(llm, [P], max_tokens=1))[0] == 0


def test_another_salt(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [{"prompt_token_ids": P, "cache_salt": "a"}])
    for explanation in (llm.explain(P), llm.explain(P, cache_salt="b")):
        assert explanation.reason == "other_salt" and explanation.num_cached_tokens == 0
        assert explanation.text.startswith("3 of its blocks")
    assert llm.explain(P, cache_salt="a").reason == "last_token"
    assert llm.explain({"prompt_token_ids": P, "cache_salt": "a"}).reason == "last_token"


def test_caching_off(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=False)
    run(llm, [P])
    explanation = llm.explain(P)
    assert explanation.reason == "caching_off" and explanation.num_cached_tokens == 0


def test_sampling_parameters_that_skip_the_cache(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [P])
    assert llm.explain(P, sampling_params=SamplingParams(prompt_logprobs=1)).reason == "prompt_logprobs"
    skipping = SamplingParams(skip_reading_prefix_cache=True)
    assert llm.explain(P, sampling_params=skipping).reason == "skip_reading_prefix_cache"


def test_after_a_reset_nothing_is_known(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [P])
    assert llm.reset_prefix_cache()
    assert llm.explain(P).reason == "no_such_block"


def test_texts_and_bad_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    text = "The quick brown fox jumps over the lazy dog."
    run(llm, [text])
    explanation = llm.explain(text)
    assert explanation.reason == "last_token" and explanation.num_cached_tokens == explanation.num_prompt_tokens - 1
    with pytest.raises(ValueError, match="cache_salt"):
        llm.explain(P, cache_salt="")
    with pytest.raises(ValueError, match="empty"):
        llm.explain([])


def test_it_tells_what_the_next_request_gets_and_changes_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=16, max_model_len=48)
    prompts = [random_ids(9 + i % 7, seed=i % 3) + random_ids(i % 5 + 1, seed=i) for i in range(24)]
    for prompt in prompts:
        before = pool_state(llm.engine.manager.pool), llm.metrics()
        explanation = llm.explain(prompt)
        assert (pool_state(llm.engine.manager.pool), llm.metrics()) == before
        assert explanation.num_cached_tokens == cached(run(llm, [prompt], max_tokens=6))[0]
    # What the last step has filled can be copied from in the next.
    run(llm, [P], max_tokens=1)
    assert llm.explain([*P[:11], 7]).num_cached_tokens == cached(run(llm, [[*P[:11], 7]]))[0] == 11
    assert llm.metrics().hit_tokens > 0 and llm.metrics().evictions > 0


def test_the_debug_log_has_a_line_for_each_event(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nanoapc")
    llm = make_llm(num_kv_blocks=12, max_model_len=48, schedule_policy="fcfs")
    run(llm, [P], max_tokens=1)
    run(llm, [P, random_ids(40, 1)], max_tokens=5)
    lines = [record.getMessage() for record in caplog.records if record.name == "nanoapc.engine.events"]
    assert any("looked_up seq=1 tokens=14 cached=12 blocks=[0, 1, 2]" in line for line in lines)
    assert sum("taken seq=" in line for line in lines) >= 3
    assert sum(": evicted block=" in line for line in lines) == llm.metrics().evictions > 0
    assert all("\n" not in line for line in lines)


def test_the_environment_switches_the_log_on(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a script that has configured no logging
    package = logging.getLogger("nanoapc")
    level = package.level
    try:
        monkeypatch.setenv("NANOAPC_LOG", "debug")
        run(make_llm(), [[5, 6, 7]], max_tokens=2)
        assert "looked_up seq=0 tokens=3 cached=0" in capsys.readouterr().err
        monkeypatch.setenv("NANOAPC_LOG", "warning")
        run(make_llm(), [[5, 6, 7]], max_tokens=2)
        assert "looked_up" not in capsys.readouterr().err
        monkeypatch.setenv("NANOAPC_LOG", "loud")
        with pytest.raises(ValueError, match="NANOAPC_LOG='loud' in the environment; it must be one of debug, info"):
            make_llm()
    finally:
        package.setLevel(level)


def test_no_log_no_trace_no_events(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert llm.engine.events is None and llm.engine.scheduler.events is None
    assert llm.engine.manager.events is None and llm.engine.manager.pool.events is None
    run(llm, [P], greedy(2))
