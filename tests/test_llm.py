"""The LLM's API: what goes in, what comes out, in which order, and what happens when something goes wrong."""

from __future__ import annotations

import gc
import io
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from conftest import MakeLLM
from huggingface_hub.errors import LocalEntryNotFoundError
from llm_helpers import DEFAULTS, assert_idle, cached, greedy, hf_greedy, observe, run, token_ids
from test_detokenizer import byte_fallback, byte_level
from test_models import edit_json
from tiny_models import FAMILIES, make_tiny_model, random_ids, tiny_tokenizer
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedModel

from nanoapc import LLM, RequestOutput, SamplingParams
from nanoapc.batch_file import dry_run
from nanoapc.engine import engine as engine_module
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.block_pool import BlockPool, FreeBlockQueue
from nanoapc.engine.model_runner import InFlight, ModelRunner
from nanoapc.engine.request import Request, make_sequences
from nanoapc.engine.scheduler import Scheduler
from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.models.checkpoint import load_tokenizer

MESSAGES = [{"role": "user", "content": "What jumps over the lazy dog?"}]


def finish(llm: LLM) -> list[RequestOutput]:
    """Steps until nothing is left."""
    outputs: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


class TestParity:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_greedy_ids_equal_transformers(self, family: str, tmp_path: Path, make_llm: MakeLLM) -> None:
        model = make_tiny_model(tmp_path, family)
        llm, prompts = make_llm(tmp_path, max_num_batched_tokens=24), [random_ids(n, n) for n in (1, 17, 40)]
        expected = [hf_greedy(model, prompt, 12) for prompt in prompts]
        assert token_ids(run(llm, prompts, max_tokens=12)) == expected
        warm = run(llm, prompts, max_tokens=12)
        assert token_ids(warm) == expected and cached(warm) == [0, 16, 39]

    def test_an_end_of_text_id_ends_as_in_transformers(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        model = make_tiny_model(tmp_path, eos_token_id=[2, *range(30, 80)])
        prompts = [random_ids(9, seed) for seed in range(8)]
        outputs = run(make_llm(tmp_path), prompts, SamplingParams(temperature=0, max_tokens=12))
        ended = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            completion = output.outputs[0]
            assert completion.token_ids == ids[0, 9:].tolist()
            stopped = completion.token_ids[-1] == 2 or 30 <= completion.token_ids[-1] < 80
            assert completion.finish_reason == ("stop" if stopped else "length")
            last = completion.token_ids[-1]
            assert completion.stop_reason == (last if stopped and last != 2 else None)
            text_ids = completion.token_ids[:-1] if stopped else completion.token_ids
            assert completion.text == tiny_tokenizer().decode(text_ids, skip_special_tokens=True)
            ended += stopped
        assert 0 < ended < 8

    @pytest.mark.parametrize("in_files", [0, [0, 5], None])
    def test_the_tokenizers_end_of_text_ends_a_text_too(self, in_files: Any, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path, eos_token_id=in_files)  # the tokenizer's is 2
        ended = SamplingParams(temperature=0, max_tokens=9, logit_bias={2: 100})
        params = [ended, replace(ended, min_tokens=3), replace(ended, ignore_eos=True)]
        for options, lengths in (({}, [1, 4, 9]), ({"skip_tokenizer_init": True}, [9, 9, 9])):
            outputs = [o.outputs[0] for o in run(make_llm(tmp_path, **options), [random_ids(5)] * 3, params)]
            assert [len(output.token_ids) for output in outputs] == lengths
            reasons = ["stop" if options == {} and i < 2 else "length" for i in range(3)]
            assert [output.finish_reason for output in outputs] == reasons


class TestPrompts:
    def test_all_kinds_of_prompts_give_the_same(self, make_llm: MakeLLM) -> None:
        llm, text = make_llm(), "The quick brown fox"
        ids = tiny_tokenizer()(text)["input_ids"]
        kinds: list[Any] = [
            text,
            ids,
            tuple(ids),
            np.array(ids),
            torch.tensor(ids),
            {"prompt": text},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": np.array(ids, np.uint16), "cache_salt": "a"},
            {"prompt": "shown only", "prompt_token_ids": ids, "cache_salt": None},
            {"prompt_token_ids": ids, "multi_modal_data": None, "mm_processor_kwargs": None, "prompt_embeds": None},
            {"prompt": text, "multi_modal_uuids": None, "multi_modal_data": {}, "token_type_ids": None},
        ]
        outputs = run(llm, kinds)
        assert len({tuple(ids) for ids in token_ids(outputs)}) == 1
        assert [output.prompt_token_ids for output in outputs] == [ids] * len(kinds)
        expected = [text, None, None, None, None, text, None, None, "shown only", None, text]
        assert [output.prompt for output in outputs] == expected
        for kind in kinds:
            assert token_ids(llm.generate(kind, greedy(), use_tqdm=False)) == token_ids(outputs[:1])

    def test_many_prompts_in_any_container(self, make_llm: MakeLLM) -> None:
        llm, ids = make_llm(), [random_ids(6, 1), random_ids(6, 2)]
        expected = token_ids(run(llm, ids))
        for many in (tuple(ids), iter(ids), np.array(ids), torch.tensor(ids), (np.array(x) for x in ids)):
            assert token_ids(llm.generate(many, greedy(), use_tqdm=False)) == expected

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (5.0, "prompt 1 is 5.0; it must be a text, a list of token ids or a dict"),
            (None, "prompt 1 is None; it must be"),
            (b"bytes", "prompt 1 is b'bytes'; it must be"),
            (torch.tensor(5), "prompt 1 is tensor.5.; it must be"),
            ({}, "prompt 1 has neither 'prompt' nor 'prompt_token_ids'"),
            ({"prompt": 5}, "prompt 1 has 'prompt' 5; it must be a text"),
            ({"prompt_token_ids": "text"}, "prompt 1 has 'prompt_token_ids' 'text'; they must be a list"),
            ({"prompt_token_ids": 5}, "prompt 1 has 'prompt_token_ids' 5; they must be a list"),
            ({"prompt": "a", "promt_token_ids": [5]}, "prompt 1 has 'promt_token_ids', which is not supported; known:"),
            (
                {"prompt": "a", "promt_token_ids": None},
                "prompt 1 has 'promt_token_ids', which is not supported; known:",
            ),
            (
                {"prompt": "a", "multi_modal_data": {"image": 5}},
                "prompt 1 has 'multi_modal_data', which is not supported; known:",
            ),
            ({"prompt_embeds": None}, "prompt 1 has neither 'prompt' nor 'prompt_token_ids'"),
            ("\ud800", "prompt 1 is not valid Unicode"),
            ([5, [6]], "prompt 1 has a token id .6. of type list"),
        ],
    )
    def test_what_is_no_prompt_is_named(self, prompt: Any, message: str, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=message):
            run(make_llm(), ["a", prompt, "b"])

    @pytest.mark.parametrize("prompts", [b"bytes", bytearray(b"bytes"), None, 5, np.array(5), Path("prompts.txt")])
    def test_what_is_neither_a_prompt_nor_many_is_named(self, prompts: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=r"prompt 0 is .*; it must be"):
            run(make_llm(), prompts)
        with pytest.raises(ValueError, match=r"prompt 1 is .*; it must be"):
            run(make_llm(), ["a", prompts])
        with pytest.raises(ValueError, match=r"prompt 0 is .*; it must be"):
            list(make_llm().stream(prompts))

    def test_what_is_too_long_gets_one_message(
        self, make_llm: MakeLLM, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        llm = make_llm()
        llm.get_tokenizer().model_max_length = 64
        with pytest.raises(ValueError, match="prompt 0 has 300 tokens"):
            run(llm, ["x" * 300])
        assert "longer than" not in capfd.readouterr().err + caplog.text  # transformers' own warning

    def test_the_callers_objects_are_left_alone(self, make_llm: MakeLLM) -> None:
        llm, ids = make_llm(), random_ids(9)
        prompts = [{"prompt_token_ids": ids, "cache_salt": "a"}, "text"]
        messages = [[{"role": "user", "content": "hi"}]]
        outputs = run(llm, prompts)
        llm.chat(messages, greedy(), use_tqdm=False)
        outputs[0].prompt_token_ids.append(5)
        assert prompts == [{"prompt_token_ids": random_ids(9), "cache_salt": "a"}, "text"]
        assert messages == [[{"role": "user", "content": "hi"}]]

    def test_without_a_tokenizer_only_ids_run(self, make_llm: MakeLLM) -> None:
        llm, ids = make_llm(skip_tokenizer_init=True), random_ids(9)
        output = run(llm, [ids])[0]
        assert token_ids([output]) == token_ids(run(make_llm(), [ids])) and output.outputs[0].text == ""
        assert llm.get_tokenizer() is None
        with pytest.raises(ValueError, match="prompt 1 is a text, but this LLM has no tokenizer"):
            run(llm, [ids, "text"])
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            llm.chat(MESSAGES, use_tqdm=False)
        with pytest.raises(ValueError, match=r"stop=.*only with a tokenizer"):
            run(llm, [ids], SamplingParams(stop="a"))


class TestParams:
    def test_one_for_all_or_one_for_each(self, make_llm: MakeLLM) -> None:
        llm, prompts = make_llm(), [random_ids(5, 1), random_ids(5, 2)]
        lengths = [len(ids) for ids in token_ids(run(llm, prompts, [greedy(2), greedy(5)]))]
        assert lengths == [2, 5]
        assert len(run(llm, prompts, greedy(3))[1].outputs[0].token_ids) == 3
        assert len(llm.generate(prompts[0], [greedy(4)], use_tqdm=False)[0].outputs[0].token_ids) == 4

    def test_none_samples_with_the_defaults(self, make_llm: MakeLLM) -> None:
        first, second = (make_llm().generate([random_ids(5)] * 2, use_tqdm=False) for _ in range(2))
        assert [len(ids) for ids in token_ids(first)] == [16, 16]
        assert token_ids(first) == token_ids(second)  # the engine's seed is fixed
        assert token_ids(first)[0] != token_ids(first)[1]  # but each request has a seed of its own
        assert token_ids(make_llm(seed=1).generate([random_ids(5)] * 2, use_tqdm=False)) != token_ids(first)

    def test_bad_pairs_are_refused_before_anything_runs(self, make_llm: MakeLLM) -> None:
        llm, prompts = make_llm(), [random_ids(5, seed) for seed in range(3)]
        for params, message in (
            ([greedy(), greedy()], "there are 3 prompts but 2 sampling_params"),
            ([], "there are 3 prompts but 0 sampling_params"),
            ({"max_tokens": 5}, "sampling_params is {'max_tokens': 5}; it must be"),
            (SamplingParams, "sampling_params is <class"),
            ([greedy(), {"max_tokens": 5}, greedy()], r"sampling_params\[1\] is {'max_tokens': 5}"),
            ([greedy(), greedy(), greedy(stop_token_ids=[320])], "sampling_params of prompt 2: stop_token_ids=320"),
            ([greedy(), greedy(logit_bias={400: 1}), greedy()], "sampling_params of prompt 1: logit_bias=400"),
            ([greedy(), greedy(logprobs=321), greedy()], "sampling_params of prompt 1: logprobs=321"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        assert_idle(llm)
        assert run(llm, prompts)[0].request_id == "0"  # none of them had become a request


class TestConstruction:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_model_length": 5}, "unknown argument 'max_model_length'; did you mean 'max_model_len'"),
            ({"scheduling_policy": "priority"}, "scheduling_policy='priority' is not supported .*; schedule_policy is"),
            ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 is not supported \(only 1 is\); an LLM runs on one"),
            ({"quantization": "awq"}, "quantization='awq' is not supported .*; pass an unquantised checkpoint"),
            ({"dtype": "int8"}, "dtype must be one of auto, float32"),
            ({"device": "tpu"}, "device must be 'auto', 'cpu', 'cuda'"),
            ({"device": "meta"}, "device must be"),
            ({"schedule_policy": "random"}, "schedule_policy must be one of prefix, fcfs"),
            ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be one of xxhash"),
            ({"load_format": "pt"}, "load_format must be one of auto, dummy"),
            ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, not 1"),
            ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must lie in \(0, 1\], not 1.5"),
            ({"max_model_len": 513}, "max_model_len=513 is more than the model's own limit of 512"),
            ({"max_model_len": 1}, "max_model_len=1 leaves no room"),
            ({"tokenizer": "/nowhere"}, "/nowhere: there is no such directory"),
            ({"seed": 2**64}, "seed must be a whole number of at most 64 bits"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], message: str, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=message):
            make_llm(**arguments)

    def test_a_directory_that_is_no_model_is_named(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        for model, message in (
            ("", "model is empty"),
            (str(tmp_path / "nothing"), "there is no such directory"),
            (str(tmp_path), r"is not a model directory: it has no config\.json"),
            (str(tmp_path / "model.gguf"), "GGUF files are not supported"),
        ):
            with pytest.raises(ValueError, match=message):
                make_llm(model)
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(ValueError, match="GGUF files are not supported"):
            make_llm(str(tmp_path / "model.gguf"))

    def test_a_hub_name_without_a_network_is_a_clear_error(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def offline(*arguments: Any, **options: Any) -> str:
            raise LocalEntryNotFoundError("no network")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(ValueError, match=r"'Qwen/Qwen3-0\.6B' is no local directory.*check the name, the network"):
            make_llm("Qwen/Qwen3-0.6B")

    def test_what_needs_no_weights_fetches_none(
        self, model_dir: Path, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[bool] = []

        def snapshot_download(name: str, allow_patterns: list[str], **options: Any) -> str:
            fetched.append("*.safetensors" in allow_patterns)
            return str(model_dir)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        make_llm("Qwen/Qwen3-0.6B")
        assert fetched == [False, True]  # what is not supported is refused before its weights are fetched
        make_llm("Qwen/Qwen3-0.6B", load_format="dummy")
        (tmp_path / "in.jsonl").write_text("")
        dry_run(tmp_path / "in.jsonl", "Qwen/Qwen3-0.6B", quiet=True)
        assert fetched == [False, True, False, False]
        model_dir = tmp_path
        (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
        with pytest.raises(ValueError, match="GPT2LMHeadModel"):
            make_llm("openai-community/gpt2")
        assert fetched == [False, True, False, False, False]

    def test_a_missing_tokenizer_is_a_clear_error(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path, tokenizer=False)
        with pytest.raises(
            ValueError, match=r"no tokenizer could be loaded.*give tokenizer=.*skip_tokenizer_init=True"
        ):
            make_llm(tmp_path)
        (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7\nsize 5\n")
        with pytest.raises(ValueError, match=r"no tokenizer.*\(tokenizer\.json is a Git LFS pointer.*`git lfs pull`\)"):
            make_llm(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path / "elsewhere")
        llm = make_llm(tmp_path, tokenizer=str(tmp_path / "elsewhere"))
        assert run(llm, ["the dog"])[0].prompt_token_ids == tiny_tokenizer()("the dog")["input_ids"]

    @pytest.mark.parametrize("label", ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
    @pytest.mark.parametrize("make", [byte_level, byte_fallback])
    @pytest.mark.parametrize("family", ["llama", "qwen2"])
    def test_what_tokenizer_json_says_runs_whatever_class_it_is_labelled_with(
        self, label: str | None, make: Any, family: str, tmp_path: Path
    ) -> None:
        make().save_pretrained(tmp_path)
        edit_json(tmp_path / "tokenizer_config.json", **({"tokenizer_class": label} if label else {}))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for trust_remote_code in (False, True):  # there is no code
            tokenizer = load_tokenizer(str(tmp_path), trust_remote_code)
            for text in ("hello world", "  hello", "It ends</s>It begins", "In 2024.", "cafe\u0301", " "):
                ids = plain.encode(text).ids
                assert tokenizer(text)["input_ids"] == ids
                assert tokenizer.decode(ids, skip_special_tokens=True) == plain.decode(ids)

    def test_code_in_a_model_directory_is_not_run(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path)
        marker = tmp_path / "marker"
        (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
        edit_json(tmp_path / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
        edit_json(
            tmp_path / "tokenizer_config.json",
            tokenizer_class="Evil",
            auto_map={"AutoTokenizer": [None, "evil.Evil"]},
        )
        with suppress(ValueError):  # refused or run without it: either is right
            run(make_llm(tmp_path), ["the fox"])
        assert not marker.exists()

    def test_dummy_weights_need_only_the_config(self, model_dir: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
        (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
        options = {"load_format": "dummy", "skip_tokenizer_init": True}
        first, second = (run(make_llm(tmp_path, **options), [random_ids(9)]) for _ in range(2))
        assert token_ids(first) == token_ids(second) != token_ids(run(make_llm(), [random_ids(9)]))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16])
    def test_dtype_is_that_of_weights_and_cache(self, dtype: Any, make_llm: MakeLLM) -> None:
        llm = make_llm(dtype=dtype)
        wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        assert llm.engine.runner.kv_memory.dtype == wanted
        assert llm.engine.runner.model.model.embed_tokens.weight.dtype == wanted
        assert len(run(llm, [random_ids(9)])[0].outputs[0].token_ids) == 6


class TestLifecycle:
    def test_a_context_manager_closes_and_close_may_be_repeated(self, model_dir: Path) -> None:
        with LLM(model_dir, **DEFAULTS) as llm:
            run(llm, [random_ids(5)])
            llm.add_request(random_ids(5))
            stream = llm.stream([random_ids(5)] * 2, [greedy(2), greedy(9)])
            next(stream)
        llm.close()
        llm.close()
        for use in (
            lambda: run(llm, [random_ids(5)]),
            lambda: run(llm, []),
            lambda: llm.chat(MESSAGES, use_tqdm=False),
            lambda: next(llm.stream([random_ids(5)])),
            lambda: next(stream),
            lambda: llm.add_request(random_ids(5)),
            llm.step,
            llm.reset_prefix_cache,
            lambda: llm.load_weights([]),
        ):
            with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
                use()
        assert not llm.has_unfinished_requests()  # or whoever steps until then would never stop

    def test_close_gives_the_memory_back(self, model_dir: Path) -> None:
        llm = LLM(model_dir, **DEFAULTS)
        run(llm, [random_ids(5)])
        memory = [weakref.ref(llm.engine.runner.kv_memory), weakref.ref(llm.engine.runner.model)]
        llm.close()
        gc.collect()
        assert [reference() for reference in memory] == [None, None]

    def test_two_llms_live_in_one_process(self, tmp_path: Path, make_llm: MakeLLM, hf_model: PreTrainedModel) -> None:
        other_model = make_tiny_model(tmp_path, "llama", seed=5)
        one, two = make_llm(block_size=4), make_llm(tmp_path, block_size=3)
        prompt = random_ids(13)
        expected = (hf_greedy(hf_model, prompt, 6), hf_greedy(other_model, prompt, 6))
        assert expected[0] != expected[1]
        for _ in range(2):
            assert (token_ids(run(one, [prompt]))[0], token_ids(run(two, [prompt]))[0]) == expected
        one.add_request(prompt, greedy())
        two.add_request(prompt, greedy())
        outputs: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
        while one.has_unfinished_requests() or two.has_unfinished_requests():  # step by step, in turn
            outputs[0].extend(one.step())
            outputs[1].extend(two.step())
        assert (token_ids(outputs[0])[0], token_ids(outputs[1])[0]) == expected
        two.close()
        assert token_ids(run(one, [prompt]))[0] == expected[0]


class TestThreads:
    def test_calls_from_several_threads_share_the_batch(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_seqs=8, num_kv_blocks=64)
        log = observe(llm)
        stem = random_ids(12, 50)
        jobs = [[stem[: 4 * (i % 4)] + random_ids(3 + i, 10 * i + j) for j in range(6)] for i in range(5)]
        expected = [token_ids(run(cache_off, prompts, max_tokens=12)) for prompts in jobs]
        barrier = threading.Barrier(len(jobs))

        def work(i: int) -> list[list[int]]:
            barrier.wait()
            if i % 2:
                outputs = sorted(llm.stream(jobs[i], greedy(12)), key=lambda output: output.index)
            else:
                outputs = run(llm, jobs[i], max_tokens=12)
            return token_ids(outputs)

        with ThreadPoolExecutor(len(jobs)) as pool:
            assert list(pool.map(work, range(len(jobs)))) == expected
        owner = {seq_id: seq_id // 6 for step in log.steps for seq_id in step.counts}
        assert any(len({owner[seq_id] for seq_id in step.counts}) > 1 for step in log.steps)  # they ran together
        assert_idle(llm)

    def test_a_failed_step_reaches_every_caller_and_the_next_call_works(
        self, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        llm, prompts = make_llm(max_num_seqs=2), [random_ids(9, seed) for seed in range(12)]
        model, main = llm.engine.runner.model, threading.current_thread()
        forward = model.forward

        def fail_in_main(*arguments: Any) -> torch.Tensor:
            if threading.current_thread() is main:
                raise MemoryError("no memory left")
            return forward(*arguments)

        model.forward = fail_in_main  # type: ignore[method-assign]
        failures: list[BaseException] = []

        def consume() -> None:
            try:
                list(llm.stream(prompts, greedy(100)))
            except BaseException as error:
                failures.append(error)

        llm.add_request(random_ids(5), greedy(400))  # it must not end before `step` below has its turn
        thread = threading.Thread(target=consume)
        thread.start()
        while not (llm._calls and llm._calls[0].pending):
            time.sleep(0.001)
        with pytest.raises(MemoryError):  # whoever runs the step gets the error itself ...
            llm.step()
        thread.join()
        (failure,) = failures  # ... and whoever shared it is told so
        assert isinstance(failure, RuntimeError) and isinstance(failure.__cause__, MemoryError)
        assert not llm.has_unfinished_requests()
        assert_idle(llm)
        model.forward = forward  # type: ignore[method-assign]
        assert token_ids(run(llm, prompts)) == token_ids(run(cache_off, prompts))

    def test_a_failure_while_a_window_is_on_its_way_submits_no_orphans(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        windows, forward = llm._windows, llm.engine.runner.model.forward

        def fail(*arguments: Any) -> torch.Tensor:
            raise MemoryError("no memory left")

        def interrupted(pairs: Any, call: Any) -> Iterator[Any]:
            for sequences in windows(pairs, call):
                llm.engine.runner.model.forward = fail  # type: ignore[method-assign]
                with pytest.raises(MemoryError):  # what another thread may do between the two
                    llm.step()
                llm.engine.runner.model.forward = forward  # type: ignore[method-assign]
                yield sequences

        llm._windows = interrupted  # type: ignore[method-assign]
        llm.add_request(random_ids(5))
        with pytest.raises(RuntimeError, match="shared with others has failed"):
            list(llm.stream([random_ids(5)] * 3))
        assert_idle(llm)

    def test_a_failure_in_someone_elses_step_is_not_silent_for_queued_requests(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        llm.add_request(random_ids(5), greedy(60))
        model = llm.engine.runner.model
        forward = model.forward

        def fail(*arguments: Any) -> torch.Tensor:
            raise MemoryError("no memory left")

        model.forward = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            run(llm, [random_ids(9)])
        model.forward = forward  # type: ignore[method-assign]
        assert llm.has_unfinished_requests()
        with pytest.raises(RuntimeError, match="shared with others has failed"):
            llm.step()
        assert not llm.has_unfinished_requests() and llm.step() == []
        assert_idle(llm)


class TestSteps:
    def test_requests_finish_step_by_step(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(), [random_ids(5, seed) for seed in range(3)]
        assert not llm.has_unfinished_requests() and llm.step() == []
        first = llm.add_request(prompts[0], greedy(3))
        second = llm.add_request(prompts[1], greedy(5))
        assert len({first, second}) == 2 and llm.has_unfinished_requests()
        assert llm.step() == []
        third = llm.add_request(prompts[2], greedy(2))  # joins the running ones
        done = {}
        for number in range(2, 6):
            done |= {output.request_id: (number, output) for output in llm.step()}
        assert {request_id: number for request_id, (number, _) in done.items()} == {first: 3, second: 5, third: 3}
        assert not llm.has_unfinished_requests()
        for request_id, prompt, count in zip((first, second, third), prompts, (3, 5, 2), strict=True):
            assert token_ids([done[request_id][1]]) == token_ids(run(cache_off, [prompt], max_tokens=count))

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_abort_frees_everything_and_leaves_the_others(self, steps: int, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(max_num_seqs=4, max_num_batched_tokens=8), [random_ids(11, seed) for seed in range(4)]
        observe(llm)
        ids = [llm.add_request(prompt, greedy(8, n=2)) for prompt in prompts]
        for _ in range(steps):
            llm.step()
        assert llm.abort_request(ids[0]) and llm.abort_request(ids[3])  # one that runs (or waits), one that waits
        assert not llm.abort_request(ids[0]) and not llm.abort_request("no such request")
        outputs = finish(llm)
        assert [output.request_id for output in outputs] == ids[1:3]
        assert token_ids(outputs) == token_ids(run(cache_off, prompts[1:3], max_tokens=8))
        assert not llm.abort_request(ids[1])
        assert_idle(llm)

    def test_an_id_that_is_no_text_is_refused(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        request_id = llm.add_request({"prompt_token_ids": random_ids(9)}, greedy(4))
        for wrong in (int(request_id), [request_id], None):  # as a number, as vLLM's LLMEngine has them
            with pytest.raises(ValueError, match=r"request_id is .*; pass one text at a time"):
                llm.abort_request(wrong)  # type: ignore[arg-type]
        assert llm.abort_request(request_id)

    def test_aborting_all_leaves_nothing(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        ids = [llm.add_request(random_ids(11), greedy(8)) for _ in range(5)]
        llm.step()
        assert all(llm.abort_request(request_id) for request_id in ids)
        assert not llm.has_unfinished_requests() and llm.step() == []
        assert_idle(llm)

    def test_a_bad_request_is_refused_and_the_others_run_on(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        llm.add_request(random_ids(11), greedy(8))
        llm.step()
        for prompt, params in (([], None), ([320], None), (random_ids(128), None), ([5], greedy(stop_token_ids=[999]))):
            with pytest.raises(ValueError, match="prompt 0"):
                llm.add_request(prompt, params)
        assert len(finish(llm)) == 1

    def test_generate_and_steps_mix(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(), [random_ids(5, seed) for seed in range(3)]
        queued = llm.add_request(prompts[0], greedy(3))
        outputs = run(llm, prompts[1:], max_tokens=6)  # runs the queued one, too, and keeps its output
        assert token_ids(outputs) == token_ids(run(cache_off, prompts[1:]))
        (output,) = llm.step()
        assert output.request_id == queued and not llm.has_unfinished_requests()


class TestStream:
    def test_outputs_come_as_they_finish_and_know_their_place(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(schedule_policy="fcfs"), [random_ids(5, seed) for seed in range(4)]
        params = [greedy(count) for count in (9, 3, 6, 1)]
        outputs = list(llm.stream(prompts, params))
        assert [output.index for output in outputs] == [3, 1, 2, 0]
        expected = [run(cache_off, [p], s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
        assert token_ids(sorted(outputs, key=lambda output: output.index)) == expected

    @pytest.mark.parametrize("prompt", ["a text", {"prompt": "a text"}])
    def test_one_prompt_is_not_taken_apart(self, prompt: Any, make_llm: MakeLLM) -> None:
        llm = make_llm()
        (output,) = llm.stream(prompt, greedy(4))
        assert output.prompt == "a text"
        assert token_ids([output]) == token_ids(run(llm, ["a text"], max_tokens=4))
        with pytest.raises(ValueError, match="prompt 0 is b'a text'"):
            list(llm.stream(b"a text"))

    def test_only_a_bounded_number_of_requests_exists(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=4, skip_tokenizer_init=True)
        read, most = 0, 0

        def prompts() -> Iterator[list[int]]:
            nonlocal read
            for i in range(400):
                read += 1
                yield random_ids(3 + i % 5, i)

        for done, _ in enumerate(llm.stream(prompts(), greedy(2))):
            most = max(most, read - done)
            if done == 300:
                gc.collect()
                assert sum(type(thing) is Request for thing in gc.get_objects()) <= 4 * 4
        assert done == 399 and read == 400
        assert most <= 4 * 4  # running, waiting and one window of two batches

    def test_an_endless_iterable_can_be_left(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm = make_llm(max_num_seqs=4)

        def endless() -> Iterator[list[int]]:
            while True:
                yield random_ids(5)

        stream = llm.stream(endless(), greedy(4))
        assert token_ids([next(stream), next(stream)]) == 2 * token_ids(run(cache_off, [random_ids(5)], max_tokens=4))
        stream.close()
        assert_idle(llm)

    @pytest.mark.parametrize("place", [0, 1, 7, 8, 23])
    @pytest.mark.parametrize("kind", ["bad prompt", "bad params", "error in the iterable"])
    def test_what_precedes_an_error_is_yielded_first(self, kind: str, place: int, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=4)

        def prompts() -> Iterator[list[int]]:
            for i in range(30):
                if i == place and kind == "error in the iterable":
                    raise OSError("disk gone")
                yield [] if i == place and kind == "bad prompt" else random_ids(4, i)

        params = [SamplingParams(max_tokens=2, stop_token_ids=[999] if i == place else []) for i in range(30)]
        error = OSError if kind == "error in the iterable" else ValueError
        message = "disk gone" if error is OSError else f"prompt {place}"
        outputs = []
        with pytest.raises(error, match=message):
            for output in llm.stream(prompts(), params if kind == "bad params" else greedy(2)):
                outputs.append(output)
        assert sorted(output.index for output in outputs) == list(range(place))
        assert_idle(llm)

    def test_what_another_call_has_finished_is_yielded_before_the_error(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        stream = llm.stream([random_ids(5), random_ids(6), []], [greedy(2), greedy(9), greedy(2)])
        assert next(stream).index == 0
        run(llm, [random_ids(7)], max_tokens=20)  # whose steps finish prompt 1, too
        assert next(stream).index == 1
        with pytest.raises(ValueError, match="prompt 2 is empty"):
            next(stream)

    def test_params_may_be_an_iterable_of_the_same_length(self, make_llm: MakeLLM) -> None:
        llm, prompts = make_llm(), [random_ids(5, seed) for seed in range(3)]
        outputs = sorted(llm.stream(prompts, (greedy(i + 1) for i in range(3))), key=lambda output: output.index)
        assert [len(ids) for ids in token_ids(outputs)] == [1, 2, 3]
        with pytest.raises(ValueError, match="only 2 sampling_params, but more prompts"):
            list(llm.stream(prompts, [greedy()] * 2))
        with pytest.raises(ValueError, match="only 3 prompts, but more sampling_params"):
            list(llm.stream(prompts, [greedy()] * 4))
        with pytest.raises(ValueError, match=r"sampling_params\[1\] is None"):
            list(llm.stream(prompts, [greedy(), None, greedy()]))  # type: ignore[list-item]
        assert list(llm.stream([])) == []

    def test_a_stream_beside_a_full_queue_goes_on(self, make_llm: MakeLLM) -> None:
        # The queued requests fill the waiting queue, and nobody else steps: the stream has to.
        llm = make_llm(max_num_seqs=2)
        for seed in range(9):
            llm.add_request(random_ids(5, seed), greedy(3))
        assert len(list(llm.stream([random_ids(6)], greedy(2)))) == 1
        assert len(finish(llm)) == 9

    def test_the_llm_may_be_used_while_a_stream_is_read(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(max_num_seqs=2), [random_ids(5, seed) for seed in range(6)]
        expected = token_ids(run(cache_off, prompts))

        def chained() -> Iterator[list[int]]:
            for prompt in prompts:
                run(llm, [prompt], max_tokens=1)  # even where the iterable itself calls
                yield prompt

        for output in llm.stream(chained(), greedy()):
            assert output.outputs[0].token_ids == expected[output.index]
            assert token_ids(run(llm, [prompts[output.index]])) == [expected[output.index]]

    def test_each_window_runs_in_prefix_order(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=4, num_kv_blocks=32, max_model_len=32)
        stems = [random_ids(16, 90 + i) for i in range(4)]
        prompts = [stems[i % 4] + random_ids(2, i) for i in range(8)]
        outputs = list(llm.stream(prompts, greedy(1)))
        assert [output.index for output in outputs][0::2] != [0, 2, 4, 6]
        assert sum(count >= 16 for count in cached(outputs)) == 4


def after_call(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int, act: Callable[[], None]
) -> list[None]:
    """From now on the so many-th call of owner.name ends with `act`; the list grows with each call."""
    calls: list[None] = []
    method = getattr(owner, name)

    def observed(*arguments: Any) -> Any:
        calls.append(None)
        result = method(*arguments)
        if len(calls) == number:
            act()
        return result

    monkeypatch.setattr(owner, name, observed)
    return calls


class TestInterruption:
    def test_an_interrupted_generate_leaves_nothing(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(max_num_seqs=2), [random_ids(5, seed) for seed in range(30)]
        observe(llm)
        serve = llm._serve

        def interrupted(call: Any) -> Iterator[RequestOutput]:
            outputs = serve(call)
            try:
                yield next(outputs)
                raise KeyboardInterrupt
            finally:
                outputs.close()  # type: ignore[attr-defined]

        llm._serve = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):  # while most of the requests have not even been submitted
            run(llm, prompts)
        del llm._serve
        assert_idle(llm)
        assert token_ids(run(llm, prompts)) == token_ids(run(cache_off, prompts))

    def test_an_interrupt_inside_a_step_leaves_nothing(self, make_llm: MakeLLM, cache_off: LLM) -> None:
        llm, prompts = make_llm(max_num_seqs=2), [random_ids(5, seed) for seed in range(30)]
        runner = llm.engine.runner
        execute, calls = runner.launch, 0

        def interrupt(batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 8:
                raise KeyboardInterrupt
            return execute(batch)

        runner.launch = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run(llm, prompts)
        assert_idle(llm)
        assert token_ids(run(llm, prompts)) == token_ids(run(cache_off, prompts))

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Scheduler, "_ends"),
            (SequenceTable, "add"),
            (SequenceTable, "remove"),
            (BlockManager, "admit"),
            (BlockManager, "free"),
            (BlockPool, "release"),
            (BlockPool, "unindex"),
            (BlockPool, "put"),
            (FreeBlockQueue, "_insert"),
            (FreeBlockQueue, "pop_left"),
        ],
    )
    def test_an_interrupt_anywhere_on_the_hosts_side_leaves_nothing(
        self,
        owner: type,
        name: str,
        overlap: bool,
        make_llm: MakeLLM,
        cache_off: LLM,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        llm = make_llm(max_num_seqs=2, num_kv_blocks=40, async_scheduling=overlap)
        prompts = [random_ids(5, seed) for seed in range(30)]

        def interrupt() -> None:
            raise KeyboardInterrupt

        after_call(monkeypatch, owner, name, 8, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llm, prompts, max_tokens=12)
        assert_idle(llm)
        assert token_ids(run(llm, prompts, max_tokens=12)) == token_ids(run(cache_off, prompts, max_tokens=12))

    def test_an_interrupt_while_outputs_are_made_is_not_silent_for_others(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm()
        for seed in range(3):
            llm.add_request(random_ids(5, seed), greedy(4))

        def interrupt(*arguments: Any) -> RequestOutput:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("nanoapc.llm.make_output", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(llm, [random_ids(9)], max_tokens=30)
        with pytest.raises(RuntimeError, match="shared with others has failed"):
            llm.step()
        assert not llm.has_unfinished_requests()
        assert_idle(llm)

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Scheduler, "_running_rows"),
            (Scheduler, "_index_filled"),
            (Scheduler, "advance"),
            (Scheduler, "settle"),
            (SequenceTable, "append_blocks"),
            (SequenceTable, "remove"),
            (BlockManager, "grow_each"),
            (BlockManager, "match"),
            (BlockPool, "take"),
            (FreeBlockQueue, "pop_left"),
            (ModelRunner, "launch"),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_a_stream_may_be_collected_in_the_middle_of_a_step(
        self, owner: type, name: str, overlap: bool, make_llm: MakeLLM, cache_off: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm(num_kv_blocks=40, async_scheduling=overlap)
        prompts = [random_ids(5, seed) for seed in range(6)]
        stream = llm.stream([random_ids(20, 100 + i) for i in range(8)], [greedy(1)] + [greedy(30)] * 7)
        next(stream)
        calls = after_call(monkeypatch, owner, name, 3, stream.close)  # type: ignore[attr-defined]
        assert token_ids(run(llm, prompts, max_tokens=12)) == token_ids(run(cache_off, prompts, max_tokens=12))
        assert len(calls) >= 3
        assert_idle(llm)


USES: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: run(llm, [random_ids(5)]),
    "chat": lambda llm: llm.chat(MESSAGES, greedy(), use_tqdm=False),
    "stream": lambda llm: next(llm.stream([random_ids(5)], greedy())),
    "step": lambda llm: llm.step(),
}


class TestReentry:
    """A signal's handler or a callback that comes in the middle of a step uses the LLM whose step it is."""

    PROMPTS = tuple(random_ids(5, seed) for seed in range(6))

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Scheduler, "add"),
            (Scheduler, "advance"),
            (Scheduler, "settle"),
            (BlockManager, "admit"),
            (BlockPool, "take"),
            (ModelRunner, "launch"),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_what_would_run_another_step_is_refused_and_the_step_goes_on(
        self,
        owner: type,
        name: str,
        use: Callable[[LLM], object],
        overlap: bool,
        make_llm: MakeLLM,
        cache_off: LLM,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        llm = make_llm(max_num_seqs=2, num_kv_blocks=40, async_scheduling=overlap)
        expected = token_ids(run(cache_off, self.PROMPTS, max_tokens=12))

        def refused() -> None:
            with pytest.raises(RuntimeError, match=r"a step of this LLM .*is running in this thread; call this after"):
                use(llm)

        with monkeypatch.context() as patch:
            calls = after_call(patch, owner, name, 2, refused)
            assert token_ids(run(llm, self.PROMPTS, max_tokens=12)) == expected
        assert len(calls) >= 2
        assert_idle(llm)
        with monkeypatch.context() as patch:
            after_call(patch, owner, name, 2, lambda: use(llm))  # now nobody catches it
            with pytest.raises(RuntimeError, match="is running in this thread"):
                run(llm, self.PROMPTS, max_tokens=12)
        assert_idle(llm)
        assert token_ids(run(llm, self.PROMPTS, max_tokens=12)) == expected
        use(llm)

    def test_a_stream_whose_turn_it_is_not_is_refused_too(
        self, make_llm: MakeLLM, cache_off: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm()
        stream = llm.stream([random_ids(20), random_ids(21)], [greedy(1), greedy(30)])
        next(stream)

        def refused() -> None:
            with pytest.raises(RuntimeError, match="is running in this thread"):
                next(stream)

        with monkeypatch.context() as patch:
            after_call(patch, ModelRunner, "launch", 2, refused)
            assert token_ids(run(llm, self.PROMPTS, max_tokens=12))
        assert [output.index for output in stream] == [1], "what was refused is there afterwards"
        assert token_ids(run(llm, self.PROMPTS)) == token_ids(run(cache_off, self.PROMPTS))
        assert_idle(llm)

    def test_a_signals_handler_gets_the_refusal(self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        llm, refusals = make_llm(), []

        def handle(*arguments: Any) -> None:
            with pytest.raises(RuntimeError) as error:
                run(llm, [random_ids(5)])
            refusals.append(error)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            expected = token_ids(run(llm, self.PROMPTS))
            after_call(monkeypatch, ModelRunner, "launch", 2, partial(signal.raise_signal, signal.SIGALRM))
            assert token_ids(run(llm, self.PROMPTS)) == expected
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(refusals) == 1

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (ModelRunner, "launch"),
            (Scheduler, "add"),
            (Scheduler, "_prune_rows"),
            (Scheduler, "settle"),
            (BlockManager, "match"),
            (BlockManager, "admit"),
            (BlockManager, "index_blocks"),
            (BlockPool, "take"),
            (FreeBlockQueue, "pop_left"),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_what_runs_no_step_works_at_any_moment_and_tears_nothing(
        self, owner: type, name: str, make_llm: MakeLLM, cache_off: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm(max_num_seqs=3, num_kv_blocks=40)
        queued = [llm.add_request(self.PROMPTS[i], greedy(30)) for i in range(2)]

        def use() -> None:
            assert not llm.reset_prefix_cache()
            llm.metrics()
            llm.explain(self.PROMPTS[0])
            queued.extend(llm.add_request(self.PROMPTS[i], greedy(3)) for i in range(2))
            assert llm.abort_request(queued.pop(0)), "one that waits, is just admitted, or runs"
            assert llm.abort_request(queued.pop())

        expected = token_ids(run(cache_off, self.PROMPTS, max_tokens=12))
        calls = after_call(monkeypatch, owner, name, 1, use)
        assert token_ids(run(llm, self.PROMPTS, max_tokens=12)) == expected
        assert calls
        assert {output.request_id for output in finish(llm)} == set(queued) and len(queued) == 2
        assert_idle(llm)

    def test_a_request_that_is_added_while_others_are_made_has_numbers_of_its_own(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, made = make_llm(), []

        def make(request: Request, *arguments: Any) -> list[Sequence]:
            if not made:
                made.append(request)
                llm.add_request(random_ids(5), greedy(2, n=2))
            sequences = make_sequences(request, *arguments)
            made.extend(sequences)
            return sequences

        monkeypatch.setattr("nanoapc.engine.engine.make_sequences", make)
        llm.add_request(random_ids(6), greedy(2))
        assert len({seq.seq_id for seq in made[1:]}) == 3
        assert {output.request_id for output in finish(llm)} == {"0", "1"}


class TestProgress:
    def test_use_tqdm_may_be_what_makes_the_bars(self, make_llm: MakeLLM, capfd: pytest.CaptureFixture[str]) -> None:
        llm, made = make_llm(max_model_len=512), []

        def make(**options: Any) -> Any:
            made.append(tqdm(**options, file=io.StringIO()))
            return made[-1]

        for use in (lambda: llm.generate(["a", "b"], greedy(), make), lambda: llm.chat([MESSAGES] * 2, greedy(), make)):
            made.clear()
            assert len(use()) == 2
            assert [(bar.desc, bar.n, bar.total) for bar in made] == [("Tokenizing", 2, 2), ("Processed prompts", 2, 2)]
            assert "output" in made[1].postfix
        assert capfd.readouterr().err == ""
        assert len(llm.generate(["a"], greedy(), tqdm)) == 1
        assert "Processed prompts" in capfd.readouterr().err

    @pytest.mark.parametrize("kind", ["none", "closed"])
    def test_without_a_standard_error_there_is_no_bar(
        self, kind: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, closed = make_llm(max_model_len=512), io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", None if kind == "none" else closed)
        assert len(llm.generate(["a", "b"], greedy())) == len(llm.chat([MESSAGES] * 2, greedy())) == 2


class TestSurroundings:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_callers_autocast_does_not_matter(
        self, dtype: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Training loops generate inside it; it would change the products that PyTorch computes."""
        monkeypatch.setattr(engine_module, "select_kernels", lambda *_: ReferenceKernels())
        llm, prompts = make_llm(dtype=dtype), [random_ids(9), random_ids(20)]
        expected = run(llm, prompts, logprobs=1)
        for autocast_dtype in (torch.bfloat16, torch.float16):
            llm.reset_prefix_cache()
            with torch.autocast("cpu", dtype=autocast_dtype):
                found = run(llm, prompts, logprobs=1)
            assert [output.outputs for output in found] == [output.outputs for output in expected]

    def test_pytorchs_default_dtype_does_not_matter(self, make_llm: MakeLLM) -> None:
        params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "logprobs": 2}
        expected = run(make_llm(), [random_ids(9)], **params)
        torch.set_default_dtype(torch.bfloat16)
        try:
            outputs = run(make_llm(), [random_ids(9)], **params)
        finally:
            torch.set_default_dtype(torch.float32)
        assert token_ids(outputs) == token_ids(expected)
        assert outputs[0].outputs[0].logprobs == expected[0].outputs[0].logprobs

    def test_pytorchs_default_device_does_not_matter(self, make_llm: MakeLLM) -> None:
        params = SamplingParams(seed=1, max_tokens=5, top_k=20, min_p=0.01, presence_penalty=0.5, logprobs=2)
        prompts = [random_ids(9)]
        expected = run(make_llm(), prompts, params)
        with torch.device("meta"):
            outputs = run(make_llm(), prompts, params)
        assert token_ids(outputs) == token_ids(expected)

    def test_a_forked_child_is_told_that_it_cannot_use_it(self, model_dir: Path, tmp_path: Path) -> None:
        program = (
            "import os, sys; from nanoapc import LLM, SamplingParams as S\n"
            "llm = LLM(sys.argv[1], max_model_len=64, block_size=4, prefix_cache_file=sys.argv[2])\n"
            "llm.generate([[5] * 9], S(max_tokens=1), use_tqdm=False)\n"
            "if os.fork() == 0:\n"
            "    try: llm.generate([[5] * 9], use_tqdm=False)\n"
            "    except RuntimeError as error: print(error, flush=True)\n"
            "    llm.close(); sys.exit(int(os.path.exists(sys.argv[2])))  # the file is the parent's to write\n"
            "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
        )
        command = [sys.executable, "-c", program, str(model_dir), str(tmp_path / "prefixes")]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        assert "make one in each process, and start processes with multiprocessing's 'spawn' or" in process.stdout
        assert (tmp_path / "prefixes").exists()

    def test_a_child_that_was_forked_in_the_middle_of_a_step_hangs_nowhere(self, model_dir: Path) -> None:
        program = (
            "import os, signal, sys, threading; from nanoapc import LLM\n"
            "llm = LLM(sys.argv[1], max_model_len=64, block_size=4)\n"
            "in_step, done = threading.Event(), threading.Event()\n"
            "def launch(batch): in_step.set(); done.wait(); raise RuntimeError('enough')\n"
            "llm.engine.runner.launch = launch\n"
            "thread = threading.Thread(target=llm.generate, args=([[5] * 9],), daemon=True); thread.start()\n"
            "in_step.wait()\n"
            "if os.fork() == 0:\n"
            "    signal.alarm(20)\n"
            "    for use in (llm.metrics, llm.step, lambda: llm.add_request([5])):\n"
            "        try: use()\n"
            "        except RuntimeError as error: print(error, flush=True)\n"
            "    llm.close(); sys.exit()\n"
            "code = os.waitstatus_to_exitcode(os.wait()[1]); done.set(); thread.join(); sys.exit(code)"
        )
        command = [sys.executable, "-c", program, str(model_dir)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("make one in each process") == 3


class TestChat:
    def test_one_conversation_or_many(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_model_len=512)
        conversations = [MESSAGES, [{"role": "system", "content": "The system speaks first."}, *MESSAGES]]
        one = llm.chat(conversations[0], greedy(), use_tqdm=False)
        many = llm.chat(conversations, [greedy(), greedy(4)], use_tqdm=False)
        assert len(one) == 1 and token_ids(one) == token_ids(many[:1])
        assert [len(ids) for ids in token_ids(many)] == [6, 4]
        for conversation, output in zip(conversations, many, strict=True):
            text = tiny_tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            assert tiny_tokenizer().decode(output.prompt_token_ids) == text
        assert llm.chat([], use_tqdm=False) == []

    def test_a_second_turn_finds_the_first_in_the_cache(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_model_len=512)
        first = llm.chat(MESSAGES, greedy(), use_tqdm=False)[0]
        more = [*MESSAGES, {"role": "assistant", "content": first.outputs[0].text}, *MESSAGES]
        second = llm.chat(more, greedy(), use_tqdm=False)[0]
        assert first.num_cached_tokens == 0 and second.num_cached_tokens >= len(first.prompt_token_ids)

    @pytest.mark.parametrize("num_calls", [0, 1, 2])
    def test_arrays_are_lists_as_pandas_reads_them_from_parquet(self, num_calls: int, make_llm: MakeLLM) -> None:
        def array(items: list[Any]) -> Any:
            held = np.empty(len(items), object)
            held[:] = items
            return held

        calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"[:num_calls]]
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

        def conversation(kind: Any) -> Any:
            answer = {"role": "assistant", "content": kind(parts), "tool_calls": kind(calls)}
            call = [{**answer, "content": None}] if calls else []
            return kind([{"role": "user", "content": kind(parts)}, *call, answer, *MESSAGES])

        llm = make_llm(max_model_len=512)
        template = "{% for m in messages %}{{ m.content }}|{{ m.tool_calls | length }}|{% endfor %}"
        for many in (conversation, lambda kind: kind([conversation(kind)] * 2)):
            prompts = [
                [output.prompt for output in llm.chat(many(kind), greedy(), use_tqdm=False, chat_template=template)]
                for kind in (list, array)
            ]
            expected = f"a\nb|0|{f'|{num_calls}|' if calls else ''}a\nb|{num_calls}|"
            assert prompts[0] == prompts[1] and all(prompt.startswith(expected) for prompt in prompts[0])

    def test_options_of_the_template_must_have_names(self, make_llm: MakeLLM) -> None:
        for given in ('{"enable_thinking": false}', ["enable_thinking"]):
            with pytest.raises(ValueError, match=r"chat_template_kwargs=.*enable_thinking.*must be a dict"):
                make_llm().chat(MESSAGES, greedy(), use_tqdm=False, chat_template_kwargs=given)  # type: ignore[arg-type]

    def test_options_reach_the_template(self, make_llm: MakeLLM) -> None:
        llm, decode = make_llm(max_model_len=512), tiny_tokenizer().decode
        template = "{{ messages[0]['content'] }}|{{ tools | length }}|{{ style }}|{{ add_generation_prompt }}"
        output = llm.chat(
            MESSAGES,
            greedy(),
            use_tqdm=False,
            chat_template=template,
            add_generation_prompt=False,
            tools=[{"type": "function", "function": {"name": "f"}}],
            chat_template_kwargs={"style": "brief"},
        )[0]
        assert decode(output.prompt_token_ids) == f"{MESSAGES[0]['content']}|1|brief|False"
        open_end = [*MESSAGES, {"role": "assistant", "content": "The quick"}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        output = llm.chat(open_end, greedy(), use_tqdm=False, **options)[0]
        assert decode(output.prompt_token_ids).endswith("assistant\nThe quick")

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hello", "conversation 0 is 'hello'; it must be a non-empty list of messages"),
            (None, "conversation 0 is None; it must be"),
            (MESSAGES[0], "messages is one message, {'role': .*}; put it in a list"),
            ([MESSAGES, []], r"conversation 1 is \[\]"),
            ([MESSAGES, ["hello"]], "message 0 of conversation 1 is 'hello'; it must be a dict"),
            ([{"content": "no role"}], "message 0 of conversation 0"),
            ([*MESSAGES, {"role": 5, "content": "x"}], "message 1 of conversation 0"),
            ([*MESSAGES, {"role": "user"}], "message 1 of conversation 0 has no content; give it a text"),
            ([MESSAGES, [{"role": "system", "content": None}]], "message 0 of conversation 1 has no content"),
            ([{"role": "tool", "tool_calls": [{}]}], "message 0 of conversation 0 has no content"),
            ([*MESSAGES, {"role": "assistant", "tool_calls": []}], "message 1 of conversation 0 has no content"),
            ([{"role": "user", "content": ["x"]}], "has a content part of type 'str'; only text is supported"),
        ],
    )
    def test_bad_conversations_are_named(self, messages: Any, message: str, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=message):
            make_llm().chat(messages, greedy(), use_tqdm=False)

    @pytest.mark.parametrize("template", ["template_chatml.jinja", Path("template.jinja"), "", 5])
    def test_the_name_of_a_file_is_no_template(self, template: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=r"chat_template=.* is no template; if it is a file, pass what it holds"):
            make_llm().chat(MESSAGES, greedy(), use_tqdm=False, chat_template=template)

    def test_a_template_has_to_show_the_tools(self, make_llm: MakeLLM) -> None:
        llm, tools, template = (
            make_llm(),
            [{"type": "function", "function": {"name": "f"}}],
            "{{ messages[0].content }}",
        )
        with pytest.raises(ValueError, match="the chat template shows no tools, but conversation 0 has some"):
            llm.chat(MESSAGES, greedy(), use_tqdm=False, chat_template=template, tools=tools)
        for given in (None, []):
            assert llm.chat(MESSAGES, greedy(), use_tqdm=False, chat_template=template, tools=given)
        llm.get_tokenizer().chat_template = {"default": template, "by name": "{{ tools }}"}
        with pytest.raises(ValueError, match="the chat template shows no tools"):
            llm.chat(MESSAGES, greedy(), use_tqdm=False, tools=tools)
        assert llm.chat(MESSAGES, greedy(), use_tqdm=False, chat_template="by name", tools=tools)

    def test_an_empty_list_of_tools_is_the_same_as_none(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        llm.get_tokenizer().chat_template = {"default": "{{ tools is none }}", "tool_use": "these tools: {{ tools }}"}
        for given in (None, []):
            assert llm.chat(MESSAGES, greedy(), use_tqdm=False, tools=given)[0].prompt == "True"

    def test_what_the_template_refuses_is_an_error(self, make_llm: MakeLLM) -> None:
        template = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
        with pytest.raises(ValueError, match="chat template does not take conversation 1: roles must alternate"):
            make_llm().chat([MESSAGES, MESSAGES * 2], greedy(), use_tqdm=False, chat_template=template)
        with pytest.raises(ValueError, match=r"chat template does not take conversation 0"):
            make_llm().chat(MESSAGES, greedy(), use_tqdm=False, continue_final_message=True)


class TestOutputs:
    def test_fields_belong_together(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        params = SamplingParams(n=3, seed=1, max_tokens=7, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        (output,) = llm.generate("The quick brown fox", params, use_tqdm=False)
        assert output.prompt == "The quick brown fox" and output.finished and output.index == 0
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        for completion in output.outputs:
            assert len(completion.token_ids) == 7 and completion.finish_reason == "length"
            assert completion.text == tiny_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
            assert completion.logprobs is not None and len(completion.logprobs) == 7
            chosen = [entry[i] for entry, i in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))
            assert [x.decoded_token for x in chosen] == [tiny_tokenizer().decode([i]) for i in completion.token_ids]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None

    def test_the_text_of_a_token_is_what_it_adds_to_a_text(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path, vocab_size=512, tokenizer=False)
        byte_fallback().save_pretrained(tmp_path)
        llm = make_llm(tmp_path)
        words = [i for piece, i in byte_fallback().get_vocab().items() if piece.startswith("\u2581") and len(piece) > 2]
        (output,) = run(llm, ["It"], greedy(8, logprobs=3, allowed_token_ids=words, detokenize=True))
        completion = output.outputs[0]
        chosen = zip(completion.logprobs or (), completion.token_ids, strict=True)
        assert "".join(str(entries[i].decoded_token) for entries, i in chosen) == completion.text
        assert completion.text.startswith(" ")

    def test_a_request_that_wants_many_log_probs_costs_its_neighbours_none(self, make_llm: MakeLLM) -> None:
        llm, kept = make_llm(), []
        wait = InFlight.wait

        def watch(self: InFlight) -> np.ndarray:
            token_ids = wait(self)
            kept.extend((seq.params.logprobs, len(entry[2])) for seq in self.batch.sampled for entry in seq.logprobs)
            return token_ids

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InFlight, "wait", watch)
            run(llm, [random_ids(9)] * 3, [greedy(logprobs=1), greedy(logprobs=300), greedy(logprobs=0)])
        assert {wanted for wanted, _ in kept} == {0, 1, 300} and all(wanted == found for wanted, found in kept)

    def test_the_prompt_is_scored_once_for_n_outputs(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(), random_ids(40)
        expected = run(make_llm(), [prompt], greedy(3, prompt_logprobs=2))[0].prompt_logprobs
        (output,) = run(llm, [prompt], greedy(3, prompt_logprobs=2, n=4))
        assert output.prompt_logprobs == expected and len(output.outputs) == 4
        metrics = llm.metrics()
        assert metrics.computed_prompt_tokens < 2 * len(prompt) and metrics.queried_tokens == 0

    def test_requests_with_the_same_parameters_share_what_these_change(self, make_llm: MakeLLM) -> None:
        llm, seen = make_llm(), list[Sequence]()
        add = llm.engine.scheduler.add

        def watch(sequences: list[Sequence]) -> None:
            seen.extend(sequences)
            add(sequences)

        llm.engine.scheduler.add = watch  # type: ignore[method-assign]
        params = greedy(allowed_token_ids=range(300), logit_bias={5: 1.0}, repetition_penalty=1.2)
        outputs = run(llm, [random_ids(9, 1), random_ids(9, 2)], params)
        assert len({id(seq.sampler_state.allowed_ids) for seq in seen}) == 1 and len(seen) == 2
        assert token_ids(outputs) == [token_ids(run(make_llm(), [random_ids(9, i)], params))[0] for i in (1, 2)]

    def test_each_request_is_penalised_for_its_own_prompt(self, make_llm: MakeLLM) -> None:
        params = greedy(1, allowed_token_ids=[5, 6], logit_bias={5: 50, 6: 50}, repetition_penalty=10)
        assert token_ids(run(make_llm(), [[5] * 9, [6] * 9], params)) == [[6], [5]]

    def test_log_probs_are_those_of_transformers(self, make_llm: MakeLLM, hf_model: PreTrainedModel) -> None:
        prompt = random_ids(11)
        output = run(make_llm(), [prompt], greedy(5, logprobs=3, prompt_logprobs=3, repetition_penalty=1.5))[0]
        ids = prompt + output.outputs[0].token_ids
        with torch.inference_mode():
            expected = hf_model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for i, entry in enumerate(entries):
            assert entry is not None and ids[i + 1] in entry
            top = expected[i].topk(3).indices.tolist()
            assert list(entry) == [ids[i + 1], *(token_id for token_id in top if token_id != ids[i + 1])]
            for token_id, logprob in entry.items():
                assert logprob.logprob == pytest.approx(expected[i, token_id].item(), abs=1e-4)
                assert logprob.rank == int((expected[i] > expected[i, token_id]).sum()) + 1

    def test_times_are_in_order(self, make_llm: MakeLLM) -> None:
        llm, before = make_llm(max_num_seqs=2, schedule_policy="fcfs"), time.perf_counter()
        outputs = run(llm, [random_ids(9, seed) for seed in range(6)], max_tokens=4)
        times = [output.metrics for output in outputs if output.metrics is not None]
        assert len(times) == 6
        for first, second, third in zip(times[0::2], times[2::2], times[4::2], strict=False):
            assert before < first.arrival_time < first.first_token_time < first.finished_time
            # All arrived at once, and two run at a time.
            assert third.arrival_time < first.first_token_time
            assert first.finished_time < second.first_token_time < second.finished_time < third.first_token_time

    def test_stats_say_what_the_cache_did(self, make_llm: MakeLLM) -> None:
        llm, prompt = make_llm(num_kv_blocks=32), random_ids(13)
        assert llm.metrics().hit_rate == 0
        run(llm, [prompt], max_tokens=4)
        run(llm, [[*prompt[:10], 9, 9]], max_tokens=1)
        stats = llm.metrics()
        assert (stats.queried_tokens, stats.hit_tokens, stats.copied_tokens) == (25, 10, 2)
        assert stats.hit_rate == 10 / 25
        assert (stats.computed_tokens, stats.recomputed_tokens) == (13 + 3 + 2, 0)
        assert (stats.cached_blocks, stats.cached_prefixes) == (5, 2)
        assert stats.evictions == 0
        run(llm, [random_ids(100, 1)], max_tokens=1)
        run(llm, [random_ids(100, 2)], max_tokens=1)
        stats = llm.metrics()
        assert stats.evictions > 20 and stats.cached_blocks <= 32
