"""Field cases of sampling, stops and text (SA-*, ST-*, DT-*) end to end: in batches, over several requests.

The same cases on the sampler, the detokenizer and SamplingParams alone stand in their own tests.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeLLM
from llm_helpers import assert_idle, greedy, observe, run, script_tokens, token_ids
from safetensors.torch import load_file, save_file
from test_detokenizer import FAMILY, TEXTS, byte_fallback, byte_level
from test_models import edit_json
from tiny_models import hf_logits, make_tiny_model, random_ids, tiny_tokenizer
from tokenizers import Tokenizer, normalizers
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from nanoapc import LLM, SamplingParams
from nanoapc.batch_file import run_batch

PROMPT = random_ids(9)


def solo(llm: LLM, prompt: Any, params: SamplingParams) -> list[list[int]]:
    """The ids of a request that runs alone."""
    return [completion.token_ids for completion in run(llm, [prompt], params)[0].outputs]


class TestMixedBatches:
    """SA-01, SA-11: a row's tokens do not depend on its neighbours."""

    def test_greedy_and_random_rows_mix(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(), [random_ids(9, seed) for seed in range(4)]
        params = [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0, 0.7, 0, 1.3)]
        log = observe(llm)
        expected = [solo(cache_off, *pair)[0] for pair in zip(prompts, params, strict=True)]
        assert token_ids(run(llm, prompts, params)) == expected
        assert any(len(step.counts) == 4 for step in log.steps)
        # Without the greedy rows the others draw the same.
        assert token_ids(run(llm, prompts[1::2], params[1::2])) == expected[1::2]
        greedy_ids = token_ids(run(cache_off, prompts, max_tokens=8))
        assert expected[0::2] == greedy_ids[0::2] and expected[1] != greedy_ids[1] and expected[3] != greedy_ids[3]

    def test_any_order_of_any_parameters_gives_the_same(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        kinds: list[dict[str, Any]] = [
            {"repetition_penalty": 1.8, "temperature": 0, "max_tokens": 6},
            {"top_k": 1, "seed": 3, "max_tokens": 5},
            {"temperature": 0, "bad_words": ["a"], "logprobs": 1, "max_tokens": 7},
            {"seed": 4, "top_p": 0.5, "min_tokens": 3, "presence_penalty": 1.0, "max_tokens": 4},
        ]
        requests = [(random_ids(9, i), SamplingParams(ignore_eos=True, **kind)) for i, kind in enumerate(kinds)]
        expected = [solo(cache_off, *request)[0] for request in requests]
        for policy, order in itertools.product(("fcfs", "prefix"), itertools.permutations(range(4))):
            if policy == "prefix" and order[0]:
                continue
            llm = make_llm(schedule_policy=policy)
            outputs = run(llm, [requests[i][0] for i in order], [requests[i][1] for i in order])
            assert token_ids(outputs) == [expected[i] for i in order]

    def test_seeded_draws_do_not_depend_on_batch_size_budget_or_cache(self, make_llm: MakeLLM) -> None:
        prompts = [PROMPT[: 4 + i % 5] + random_ids(2, i) for i in range(10)]
        params = [SamplingParams(seed=i, temperature=0.9, max_tokens=10, ignore_eos=True) for i in range(10)]
        expected = token_ids(run(make_llm(), prompts, params))
        for options in (
            {"max_num_seqs": 1},
            {"max_num_batched_tokens": 5},
            {"enable_prefix_caching": False},
            {"num_kv_blocks": 12, "max_model_len": 32},
            {"seed": 99},
        ):
            llm = make_llm(**options)
            assert token_ids(run(llm, prompts, params)) == expected
            assert token_ids(run(llm, prompts, params)) == expected


class TestTemperature:
    """SA-02."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_tiny_temperatures_equal_greedy(self, dtype: str, make_llm: MakeLLM) -> None:
        llm = make_llm(dtype=dtype, enable_prefix_caching=False)
        expected = token_ids(run(llm, [PROMPT]))
        for temperature in (1e-4, 1e-5, 1e-6, 1e-12, 1e-30):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=6, ignore_eos=True)
            assert token_ids(run(llm, [PROMPT], params)) == expected

    @pytest.mark.parametrize("value", [-1, -1e-9, float("nan"), float("inf"), "0"])
    def test_impossible_temperatures_are_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"temperature=.*a finite number of at least 0"):
            SamplingParams(temperature=value)


class TestFilters:
    """SA-04, SA-06, SA-07."""

    @pytest.mark.parametrize("top_k", [-1, 0, 320, 330])
    def test_top_k_off_is_no_filter(self, top_k: int, make_llm: MakeLLM) -> None:
        params = [SamplingParams(temperature=2.0, seed=i, max_tokens=1) for i in range(200)]
        plain = token_ids(run(make_llm(max_num_seqs=200), [PROMPT] * 200, params))
        params = [SamplingParams(temperature=2.0, seed=i, max_tokens=1, top_k=top_k) for i in range(200)]
        ids = token_ids(run(make_llm(max_num_seqs=200), [PROMPT] * 200, params))
        assert ids == plain and len({tuple(x) for x in ids}) > 40

    @pytest.mark.parametrize("temperature", [0.01, 1.0, 50.0])
    @pytest.mark.parametrize("top_k", [1, 2])
    def test_small_top_k_with_top_p_always_keeps_one(self, top_k: int, temperature: float, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=50)
        best = list(run(llm, [PROMPT], greedy(1, logprobs=2))[0].outputs[0].logprobs[0])  # type: ignore[index]
        params = [
            SamplingParams(temperature=temperature, top_k=top_k, top_p=0.8, seed=i, max_tokens=1) for i in range(50)
        ]
        found = {ids[0] for ids in token_ids(run(llm, [PROMPT] * 50, params))}
        # At 50 the two are equally likely, so 0.8 needs both; renormalised, the best has more than 0.8 at 0.01.
        assert found == ({best[0]} if top_k == 1 or temperature < 1 else found) and found <= set(best)
        if top_k == 2 and temperature == 50:
            assert found == set(best)

    def test_min_p_1_leaves_the_best(self, make_llm: MakeLLM) -> None:
        params = SamplingParams(temperature=5.0, min_p=1.0, seed=3, max_tokens=6, ignore_eos=True)
        assert token_ids(run(make_llm(), [PROMPT], params)) == token_ids(run(make_llm(), [PROMPT]))


class TestSeveralOutputs:
    """SA-09."""

    def test_seeded_outputs_differ_and_repeat(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        log = observe(llm)
        params = SamplingParams(n=4, seed=5, max_tokens=32, ignore_eos=True)
        first = solo(llm, PROMPT, params)
        assert len({tuple(ids) for ids in first}) == 4 and [len(ids) for ids in first] == [32] * 4
        assert log.steps[0].num_tokens == 9 + 3  # the prompt is computed once: 8 shared ids, 1 each
        assert solo(llm, PROMPT, params) == first
        assert solo(llm, PROMPT, SamplingParams(seed=5, max_tokens=32, ignore_eos=True)) == first[:1]

    def test_greedy_outputs_are_equal(self, make_llm: MakeLLM) -> None:
        outputs = solo(make_llm(), PROMPT, greedy(32, n=4))
        assert outputs == [outputs[0]] * 4

    def test_a_request_ends_when_all_of_its_outputs_have(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=2)  # its four outputs do not even run together
        params = SamplingParams(n=4, seed=5, max_tokens=12, stop_token_ids=list(range(3, 90)))
        (output,) = run(llm, [PROMPT], params)
        assert len({len(completion.token_ids) for completion in output.outputs}) > 1
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert all(completion.finish_reason for completion in output.outputs)


class TestPenalties:
    """SA-10."""

    def test_repetition_penalty_counts_the_prompt_as_transformers_does(
        self, make_llm: MakeLLM, hf_model: PreTrainedModel
    ) -> None:
        red = tiny_tokenizer()("the fox")["input_ids"]
        for prompt in (red * 4, PROMPT):
            ids = list(prompt)
            processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
            for _ in range(16):
                scores = processors(torch.tensor([ids]), hf_logits(hf_model, ids)[-1:])
                ids.append(int(scores.argmax()))
            params = greedy(16, repetition_penalty=1.3)
            assert token_ids(run(make_llm(), [prompt], params)) == [ids[len(prompt) :]]
            assert token_ids(run(make_llm(), [prompt], max_tokens=16)) != [ids[len(prompt) :]]  # it has an effect

    def test_presence_and_frequency_penalty_do_not_count_the_prompt(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        (best,) = token_ids(run(llm, [PROMPT], max_tokens=1))[0]
        # A prompt that already holds the id that will be best: only the output counts.
        prompt = [best, *PROMPT]
        (best_after,) = token_ids(run(llm, [prompt], max_tokens=1))[0]
        prompt = [best_after, *prompt[1:]]
        for name in ("presence_penalty", "frequency_penalty"):
            penalised = token_ids(run(llm, [prompt], greedy(1, **{name: 2.0})))
            assert penalised == token_ids(run(llm, [prompt], max_tokens=1))
        assert token_ids(run(llm, [PROMPT], greedy(12, presence_penalty=2.0))) != token_ids(
            run(llm, [PROMPT], max_tokens=12)
        )


class TestIdsOfParameters:
    """SA-12, SA-13, SA-14: bad ids and words are that request's error, and never another's tokens."""

    @pytest.mark.parametrize("bias", [{320: 5}, {-1: 5}, {12: float("nan")}, {"x": 1}, {12: float("inf")}])
    def test_a_bad_bias_is_refused_and_harms_nobody(self, bias: Any, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm()
        with pytest.raises(ValueError, match="logit_bias"):
            run(llm, [PROMPT, PROMPT], [greedy(), greedy(logit_bias=bias)])
        assert_idle(llm)
        assert token_ids(run(llm, [PROMPT])) == token_ids(run(cache_off, [PROMPT]))

    @pytest.mark.parametrize("key", [-1, 320, "x", 12])
    def test_a_bias_that_is_changed_in_place_is_checked_like_a_new_one(self, key: Any, make_llm: MakeLLM) -> None:
        llm, params = make_llm(), greedy(logit_bias={3: 1.0})
        params.logit_bias[key] = float("nan") if key == 12 else 5.0  # type: ignore[index]
        with pytest.raises(ValueError, match=r"sampling_params of prompt 1: logit_bias"):
            run(llm, [PROMPT, PROMPT], [greedy(), params])
        assert_idle(llm)

    @pytest.mark.parametrize("penalty", [1e-6, 1e30])
    @pytest.mark.parametrize("bias", [-1e30, 1e30])
    def test_the_largest_and_smallest_numbers_together_stay_finite(
        self, bias: float, penalty: float, make_llm: MakeLLM
    ) -> None:
        params = {"logit_bias": {7: bias}, "repetition_penalty": penalty, "frequency_penalty": -2}
        for temperature in (0, 1e-5, 1e30):
            (output,) = run(make_llm(), [[7, 8]], temperature=temperature, seed=1, **params)
            assert output.outputs[0].finish_reason == "length"

    def test_biases_act_on_their_own_request(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        biases: list[Any] = [{"12": 100}, None, {12: -100, 40: 100.0}, {}]
        outputs = token_ids(run(make_llm(), [PROMPT] * 4, [greedy(logit_bias=bias) for bias in biases]))
        plain = token_ids(run(cache_off, [PROMPT]))[0]
        assert outputs == [[12] * 6, plain, [40] * 6, plain]

    def test_a_stop_id_outside_the_vocabulary_is_refused(self, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match="sampling_params of prompt 1: stop_token_ids=325"):
            run(make_llm(), [PROMPT, PROMPT], [greedy(), greedy(min_tokens=4, stop_token_ids=[325])])

    def test_an_end_id_outside_the_vocabulary_changes_no_neighbour(
        self, tmp_path: Path, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        # A generation_config from another model: 325 would be column 5 of the next row.
        make_tiny_model(tmp_path, eos_token_id=[2, 325, 5000])
        llm, prompts = make_llm(tmp_path), [random_ids(9, seed) for seed in range(4)]
        params = [SamplingParams(temperature=0, min_tokens=6, max_tokens=6), greedy()] * 2
        assert token_ids(run(llm, prompts, params)) == token_ids(run(cache_off, prompts, params))

    def test_neither_form_of_a_bad_word_appears(self, make_llm: MakeLLM) -> None:
        tokenizer = tiny_tokenizer()
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        word = next(w for w in ("token", "what", "every", "lazy", "quick") if len(encode(w)) != len(encode(" " + w)))
        forms = [encode(word), encode(" " + word)]
        for form in forms:
            llm = make_llm()
            # A bias that draws the form's ids, one after the other, makes the word appear ...
            pull = {token_id: 30.0 for ids in forms for token_id in ids}
            free = SamplingParams(n=20, seed=1, temperature=3.0, max_tokens=40, logit_bias=pull, ignore_eos=True)
            barred = SamplingParams(
                n=20, seed=1, temperature=3.0, max_tokens=40, logit_bias=pull, ignore_eos=True, bad_words=[word]
            )
            found = [contains(ids, form) for ids in solo(llm, PROMPT, free)]
            assert any(found)
            # ... and never where it is forbidden, though its first ids still do.
            outputs = solo(llm, PROMPT, barred)
            assert not any(contains(ids, form) for form in forms for ids in outputs)
            assert len(form) == 1 or any(contains(ids, form[:-1]) for ids in outputs)

    def test_a_bad_word_without_tokens_is_named_before_anything_runs(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
        backend.normalizer = normalizers.Replace("\u200b", "")
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(tmp_path)
        llm = make_llm(tokenizer=str(tmp_path))
        log = observe(llm)
        with pytest.raises(ValueError, match=r"sampling_params of prompt 1: bad_words='\\u200b'.*at least one token"):
            run(llm, [PROMPT, PROMPT], [greedy(), greedy(bad_words=["\u200b"])])
        outputs = []
        with pytest.raises(ValueError, match="sampling_params of prompt 2"):
            for output in llm.stream([PROMPT] * 4, [greedy(), greedy(), greedy(bad_words=["\u200b"]), greedy()]):
                outputs.append(output)
        assert len(outputs) == 2 and log.steps
        with pytest.raises(ValueError, match="bad_words="):
            greedy(bad_words=[""])

    def test_only_allowed_ids_are_emitted(self, make_llm: MakeLLM) -> None:
        params = SamplingParams(n=8, seed=1, temperature=5.0, max_tokens=20, allowed_token_ids=[7, 9, 300])
        assert {i for ids in solo(make_llm(), PROMPT, params) for i in ids} == {7, 9, 300}


class TestNoIdLeft:
    """A request whose own parameters exclude every id ends alone. Here ~ is the id 96, ^ is 64, and 2 ends a text."""

    @pytest.mark.parametrize(
        ("excluding", "names", "ids"),
        [
            ({"allowed_token_ids": [2], "min_tokens": 2, "ignore_eos": False}, "allowed_token_ids and min_tokens", []),
            ({"allowed_token_ids": [96], "bad_words": "~~~"}, "allowed_token_ids and bad_words", [96, 96]),
            (
                {"allowed_token_ids": [96, 2], "bad_words": "~~", "min_tokens": 3, "ignore_eos": False},
                "allowed_token_ids and bad_words and min_tokens",
                [96],
            ),
            ({"stop_token_ids": list(range(320)), "min_tokens": 1}, "min_tokens", []),
        ],
    )
    @pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1, "logprobs": 1, "stop": "x"}])
    def test_it_ends_with_what_it_has_and_says_why(
        self, changes: dict[str, Any], excluding: dict[str, Any], names: str, ids: list[int], make_llm: MakeLLM
    ) -> None:
        llm = make_llm()
        (output,) = run(llm, [PROMPT], greedy(9, **excluding, **changes))
        (completion,) = output.outputs
        assert output.finished and completion.token_ids == ids and completion.text == "~" * len(ids)
        assert completion.logprobs is None or len(completion.logprobs) == len(ids)
        assert completion.finish_reason == "error" and completion.stop_reason == output.error
        assert output.error == f"{names} leave no token id to choose for output token {len(ids) + 1}; loosen them"
        assert llm.metrics().generated_tokens == len(ids)

    def test_the_rest_of_the_batch_is_what_it_is_without(
        self, make_llm: MakeLLM, cache_off: LLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        llm, prompts = make_llm(), [PROMPT + random_ids(i, i) for i in range(6)]
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=8, logprobs=1) for i in range(6)]
        expected = run(cache_off, prompts, params)
        params[2] = params[3] = SamplingParams(allowed_token_ids=[96], bad_words="~~~", max_tokens=8, seed=1)
        outputs = run(llm, prompts, params)
        assert [output.error is None for output in outputs] == [True, True, False, False, True, True]
        for i in (0, 1, 4, 5):
            assert outputs[i].outputs == expected[i].outputs
        (warning,) = caplog.records
        assert warning.levelname == "WARNING"
        assert "2 of 6 prompts ended with an error: prompt 2: allowed_token_ids and bad" in warning.getMessage()
        assert "prompt 3: " in warning.getMessage()
        assert sum(output.error is not None for output in llm.stream(prompts, params)) == 2

    def test_its_text_is_that_of_all_its_ids(self, make_llm: MakeLLM) -> None:
        llm, tokenizer = make_llm(), tiny_tokenizer()
        part = next(i for i in range(3, 320) if tokenizer.decode([i]) == "\ufffd")  # of a character: held back so far
        script_tokens(llm, [96, part, -1])
        params = greedy(9, stop="x", stop_token_ids=list(range(320)), min_tokens=9)
        (completion,) = run(llm, [PROMPT], params)[0].outputs
        assert completion.finish_reason == "error" and completion.text == "~\ufffd"

    def test_only_those_of_n_outputs_end_so_that_have_none_left(self, make_llm: MakeLLM) -> None:
        params = SamplingParams(
            n=8, seed=1, temperature=9.0, max_tokens=4, allowed_token_ids=[96, 64], bad_words=["~~", "~^"]
        )
        (output,) = run(make_llm(), [PROMPT], params)
        for completion in output.outputs:  # ^ may be followed by both, ~ by nothing
            ids = completion.token_ids
            assert 96 not in ids[:-1] and (ids[-1] == 96 or len(ids) == 4)
            assert completion.finish_reason == ("error" if ids[-1] == 96 and len(ids) < 4 else "length")
        assert len({completion.finish_reason for completion in output.outputs}) == 2

    def test_what_can_be_known_is_an_error_before_anything_runs(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        log = observe(llm)
        for excluding in ({"bad_words": "~"}, {"stop_token_ids": [96], "min_tokens": 2}):
            with pytest.raises(ValueError, match=r"params of prompt 1: allowed_token_ids=\(96,\) is not possible"):
                run(llm, [PROMPT, PROMPT], [greedy(), greedy(allowed_token_ids=[96], **excluding)])
        assert not log.steps


def contains(ids: list[int], part: list[int]) -> bool:
    """Whether `part` stands in `ids`."""
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


class TestPaddedVocabulary:
    """SA-16: rows of the head that the tokenizer has no id for."""

    @pytest.fixture(scope="class")
    def padded(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("padded")
        make_tiny_model(directory, vocab_size=340, tie_word_embeddings=False)
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"][320:] = 50 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def test_such_ids_are_never_emitted(self, padded: Path, make_llm: MakeLLM) -> None:
        free = make_llm(padded, skip_tokenizer_init=True)
        assert max(i for ids in solo(free, PROMPT, greedy(30)) for i in ids) >= 320  # they would be, by far
        llm = make_llm(padded)
        for params in (
            greedy(30),
            SamplingParams(n=8, seed=1, temperature=10.0, max_tokens=30, ignore_eos=True),
            SamplingParams(n=8, seed=1, top_k=5, top_p=0.9, repetition_penalty=2.0, max_tokens=30, ignore_eos=True),
            greedy(30, logit_bias={5: 1.0}, min_tokens=9, logprobs=5),
        ):
            (output,) = run(llm, [PROMPT], params)
            for completion in output.outputs:
                assert max(completion.token_ids) < 320
                assert all(max(entry) < 320 for entry in completion.logprobs or [])

    def test_they_may_be_fed(self, padded: Path, make_llm: MakeLLM) -> None:
        llm = make_llm(padded)
        assert run(llm, [[5, 339]])[0].prompt_token_ids == [5, 339]
        with pytest.raises(ValueError, match=r"token id 340, outside the model's vocabulary 0\.\.339"):
            run(llm, [[5, 340]])
        with pytest.raises(ValueError, match="stop_token_ids=330"):
            run(llm, [[5]], greedy(stop_token_ids=[330]))


class TestLogprobs:
    """SA-17: log-probs are of the raw logits; k or k + 1 entries, always with the chosen id and its rank."""

    @pytest.mark.parametrize("k", [0, 1, 5])
    def test_entries(self, k: int, make_llm: MakeLLM) -> None:
        params = SamplingParams(n=4, seed=2, temperature=2.0, max_tokens=20, logprobs=k, ignore_eos=True, top_k=40)
        (output,) = run(make_llm(), [PROMPT], params)
        sizes = set()
        for completion in output.outputs:
            for token_id, entry in zip(completion.token_ids, completion.logprobs or [], strict=True):
                sizes.add(len(entry))
                rank = entry[token_id].rank
                assert rank is not None and (len(entry) == k + 1) == (rank > k)
                assert next(iter(entry)) == token_id
                assert sorted(e.rank or 0 for e in entry.values())[:k] == list(range(1, k + 1))
        assert sizes == ({1} if k == 0 else {k, k + 1})

    def test_neighbours_with_other_numbers_do_not_change_them(self, make_llm: MakeLLM) -> None:
        llm, numbers = make_llm(), [None, 0, 3, 1, None, 5]
        outputs = run(llm, [PROMPT] * 6, [greedy(logprobs=number) for number in numbers])
        for output, number in zip(outputs, numbers, strict=True):
            entries = output.outputs[0].logprobs
            assert (entries is None) == (number is None)
            assert number is None or {len(entry) for entry in entries or []} == {max(number, 1)}
            assert (output.outputs[0].cumulative_logprob is None) == (number is None)

    def test_they_are_taken_before_temperature_penalties_and_filters(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        raw = run(llm, [PROMPT], greedy(1, logprobs=5))[0].outputs[0].logprobs
        changed = SamplingParams(
            seed=1, temperature=7.0, max_tokens=1, logprobs=5, repetition_penalty=2.0, top_k=2, logit_bias={9: 9.0}
        )
        other = run(llm, [PROMPT], changed)[0].outputs[0].logprobs
        assert raw is not None and other is not None
        for token_id in list(raw[0])[:5]:
            assert other[0][token_id].logprob == pytest.approx(raw[0][token_id].logprob, abs=1e-5)

    @pytest.mark.parametrize("k", [-1, 321, 1.5])
    def test_impossible_numbers_are_refused(self, k: Any, make_llm: MakeLLM) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ValueError, match=f"{name}={k}"):
                run(make_llm(), [PROMPT], greedy(**{name: k}))


class TestNaN:
    """LO-09: logits that are no numbers are an error, not id 0."""

    @pytest.fixture(scope="class")
    def overflowing(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("overflowing")
        make_tiny_model(directory)
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1e5  # activations far above 65504
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    @pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_types_with_room_work(self, key: str, dtype: str, overflowing: Path, make_llm: MakeLLM) -> None:
        edit_json(overflowing / "config.json", remove=("dtype", "torch_dtype"), **{key: "float32"})
        llm = make_llm(overflowing, dtype=dtype)
        assert llm.engine.model_config.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert len(set(token_ids(run(llm, [PROMPT], max_tokens=12))[0])) > 2

    @pytest.mark.parametrize(
        "params",
        [greedy(), SamplingParams(seed=1), greedy(logprobs=1, presence_penalty=1.0), greedy(allowed_token_ids=[96])],
    )
    def test_float16_overflow_is_an_error(self, params: SamplingParams, overflowing: Path, make_llm: MakeLLM) -> None:
        llm = make_llm(overflowing, dtype="float16")
        with pytest.raises(
            RuntimeError,
            match=r"prompt 0: its logits are NaN or infinite: the dtype overflows; use dtype='bfloat16'",
        ):
            run(llm, [PROMPT], params)
        assert_idle(llm)

    @pytest.fixture
    def broken_token(self, tmp_path: Path) -> Path:
        """A model whose id 50 makes logits NaN."""
        make_tiny_model(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.embed_tokens.weight"][50] = float("nan")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].nan_to_num()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        edit_json(tmp_path / "config.json", tie_word_embeddings=False)
        return tmp_path

    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_prompt_with_such_logits_ends_alone_where_results_come_one_by_one(
        self, overlap: bool, broken_token: Path, make_llm: MakeLLM
    ) -> None:
        good, params = [random_ids(9, 1), random_ids(9, 2)], greedy(max_tokens=6, logprobs=1, ignore_eos=True)
        solo = make_llm(broken_token, enable_prefix_caching=False)
        expected = [token_ids(run(solo, [prompt], params))[0] for prompt in good]
        assert not any(50 in ids for ids in (*good, *expected))
        llm = make_llm(broken_token, async_scheduling=overlap)
        prompts = [good[0], [*good[0], 50, 51], good[1], [50]]
        for _ in range(2):  # cold, warm
            outputs = sorted(llm.stream(prompts, params), key=lambda output: output.index)
            assert [output.error is None for output in outputs] == [True, False, True, False]
            assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == expected
            for output in (outputs[1], outputs[3]):
                assert output.error.startswith("its logits are NaN or infinite: a weight of the checkpoint")
                assert output.outputs[0].token_ids == [] == output.outputs[0].logprobs
            with pytest.raises(RuntimeError, match=r"prompt [13]: its logits are NaN"):
                run(llm, prompts, params)
            assert_idle(llm)

    def test_a_line_with_such_logits_does_not_keep_a_batch_file_from_its_end(
        self, broken_token: Path, make_llm: MakeLLM
    ) -> None:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": ids, "max_tokens": 4}}
            for i, ids in enumerate([[40, 41], [50, 41], [42, 41]])
        ]
        source, target = broken_token / "in.jsonl", broken_token / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = run_batch(source, target, make_llm(broken_token), quiet=True)
        assert (summary.done, summary.failed) == (2, 1)
        errors = {line["custom_id"]: line["error"] for line in map(json.loads, target.read_text().splitlines())}
        assert errors["0"] is errors["2"] is None and "NaN or infinite" in errors["1"]["message"]

    def test_the_engine_goes_on_with_better_weights(
        self, overflowing: Path, model_dir: Path, make_llm: MakeLLM
    ) -> None:
        llm = make_llm(overflowing, dtype="float16")
        with pytest.raises(RuntimeError, match="NaN"):
            run(llm, [PROMPT])
        llm.load_weights(load_file(model_dir / "model.safetensors").items())
        assert token_ids(run(llm, [PROMPT])) == token_ids(run(make_llm(dtype="float16"), [PROMPT]))


class TestStops:
    """ST-01, ST-03: through generate, where tokens, stop ids, text and finish reason meet."""

    @staticmethod
    def pieces(*texts: str) -> list[int]:
        return [i for text in texts for i in tiny_tokenizer().encode(text, add_special_tokens=False)]

    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize(
        ("stops", "text", "hit"),
        [
            (["##END##"], "ab", "##END##"),
            (["D##c", "##END##"], "ab", "##END##"),
            (["zzz", "#c", "END#"], "ab##", "END#"),
            (["b", "ab"], "", "ab"),
            (["nothing"], "ab##END##cd", None),
        ],
    )
    def test_a_stop_string_over_and_inside_tokens(
        self, stops: list[str], text: str, hit: str | None, include: bool, make_llm: MakeLLM
    ) -> None:
        llm = make_llm()
        script = self.pieces("ab#", "#EN", "D##c", "d")
        script_tokens(llm, script)
        params = greedy(len(script), stop=stops, include_stop_str_in_output=include)
        for prompt in ("x", "ends in ##END", "##END##"):  # the prompt's own text does not count
            completion = run(llm, [prompt], params)[0].outputs[0]
            assert completion.text == text + (hit or "" if include else "")
            assert completion.stop_reason == hit and completion.finish_reason == ("stop" if hit else "length")
            assert tiny_tokenizer().decode(completion.token_ids).startswith(text)

    def test_rows_stop_each_by_their_own(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        script_tokens(llm, self.pieces("one two", " three", " four"))
        full = run(llm, ["x"], greedy(len(self.pieces("one two", " three", " four"))))[0].outputs[0]
        stop_id = full.token_ids[2]
        params = [
            greedy(len(full.token_ids), **kind)
            for kind in (
                {"stop": " three"},
                {"stop_token_ids": [stop_id]},
                {"stop": [" th"], "min_tokens": len(full.token_ids)},
                {"stop": ["one"], "include_stop_str_in_output": True},
                {},
            )
        ]
        outputs = [output.outputs[0] for output in run(llm, ["x"] * 5, params)]
        assert [o.text for o in outputs] == [
            "one two",
            tiny_tokenizer().decode(full.token_ids[:2]),
            full.text,
            "one",
            full.text,
        ]
        assert [o.stop_reason for o in outputs] == [" three", stop_id, None, "one", None]
        assert [o.finish_reason for o in outputs] == ["stop", "stop", "length", "stop", "length"]
        assert outputs[1].token_ids == full.token_ids[:3]

    @pytest.mark.parametrize("stop", ["", [""], ["", "x"], 5, [5], [None]])
    def test_empty_and_foreign_stops_are_refused(self, stop: Any) -> None:
        with pytest.raises(ValueError, match="stop="):
            SamplingParams(stop=stop)

    @pytest.mark.parametrize("stop", [None, [], ()])
    def test_no_stops_are_no_stops(self, stop: Any, make_llm: MakeLLM) -> None:
        assert len(token_ids(run(make_llm(), [PROMPT], greedy(9, stop=stop)))[0]) == 9


class TestText:
    """DT-01, DT-03: the text of whole outputs, one id a step."""

    @pytest.mark.parametrize("name", TEXTS)
    @pytest.mark.parametrize("kind", [byte_level, byte_fallback])
    def test_text_is_that_of_the_tokenizer(self, kind: Any, name: str, tmp_path: Path, make_llm: MakeLLM) -> None:
        tokenizer, text = kind(), TEXTS[name]
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        make_tiny_model(tmp_path, tokenizer=False, vocab_size=len(tokenizer), num_hidden_layers=1)
        llm = make_llm(tmp_path, tokenizer=str(tmp_path / "tokenizer"), max_model_len=256)
        for prompt in ("It ends.", "It begins "):
            prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
            script = tokenizer.encode(text, add_special_tokens=False)
            whole = tokenizer.decode(prompt_ids + script)
            script_tokens(llm, script)
            for stop in ([], ["@@never@@"]):  # at the end, and incrementally
                completion = run(llm, [prompt_ids], greedy(len(script), stop=stop))[0].outputs[0]
                assert "\ufffd" not in completion.text
                assert tokenizer.decode(prompt_ids) + completion.text == whole

    @pytest.mark.parametrize("kind", [byte_level, byte_fallback])
    def test_an_emoji_stops(self, kind: Any, tmp_path: Path, make_llm: MakeLLM) -> None:
        tokenizer = kind()
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        make_tiny_model(tmp_path, tokenizer=False, vocab_size=len(tokenizer), num_hidden_layers=1)
        llm = make_llm(tmp_path, tokenizer=str(tmp_path / "tokenizer"))
        script = tokenizer.encode(TEXTS["family"] + " more", add_special_tokens=False)
        script_tokens(llm, script)
        completion = run(llm, ["x"], greedy(len(script), stop=[FAMILY]))[0].outputs[0]
        assert completion.text.strip() == "a" and completion.stop_reason == FAMILY
        assert len(completion.token_ids) < len(script)

    def test_without_detokenize_there_is_no_text(self, make_llm: MakeLLM) -> None:
        completion = run(make_llm(), ["the fox"], greedy(detokenize=False))[0].outputs[0]
        assert completion.text == "" and len(completion.token_ids) == 6

    @pytest.mark.parametrize("skip", [True, False])
    def test_special_tokens_are_left_out_unless_asked_for(self, skip: bool, make_llm: MakeLLM) -> None:
        llm = make_llm()
        script_tokens(llm, [1, *TestStops.pieces("fox"), 2, 0])
        completion = run(llm, ["x"], greedy(3 + len(TestStops.pieces("fox")), skip_special_tokens=skip))[0].outputs[0]
        assert completion.text == ("fox" if skip else "<|im_start|>fox<|im_end|><|endoftext|>")
