"""Field cases of input (IN-*): lengths, empty prompts, bad ids, BOS, order.

What is refused is refused before anything runs, and leaves nothing behind.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeLLM
from llm_helpers import assert_idle, bos_tokenizer, greedy, hf_greedy, observe, run, token_ids
from tiny_models import make_tiny_model, random_ids, tiny_tokenizer

from nanoapc import LLM, EngineConfig, SamplingParams


class TestTooLong:
    """IN-01, IN-02, IN-03."""

    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("length", [64, 65, 5000])
    def test_one_prompt_over_the_limit_is_named_before_anything_runs(
        self, length: int, place: int, make_llm: MakeLLM
    ) -> None:
        llm = make_llm(max_model_len=64)
        log = observe(llm)
        prompts = [random_ids(5, 1), random_ids(6, 2)]
        prompts.insert(place, random_ids(length))
        with pytest.raises(ValueError, match=f"prompt {place} has {length} tokens") as error:
            run(llm, prompts)
        assert "max_model_len=64 allows 63; shorten it or raise max_model_len" in str(error.value)
        assert not log.steps
        assert_idle(llm)

    @pytest.mark.parametrize("scoring", [{}, {"prompt_logprobs": 1}])
    @pytest.mark.parametrize("max_tokens", [1, 4])
    def test_prompts_at_the_limit(self, max_tokens: int, scoring: dict[str, int], make_llm: MakeLLM) -> None:
        llm = make_llm(max_model_len=32)
        params = greedy(max_tokens, **scoring)
        for length, count in ((28, 4), (29, 3), (30, 2), (31, 1)):
            (output,) = run(llm, [random_ids(length)], params)
            assert len(output.outputs[0].token_ids) == min(count, max_tokens)
            assert output.outputs[0].finish_reason == "length"
            assert len(output.prompt_logprobs or []) == (length if scoring else 0)
        for length in (32, 33):  # no room for one token: refused on every path
            with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens"):
                run(llm, [random_ids(length)], params)
            with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens"):
                next(llm.stream([random_ids(length)], params))
            with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens"):
                llm.add_request(random_ids(length), params)

    def test_text_and_chat_over_the_limit_are_refused_alike(self, make_llm: MakeLLM) -> None:
        llm, text = make_llm(max_model_len=32), "the quick brown fox " * 9
        length = len(tiny_tokenizer()(text)["input_ids"])
        with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens"):
            run(llm, ["short", text])
        with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens"):
            llm.chat([[{"role": "u", "content": "a"}], [{"role": "user", "content": text}]], greedy(), use_tqdm=False)

    def test_after_an_error_the_engine_is_as_new(self, make_llm: MakeLLM) -> None:
        prompts = [random_ids(1 + i, i) for i in range(20)]
        params = [greedy(1 + i % 7) for i in range(20)]
        fresh = [token_ids(run(make_llm(max_model_len=32), [random_ids(5)])), None]
        fresh[1] = token_ids(run(make_llm(max_model_len=32), prompts, params))
        llm = make_llm(max_model_len=32)
        for bad in (random_ids(33), [], [999]):
            with pytest.raises(ValueError):
                run(llm, [random_ids(5), bad])
            assert_idle(llm)
            assert llm.metrics().cached_blocks == 0
        assert [token_ids(run(llm, [random_ids(5)])), token_ids(run(llm, prompts, params))] == fresh


class TestEmpty:
    """IN-04."""

    def test_no_prompts_give_no_outputs(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        assert run(llm, []) == llm.generate((), [], use_tqdm=False) == list(llm.stream(iter(()))) == []

    @pytest.mark.parametrize("empty", ["", [], np.array([], int), {"prompt": ""}, {"prompt_token_ids": []}])
    def test_a_prompt_without_tokens_is_named(self, empty: Any, make_llm: MakeLLM) -> None:
        llm = make_llm()
        with pytest.raises(ValueError, match=r"prompt 1 is empty \(no token ids\); give it at least one token"):
            run(llm, ["a", empty, "b"])
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            llm.add_request(empty)
        assert_idle(llm)
        assert len(run(llm, ["a", "b"])) == 2

    @pytest.mark.parametrize("text", [" ", "\n", "\t \r\n", "\u3000"])
    def test_whitespace_is_a_prompt(self, text: str, make_llm: MakeLLM) -> None:
        (output,) = run(make_llm(), [text])
        assert tiny_tokenizer().decode(output.prompt_token_ids) == text and len(output.outputs[0].token_ids) == 6

    def test_with_a_bos_the_empty_text_runs(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        llm = make_llm(tokenizer=str(bos_tokenizer(tmp_path)))
        outputs = run(llm, ["", "a"])
        assert outputs[0].prompt_token_ids == [0] and outputs[1].prompt_token_ids[0] == 0
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            run(llm, [[]])


class TestMaxTokens:
    """IN-05."""

    @pytest.mark.parametrize("value", [0, -1, 1.5, "5", True])
    def test_impossible_values_are_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match=f"max_tokens={value!r} is not possible; allowed: an integer, at least 1"):
            SamplingParams(max_tokens=value)

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
    def test_one_token_is_one_token(self, length: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompt = make_llm(), random_ids(length)
        for _ in range(2):
            (output,) = run(llm, [prompt], max_tokens=1)
            assert token_ids([output]) == token_ids(run(cache_off, [prompt], max_tokens=1))
            assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("value", [None, 10**9, 60])
    def test_more_than_fits_is_cut_to_what_fits(self, value: Any, make_llm: MakeLLM) -> None:
        (output,) = run(make_llm(max_model_len=64), [random_ids(9)], SamplingParams(max_tokens=value, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 64 - 9 and output.outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("value", [500, 2**63, 10**40])
    def test_min_tokens_does_not_outlast_the_room(self, value: int, make_llm: MakeLLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=None, min_tokens=value)
        (output,) = run(make_llm(max_model_len=32), [random_ids(9)], params)
        assert len(output.outputs[0].token_ids) == 23 and output.outputs[0].finish_reason == "length"


class TestTokenIds:
    """IN-07. The limit is the embedding's size: ids of a padded vocabulary may be fed, but are never emitted."""

    @pytest.mark.parametrize("bad", [320, -1, -320, 2**31, 2**63, 2**64, np.int64(320), np.uint64(2**63)])
    def test_ids_outside_the_vocabulary_are_named(self, bad: Any, make_llm: MakeLLM) -> None:
        llm = make_llm()
        with pytest.raises(
            ValueError, match=rf"prompt 1 has the token id {bad}, outside the model's vocabulary 0\.\.319"
        ):
            run(llm, [[5], [7, bad, 9], [400]])
        assert_idle(llm)

    @pytest.mark.parametrize("bad", [3.0, True, None, "5", np.float32(3), np.bool_(True), [5]])
    def test_what_is_no_whole_number_is_named(self, bad: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=f"prompt 1 has a token id .* of type {type(bad).__name__}"):
            run(make_llm(), [[5], [7, bad, 9]])
        with pytest.raises(ValueError, match=r"prompt 0 has a token id"):
            run(make_llm(), [[bad, 7]])

    def test_whole_numbers_of_numpy_are_accepted(self, make_llm: MakeLLM) -> None:
        llm, ids = make_llm(), [0, 5, 319]
        kinds = (np.int64, np.int32, np.uint8, np.uint16, np.uint64)
        prompts: list[Any] = [[kind(x % 256) for x in ids] for kind in kinds]
        assert len({tuple(ids) for ids in token_ids(run(llm, prompts))}) == 1
        assert run(llm, [[np.int64(319)]])[0].prompt_token_ids == [319]

    @pytest.mark.parametrize("container", [np.array([1.0, 2.0]), np.array([True, False]), np.array([[1, 2]])])
    def test_arrays_of_other_types_or_shapes_are_refused(self, container: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=r"prompt 1 has a token id .* of type (float|bool|list)"):
            run(make_llm(), [[5], container])

    @pytest.mark.parametrize(
        "text", [b"fox", bytearray(b"fox"), memoryview(b"fox"), memoryview(b"fox").cast("c"), array("B", b"fox")]
    )
    def test_bytes_are_no_token_ids(self, text: Any, make_llm: MakeLLM) -> None:
        llm = make_llm()
        for prompts in (text, [text], {"prompt_token_ids": text}):
            with pytest.raises(ValueError, match=r"prompt 0 (is|has 'prompt_token_ids') .* must be a"):
                run(llm, prompts)
            with pytest.raises(ValueError, match=r"prompt 0 (is|has 'prompt_token_ids') .* must be a"):
                next(llm.stream(prompts))
        with pytest.raises(ValueError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=text if not isinstance(text, array) else memoryview(text))
        wide = array("i", [5, 6])
        assert [output.prompt_token_ids for output in run(llm, [wide, memoryview(wide)])] == [[5, 6]] * 2


class TestTables:
    """What iterates over the names of its columns (a DataFrame) is no list of prompts; over its rows, it is."""

    class Table:
        def __init__(self, rows: list[dict[str, str]]):
            self.rows = rows

        def __iter__(self) -> Iterator[Any]:
            return iter(self.rows)

    class DataFrame(Table):
        @property
        def columns(self) -> list[str]:
            return list(self.rows[0])

        def __iter__(self) -> Iterator[Any]:
            return iter(self.columns)

    def test_columns_are_refused_and_rows_run(self, make_llm: MakeLLM) -> None:
        llm, rows = make_llm(), [{"prompt": "the fox"}, {"prompt": "a dog"}]
        message = r"prompts is a DataFrame, a table; pass one of its columns as a list: df\['prompt'\]\.tolist\(\)"
        frame: Any = self.DataFrame(rows)
        for params in (None, greedy(), [greedy()]):
            with pytest.raises(ValueError, match=message):
                run(llm, frame, params)
            with pytest.raises(ValueError, match=message):
                next(llm.stream(frame, params))
        table: Any = self.Table(rows)
        assert [output.prompt for output in run(llm, table)] == ["the fox", "a dog"]
        assert {output.prompt for output in llm.stream(table)} == {"the fox", "a dog"}


class TestVocabulary:
    """Ids up to the greatest that the tokenizer knows are emitted, as in transformers, whatever its length is."""

    def test_a_gap_in_the_tokenizers_ids_hides_none(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        hf_model, file = make_tiny_model(tmp_path, seed=3, eos_token_id=319), tmp_path / "tokenizer.json"
        raw = json.loads(file.read_text())
        model, pairs = raw["model"], [tuple(pair) for pair in raw["model"]["merges"]]
        parts = {part for pair in pairs for part in pair}
        dropped = [token for token, i in model["vocab"].items() if 258 < i < 318 and token not in parts][:3]
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in dropped}
        model["merges"] = [pair for pair in pairs if "".join(pair) not in dropped]
        file.write_text(json.dumps(raw))
        llm = make_llm(tmp_path)
        assert (len(llm.get_tokenizer()), llm.inputs.num_valid_ids) == (317, 320)

        prompts = [random_ids(7, i) for i in range(12)]
        expected = [hf_greedy(hf_model, prompt, 6) for prompt in prompts]
        assert 319 in {i for ids in expected for i in ids}
        assert token_ids(run(llm, prompts)) == expected
        everything = greedy(2, logprobs=320, prompt_logprobs=320)
        assert len(run(llm, [[5, 6]], everything)[0].outputs[0].logprobs[0]) == 320  # type: ignore[index]
        (output,) = run(llm, [[5]], SamplingParams(temperature=0, logit_bias={319: 100}))
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([319], "stop")
        assert token_ids(run(llm, [[5]], greedy(1, allowed_token_ids=[318]))) == [[318]]

    def test_tokens_that_are_added_later_are_for_prompts_only(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path, vocab_size=352)
        llm = make_llm(tmp_path)
        llm.get_tokenizer().add_tokens(["<new>"])
        (output,) = run(llm, ["a<new>"])
        assert output.prompt_token_ids[-1] == 320 and max(output.outputs[0].token_ids) < 320
        with pytest.raises(ValueError, match=r"allowed_token_ids=320 is not possible; allowed: ids below 320"):
            run(llm, ["a<new>"], greedy(allowed_token_ids=[320]))

    @pytest.mark.parametrize(("name", "options"), [("enable_truncation", (3,)), ("enable_padding", ())])
    def test_another_thread_that_truncates_or_pads_changes_no_prompt(
        self, name: str, options: tuple[int, ...], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It asks the tokenizer of `get_tokenizer` for it just when the engine has turned it off."""
        llm, texts = make_llm(), ["the fox jumps over it", "a fox"]
        tokenizer = llm.get_tokenizer()
        expected = tokenizer(texts)["input_ids"]
        own = type(tokenizer).set_truncation_and_padding

        def disturbed(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            getattr(tokenizer.backend_tokenizer, name)(*options)

        monkeypatch.setattr(type(tokenizer), "set_truncation_and_padding", disturbed)
        assert tokenizer(texts)["input_ids"] != expected
        assert [output.prompt_token_ids for output in run(llm, texts, greedy(1))] == expected


class TestBos:
    """IN-08: one BOS, and prompt_token_ids show what ran."""

    def test_chat_has_one_bos_and_rendered_templates_have_two(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        llm = make_llm(tokenizer=str(bos_tokenizer(tmp_path)))
        tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "fox"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith("<|endoftext|><|im_start|>")
        (chat,) = llm.chat(messages, greedy(), use_tqdm=False)
        assert chat.prompt_token_ids.count(0) == 1 and chat.prompt_token_ids[0] == 0
        # generate(text) follows the tokenizer, so a rendered template gets a second one (the docs warn) ...
        (rendered,) = run(llm, [text])
        assert rendered.prompt_token_ids == [0, *chat.prompt_token_ids]
        # ... and ids are run as they are.
        (ids,) = run(llm, [chat.prompt_token_ids])
        assert ids.prompt_token_ids == chat.prompt_token_ids and token_ids([ids]) == token_ids([chat])
        assert run(llm, ["fox"])[0].prompt_token_ids.count(0) == 1

    def test_a_template_without_bos_gets_none(self, make_llm: MakeLLM) -> None:
        (output,) = make_llm().chat([{"role": "user", "content": "fox"}], greedy(), use_tqdm=False)
        assert 0 not in output.prompt_token_ids


class TestOrder:
    """IN-09."""

    @pytest.mark.parametrize("policy", ["prefix", "fcfs"])
    def test_outputs_stand_in_the_order_of_the_prompts(self, policy: str, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(schedule_policy=policy, max_num_seqs=3)
        log = observe(llm)
        first = [random_ids(3 + i % 3, 20 - i) for i in range(10)]
        second = [[*prompt, 5] for prompt in first[::-1]]
        calls = [(first, [10 - i for i in range(10)]), (second, [1 + i for i in range(10)]), ([first[3]] * 5, [4] * 5)]
        request_ids: set[str] = set()
        for prompts, counts in calls:
            params = [greedy(count) for count in counts]
            outputs = run(llm, prompts, params)
            assert [output.prompt_token_ids for output in outputs] == prompts
            assert [output.index for output in outputs] == list(range(len(prompts)))
            assert [len(ids) for ids in token_ids(outputs)] == counts
            assert token_ids(outputs) == token_ids(run(cache_off, prompts, params))
            request_ids |= {output.request_id for output in outputs}
        assert len(request_ids) == 25
        started = [next(i for i, step in enumerate(log.steps) if seq_id in step.counts) for seq_id in range(10)]
        assert (started == sorted(started)) == (policy == "fcfs")  # under "prefix" they ran in another order

    def test_equal_texts_keep_their_own_params(self, make_llm: MakeLLM) -> None:
        outputs = run(make_llm(), ["the lazy dog"] * 5, [greedy(1 + i) for i in range(5)])
        assert [len(ids) for ids in token_ids(outputs)] == [1, 2, 3, 4, 5]


class TestArguments:
    @pytest.mark.parametrize("value", [None, 5, "", b"a", ["a"]])
    def test_a_model_or_tokenizer_that_is_no_name_is_refused(self, value: Any, model_dir: Path) -> None:
        remedy = "give a directory or a hub name such as 'Qwen/Qwen3-0.6B'"
        with pytest.raises(ValueError, match=f"model is .*; {remedy}"):
            LLM(value)
        if value is not None:
            with pytest.raises(ValueError, match=f"tokenizer is .*; {remedy}"):
                LLM(model_dir, tokenizer=value)

    def test_paths_and_whole_numbers_of_numpy_become_plain(self, tmp_path: Path) -> None:
        numbers = {"max_model_len": 64, "block_size": 4, "seed": 2**63, "max_num_seqs": 8, "num_kv_blocks": 99}
        given = {name: np.uint64(number) for name, number in numbers.items()}
        config = EngineConfig.from_arguments(tmp_path, tokenizer=tmp_path, **given)
        assert config == EngineConfig(str(tmp_path), str(tmp_path), **numbers)
        assert all(type(getattr(config, name)) is int for name in numbers)

    @pytest.mark.parametrize("value", [True, np.bool_(True), np.float64(4), 4.0, "4", np.int64(0)])
    def test_other_numbers_are_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match="block_size must be a positive whole number, not"):
            EngineConfig.from_arguments("m", block_size=value)

    def test_more_tokens_at_once_than_memory_has_addresses_for_are_refused_before_weights_are_read(
        self, tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
        make_tiny_model(tmp_path, **shape, max_position_embeddings=2**24)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"max_num_seqs=65536 .* max_model_len=16777216 .*; lower one of them"):
            make_llm(tmp_path, max_num_seqs=2**16, max_model_len=None, num_kv_blocks=None)

    def test_what_holds_prompts_is_readable_by_its_owner_only(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        files = {"trace": tmp_path / "run.jsonl", "prefix_cache_file": tmp_path / "x.prefixes"}
        with make_llm(**files) as llm:
            run(llm, [random_ids(9)])
        assert {file.stat().st_mode & 0o777 for file in files.values()} == {0o600}
