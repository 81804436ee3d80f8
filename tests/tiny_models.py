"""Tiny random models of every family, saved by transformers, with a real tokenizer trained on the fly.

    hf_model = make_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)  # and tmp_path is loadable

`forward_logits` runs our model on one sequence in chunks of any size and returns the logits of every row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.models.config import ModelConfig
from nanoapc.models.decoder import CausalLM
from nanoapc.models.weights import load_model

CPU = torch.device("cpu")
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
VOCAB_SIZE = 320
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """The quick brown fox jumps over the lazy dog. A prefix that many prompts share is computed once.
What is cached is the key and the value of every token, block by block; what is hashed is the chain of blocks.
user and assistant take turns, the system speaks first. Ein paar Wörter mit Umlauten: größer, über, schön."""


@functools.cache
def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids: special tokens, 256 bytes, merges; ChatML template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXT.split("\n"), trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    directory: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    **config: Any,
) -> transformers.PreTrainedModel:
    """Saves a random model (and tokenizer) to `directory` and returns transformers' model, in eval mode.

    `config` goes to transformers' config class, over TINY. All weights are drawn, biases and norms too, and
    are large enough that every token matters to the logits.
    """
    name = FAMILIES[family]
    ends = {"eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"), "bos_token_id": None}
    config = {**TINY, **ends, **FAMILY_DEFAULTS.get(family, {}), **config}
    hf_config = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"{name}ForCausalLM")(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + 0.2 * noise if norm else 0.2 * noise)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return model


def edit_json(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrites a JSON object with some keys changed or removed."""
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**raw, **changes}))


def load_tiny(directory: Path, max_len: int = 512, dtype: str = "float32", **options: Any) -> CausalLM:
    """Our model from a directory: float32, CPU, reference kernels, unless `options` say otherwise."""
    config = ModelConfig.from_directory(directory, dtype)
    defaults = {"device": CPU, "kernels": ReferenceKernels()}
    return load_model(directory, config, max_len=max_len, **{**defaults, **options})


def one_sequence_plan(block_table: Sequence[int], start: int, count: int, block_size: int) -> AttentionPlan:
    """The plan of a step that computes positions [start, start + count) of one sequence."""
    tables = np.array([block_table], np.int32)
    tiles, level_starts = AttentionPlanner(block_size).tiles(tables, np.array([start]), np.array([count]))
    positions = torch.arange(start, start + count)
    slots = torch.tensor(block_table)[positions // block_size] * block_size + positions % block_size
    return AttentionPlan(torch.from_numpy(tiles), positions, slots, torch.from_numpy(tables), tiles, level_starts)


@torch.inference_mode()
def forward_logits(
    model: CausalLM, token_ids: Sequence[int], chunks: Sequence[int] | None = None, block_size: int = 4
) -> Tensor:
    """Logits [len(token_ids), V] of a sequence computed in the given chunks (default: all at once).

    Its blocks lie scattered and in reverse order in a KV memory full of NaN, so reading a wrong place shows.
    """
    chunks = [len(token_ids)] if chunks is None else chunks
    assert sum(chunks) == len(token_ids)
    config, num_blocks = model.config, -(-len(token_ids) // block_size)
    shape = (2 * num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    kv_memory = torch.full(shape, torch.nan, dtype=model.model.embed_tokens.weight.dtype)
    table = list(range(2 * num_blocks - 1, 0, -2))
    ids, logits, start = torch.tensor(token_ids), [], 0
    for count in chunks:
        hidden = model(ids[start : start + count], kv_memory, one_sequence_plan(table, start, count, block_size))
        logits.append(model.compute_logits(hidden))
        start += count
    return torch.cat(logits)


@torch.inference_mode()
def hf_logits(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Transformers' logits [len(token_ids), V] of a sequence in one pass, as float32."""
    return model(torch.tensor([token_ids])).logits[0].float()


def random_ids(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), vocab_size, (num_tokens,), generator=generator).tolist()
