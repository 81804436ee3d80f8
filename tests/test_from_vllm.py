"""What users of vLLM write runs here: its names, its defaults, the shapes of its outputs (docs/from_vllm.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeLLM
from llm_helpers import greedy, run, token_ids
from tiny_models import make_tiny_model, random_ids

from nanoapc import EngineConfig, SamplingParams, TextPrompt, TokensPrompt

HARNESS: dict[str, Any] = {
    "revision": None,
    "tokenizer_mode": "auto",
    "tensor_parallel_size": 1,
    "max_num_seqs": None,
    "swap_space": 4,
    "quantization": None,
    "enable_lora": False,
    "max_lora_rank": 16,
}
"""What evaluation harnesses always pass."""


class TestArguments:
    def test_those_that_change_nothing_pass(self) -> None:
        config = EngineConfig.from_arguments("m", **HARNESS, disable_log_stats=False, cpu_offload_gb=0.0, seed=None)
        assert config == EngineConfig("m")

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), (None, "auto"), ("auto", "auto")],
    )
    def test_spellings_of_dtypes(self, dtype: Any, expected: str) -> None:
        assert EngineConfig.from_arguments("m", dtype=dtype).dtype == expected

    @pytest.mark.parametrize("name", ["tensor_parallel_sizes", "quantisation", "foo"])
    def test_none_makes_no_name_known(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"unknown argument '{name}'"):
            EngineConfig.from_arguments("m", **{name: None})


class TestSamplingParams:
    def test_an_assignment_concerns_later_requests_only(self, make_llm: MakeLLM) -> None:
        llm, params = make_llm(), greedy(6)
        request_id = llm.add_request(random_ids(5), params)
        params.max_tokens = 2
        other = llm.add_request(random_ids(5), params)
        finished = {}
        while llm.has_unfinished_requests():
            finished |= {output.request_id: len(output.outputs[0].token_ids) for output in llm.step()}
        assert finished == {request_id: 6, other: 2}

    @pytest.mark.parametrize("each", [False, True])
    def test_a_stream_keeps_what_it_was_given(self, each: bool, make_llm: MakeLLM) -> None:
        params, lengths = greedy(4), []
        for output in make_llm().stream([random_ids(5, i) for i in range(8)], [params] * 8 if each else params):
            params.max_tokens = 9
            lengths.append(len(output.outputs[0].token_ids))
        assert lengths == [4] * 8


class TestSuggestedSampling:
    def test_requests_without_params_get_the_models(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path)
        suggested = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 5, "top_p": None, "do_sample": True}
        (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
        llm = make_llm(tmp_path)
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.5, top_k=3, max_tokens=5)
        params.temperature, params.ignore_eos = 0, True  # a copy: nobody else gets it
        greedily = token_ids(run(llm, [random_ids(9)], params))
        assert greedily == token_ids(run(llm, [random_ids(9)], greedy(5)))
        prompts = [random_ids(9, i) for i in range(20)]
        outputs = [*llm.generate(prompts, use_tqdm=False), *llm.stream(prompts)]
        assert max(map(len, token_ids(outputs))) == 5
        assert len(run(llm, [random_ids(9)], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16

    def test_a_bad_suggestion_concerns_only_those_who_rely_on_it(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
        llm = make_llm(tmp_path)
        run(llm, [random_ids(5)])
        with pytest.raises(ValueError, match=r"generation_config\.json.*temperature=-1 is not possible"):
            llm.generate([random_ids(5)], use_tqdm=False)


class TestPromptsAndOutputs:
    def test_prompts_may_be_its_typed_dicts(self, make_llm: MakeLLM) -> None:
        ids = random_ids(5)
        outputs = run(make_llm(), [TokensPrompt(prompt_token_ids=ids, cache_salt="a"), TextPrompt(prompt="the fox")])
        assert [outputs[0].prompt_token_ids, outputs[1].prompt] == [ids, "the fox"]
        assert outputs[0].outputs[0].finished()

    def test_a_chats_output_has_the_rendered_prompt(self, make_llm: MakeLLM) -> None:
        llm, message = make_llm(), {"role": "user", "content": "the fox"}
        (output,) = llm.chat([message], greedy(2), use_tqdm=False)
        template = llm.get_tokenizer().apply_chat_template
        assert output.prompt == template([message], tokenize=False, add_generation_prompt=True)
        with pytest.raises(ValueError, match="LoRA adapters are not supported"):
            llm.chat([message], greedy(2), False, "adapter")  # type: ignore[arg-type]

    @pytest.mark.parametrize("k", [0, 1, 3])
    def test_the_first_logprob_is_that_of_the_token_itself(self, k: int, make_llm: MakeLLM) -> None:
        """Many scripts take `list(entry.values())[0]`."""
        params = SamplingParams(n=4, temperature=2.0, seed=3, logprobs=k, prompt_logprobs=k)
        (output,) = run(make_llm(), [random_ids(9)], params)
        for completion in output.outputs:
            assert [next(iter(entry)) for entry in completion.logprobs or ()] == completion.token_ids
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert [next(iter(entry or {})) for entry in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
