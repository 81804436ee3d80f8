"""Field cases of speed (TP-*) as counts and ratios: what work is done how often, never how many seconds it takes."""

from __future__ import annotations

import io
import re
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MakeLLM
from llm_helpers import cached, greedy, run
from tiny_models import random_ids, tiny_tokenizer
from tqdm import tqdm

from nanoapc import LLM, SamplingParams
from nanoapc.inputs import TOKENIZER_GROUP, InputProcessor
from nanoapc.layers.sampler import SamplingRows


class CountingTokenizer:
    """The tiny tokenizer; notes the size of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append(len(texts))
        return tiny_tokenizer()(texts, **options)

    def __len__(self) -> int:
        return len(tiny_tokenizer())

    def decode(self, ids: list[int], **options: Any) -> str:
        return tiny_tokenizer().decode(ids, **options)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return tiny_tokenizer().apply_chat_template(messages, **options)


class TestTokenizing:
    """TP-01: prompts are tokenised in bounded groups, with progress from the first group on."""

    def test_twenty_thousand_prompts_take_twenty_calls(self) -> None:
        tokenizer, progress = CountingTokenizer(), [0]
        texts = [f"prompt {i} of many, the quick brown fox" for i in range(20_000)]
        seen_at: list[int] = []  # tokenizer calls made when progress was reported

        def report(num_done: int) -> None:
            progress.append(progress[-1] + num_done)
            seen_at.append(len(tokenizer.calls))

        prompts = InputProcessor(tokenizer, 320, 512).prompts(texts, progress=report)
        assert len(tokenizer.calls) == -(-20_000 // TOKENIZER_GROUP) and max(tokenizer.calls) == TOKENIZER_GROUP
        assert seen_at == list(range(1, len(tokenizer.calls) + 1)) and progress[-1] == 20_000
        for i in (0, 1, TOKENIZER_GROUP - 1, TOKENIZER_GROUP, 14_142, 19_999):
            assert prompts[i].text == texts[i]
            assert prompts[i].token_ids.tolist() == tiny_tokenizer()(texts[i])["input_ids"]

    def test_texts_and_ids_mix_in_one_call(self) -> None:
        tokenizer = CountingTokenizer()
        raw = [f"text {i}" if i % 3 else [5, i % 300] for i in range(900)]
        prompts = InputProcessor(tokenizer, 320, 512).prompts(raw)
        assert tokenizer.calls == [600]
        for item, prompt in zip(raw, prompts, strict=True):
            expected = item if isinstance(item, list) else tiny_tokenizer()(item)["input_ids"]
            assert prompt.token_ids.tolist() == expected

    def test_a_stream_tokenizes_by_window(self, make_llm: MakeLLM) -> None:
        llm, tokenizer = make_llm(max_num_seqs=8), CountingTokenizer()
        llm.inputs.tokenizer = tokenizer
        assert len(list(llm.stream((f"text {i}" for i in range(100)), greedy(1)))) == 100
        assert tokenizer.calls == [16] * 6 + [4]

    def test_conversations_are_rendered_and_tokenised_by_group_too(self, make_llm: MakeLLM) -> None:
        llm, tokenizer = make_llm(), CountingTokenizer()
        llm.inputs.tokenizer = tokenizer
        seen: list[tuple[str, int, int]] = []  # the bar, what it shows, tokenizer calls made when it did

        class Bar(tqdm):
            def update(self, n: float | None = 1) -> bool | None:
                result = super().update(n)
                seen.append((self.desc.split(":")[0], int(self.n), len(tokenizer.calls)))
                return result

        total = 2 * TOKENIZER_GROUP + 50
        conversations = [[{"role": "user", "content": f"no. {i}"}] for i in range(total)]
        outputs = llm.chat(conversations, greedy(1), use_tqdm=partial(Bar, file=io.StringIO()))
        assert tokenizer.calls == [TOKENIZER_GROUP, TOKENIZER_GROUP, 50]
        steps = [(TOKENIZER_GROUP, 1), (2 * TOKENIZER_GROUP, 2), (total, 3)]
        assert seen[:3] == [("Tokenizing", *step) for step in steps]
        assert seen[-1][:2] == ("Processed prompts", total)
        for i in (0, TOKENIZER_GROUP - 1, TOKENIZER_GROUP, total - 1):
            text = tokenizer.apply_chat_template(conversations[i], tokenize=False, add_generation_prompt=True)
            assert outputs[i].prompt == text
            assert outputs[i].prompt_token_ids == tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
        bad = [*conversations[: TOKENIZER_GROUP + 5], ["no message"]]
        with pytest.raises(ValueError, match=f"message 0 of conversation {TOKENIZER_GROUP + 5} is"):
            llm.chat(bad, greedy(1), use_tqdm=False)
        with pytest.raises(ValueError, match=f"prompt {TOKENIZER_GROUP + 5} has .* tokens; with room"):
            llm.chat([*bad[:-1], [{"role": "user", "content": "x" * 500}]], greedy(1), use_tqdm=False)

    def test_bad_words_are_tokenised_once_for_all_requests_that_have_them(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, calls = make_llm(), [0]
        encode = llm.get_tokenizer().encode

        def count(*arguments: Any, **options: Any) -> list[int]:
            calls[0] += 1
            return encode(*arguments, **options)

        monkeypatch.setattr(llm.get_tokenizer(), "encode", count)
        words = ["fox", "the lazy", "dog"]
        each = [greedy(2, bad_words=words) for _ in range(40)]
        outputs = run(llm, [random_ids(5, seed) for seed in range(40)], each)
        assert len(list(llm.stream([random_ids(5)] * 40, each))) == len(outputs) == 40
        assert calls == [1 + 4 * len(words)]  # each with and without a space, at the start and behind a text


class TestRates:
    """TP-03: cached prompt tokens are not counted as processed ones."""

    def test_computed_and_cached_tokens_are_reported_apart(
        self, make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]
    ) -> None:
        llm, stem = make_llm(num_kv_blocks=1024), random_ids(90, 500)
        prompts = [stem + random_ids(10, i) for i in range(100)]
        total = 100 * 100
        for share in (0.87, 0.98):  # cold: the stem is computed once; warm: only each last token
            before = llm.metrics()
            outputs = llm.generate(prompts, greedy(2))
            after = llm.metrics()
            num_cached = sum(cached(outputs))
            assert num_cached > share * total
            assert after.hit_tokens - before.hit_tokens == num_cached
            # Computed: the prompt tokens that were not cached, and the first output token of each.
            assert after.computed_tokens - before.computed_tokens == total - num_cached + 100
            bars = re.findall(
                r"100/100 .*?prompt (\d+) tok/s \+ (\d+) cached, output (\d+) tok/s", capsys.readouterr().err
            )
            computed_rate, shown_cached, output_rate = map(int, bars[-1])
            assert shown_cached == num_cached
            # Both rates are over the same time, so their ratio is that of the counts.
            assert computed_rate / output_rate == pytest.approx((total - num_cached) / 200, rel=0.05)


class FakeModel:
    """A model of one constant row of logits, so that a step's time is the host's."""

    def __init__(self, vocab_size: int):
        self.logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))

    def __call__(self, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(hidden), -1)


class TestHostTime:
    """TP-04: a step's work does not grow with the number of tokens before it."""

    LENGTH = 4000

    @pytest.fixture
    def long_llm(self, make_llm: MakeLLM, model_dir: Any, tmp_path: Any) -> LLM:
        for file in model_dir.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = tmp_path / "config.json"
        config.write_text(
            re.sub(r'"max_position_embeddings": \d+', '"max_position_embeddings": 4100', config.read_text())
        )
        llm = make_llm(tmp_path, max_model_len=4100, num_kv_blocks=300, block_size=16)
        llm.engine.runner.model = FakeModel(320)  # type: ignore[assignment]
        return llm

    def test_penalties_and_detokenizing_do_not_slow_down(self, long_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded, built, penalised = [], 0, []
        build, flat = SamplingRows.__init__, SamplingRows.flat

        def count_build(*arguments: Any) -> None:
            nonlocal built
            built += 1
            build(*arguments)

        def count_flat(self: SamplingRows, rows: Any) -> torch.Tensor:
            penalised.append(sum(len(ids) for _, ids in rows))
            return flat(self, rows)

        def decode(ids: list[int], **options: Any) -> str:
            decoded.append(len(ids))
            return tiny_tokenizer().decode(ids, **options)

        monkeypatch.setattr(SamplingRows, "__init__", count_build)
        monkeypatch.setattr(SamplingRows, "flat", count_flat)
        monkeypatch.setattr(long_llm.inputs.tokenizer, "decode", decode)
        params = SamplingParams(
            seed=1,
            temperature=2.0,
            max_tokens=self.LENGTH,
            ignore_eos=True,
            repetition_penalty=1.01,
            presence_penalty=0.01,
            frequency_penalty=0.001,
            stop=["@@never@@"],
        )
        long_llm.add_request(random_ids(5), params)
        times, work = [], []
        while long_llm.has_unfinished_requests():
            decoded.clear()
            penalised.clear()
            start = time.thread_time()
            outputs = long_llm.step()
            times.append(time.thread_time() - start)
            work.append((len(decoded), sum(decoded), sum(penalised)))
        assert len(outputs[0].outputs[0].token_ids) == self.LENGTH == len(times)
        assert built <= 2  # the rows' parameters stay while the batch stays
        calls, ids, counted = np.array(work[1:-1]).max(axis=0)  # the last one decodes the whole output, once
        assert calls <= 2 and counted <= 1 and ids <= 2 * 2 * 40
        # And so it is in time: the medians of many steps of this thread's own, as the machine has other things to do.
        early, late = statistics.median(times[400:600]), statistics.median(times[3700:3900])
        assert late < 2 * early

    def test_a_step_touches_each_sequence_at_most_once_in_a_block(self, make_llm: MakeLLM) -> None:
        # Between the ends of blocks nothing changes for a sequence, so no block is taken and no key is made.
        llm = make_llm(num_kv_blocks=512)
        manager, pool = llm.engine.manager, llm.engine.manager.pool
        hasher, take = manager.hasher, pool.take
        keys, taken = [0], [0]
        make_keys = hasher.keys

        def count_keys(parent: bytes, extra: bytes, blocks: list[bytes]) -> list[bytes]:
            keys[0] += len(blocks)
            return make_keys(parent, extra, blocks)

        def count_take(num_blocks: int) -> Any:
            taken[0] += num_blocks
            return take(num_blocks)

        hasher.keys, pool.take = count_keys, count_take  # type: ignore[method-assign]
        run(llm, [random_ids(8, seed) for seed in range(10)], max_tokens=40)
        assert keys[0] == 10 * ((8 + 39) // 4)  # each block is hashed once in its life
        assert taken[0] == 10 * -(-(8 + 39) // 4)
