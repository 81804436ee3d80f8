"""What users of vLLM write runs here: its names, its defaults, the shapes of its outputs (docs/from_vllm.md)."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MakeLLM
from llm_helpers import greedy, run, token_ids
from tiny_models import make_tiny_model, random_ids

from nanoapc import EngineConfig, SamplingParams, TextPrompt, TokensPrompt
from nanoapc.vllm_arguments import NO_EFFECT, UNSUPPORTED

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


NONE = """
    tokenizer allowed_media_domains quantization revision tokenizer_revision chat_template offload_params hf_token
    hf_overrides mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config
    kv_cache_memory_bytes compilation_config quantization_config logits_processors spec_method spec_model spec_tokens
    """
OF_LLM: dict[str, Any] = {
    **dict.fromkeys(("runner", "convert", "tokenizer_mode", "dtype"), "auto"),
    **dict.fromkeys(("skip_tokenizer_init", "trust_remote_code", "enforce_eager", "disable_custom_all_reduce"), False),
    **dict.fromkeys(("enable_return_routed_experts", "return_sampling_mask"), False),
    **dict.fromkeys(("seed", "cpu_offload_gb", "offload_group_size"), 0),
    **dict.fromkeys(("tensor_parallel_size", "offload_num_in_group", "offload_prefetch_step"), 1),
    **dict.fromkeys(NONE.split()),
    "allowed_local_media_path": "",
    "gpu_memory_utilization": 0.92,
}
"""The parameters of `LLM.__init__` in vLLM 0.32, with their defaults."""
OF_ENGINE_ARGS: dict[str, Any] = {
    "language_model_only": False,
    "kv_offloading_size": None,
    "decode_context_parallel_size": 1,
    "data_parallel_size_local": None,
    "nnodes": 1,
    "master_addr": "127.0.0.1",
    "cpu_offload_params": set(),
    "model_class_overrides": {},
    "enable_mm_embeds": False,
    "block_size": None,
    "prefix_caching_hash_algo": "sha256",
}
"""Some of the fields of its `EngineArgs`, one of each kind."""
DEFAULTS: dict[str, Any] = {
    "runner": "auto",
    "convert": "none",
    "task": "generate",
    "config_format": "auto",
    "hf_overrides": {},
    "limit_mm_per_prompt": {},
    "allowed_local_media_path": "",
    "override_generation_config": {},
    "rope_scaling": {},
    "logits_processors": [],
    "hf_token": None,
    "download_dir": None,
    "calculate_kv_scales": False,
    "compilation_config": None,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": None,
    "scheduling_policy": "fcfs",
    "data_parallel_size": 1,
    "worker_cls": "auto",
}
"""Each kind of value that asks for nothing."""
HOW_VLLM_RUNS: dict[str, Any] = {
    "distributed_executor_backend": "mp",
    "served_model_name": "x",
    "compilation_config": 3,
    "attention_backend": "FLASH_ATTN",
    "use_v2_block_manager": True,
    "num_scheduler_steps": 8,
    "disable_async_output_proc": True,
    "max_num_partial_prefills": 2,
    "mm_processor_kwargs": {"a": 1},
    "disable_sliding_window": True,
}


class TestArguments:
    @pytest.mark.parametrize("arguments", [HARNESS, DEFAULTS, HOW_VLLM_RUNS, dict.fromkeys({**HARNESS, **DEFAULTS})])
    def test_those_that_change_nothing_pass(self, arguments: dict[str, Any]) -> None:
        config = EngineConfig.from_arguments("m", **arguments, disable_log_stats=False, cpu_offload_gb=0.0, seed=None)
        assert config == EngineConfig("m")

    def test_the_defaults_of_vllm_pass(self) -> None:
        config = EngineConfig.from_arguments("m", **OF_LLM, **OF_ENGINE_ARGS)
        assert config == EngineConfig("m", gpu_memory_utilization=0.92, prefix_caching_hash_algo="sha256")

    @pytest.mark.parametrize(
        ("name", "value", "remedy"),
        [
            ("tensor_parallel_size", 2, "an LLM runs on one device"),
            ("num_gpu_blocks_override", 512, "num_kv_blocks=... says the same"),
            ("scheduling_policy", "priority", "schedule_policy is 'prefix' or 'fcfs'"),
            ("override_generation_config", {"temperature": 0}, "SamplingParams"),
            ("rope_scaling", {"factor": 2}, "change config.json in a copy"),
            ("runner", "pooling", "a model generates text"),
            ("calculate_kv_scales", True, "the dtype of the weights"),
            ("hf_token", "hf_x", "HF_TOKEN"),
            ("chat_template", "{{ x }}", "pass chat_template to chat()"),
            ("quantization_config", {"bits": 8}, "pass an unquantised checkpoint"),
            ("spec_tokens", 3, "the outputs are the same"),
            ("kv_offloading_size", 4.0, "prefix_cache_file=... keeps"),
            ("decode_context_parallel_size", 2, "an LLM runs on one device"),
            ("offload_group_size", 8, "the weights must fit the device"),
        ],
    )
    def test_those_that_would_be_missed_are_refused_with_a_remedy(self, name: str, value: Any, remedy: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not supported (only ") + f".*{remedy}"):
            EngineConfig.from_arguments("m", **{name: value})

    def test_values_that_are_neither_true_nor_false_are_refused_all_the_same(self) -> None:
        for name in ("logits_processors", "hf_overrides"):
            with pytest.raises(ValueError, match=f"{name}=array.* is not supported"):
                EngineConfig.from_arguments("m", **{name: np.zeros(3)})

    def test_no_argument_is_known_twice(self) -> None:
        own = {field.name for field in dataclasses.fields(EngineConfig)}
        assert not own & (NO_EFFECT | UNSUPPORTED.keys()) and not NO_EFFECT & UNSUPPORTED.keys()

    @pytest.mark.parametrize(("load_format", "expected"), [("safetensors", "auto"), ("dummy", "dummy"), (None, "auto")])
    def test_load_formats(self, load_format: Any, expected: str) -> None:
        assert EngineConfig.from_arguments("m", load_format=load_format).load_format == expected

    @pytest.mark.parametrize("value", [2**16 + 1, 10**9])
    def test_more_sequences_at_once_than_any_step_takes_are_refused(self, value: int) -> None:
        with pytest.raises(ValueError, match=f"max_num_seqs must be at most 65536, not {value}; lower it"):
            EngineConfig.from_arguments("m", max_num_seqs=value)
        assert EngineConfig("m", max_num_seqs=2**16).max_num_seqs == 2**16

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

    @pytest.mark.parametrize(("token_id", "reason"), [(2, None), (5, 5)])
    def test_of_the_ids_that_end_a_text_the_tokenizers_is_no_stop_reason(
        self, token_id: int, reason: int | None, tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        make_tiny_model(tmp_path, eos_token_id=[2, 5])
        llm = make_llm(tmp_path)
        assert llm.get_tokenizer().eos_token_id == 2
        params = SamplingParams(temperature=0, allowed_token_ids=[token_id])
        (completion,) = run(llm, [random_ids(9)], params)[0].outputs
        assert completion.token_ids == [token_id]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)

    def test_all_that_vllm_takes_from_the_model_is_taken(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path)
        taken: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
        taken |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
        (tmp_path / "generation_config.json").write_text(json.dumps({**taken, "max_new_tokens": 5, "max_length": 9}))
        assert make_llm(tmp_path).get_default_sampling_params() == SamplingParams(**taken, max_tokens=5)

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


ASKED: dict[str, Any] = {"role": "user", "content": "q"}


class TestToolCalls:
    """Histories as servers return them."""

    @pytest.mark.parametrize("message", [{}, {"content": None}, {"content": []}])
    def test_who_only_calls_has_said_nothing(self, message: dict[str, Any], make_llm: MakeLLM) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history = [ASKED, {"role": "assistant", **message, "tool_calls": [call]}]
        template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
        (output,) = make_llm().chat(history, greedy(1), use_tqdm=False, chat_template=template)
        assert output.prompt == "user:q;assistant:;"

    @pytest.mark.parametrize("calls", [None, []])
    @pytest.mark.parametrize("role", ["assistant", "user", "tool"])
    def test_no_calls_are_as_if_there_were_no_key(self, role: str, calls: Any, make_llm: MakeLLM) -> None:
        history = [ASKED, {"role": role, "content": "a", "tool_calls": calls}]
        template = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else m.content }};{% endfor %}"
        (output,) = make_llm().chat(history, greedy(1), use_tqdm=False, chat_template=template)
        assert output.prompt == "q;a;"
        assert history[1]["tool_calls"] == calls  # the caller's is as it was

    def test_a_key_without_a_value_reaches_no_template(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In rows of a table each message has the keys of all others (not every transformers 5 drops them)."""
        llm, seen = make_llm(), []
        template = llm.get_tokenizer().apply_chat_template
        monkeypatch.setattr(
            llm.get_tokenizer(), "apply_chat_template", lambda m, **options: seen.append(m) or template(m, **options)
        )
        llm.chat([{**ASKED, "name": None, "tool_call_id": None}], greedy(1), use_tqdm=False)
        assert seen == [[ASKED]]

    @pytest.mark.parametrize(
        ("arguments", "shown"),
        [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), *((x, "{}") for x in ("", None, "{x", "[1]", "5"))],
    )
    def test_arguments_are_an_object(self, arguments: Any, shown: str, make_llm: MakeLLM) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
        template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
        (output,) = make_llm().chat(history, greedy(1), use_tqdm=False, chat_template=template)
        assert output.prompt == shown
