"""Field cases of the prefix cache (PC-*): what people met in public engines, end to end through the LLM.

Every expected id comes from the same model without a cache (`cache_off`), and each test also asserts that the
situation really happened. Where sub-block hits find more than whole blocks would, the comment says so.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeLLM
from llm_helpers import B, assert_idle, cached, greedy, hf_greedy, observe, run, token_ids
from safetensors.torch import load_file
from test_models import edit_json
from tiny_models import make_tiny_model, random_ids
from transformers import PreTrainedModel

from nanoapc import LLM, RequestOutput, SamplingParams


class TestBlockEdges:
    """PC-01, PC-02, PC-27, PC-28."""

    @pytest.mark.parametrize("length", [4, 8, 12, 5, 7, 1])
    def test_a_prompt_found_whole_computes_one_token(self, length: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(length)
        longer = [*prompt, 7]
        expected, expected_longer = token_ids(run(cache_off, [prompt, longer]))
        first, second = run(llm, [prompt]), run(llm, [prompt])
        assert token_ids(first) == token_ids(second) == [expected]
        # Where the prompt ends inside a block, the generated block after it agrees with all of it.
        assert cached(first) == [0] and cached(second) == [length - 1]
        third = run(llm, [longer])
        assert token_ids(third) == [expected_longer]
        assert cached(third) == [length]

    @pytest.mark.parametrize("length", [4, 8, 12])
    def test_the_same_prompt_twice_in_one_call(self, length: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(length)
        log = observe(llm)
        outputs = run(llm, [prompt, prompt])
        assert token_ids(outputs) == 2 * token_ids(run(cache_off, [prompt]))
        assert cached(outputs) == [0, length - 1]
        assert sorted(log.steps[0].counts.values()) == [1, length]  # both ran in the first step

    @pytest.mark.parametrize("caching", [True, False])
    def test_blocks_held_are_those_that_the_written_tokens_need(
        self, caching: bool, make_llm: MakeLLM, hf_model: PreTrainedModel
    ) -> None:
        llm = make_llm(enable_prefix_caching=caching, num_kv_blocks=512, max_num_seqs=81)
        log = observe(llm)
        cases = [(random_ids(length, seed=length), count) for length in range(1, 10) for count in range(1, 10)]
        outputs = llm.generate([p for p, _ in cases], [greedy(count) for _, count in cases], use_tqdm=False)
        longest = {length: hf_greedy(hf_model, random_ids(length, seed=length), 9) for length in range(1, 10)}
        assert token_ids(outputs) == [longest[len(prompt)][:count] for prompt, count in cases]
        for step in log.steps:  # no block is reserved ahead
            for seq_id, num_blocks in step.num_blocks.items():
                assert num_blocks == -(-(step.positions[seq_id] + step.counts[seq_id]) // B)

    @pytest.mark.parametrize("block_size", [0, -1, 2.5, True, "4"])
    def test_impossible_block_sizes_are_refused(self, block_size: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=f"block_size must be a positive whole number, not {block_size!r}"):
            make_llm(block_size=block_size)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 4096])
    def test_any_positive_block_size_works(self, block_size: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(block_size=block_size), [random_ids(13), random_ids(13)[:9] + random_ids(5, 1)]
        log = observe(llm)
        expected = token_ids(run(cache_off, prompts))
        assert token_ids(run(llm, prompts)) == expected
        again = run(llm, prompts)
        assert token_ids(again) == expected
        assert len(log.steps) == 12
        assert cached(again) == ([12, 13] if block_size <= 16 else [0, 0])  # 16: found within a block

    def test_a_prompt_shorter_than_a_block_never_hits(self, make_llm: MakeLLM) -> None:
        llm = make_llm(block_size=16)
        for _ in range(20):
            assert cached(run(llm, [random_ids(5)], max_tokens=4)) == [0]
        assert llm.metrics().queried_tokens == 100

    def test_off_means_no_lookups_and_no_keys(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(enable_prefix_caching=False), random_ids(40)
        outputs = [*run(llm, [prompt, prompt]), *run(llm, [prompt])]
        assert cached(outputs) == [0, 0, 0]
        stats = llm.metrics()
        assert stats.queried_tokens == stats.hit_tokens == stats.cached_blocks == 0
        assert not llm.engine.manager.pool.index


class TestSameStep:
    """PC-05, PC-06: blocks that are not filled yet."""

    def test_one_step_shares_what_it_computes(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(12)
        log = observe(llm)  # checks that no K/V is read that has not been written
        prompts = [prompt] * 8 + [[*prompt, 9]] * 8
        expected = token_ids(run(cache_off, prompts))
        cold, warm = run(llm, prompts), run(llm, prompts)
        assert token_ids(cold) == token_ids(warm) == expected
        assert cached(cold) == [0] + [11] * 7 + [12] * 8
        assert cached(warm) == [11] * 8 + [12] * 8
        assert len(log.steps[0].counts) == 16 and log.steps[0].num_tokens == 12 + 7 + 8
        assert_idle(llm)

    @pytest.mark.parametrize("where", ["before", "after"])
    def test_blocks_of_a_failed_step_are_no_hits(self, where: str, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(12)
        observe(llm)
        runner = llm.engine.runner
        forward, calls = runner.model.forward, 0

        def fail_once(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                if where == "after":
                    forward(*arguments)
                raise MemoryError("out of memory in the forward pass")
            return forward(*arguments)

        runner.model.forward = fail_once  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="forward pass"):
            run(llm, [prompt, [*prompt, 9], random_ids(30, 1)])
        assert_idle(llm)
        first = run(llm, [prompt])
        assert cached(first) == [0]
        assert token_ids(first) == token_ids(run(cache_off, [prompt]))
        second = run(llm, [[*prompt, 9]])
        assert cached(second) == [12]
        assert token_ids(second) == token_ids(run(cache_off, [[*prompt, 9]]))

    def test_a_failure_in_a_later_chunk_keeps_what_the_earlier_ones_filled(
        self, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        llm, prompt = make_llm(max_num_batched_tokens=8), random_ids(30)
        observe(llm)
        model, calls = llm.engine.runner.model, 0
        forward = model.forward

        def fail_third(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("third chunk")
            return forward(*arguments)

        model.forward = fail_third  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            run(llm, [prompt])
        assert_idle(llm)
        again = run(llm, [prompt])
        assert cached(again) == [16]
        assert token_ids(again) == token_ids(run(cache_off, [prompt]))

    def test_a_request_aborted_before_its_prefill_leaves_nothing(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(12)
        observe(llm)
        assert llm.abort_request(llm.add_request(prompt, greedy()))
        assert_idle(llm)
        outputs = [*run(llm, [prompt]), *run(llm, [[*prompt, 9]])]
        assert cached(outputs) == [0, 12]
        assert token_ids(outputs) == token_ids(run(cache_off, [prompt, [*prompt, 9]]))


class TestPreemption:
    """PC-04: preempted sequences meet their own blocks again."""

    def test_a_pool_that_is_too_small_changes_no_ids(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        prompts = [random_ids(9, seed) for seed in range(12)]
        expected = token_ids(run(cache_off, prompts, max_tokens=30))
        for policy in ("prefix", "fcfs"):
            llm = make_llm(num_kv_blocks=24, max_model_len=64, schedule_policy=policy)
            log = observe(llm)
            outputs = run(llm, prompts, max_tokens=30)
            assert token_ids(outputs) == expected
            assert len(log.victims) >= 5 and llm.metrics().num_preemptions == len(log.victims)
            assert cached(outputs) == [0] * 12  # what it found of its own after a preemption is no prompt hit
            assert llm.engine.manager.num_free_blocks == 24

    def test_what_a_preempted_sequence_lost_is_counted_apart(self, make_llm: MakeLLM) -> None:
        llm = make_llm(num_kv_blocks=24, max_model_len=64)
        log = observe(llm)
        prompts = [random_ids(9, seed) for seed in range(12)]
        run(llm, prompts, max_tokens=30)
        stats = llm.metrics()
        assert stats.queried_tokens == 12 * 9 and stats.hit_tokens == 0
        assert stats.computed_tokens == sum(step.num_tokens for step in log.steps)
        # Each of 12 sequences computes 9 + 29 tokens once; all else is recomputed. A sequence that
        # finds everything up to its last token computes that one token, which it had not computed before.
        assert stats.computed_tokens - stats.recomputed_tokens == 12 * (9 + 29)
        assert stats.recomputed_tokens > 0


class TestPromptLogprobs:
    """PC-07, PC-08: scoring a prompt that is cached."""

    @staticmethod
    def values(output: RequestOutput) -> list[dict[int, float]]:
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(output.prompt_token_ids) and entries[0] is None
        return [{i: logprob.logprob for i, logprob in entry.items()} for entry in entries[1:] if entry is not None]

    def test_warm_scores_equal_cold_ones_in_any_order(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        prompt = random_ids(13)
        other = prompt[:8] + random_ids(6, 1)
        scoring = greedy(4, prompt_logprobs=1)
        expected = {i: self.values(run(cache_off, [p], scoring)[0]) for i, p in enumerate((prompt, other))}
        for order in ((0, 1), (1, 0)):
            for chunk in (None, 5):
                llm = make_llm(max_num_batched_tokens=chunk, schedule_policy="fcfs")
                run(llm, [prompt])
                assert cached(run(llm, [prompt])) == [12]  # it is in the cache
                outputs = run(llm, [(prompt, other)[i] for i in order], scoring)
                assert cached(outputs) == [0, 0]
                for i, output in zip(order, outputs, strict=True):
                    for found, wanted in zip(self.values(output), expected[i], strict=True):
                        assert found == pytest.approx(wanted, abs=1e-5)

    def test_more_entries_than_a_run_before_asked_for(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(13)
        first = run(llm, [prompt], greedy(prompt_logprobs=1))
        before = llm.metrics()
        assert before.queried_tokens == before.hit_tokens == 0  # it did not look, so it counts neither way
        second = run(llm, [prompt], greedy(prompt_logprobs=5))
        assert cached([*first, *second]) == [0, 0]
        wanted = self.values(run(cache_off, [prompt], greedy(prompt_logprobs=5))[0])
        for entry, expected in zip(self.values(second[0]), wanted, strict=True):
            assert len(entry) in (5, 6) and entry == pytest.approx(expected, abs=1e-5)
        third = run(llm, [prompt])
        assert cached(third) == [12]
        after = llm.metrics()
        assert (after.queried_tokens, after.hit_tokens) == (13, 12)

    def test_a_request_may_skip_reading_and_still_fills_the_cache(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(), random_ids(13)
        skipping = greedy(skip_reading_prefix_cache=True)
        assert cached(run(llm, [prompt, prompt], skipping)) == [0, 0]
        assert llm.metrics().queried_tokens == 0
        assert cached(run(llm, [prompt])) == [12]


class TestOnEqualsOff:
    """PC-09: caching on and off, cold and warm, give the same tokens."""

    @staticmethod
    def prompts() -> list[list[int]]:
        shared = random_ids(300, 99)
        return [random_ids(384, i) for i in range(6)] + [shared + random_ids(20 + i, i) for i in range(6)]

    @pytest.fixture(scope="class")
    def long_model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("long")
        make_tiny_model(directory, "llama", num_key_value_heads=2, head_dim=8, tokenizer=False)
        return directory

    def runs(self, directory: Path, dtype: str, make_llm: MakeLLM) -> tuple[list[RequestOutput], ...]:
        options = {"dtype": dtype, "num_kv_blocks": 800, "block_size": 16, "max_model_len": 512}
        options["skip_tokenizer_init"] = True
        params = greedy(24, logprobs=2)
        off = run(make_llm(directory, enable_prefix_caching=False, **options), self.prompts(), params)
        llm = make_llm(directory, **options)
        cold, warm, again = (run(llm, self.prompts(), params) for _ in range(3))
        assert cached(off) == [0] * 12
        assert cached(cold)[:6] == [0] * 6 and sum(cached(cold)[6:]) >= 5 * 288
        assert cached(warm) == cached(again) == [len(prompt) - 1 for prompt in self.prompts()]
        return off, cold, warm, again

    def test_float32_ids_are_identical(self, long_model: Path, make_llm: MakeLLM) -> None:
        off, *others = self.runs(long_model, "float32", make_llm)
        for outputs in others:
            assert token_ids(outputs) == token_ids(off)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_with_the_cpu_kernels_it_is_bit_for_bit(self, dtype: str, long_model: Path, make_llm: MakeLLM) -> None:
        off, *others = self.runs(long_model, dtype, make_llm)
        if make_llm(long_model, skip_tokenizer_init=True).engine.runner.kernels.name == "reference":
            pytest.skip("only the C++ kernels promise it, and they could not be compiled here")
        for outputs in others:
            assert [output.outputs[0].logprobs for output in outputs] == [output.outputs[0].logprobs for output in off]

    def test_bfloat16_ids_differ_only_from_near_ties_on(self, long_model: Path, make_llm: MakeLLM) -> None:
        off, cold, warm, again = self.runs(long_model, "bfloat16", make_llm)
        assert token_ids(warm) == token_ids(again)
        for outputs in (cold, warm):
            for a, b in zip(off, outputs, strict=True):
                pairs = zip(a.outputs[0].token_ids, b.outputs[0].token_ids, strict=True)
                at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
                if at is not None:
                    assert a.outputs[0].logprobs is not None
                    best, second, *_ = (entry.logprob for entry in a.outputs[0].logprobs[at].values())
                    assert best - second < 0.1, f"a difference at {at}, where the choice was clear"


class TestOtherContents:
    """PC-10, PC-11, PC-15, PC-16: what equal ids may stand for."""

    def test_lora_is_refused(self, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=r"LoRA adapters are not supported; merge it"):
            make_llm().generate([[5, 6]], lora_request=("adapter", 1), use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"enable_lora=True is not supported \(only None is\); merge the adapter"):
            make_llm(enable_lora=True)

    @pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds", "image", "mm_processor_kwargs"])
    def test_prompts_that_carry_other_content_are_refused(self, key: str, make_llm: MakeLLM) -> None:
        llm = make_llm()
        with pytest.raises(ValueError, match=f"prompt 1 has '{key}', which is not supported; known: cache_salt"):
            run(llm, [[5, 6], {"prompt_token_ids": [5, 6], key: torch.zeros(2)}])
        assert not llm.engine.manager.pool.index

    def test_images_in_messages_are_refused(self, make_llm: MakeLLM) -> None:
        parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
        with pytest.raises(ValueError, match="message 0 of conversation 0 has a content part of type 'image_url'"):
            make_llm().chat([{"role": "user", "content": parts}], use_tqdm=False)

    @pytest.mark.parametrize("window", [8, 4096])
    def test_sliding_windows_are_refused_at_load(self, window: int, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path, "mistral")
        edit_json(tmp_path / "config.json", sliding_window=window)
        with pytest.raises(ValueError, match=rf"sliding-window.*not supported \(sliding_window: {window}\)"):
            make_llm(tmp_path)

    def test_mistral_without_a_window_hits_like_the_others(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        model = make_tiny_model(tmp_path, "mistral")
        llm, prompts = make_llm(tmp_path), [random_ids(n, n) for n in (7, 8, 9, 20, 24)]
        expected = [hf_greedy(model, prompt, 6) for prompt in prompts]
        assert token_ids(run(llm, prompts)) == expected
        again = run(llm, prompts)
        assert token_ids(again) == expected and cached(again) == [6, 7, 8, 19, 23]

    def test_new_weights_forget_the_old_ones_prefixes(self, model_dir: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
        new = make_tiny_model(tmp_path, seed=1)
        llm, prompt = make_llm(), random_ids(13)
        old_ids = token_ids(run(llm, [prompt]))
        assert cached(run(llm, [prompt])) == [12]
        llm.load_weights(load_file(tmp_path / "model.safetensors").items())
        outputs = run(llm, [prompt])
        assert cached(outputs) == [0]
        assert token_ids(outputs) == [hf_greedy(new, prompt, 6)] != old_ids
        llm.load_weights(load_file(model_dir / "model.safetensors").items())
        assert token_ids(run(llm, [prompt])) == old_ids

    def test_weights_that_are_replaced_in_part_run_nothing_until_they_are_whole(
        self, tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        new, file, prompt = make_tiny_model(tmp_path, seed=1), tmp_path / "x.prefixes", random_ids(13)
        weights = load_file(tmp_path / "model.safetensors")
        llm, name = make_llm(prefix_cache_file=file), "model.layers.1.mlp.down_proj.weight"
        old_ids = token_ids(run(llm, [prompt]))
        with pytest.raises(ValueError, match="missing"):
            llm.load_weights([])
        assert cached(run(llm, [prompt])) == [12]  # nothing has changed

        interrupted = {**weights, name: weights[name].as_subclass(Interrupting)}
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                llm.load_weights(interrupted.items())
            assert llm.metrics().cached_blocks == 0
            with pytest.raises(RuntimeError, match="call load_weights again"):
                llm.add_request(prompt)  # it would be in the way of load_weights
            with pytest.raises(RuntimeError, match=r"were replaced only in part.*; call load_weights again"):
                run(llm, [prompt])
            assert_idle(llm)
        assert llm.save_prefix_cache() == 0 and not file.exists()
        closed = make_llm(prefix_cache_file=file)
        run(closed, [prompt])
        with pytest.raises(KeyboardInterrupt):
            closed.load_weights(interrupted.items())
        closed.close()
        assert not file.exists()

        llm.load_weights(weights.items())
        assert token_ids(run(llm, [prompt])) == [hf_greedy(new, prompt, 6)] != old_ids
        llm.close()
        assert cached(run(make_llm(tmp_path, prefix_cache_file=file), [prompt])) == [12]  # they are the new ones

    @pytest.mark.parametrize("build_inside", [False, True])
    def test_inference_mode_of_the_caller_changes_nothing(
        self, build_inside: bool, model_dir: Path, tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        new, file, prompt = make_tiny_model(tmp_path, seed=1), tmp_path / "x.prefixes", random_ids(13)
        with make_llm(prefix_cache_file=file) as before:
            old_ids = token_ids(run(before, [prompt]))
        weights = [load_file(path / "model.safetensors") for path in (tmp_path, model_dir)]
        with torch.inference_mode(build_inside):
            llm = make_llm(prefix_cache_file=file)
        for inside in (not build_inside, build_inside):
            with torch.inference_mode(inside):
                assert cached(run(llm, [prompt])) == [12]
                llm.load_weights((name, tensor * 1) for name, tensor in weights[0].items())
                assert token_ids(run(llm, [prompt])) == [hf_greedy(new, prompt, 6)]
                llm.load_weights(weights[1].items())
                assert token_ids(run(llm, [prompt])) == old_ids
                run(llm, [random_ids(40, i) for i in range(3)])
                assert llm.save_prefix_cache() > 3
                kept = (llm.engine.runner.kv_memory, *llm.engine.runner.model.parameters())
                assert not any(tensor.is_inference() for tensor in kept)

    def test_weights_changed_behind_the_engine_need_a_reset(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(), random_ids(13)
        run(llm, [prompt])
        with torch.no_grad():
            llm.engine.runner.model.model.embed_tokens.weight.mul_(-1)
        stale = run(llm, [prompt])
        assert cached(stale) == [12]  # nobody told the engine
        assert llm.reset_prefix_cache()
        fresh = run(llm, [prompt])
        assert cached(fresh) == [0] and token_ids(fresh) != token_ids(stale)

    def test_weights_do_not_change_under_running_requests(self, model_dir: Path, make_llm: MakeLLM) -> None:
        llm = make_llm()
        request_id = llm.add_request(random_ids(13), greedy())
        llm.step()
        with pytest.raises(RuntimeError, match="weights cannot change while requests are unfinished"):
            llm.load_weights(load_file(model_dir / "model.safetensors").items())
        assert llm.abort_request(request_id)


class Interrupting(torch.Tensor):
    """Its content is read when somebody presses Ctrl-C."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            raise KeyboardInterrupt
        return super().__torch_function__(function, types, args, kwargs or {})


class TestReset:
    """PC-12."""

    def test_a_reset_while_requests_run_changes_nothing(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(13)
        observe(llm)
        llm.add_request(prompt, greedy())
        llm.step()
        cached_blocks = llm.metrics().cached_blocks
        assert cached_blocks == 3 and llm.reset_prefix_cache() is False
        assert llm.metrics().cached_blocks == 3
        outputs: list[RequestOutput] = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert token_ids(outputs) == token_ids(run(cache_off, [prompt]))
        assert cached(run(llm, [prompt])) == [12]  # the cache is still valid

        free = llm.engine.manager.num_free_blocks
        assert llm.reset_prefix_cache() is True
        assert llm.engine.manager.num_free_blocks == free == 256
        assert llm.metrics().cached_blocks == llm.metrics().cached_prefixes == 0
        assert cached(run(llm, [prompt])) == [0]


class TestSalt:
    """PC-13, PC-14."""

    def test_only_the_same_salt_shares(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        # 13 ids = 3 blocks and the one token that is always computed, so no sub-block hit adds to these.
        llm, prompt = make_llm(), random_ids(13)
        salts = ["a", "a", "b", None, None]
        outputs = [run(llm, [{"prompt_token_ids": prompt, "cache_salt": salt}])[0] for salt in salts]
        assert cached(outputs) == [0, 12, 0, 0, 12]
        assert token_ids(outputs) == 5 * token_ids(run(cache_off, [prompt]))

    def test_salts_separate_sub_block_hits_too(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(), random_ids(8)
        for salt, expected in (("a", [0, 2]), ("b", [0, 2]), (None, [0, 2])):
            one, two = ({"prompt_token_ids": p, "cache_salt": salt} for p in (prompt, [*prompt[:2], 9, 9, 9]))
            assert cached([*run(llm, [one]), *run(llm, [two])]) == expected

    def test_salts_in_one_call_keep_apart(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(), random_ids(13)
        prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a", "b", "a")]
        outputs = run(llm, prompts)
        assert cached(outputs) == [0, 0, 12, 12, 12]

    def test_parts_of_a_key_cannot_run_into_each_other(self, make_llm: MakeLLM) -> None:
        # b"b" + the bytes of the first id of one prompt could complete the salt of the other.
        llm = make_llm()
        first_id = int.from_bytes(b"\0\0\0b", "big")
        salts = ["a", "ab", "a\0\0\0b", "aa", "salt", "5", "sa", 'a"', "ä"]
        prompts = [random_ids(12), [first_id, *random_ids(11)], [first_id, first_id, *random_ids(10)]]
        for prompt in prompts:
            for salt in salts:
                hits = cached(run(llm, [{"prompt_token_ids": prompt, "cache_salt": salt}]))
                assert hits == [1 if prompt is prompts[2] else 0]  # under its own salt: first_id, copied
        assert cached(run(llm, [{"prompt_token_ids": prompts[0], "cache_salt": "ab"}])) == [11]

    @pytest.mark.parametrize("salt", ["", 5, b"a", ["a"], True])
    def test_a_salt_is_a_text_that_is_not_empty(self, salt: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=r"prompt 1 has cache_salt .*non-empty text"):
            run(make_llm(), [[5], {"prompt_token_ids": [5], "cache_salt": salt}])

    def test_chat_takes_a_salt(self, make_llm: MakeLLM) -> None:
        llm, messages = make_llm(max_model_len=256), [{"role": "user", "content": "the quick brown fox"}]
        outputs = [llm.chat(messages, greedy(), use_tqdm=False, cache_salt=salt)[0] for salt in ("a", "b", "a")]
        assert [count > 0 for count in cached(outputs)] == [False, False, True]


class TestChunks:
    """PC-17: hits that end before, inside and after the current chunk."""

    def test_chunked_prefill_reuses_past_one_chunk(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(max_num_batched_tokens=8), random_ids(40)
        log = observe(llm)
        other = prompt[:18] + random_ids(15, 1)
        assert other[18] != prompt[18]
        expected, expected_other = token_ids(run(cache_off, [prompt, other]))
        first = run(llm, [prompt])
        assert [step.num_tokens for step in log.steps[:5]] == [8] * 5
        second, before = run(llm, [prompt]), len(log.steps)
        third = run(llm, [other])
        assert token_ids([*first, *second, *third]) == [expected, expected, expected_other]
        assert cached([*first, *second]) == [0, 39]
        assert cached(third) == [18]  # 16 in whole blocks; the other 2 are copied from the sibling
        assert [num_tokens for _, _, num_tokens in log.steps[before].copies] == [2]

        decoding = random_ids(5, 2)
        llm.add_request(decoding, greedy(20))
        llm.step()
        both = run(llm, [[*prompt, 9], [*other[:30], 9]])
        assert token_ids(both) == token_ids(run(cache_off, [[*prompt, 9], [*other[:30], 9]]))
        assert cached(both) == [40, 30]  # 28 in blocks, 2 copied
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert token_ids(outputs) == token_ids(run(cache_off, [decoding], max_tokens=20))

    @pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 64])
    def test_any_budget_gives_the_same_ids(self, budget: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_batched_tokens=budget)
        log = observe(llm)
        stem = random_ids(21, 50)
        prompts = [stem[: 3 * i] + random_ids(2 + i, i) for i in range(8)]
        expected = token_ids(run(cache_off, prompts))
        assert token_ids(run(llm, prompts)) == expected
        cold_steps = len(log.steps)
        again = run(llm, prompts)
        assert token_ids(again) == expected
        assert cached(again) == [len(prompt) - 1 for prompt in prompts]
        assert len(log.steps) - cold_steps <= cold_steps


class TestAccounting:
    """PC-20, PC-25: hits count once, and what admission counts on is really there."""

    def test_hits_are_counted_once_on_admission(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(num_kv_blocks=12, max_model_len=48)
        log = observe(llm)
        prefix, long = random_ids(8), random_ids(20, 1)
        run(llm, [prefix], max_tokens=1)
        before = llm.metrics()
        llm.add_request(long, greedy(8))  # 7 of the 12 blocks in the end
        llm.step()
        prompt = prefix + random_ids(24, 2)  # 8 blocks: the tail does not fit before the other ends
        llm.add_request(prompt, greedy(4))
        waited, outputs = 0, []
        while llm.has_unfinished_requests():
            outputs += llm.step()
            waited += bool(llm.engine.scheduler.waiting)
            if llm.engine.scheduler.waiting:
                assert llm.metrics().queried_tokens == before.queried_tokens + len(long)
        assert waited >= 5 and not log.victims
        after = llm.metrics()
        assert after.queried_tokens - before.queried_tokens == len(long) + len(prompt)
        assert after.hit_tokens - before.hit_tokens == 8
        assert sorted(cached(outputs)) == [0, 8]
        expected = token_ids(run(cache_off, [long], max_tokens=8)) + token_ids(run(cache_off, [prompt], max_tokens=4))
        assert sorted(token_ids(outputs)) == sorted(expected)

    @pytest.mark.parametrize("policy", ["prefix", "fcfs"])
    def test_idle_blocks_that_are_hit_are_no_longer_free(self, policy: str, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(num_kv_blocks=7, max_model_len=28, schedule_policy=policy)
        log = observe(llm)
        stem = random_ids(16)
        run(llm, [stem], max_tokens=1)
        assert llm.metrics().cached_blocks == 4 and llm.engine.manager.num_free_blocks == 7
        prompts = [stem + random_ids(9, 1), random_ids(9, 2)]  # 4 hits + 3 new, and 3 new: 10 > 7
        outputs = run(llm, prompts, max_tokens=3)
        assert token_ids(outputs) == token_ids(run(cache_off, prompts, max_tokens=3))
        assert cached(outputs)[0] == 16
        assert all(len(step.counts) == 1 for step in log.steps)  # one of them waited
        assert_idle(llm)


class TestCollisions:
    """PC-21: a key finds candidates, tokens and parents prove them."""

    @pytest.mark.parametrize("bits", [0, 4])
    def test_colliding_keys_never_answer_for_each_other(self, bits: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(num_kv_blocks=1024)
        hasher = llm.engine.manager.hasher
        # A constant, or 16 different keys, in place of the hash.
        hasher._digest = lambda data: bytes([hashlib.sha256(data).digest()[0] % 2**bits])
        observe(llm)
        prompts = [random_ids(12, seed) for seed in range(64)]
        prompts += [prompts[i][:4] + prompts[i + 1][4:] for i in range(8)]  # equal blocks after other parents
        expected = token_ids(run(cache_off, prompts))
        assert token_ids(run(llm, prompts)) == expected
        again = run(llm, prompts)
        assert token_ids(again) == expected and cached(again) == [11] * len(prompts)
        assert len(llm.engine.manager.pool.index) <= 2**bits < llm.metrics().cached_prefixes


class TestLeaks:
    """PC-22: no block is lost, however requests end."""

    def test_after_two_thousand_requests_every_block_is_free(self, make_llm: MakeLLM) -> None:
        llm = make_llm(num_kv_blocks=64, max_model_len=40, max_num_batched_tokens=64, skip_tokenizer_init=True)
        pool, aborted, preempted, evicted = llm.engine.manager.pool, 0, 0, 0
        for call in range(20):
            prompts = [random_ids(1 + (7 * i + call) % 23, seed=(i * i + call) % 60) for i in range(96)]
            prompts += prompts[:4]  # duplicates
            ends = [{"max_tokens": 1 + i % 9, "stop_token_ids": [i % 300]} for i in range(100)]
            params = [SamplingParams(temperature=1.0, seed=i, **end) for i, end in enumerate(ends)]
            with pytest.raises(ValueError, match="prompt 100 has 40 tokens"):
                run(llm, [*prompts, random_ids(40)], [*params, greedy()])
            if call % 2:
                ids = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
                for step in range(12):
                    llm.step()
                    aborted += llm.abort_request(ids[8 * step])
                    llm.engine.manager.pool.check_invariants([s.blocks for s in llm.engine.scheduler.running])
                while llm.has_unfinished_requests():
                    llm.step()
            else:
                outputs = run(llm, prompts, params)
                assert {o.outputs[0].finish_reason for o in outputs} == {"stop", "length"}
            assert_idle(llm)
            idle = sum(block.prefix is not None for block in pool.blocks)
            assert idle == llm.metrics().cached_blocks > 0
        stats = llm.metrics()
        preempted, evicted = int(stats.num_preemptions), int(stats.evictions)
        assert aborted > 10 and preempted > 10 and evicted > 1000 and stats.hit_tokens > 1000


class TestAnyEngine:
    """All of it at once: random prompts with common parts, random parameters, salts, pools, budgets and aborts."""

    @pytest.mark.parametrize("seed", range(12))
    def test_random_calls_equal_solo_runs_without_a_cache(self, seed: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        rng = random.Random(seed)
        llm = make_llm(
            block_size=rng.choice([1, 2, 3, 4, 8, 16]),
            num_kv_blocks=rng.choice([64, 80, 128]),
            max_model_len=64,
            max_num_batched_tokens=rng.choice([3, 8, 20, None]),
            max_num_seqs=rng.choice([1, 3, 8, 64]),
            schedule_policy=rng.choice(["prefix", "fcfs"]),
            prefix_caching_hash_algo=rng.choice(["xxhash", "sha256"]),
        )
        observe(llm)
        stems = [random_ids(rng.randrange(1, 30), 1000 + seed + i) for i in range(3)]
        for _ in range(3):
            prompts, params = [], []
            for _ in range(rng.randrange(1, 12)):
                stem = rng.choice(stems)
                ids = stem[: rng.randrange(len(stem) + 1)] + random_ids(rng.randrange(1, 9), rng.randrange(20))
                prompts.append({"prompt_token_ids": ids, "cache_salt": rng.choice([None, None, "a", "b"])})
                options: dict[str, Any] = {"seed": rng.randrange(50), "temperature": rng.choice([0, 0.8])}
                options |= rng.choice([{}, {"n": 2}, {"prompt_logprobs": 0}, {"frequency_penalty": 0.5}])
                params.append(SamplingParams(max_tokens=rng.randrange(1, 25), ignore_eos=True, **options))
            aborted = [llm.add_request(*pair) for pair in zip(prompts[:3], params[:3], strict=True)]
            for _ in range(rng.randrange(6)):
                llm.step()
            for request_id in aborted:
                llm.abort_request(request_id)
            if not llm.engine.scheduler.has_unfinished:
                llm.step()  # fetches what had finished before it could be aborted
            outputs = run(llm, prompts, params)
            for prompt, param, output in zip(prompts, params, outputs, strict=True):
                (alone,) = run(cache_off, [prompt], param)
                assert [o.token_ids for o in output.outputs] == [o.token_ids for o in alone.outputs]
