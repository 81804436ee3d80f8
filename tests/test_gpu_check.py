"""tools/gpu_check_engine.py runs, at tiny sizes on the CPU, so that a typo in it does not wait for a GPU."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_helpers import load_script

TOOL = Path(__file__).parent.parent / "tools" / "gpu_check_engine.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script(TOOL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, run tools/gpu_check.sh")
def test_every_part_runs_dry(tool: Any, tmp_path: Path) -> None:
    check = tool.Check(dry=True, folder=tmp_path, path=tmp_path / "figures.json")
    for part in chain.from_iterable(tool.PARTS.values()):
        check.attempt(part)
    assert check.failures == []
    assert json.loads((tmp_path / "figures.json").read_text())["figures"].keys() == check.figures.keys()
    names = " ".join(check.figures)
    for figure in (
        "card",
        "decode, qwen3-0.6b",
        "decode, qwen3-8b",
        "host",
        "nano-vLLM",
        "generate",
        "cache and forest",
    ):
        assert figure in names
    assert all(value > 0 for name, values in check.figures.items() for value in values.values() if value == value)


def test_a_difference_is_a_failure(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = tool.Check(dry=True, folder=tmp_path)
    runs = iter(range(100))
    generate = tool.ids_of
    monkeypatch.setattr(tool, "ids_of", lambda *work: generate(*work) if next(runs) != 1 else [[0]])
    tool.check_parity(check)
    assert check.failures == ["llama: transformers' ids, cold and warm"]
