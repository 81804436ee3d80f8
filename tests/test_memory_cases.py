"""Field cases of memory (ME-*): pools that are too small, preemption, token budgets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import MakeLLM
from llm_helpers import assert_idle, cached, greedy, observe, run, token_ids
from tiny_models import random_ids, tiny_tokenizer

from nanoapc import LLM, RequestOutput, SamplingParams
from nanoapc.config import EngineConfig
from nanoapc.engine import kv_memory
from nanoapc.engine.kv_memory import MemoryUse, _control_group_available, count_blocks


class TestCannotFit:
    """ME-01, ME-02, ME-03, ME-08: what does not fit is said at construction, with both numbers."""

    @pytest.mark.parametrize(("num_blocks", "max_len"), [(8, 64), (8, 33), (1, 5), (3, 31)])
    def test_a_pool_smaller_than_one_sequence_is_refused(
        self, num_blocks: int, max_len: int, make_llm: MakeLLM
    ) -> None:
        with pytest.raises(ValueError, match=f"max_model_len={max_len} needs {-(-max_len // 4)} KV blocks") as error:
            make_llm(num_kv_blocks=num_blocks, max_model_len=max_len)
        assert f"num_kv_blocks={num_blocks} gives {num_blocks} blocks = {4 * num_blocks} tokens" in str(error.value)
        assert f"lower max_model_len to at most {4 * num_blocks}" in str(error.value)

    @pytest.mark.parametrize("num_blocks", [10**14, 2**62])
    def test_more_blocks_than_there_is_memory_are_refused_at_once(self, num_blocks: int, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=f"{num_blocks} KV blocks of 4 tokens are .* lower num_kv_blocks"):
            make_llm(num_kv_blocks=num_blocks)

    @pytest.mark.parametrize(("num_blocks", "max_len"), [(8, 32), (2, 5), (3, 12)])
    def test_what_the_message_advises_works_to_the_last_slot(
        self, num_blocks: int, max_len: int, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        llm = make_llm(num_kv_blocks=num_blocks, max_model_len=max_len)
        log = observe(llm)
        prompts = [random_ids(2, 1), random_ids(max_len - 1), random_ids(2, 2)]
        outputs = run(llm, prompts, max_tokens=max_len)
        expected = token_ids(run(cache_off, prompts, max_tokens=max_len))
        assert token_ids(outputs) == [ids[: max_len - len(p)] for ids, p in zip(expected, prompts, strict=True)]
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
        assert max(max(step.num_blocks.values()) for step in log.steps) == -(-(max_len - 1) // 4)

    def test_a_long_default_needs_a_shorter_max_model_len(self, make_llm: MakeLLM) -> None:
        block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, KV heads, head_dim, tokens, bytes
        options = {"num_kv_blocks": None, "kv_cache_memory_bytes": 8 * block + block // 2}
        with pytest.raises(ValueError, match="max_model_len=512 needs 128 KV blocks of 4 tokens") as error:
            make_llm(max_model_len=None, **options)
        assert f"kv_cache_memory_bytes={8 * block + block // 2} gives 8 blocks = 32 tokens" in str(error.value)
        llm = make_llm(max_model_len=32, **options)
        assert len(llm.engine.manager.pool.blocks) == 8 and llm.engine.runner.kv_memory.nbytes == 8 * block
        assert len(run(llm, [random_ids(5)])[0].outputs[0].token_ids) == 6

    @pytest.mark.parametrize("size", [1, 2047])
    def test_memory_for_less_than_a_block_is_refused(self, size: int, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=rf"kv_cache_memory_bytes={size} gives 0 blocks = 0 tokens"):
            make_llm(num_kv_blocks=None, kv_cache_memory_bytes=size)

    @pytest.mark.parametrize("free", [-(10**9), 0, 100])
    def test_memory_that_others_hold_never_gives_a_negative_count(
        self, free: int, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_memory, "available_memory", lambda: free)
        with pytest.raises(ValueError, match=r"MiB of free memory gives 0 blocks = 0 tokens"):
            make_llm(num_kv_blocks=None)

    def test_on_cuda_the_cache_gets_what_others_weights_activations_and_graphs_leave(self) -> None:
        gib = 2**30
        use = MemoryUse(total=80 * gib, outside=5 * gib, peak=20 * gib, graphs=gib)
        assert use.left(0.9) == (72 - 5 - 20 - 1) * gib
        assert use.left(0.3) == -2 * gib
        model = SimpleNamespace(kv_bytes=2**20)
        arguments = {"block_size": 16, "gpu_memory_utilization": 0.9}
        config = EngineConfig.from_arguments("model", **arguments)
        assert count_blocks(config, model, 100, lambda: use) == 46 * 1024 // 16
        config = EngineConfig.from_arguments("model", **{**arguments, "gpu_memory_utilization": 0.3})
        with pytest.raises(ValueError, match="gives 0 blocks = 0 tokens") as error:
            count_blocks(config, model, 100, lambda: use)
        for number in ("=0.3", "81920 MiB", "5120 MiB", "20480 MiB", "1024 MiB", "100 needs 7 KV blocks", "112.0 MiB"):
            assert number in str(error.value)

    def test_the_default_is_a_share_of_what_is_available(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_memory, "available_memory", lambda: 10 * 2**20)
        llm = make_llm(num_kv_blocks=None, max_num_seqs=64)
        assert llm.engine.runner.kv_memory.nbytes == int(kv_memory.CPU_SHARE * 10 * 2**20) // 2048 * 2048
        small = make_llm(num_kv_blocks=None, max_num_seqs=2)  # no more than so many sequences can use
        assert len(small.engine.manager.pool.blocks) == 2 * (128 // 4 + 1)

    @pytest.mark.parametrize("version", [1, 2])
    def test_containers_leave_what_their_limit_does_and_what_only_caches_files(
        self, version: int, tmp_path: Path
    ) -> None:
        def group(path: str, limit: str, used: int) -> None:
            folder = mount / path
            folder.mkdir(parents=True, exist_ok=True)
            names = ("memory.max", "memory.current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
            for name, value in zip(names, (limit, used), strict=True):
                (folder / (name if version == 2 else f"memory.{name}")).write_text(f"{value}\n")
            prefix = "" if version == 2 else "total_"
            lines = ["anon 7", f"{prefix}active_file 20", f"{prefix}inactive_file 300", "file 9999", "active_file 0"]
            (folder / "memory.stat").write_text("\n".join(lines[: 5 if version == 1 else 4]))

        mount = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
        own = tmp_path / "proc/self/cgroup"
        own.parent.mkdir(parents=True)
        assert _control_group_available(tmp_path) == kv_memory.UNLIMITED  # no such file
        own.write_text("1:name=systemd:/elsewhere\n" + ("0::" if version == 2 else "4:memory:") + "/jobs/of:me\n")
        assert _control_group_available(tmp_path) == kv_memory.UNLIMITED
        no_limit = "max" if version == 2 else str(2**63 - 4096)
        group("jobs/of:me", no_limit, 500)
        assert _control_group_available(tmp_path) == kv_memory.UNLIMITED
        group("jobs", "2000", 1000)  # the limit of all jobs
        assert _control_group_available(tmp_path) == 2000 - 1000 + 320
        group("jobs/of:me", "900", 900)  # full, but mostly with what has been read
        assert _control_group_available(tmp_path) == 320
        own.write_text(("0::" if version == 2 else "4:memory:") + "/a/path/of/the/host\n")  # seen from a container
        group("", "5000", 4900)
        assert _control_group_available(tmp_path) == 420

    @pytest.mark.parametrize("argument", ["num_kv_blocks", "kv_cache_memory_bytes", "max_num_seqs", "max_model_len"])
    @pytest.mark.parametrize("value", [0, -3, 2.5, "8"])
    def test_sizes_are_positive_whole_numbers(self, argument: str, value: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=f"{argument} must be a positive whole number"):
            make_llm(**{argument: value})


class TestPreemption:
    """ME-04, ME-06, ME-07: preemption ends, and neither loses nor doubles anything."""

    def test_the_oldest_is_never_the_victim_and_work_ends(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        prompts = [random_ids(8, seed) for seed in range(8)]
        expected = token_ids(run(cache_off, prompts, max_tokens=24))
        llm = make_llm(num_kv_blocks=10, max_model_len=32)
        log = observe(llm)
        assert token_ids(run(llm, prompts, max_tokens=24)) == expected
        # A decode block that finds no room costs one preemption at most: it frees two or more.
        assert 0 < len(log.victims) <= 8 * 6
        for victim, running in log.victims:
            assert victim == running[-1] != running[0]
        # Whoever is oldest runs in every step, so there is progress: no more steps than one after another.
        assert len(log.steps) <= 8 * 24
        assert_idle(llm)

    @pytest.mark.parametrize("policy", ["prefix", "fcfs"])
    def test_ids_text_and_logprobs_survive_many_preemptions(
        self, policy: str, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        prompts = [random_ids(9, seed) for seed in range(12)]
        params = greedy(30, logprobs=1)
        expected = run(cache_off, prompts, params)
        llm = make_llm(block_size=1, num_kv_blocks=60, max_model_len=40, schedule_policy=policy)
        log = observe(llm)
        outputs = run(llm, prompts, params)
        counts = [log.preempted.count(index) for index in range(12)]
        assert sorted(counts)[1] >= 1 and max(counts) >= 3
        for output, wanted in zip(outputs, expected, strict=True):
            completion, reference = output.outputs[0], wanted.outputs[0]
            assert completion.token_ids == reference.token_ids and len(completion.token_ids) == 30
            text = tiny_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
            assert completion.text == reference.text == text
            assert completion.logprobs is not None and len(completion.logprobs) == 30
            assert completion.cumulative_logprob == pytest.approx(reference.cumulative_logprob, abs=1e-3)

    @pytest.mark.parametrize("caching", [True, False])
    def test_draws_penalties_and_stops_survive_preemption(self, caching: bool, make_llm: MakeLLM) -> None:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
            {"temperature": 0, "repetition_penalty": 1.4},
            {"seed": 3, "top_k": 30, "frequency_penalty": 0.5},
            {"seed": 4, "n": 2},
            {"seed": 5, "min_tokens": 12, "stop_token_ids": list(range(3, 200))},
            {"temperature": 0, "bad_words": ["a", "the"], "min_p": 0.1, "logit_bias": {40: 5.0}},
            {"seed": 7, "stop": ["zz", "e", "a"], "min_tokens": 18},
            {"temperature": 0, "prompt_logprobs": 1, "logprobs": 2},
        ]
        prompts = [random_ids(9, seed) for seed in range(len(kinds))]
        params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in kinds]
        whole = run(make_llm(num_kv_blocks=200), prompts, params)
        preempted = set()
        for order in (1, -1):  # the oldest is never preempted, so let each be a newer one
            llm = make_llm(num_kv_blocks=12, max_model_len=40, enable_prefix_caching=caching, schedule_policy="fcfs")
            log = observe(llm)
            small = run(llm, prompts[::order], params[::order])
            preempted |= {range(len(kinds))[::order][index] for index in log.preempted}
            for a, b in zip(whole[::order], small, strict=True):
                assert [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in a.outputs] == [
                    (o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in b.outputs
                ]
                assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
                assert len(a.prompt_logprobs or ()) == len(b.prompt_logprobs or ())
        assert preempted == set(range(8))

    def test_the_prompt_ends_where_it_did_for_penalties(self, make_llm: MakeLLM) -> None:
        # Presence and frequency penalties see the output alone: were it taken for prompt after a
        # preemption, repeating would be free again.
        prompts = [random_ids(9, seed) for seed in range(6)]
        params = greedy(24, presence_penalty=2.0, frequency_penalty=2.0)
        expected = token_ids(run(make_llm(), prompts, params))
        llm = make_llm(num_kv_blocks=10, max_model_len=40)
        log = observe(llm)
        assert token_ids(run(llm, prompts, params)) == expected != token_ids(run(make_llm(), prompts, greedy(24)))
        assert len(log.victims) >= 4

    def test_a_shared_prefix_outlives_the_preempted_that_used_it(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        stem = random_ids(16, 77)
        prompts = [stem + random_ids(3, seed) for seed in range(8)]
        expected = token_ids(run(cache_off, prompts, max_tokens=20))
        llm = make_llm(num_kv_blocks=16, max_model_len=48)
        log = observe(llm)
        outputs = run(llm, prompts, max_tokens=20)
        assert token_ids(outputs) == expected and log.victims
        assert min(sorted(cached(outputs))[1:]) >= 16
        # No preempted sequence computed the stem again.
        starts = [step.positions[seq_id] for step in log.steps for seq_id in step.positions]
        assert starts.count(0) == 1


class TestTokenBudget:
    """ME-10."""

    @pytest.mark.parametrize("budget", [16, 5, 1])
    def test_prompts_longer_than_the_budget_run_in_chunks(self, budget: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_batched_tokens=budget, max_model_len=64)
        log = observe(llm)
        prompts = [random_ids(8), random_ids(40, 1), random_ids(8, 2)]
        assert token_ids(run(llm, prompts)) == token_ids(run(cache_off, prompts))
        assert max(step.num_tokens for step in log.steps) == budget  # the log checks that none exceeds it
        assert sum(step.num_tokens for step in log.steps) == 8 + 40 + 8 + 3 * 5

    def test_prefill_chunks_run_beside_decodes(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_batched_tokens=8, schedule_policy="fcfs")
        log = observe(llm)
        prompts = [random_ids(4), random_ids(40, 1)]
        assert token_ids(run(llm, prompts, max_tokens=20)) == token_ids(run(cache_off, prompts, max_tokens=20))
        mixed = [sorted(step.counts.values()) for step in log.steps if len(step.counts) == 2]
        assert [1, 7] in mixed

    def test_more_sequences_than_the_budget_has_tokens(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_batched_tokens=4)
        log = observe(llm)
        prompts = [random_ids(3 + seed, seed) for seed in range(9)]
        assert token_ids(run(llm, prompts)) == token_ids(run(cache_off, prompts))
        assert max(len(step.counts) for step in log.steps) == 4

    def test_one_row_at_a_time(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_seqs=1)
        log = observe(llm)
        prompts = [random_ids(3 + seed, seed) for seed in range(4)]
        outputs: list[RequestOutput] = run(llm, prompts, SamplingParams(n=2, temperature=0, max_tokens=3))
        expected = token_ids(run(cache_off, prompts, SamplingParams(temperature=0, max_tokens=3)))
        assert [[o.token_ids for o in output.outputs] for output in outputs] == [[ids, ids] for ids in expected]
        assert max(len(step.counts) for step in log.steps) == 1
