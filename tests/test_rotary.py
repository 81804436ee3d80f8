"""The rotary table equals transformers' for every supported rope type, in both spellings of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanoapc.layers.rotary import MAX_LEN as LONGEST
from nanoapc.layers.rotary import cos_sin_table, read_rope

MAX_LEN = 700
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, other base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, original from the config": {"rope_type": "yarn", "factor": 4.0},
    "yarn, no blend": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    "yarn, one beta": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 8, "truncate": False},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta at the top level and rope_scaling (or null) beside it, as before transformers 5."""
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old["rope_theta"] = rope.pop("rope_theta", 10000.0)
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return old


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_table_equals_transformers_bit_for_bit(name: str, head_dim: int) -> None:
    config = {"max_position_embeddings": 512, "rope_parameters": dict(ROPES[name])}
    hf_config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, **config)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), torch.arange(MAX_LEN)[None])
    half = head_dim // 2

    table = cos_sin_table(read_rope(config), head_dim, MAX_LEN, torch.device("cpu"))

    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, half:], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_pytorchs_default_device_and_dtype_do_not_matter(name: str) -> None:
    rope = read_rope({"max_position_embeddings": 512, "rope_parameters": dict(ROPES[name])})
    table = cos_sin_table(rope, 16, 9, torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = cos_sin_table(rope, 16, 9, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, table, rtol=0, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_both_spellings_mean_the_same(name: str) -> None:
    config = {"max_position_embeddings": 512, "rope_parameters": dict(ROPES[name])}
    assert read_rope(old_spelling(config)) == read_rope(config)


def test_the_key_type_is_an_old_name_of_rope_type() -> None:
    raw = {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope(raw) == read_rope({**raw, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})


def test_an_original_length_at_the_top_level_comes_first() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    config = {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_parameters": rope,
    }
    hf_config = Qwen3Config(head_dim=64, **{**config, "rope_parameters": dict(rope)})
    cos, _ = Qwen3RotaryEmbedding(hf_config)(torch.zeros(1), torch.arange(9)[None])
    table = cos_sin_table(read_rope(config), 64, 9, torch.device("cpu"))
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=0)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert read_rope({"max_position_embeddings": 512, "rope_parameters": rope})["factor"] == 4.0


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 1e6}])
@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}])
@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}])
def test_both_spellings_in_one_file_are_read_as_in_transformers(
    theta: dict[str, Any], scaling: Any, parameters: Any, tmp_path: Path
) -> None:
    raw = {"max_position_embeddings": 512, **theta, "rope_scaling": scaling, "rope_parameters": parameters}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **raw}))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    rope = read_rope(raw)
    assert {key: rope.get(key) for key in expected} == expected


@pytest.mark.parametrize("max_len", [LONGEST + 1, 10**9])
def test_more_positions_than_float32_tells_apart_are_refused(max_len: int) -> None:
    near = torch.tensor([LONGEST - 1, LONGEST, LONGEST + 1], dtype=torch.float32)
    assert near.unique().numel() == 2
    rope = read_rope({"max_position_embeddings": 10**9})
    with pytest.raises(ValueError, match=rf"{max_len} .*max_position_embeddings\) .*pass a smaller max_model_len"):
        cos_sin_table(rope, 16, max_len, torch.device("cpu"))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "mrope", "su", "nonsense"])
def test_other_rope_types_are_refused_by_name(rope_type: str) -> None:
    raw = {"max_position_embeddings": 512, "rope_scaling": {"rope_type": rope_type, "factor": 2.0}}
    with pytest.raises(ValueError, match=f"'{rope_type}' is not supported.*default, linear, llama3, yarn"):
        read_rope(raw)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "'linear' needs a positive number 'factor', got None"),
        ({"rope_type": "linear", "factor": "2"}, "'factor', got '2'"),
        ({"rope_type": "linear", "factor": 0}, "'factor', got 0"),
        ({"rope_type": "yarn", "factor": "4"}, "'yarn' needs a positive number 'factor', got '4'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'high_freq_factor', got None"),
        ({"rope_type": "default", "rope_theta": -1.0}, "'rope_theta', got -1.0"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "'rope_theta', got nan"),
        ({"rope_type": "linear", "factor": float("inf")}, "'factor', got inf"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not supported",
        ),
        ({"full_attention": {"rope_type": "default"}}, "for each layer type"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "false"}, "truncate must be true or false, got 'false'"),
    ],
)
def test_bad_rope_parameters_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({"max_position_embeddings": 512, "rope_parameters": rope})
