"""Fixtures that several test files share: a tiny model, LLMs on it that check themselves, oracles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_helpers import DEFAULTS, assert_idle
from tiny_models import make_tiny_model

from nanoapc import LLM

if not torch.cuda.is_available():  # Triton looks once, when something imports it (transformers may)
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # tiny tensors: a second thread only costs
transformers.utils.logging.disable_progress_bar()

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Qwen3 model in float32 and its tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-qwen3")
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def hf_model(model_dir: Path) -> transformers.PreTrainedModel:
    """Transformers' model of `model_dir`."""
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()


@pytest.fixture
def make_llm(model_dir: Path) -> Iterator[MakeLLM]:
    """Makes LLMs (default: of `model_dir`, blocks of 4 tokens); at the end each must have no block in use."""
    made: list[LLM] = []

    def make(model: Path = model_dir, **arguments: Any) -> LLM:
        made.append(LLM(model, **{**DEFAULTS, **arguments}))
        return made[-1]

    yield make
    for llm in made:
        if llm.engine.dead is None:
            assert_idle(llm)
            llm.close()


@pytest.fixture(scope="session")
def cache_off(model_dir: Path) -> Iterator[LLM]:
    """The oracle: `model_dir` without a prefix cache, with more blocks than any test needs, first come first served."""
    options = {"enable_prefix_caching": False, "num_kv_blocks": 2048, "max_model_len": 512, "schedule_policy": "fcfs"}
    with LLM(model_dir, **{**DEFAULTS, **options}) as llm:
        yield llm
