"""Each supported architecture gives transformers' logits; a model that would not is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MakeLLM
from llm_helpers import hf_greedy, run, token_ids
from safetensors.torch import load_file, save_file
from test_rotary import ROPES, old_spelling
from tiny_models import FAMILIES, edit_json, forward_logits, hf_logits, load_tiny, make_tiny_model, random_ids

from nanoapc.models.config import ModelConfig

LLAMA3 = ROPES["llama3"]
YARN = ROPES["yarn"]
LINEAR = ROPES["linear"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, head_dim 32": ("llama", {"head_dim": 32}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral, tied, head_dim 8": ("mistral", {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn rope": ("qwen2", {"rope_parameters": YARN}),
    "qwen2, unused window": ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, head_dim 32": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, yarn rope": ("qwen3", {"rope_parameters": YARN}),
}


KEYS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "silu",
    "eos_token_id": 7,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 1,
}
"""What a config.json may hold; no value is a default of transformers, as far as a model with another runs here."""


def write_config(directory: Path, family: str, remove: str = "", **changes: Any) -> None:
    raw = {"model_type": family, **KEYS, **changes}
    (directory / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != remove}))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each family."""
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in directories.items():
        make_tiny_model(directory, family, tokenizer=False)
    return directories


def copy_config(source: Path, directory: Path, **changes: Any) -> Path:
    """A directory with a changed copy of config.json and no weights; None removes nothing, it stores null."""
    (directory / "config.json").write_text((source / "config.json").read_text())
    edit_json(directory / "config.json", **changes)
    return directory


class TestLogits:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_prefill_chunks_and_decode_equal_transformers(self, name: str, tmp_path: Path) -> None:
        family, config = VARIANTS[name]
        hf_model = make_tiny_model(tmp_path, family, tokenizer=False, **config)
        model, ids = load_tiny(tmp_path), random_ids(45)
        expected = hf_logits(hf_model, ids)
        assert expected.std() > 0.5  # the comparison is not one of zeros
        for chunks in ([45], [1, 16, 7, 21], [33] + 12 * [1]):
            torch.testing.assert_close(forward_logits(model, ids, chunks), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["llama, linear rope", "llama, llama3 rope", "qwen3, yarn rope", "qwen3"])
    def test_long_prompts_equal_transformers_in_both_spellings(self, name: str, tmp_path: Path) -> None:
        family, config = VARIANTS[name]
        hf_model = make_tiny_model(tmp_path, family, tokenizer=False, **config)
        ids = random_ids(400)
        expected = hf_logits(hf_model, ids)
        torch.testing.assert_close(forward_logits(load_tiny(tmp_path), ids), expected, rtol=1e-4, atol=1e-4)

        path = tmp_path / "config.json"
        path.write_text(json.dumps(old_spelling(json.loads(path.read_text()))))
        torch.testing.assert_close(forward_logits(load_tiny(tmp_path), ids), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64])
    def test_block_size_does_not_change_logits(self, block_size: int, tmp_path: Path) -> None:
        hf_model = make_tiny_model(tmp_path, tokenizer=False)
        ids = random_ids(40)
        logits = forward_logits(load_tiny(tmp_path), ids, [29, 11], block_size)
        torch.testing.assert_close(logits, hf_logits(hf_model, ids), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_bfloat16_stays_as_close_to_float32_as_transformers_bfloat16(self, family: str, tmp_path: Path) -> None:
        hf_model = make_tiny_model(tmp_path, family, dtype=torch.bfloat16, tokenizer=False)
        ids = random_ids(40)
        low = hf_logits(hf_model, ids)
        exact = hf_logits(hf_model.float(), ids)
        logits = forward_logits(load_tiny(tmp_path, dtype="bfloat16"), ids, [30, 10])
        assert logits.dtype == torch.bfloat16
        assert (logits - exact).abs().mean() < 1.2 * (low - exact).abs().mean()

    def test_a_missing_or_null_head_dim_is_hidden_size_by_heads(self, tmp_path: Path) -> None:
        hf_model = make_tiny_model(tmp_path, "llama", tokenizer=False)
        expected, path = hf_logits(hf_model, random_ids(9)), tmp_path / "config.json"
        edit_json(path, head_dim=None)
        torch.testing.assert_close(forward_logits(load_tiny(tmp_path), random_ids(9)), expected)
        edit_json(path, remove=("head_dim",))
        torch.testing.assert_close(forward_logits(load_tiny(tmp_path), random_ids(9)), expected)

    def test_qwen3_heads_are_128_wide_where_config_json_is_silent(self, tmp_path: Path) -> None:
        hf_model = make_tiny_model(tmp_path, "qwen3", head_dim=128, tokenizer=False)
        edit_json(tmp_path / "config.json", remove=("head_dim",))
        logits = forward_logits(load_tiny(tmp_path), random_ids(9))
        torch.testing.assert_close(logits, hf_logits(hf_model, random_ids(9)), rtol=1e-4, atol=1e-4)


class TestConfig:
    def test_architecture_follows_from_model_type_where_none_is_named(
        self, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        directory = copy_config(shapes["qwen2"], tmp_path, architectures=None)
        assert ModelConfig.from_directory(directory).architecture == "Qwen2ForCausalLM"

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_missing_key_has_the_value_that_transformers_takes(self, family: str, key: str, tmp_path: Path) -> None:
        write_config(tmp_path, family, remove=key)
        hf = transformers.AutoConfig.from_pretrained(tmp_path)
        if getattr(hf, "sliding_window", None):
            with pytest.raises(ValueError, match=r"config\.json.*sliding_window"):
                ModelConfig.from_directory(tmp_path, "float16")
            return
        config = ModelConfig.from_directory(tmp_path, "float16")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
            assert getattr(config, name) == getattr(hf, name), name
        assert config.tie_word_embeddings == hf.tie_word_embeddings
        assert config.num_layers == hf.num_hidden_layers
        assert (config.num_heads, config.num_kv_heads) == (hf.num_attention_heads, hf.num_key_value_heads)
        assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
        assert config.rope["rope_theta"] == hf.rope_parameters["rope_theta"]
        assert config.eos_token_ids == (() if hf.eos_token_id is None else (hf.eos_token_id,))
        assert config.output_bias == (family in ("llama", "qwen3") and hf.attention_bias)
        assert config.mlp_bias == (family == "llama" and hf.mlp_bias)

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_key_that_is_null_counts_as_missing_unless_null_says_something(
        self, family: str, key: str, tmp_path: Path
    ) -> None:
        write_config(tmp_path, family, **{key: None})
        found = ModelConfig.from_directory(tmp_path, "float16")
        if key in (
            says := {"head_dim": 512 // 64, "num_key_value_heads": 64, "eos_token_id": [], "sliding_window": None}
        ):
            write_config(tmp_path, family, **{key: says[key]})
        else:
            write_config(tmp_path, family, remove=key)
        assert found == ModelConfig.from_directory(tmp_path, "float16")

    @pytest.mark.parametrize(("key", "other"), [("dtype", "torch_dtype"), ("torch_dtype", "dtype")])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_dtype_is_read_in_both_spellings(
        self, key: str, other: str, dtype: torch.dtype, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        directory = copy_config(shapes["llama"], tmp_path, remove=(other,), **{key: name})
        assert ModelConfig.from_directory(directory).dtype == dtype

    def test_without_a_dtype_key_the_dtype_is_that_of_the_tensors(self, tmp_path: Path) -> None:
        make_tiny_model(tmp_path, dtype=torch.float16, tokenizer=False)
        edit_json(tmp_path / "config.json", remove=("dtype", "torch_dtype"))
        assert ModelConfig.from_directory(tmp_path).dtype == torch.float16
        edit_json(tmp_path / "config.json", dtype="auto")
        assert ModelConfig.from_directory(tmp_path).dtype == torch.float16

    @pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("float", torch.float32)])
    def test_short_names_of_dtypes(
        self, name: str, dtype: torch.dtype, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        assert ModelConfig.from_directory(copy_config(shapes["llama"], tmp_path, dtype=name)).dtype == dtype

    @pytest.mark.parametrize("stored", ["float64", "double", "float8_e4m3fn", "int8", 3, "auto", None])
    def test_an_explicit_dtype_needs_no_word_of_the_checkpoint(
        self, stored: Any, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        copy_config(shapes["llama"], tmp_path, dtype=stored, torch_dtype=None)
        assert ModelConfig.from_directory(tmp_path, "bfloat16").dtype == torch.bfloat16

    @pytest.mark.parametrize("changes", [{}, {"dtype": None}])
    def test_a_float64_checkpoint_runs_where_a_dtype_is_given(
        self, changes: dict[str, Any], tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        hf_model = make_tiny_model(tmp_path, dtype=torch.float64)
        edit_json(tmp_path / "config.json", **changes)
        with pytest.raises(ValueError, match=r"dtype 'float64' is not supported; pass dtype=\.\.\. to convert it"):
            make_llm(tmp_path, dtype="auto")
        llm, ids = make_llm(tmp_path, dtype="float32"), random_ids(9)
        assert token_ids(run(llm, [ids])) == [hf_greedy(hf_model.float(), ids, 6)]

    @pytest.mark.parametrize(
        ("in_config", "in_generation_config", "expected"),
        [
            (2, "no file", (2,)),
            ([2, 7], "no file", (2, 7)),
            (None, "no file", ()),
            (2, [5, 9, 5], (5, 9)),
            (2, 0, (0,)),
            ([2, 3], None, (2, 3)),
        ],
    )
    def test_all_eos_ids_are_read(
        self,
        in_config: Any,
        in_generation_config: Any,
        expected: Any,
        shapes: dict[str, Path],
        tmp_path: Path,
    ) -> None:
        copy_config(shapes["qwen3"], tmp_path, eos_token_id=in_config)
        if in_generation_config != "no file":
            generation = json.dumps({"eos_token_id": in_generation_config})
            (tmp_path / "generation_config.json").write_text(generation)
        assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected

    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            ({"rope_type": "default"}, 128),
            ({"rope_type": "linear", "factor": 2.5}, 320),
            ({"rope_type": "yarn", "factor": 4.0}, 512),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
            ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 128),
            (LLAMA3, 128),
        ],
    )
    def test_the_longest_sequence_is_what_rope_stretches_the_original_length_to(
        self, rope: dict[str, Any], expected: int, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        raw = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "llama3", **rope}}
        copy_config(shapes["qwen2"], tmp_path, **raw)
        assert ModelConfig.from_directory(tmp_path).max_len == expected
        path = tmp_path / "config.json"
        path.write_text(json.dumps(old_spelling(json.loads(path.read_text()))))
        assert ModelConfig.from_directory(tmp_path).max_len == expected

    @pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}])
    def test_sequences_as_long_as_rope_allows_run_as_in_transformers(
        self, rope: dict[str, Any], tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        hf_model = make_tiny_model(tmp_path, "qwen2", max_position_embeddings=64, rope_parameters=rope)
        llm, prompt = make_llm(tmp_path, max_model_len=None), random_ids(250)
        assert llm.inputs.max_model_len == 256
        assert token_ids(run(llm, [prompt], max_tokens=9)) == [hf_greedy(hf_model, prompt, 6)]
        with pytest.raises(ValueError, match="max_model_len=257 is more than the model's own limit of 256"):
            make_llm(tmp_path, max_model_len=257)

    def test_vocab_size_counts_padded_rows(self, tmp_path: Path) -> None:
        make_tiny_model(tmp_path, vocab_size=352)
        model = load_tiny(tmp_path)
        assert model.config.vocab_size == 352
        assert forward_logits(model, [5, 6, 7]).shape == (3, 352)


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "changes", "message"),
        [
            (
                "mistral",
                {"sliding_window": 8},
                r"sliding-window attention is not supported \(sliding_window: 8\)",
            ),
            ("mistral", {"remove": ("sliding_window",)}, r"\(sliding_window: 4096\)"),
            (
                "qwen2",
                {
                    "use_sliding_window": True,
                    "sliding_window": 8,
                    "max_window_layers": 1,
                    "layer_types": None,
                },
                r"\(sliding_window: 8\)",
            ),
            ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
            ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window"),
            ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised.*gptq"),
            ("llama", {"is_causal": False}, "is_causal: false is not supported"),
            ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu'"),
            ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
            ("llama", {"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
            ("llama", {"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
            (
                "llama",
                {"num_hidden_layers": "2"},
                "num_hidden_layers must be a positive whole number, got '2'",
            ),
            (
                "llama",
                {"num_key_value_heads": 3},
                "num_attention_heads 4 is no multiple of num_key_value_heads 3",
            ),
            ("llama", {"head_dim": 15}, "head_dim must be a positive even number .*, got 15"),
            ("llama", {"head_dim": None, "hidden_size": 2}, "head_dim must be a positive even number .*, got 0"),
            ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got 'small'"),
            ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
            ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive number, got inf"),
            ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
            ("llama", {"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True"),
            ("llama", {"num_hidden_layers": math.inf}, "num_hidden_layers must be a positive whole number, got inf"),
            ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be a bool or null, got 'false'"),
            ("llama", {"attention_bias": "false"}, "attention_bias must be a bool or null, got 'false'"),
            ("llama", {"mlp_bias": 1}, "mlp_bias must be a bool or null, got 1"),
            ("qwen2", {"max_window_layers": True}, "max_window_layers must be a int or null, got True"),
            ("llama", {"rope_parameters": {"rope_type": ["default"]}}, "rope_type must be a text"),
            ("llama", {"rope_scaling": {"type": {"a": 1}}}, "rope_type must be a text"),
            ("qwen3", {"use_sliding_window": "false"}, "use_sliding_window must be a bool or null, got 'false'"),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers must be a int.*'2'"),
            ("qwen2", {"use_sliding_window": True, "num_hidden_layers": "2"}, "num_hidden_layers must be a positive"),
            ("llama", {"rope_scaling": "linear"}, "rope_scaling must be a dict or null, got 'linear'"),
            ("llama", {"rope_parameters": [1]}, r"rope_parameters must be a dict or null, got \[1\]"),
            ("llama", {"layer_types": 2}, "layer_types must be a list or null, got 2"),
            ("llama", {"architectures": "MyLlamaForCausalLM"}, "architectures must be a list or null, got 'MyLlama"),
            ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has 'chunked_attention'"),
            ("qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types has 'linear_attention'"),
            ("mistral", {"layer_types": ["nonsense", 3]}, "layer_types has 'nonsense'.*only 'full_attention' is"),
            ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id.*'</s>'"),
            ("llama", {"eos_token_id": [2, -1]}, r"eos_token_id must be a token id.*\[2, -1\]"),
            ("llama", {"eos_token_id": True}, "eos_token_id must be a token id.*True"),
        ],
    )
    def test_what_would_run_differently_is_refused_by_name(
        self, family: str, changes: dict[str, Any], message: str, shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        copy_config(shapes[family], tmp_path, **changes)
        with pytest.raises(ValueError, match=message) as error:
            ModelConfig.from_directory(tmp_path)
        assert "config.json" in str(error.value)

    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            ("mistral", {"sliding_window": None}),
            ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None}),
            ("qwen3", {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}),
            ("llama", {"sliding_window": 8}),  # Llama has no windows: transformers ignores the key
        ],
    )
    def test_windows_that_no_layer_uses_are_accepted(
        self, family: str, changes: dict[str, Any], shapes: dict[str, Path], tmp_path: Path
    ) -> None:
        copy_config(shapes[family], tmp_path, **changes)
        assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_directory(shapes[family])

    @pytest.mark.parametrize("eos", ["</s>", [2, "7"], -1, 2.0, {"a": 1}])
    def test_a_bad_eos_id_is_blamed_on_its_file(self, eos: Any, shapes: dict[str, Path], tmp_path: Path) -> None:
        copy_config(shapes["llama"], tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(ValueError, match=r"/generation_config\.json: eos_token_id must be a token id") as error:
            ModelConfig.from_directory(tmp_path)
        assert "/config.json" not in str(error.value)

    def test_a_model_of_too_many_positions_says_what_to_pass(self, tmp_path: Path, make_llm: MakeLLM) -> None:
        make_tiny_model(tmp_path)
        edit_json(tmp_path / "config.json", max_position_embeddings=10**9)
        with pytest.raises(ValueError, match=r"max_model_len=1000000000 needs .*lower max_model_len"):
            make_llm(tmp_path, max_model_len=None)
        assert make_llm(tmp_path, max_model_len=64).inputs.max_model_len == 64

    @pytest.mark.parametrize(
        ("dtype", "message"),
        [
            ("float32", "a weight of the checkpoint is NaN or infinite, or exceeds the range of float32"),
            ("bfloat16", "a weight of the checkpoint is NaN or infinite, or exceeds the range of bfloat16"),
            ("float16", "the dtype overflows; use dtype='bfloat16' or 'float32' instead of 'float16'"),
        ],
    )
    def test_logits_that_are_nan_are_blamed_on_what_can_be_the_cause(
        self, dtype: str, message: str, tmp_path: Path, make_llm: MakeLLM
    ) -> None:
        make_tiny_model(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.norm.weight"][3] = math.nan
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match=f"prompt 0: its logits are NaN or infinite: {message}"):
            run(make_llm(tmp_path, dtype=dtype), [random_ids(5)])

    @pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", '{"a": 1'])
    def test_a_broken_config_json_is_named(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            ModelConfig.from_directory(tmp_path)

    def test_a_byte_order_mark_is_passed_over(self, shapes: dict[str, Path], tmp_path: Path) -> None:
        path = copy_config(shapes["llama"], tmp_path) / "config.json"
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_directory(shapes["llama"])

    def test_a_lora_adapter_is_refused(self, shapes: dict[str, Path], tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ValueError, match="LoRA adapter"):
            ModelConfig.from_directory(tmp_path)
        copy_config(shapes["llama"], tmp_path)
        with pytest.raises(ValueError, match="LoRA adapter"):
            ModelConfig.from_directory(tmp_path)

    def test_a_directory_without_config_json_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no config\.json"):
            ModelConfig.from_directory(tmp_path)
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(ValueError, match="GGUF files are not supported"):
            ModelConfig.from_directory(tmp_path)

    @pytest.mark.parametrize("below", ["checkpoint-500", "snapshots/4d7a2146"])
    def test_a_directory_above_a_model_is_refused_with_the_models_place(self, below: str, tmp_path: Path) -> None:
        (tmp_path / below).mkdir(parents=True)
        (tmp_path / below / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=rf"has no config\.json; did you mean {tmp_path / below}\?"):
            ModelConfig.from_directory(tmp_path)
