"""What the tests of batch files share: lines to write, results to read, runs in a process of their own."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from llm_helpers import DEFAULTS

from nanoapc import LLM
from nanoapc.batch_file import BatchSummary, run_batch
from nanoapc.batch_format import CHAT, COMPLETIONS

Result = dict[str, Any]


def completion(custom_id: Any, prompt: Any = "the quick brown fox", **body: Any) -> dict[str, Any]:
    """A line for /v1/completions: greedy, 4 tokens."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


def chat(custom_id: Any, text: str = "who speaks first?", **body: Any) -> dict[str, Any]:
    """A line for /v1/chat/completions: greedy, 4 tokens."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def encode(line: Any) -> bytes:
    """Bytes as they are, everything else as JSON."""
    return line if isinstance(line, bytes) else json.dumps(line).encode()


def write_lines(path: Path, lines: Iterable[Any], end: bytes = b"\n") -> Path:
    """Writes lines (see `encode`) and returns the path."""
    path.write_bytes(b"".join(encode(line) + end for line in lines))
    return path


def read_results(path: Path) -> list[Result]:
    """All results; each line must be valid JSON in UTF-8, and whole."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line.decode()) for line in data.split(b"\n")[:-1]]


def by_id(results: Iterable[Result]) -> dict[str | None, Result]:
    """custom_id -> result; no id twice."""
    results = list(results)
    found = {result["custom_id"]: result for result in results}
    assert len(found) == len(results)
    return found


def answers(results: Iterable[Result]) -> dict[str | None, Any]:
    """custom_id -> what the model said (None for an error)."""
    return {name: result["response"]["body"].get("choices") for name, result in by_id(results).items()}


def run(tmp_path: Path, llm: LLM, lines: Iterable[Any], **options: Any) -> tuple[list[Result], BatchSummary]:
    """Runs lines as a file of their own; returns results and summary."""
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    target.unlink(missing_ok=True)
    summary = run_batch(source, target, llm, quiet=True, **options)
    return read_results(target), summary


def body(result: Result) -> Mapping[str, Any]:
    """The answer of a result that is one."""
    assert result["error"] is None and result["response"]["status_code"] == 200
    return result["response"]["body"]


def processes() -> Any:
    """Makes processes that have imported the package already (and no thread of torch's has run in)."""
    context = multiprocessing.get_context("forkserver")
    slow = [
        "nanoapc.batch_file",
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
    ]
    context.set_forkserver_preload(slow)
    return context


def run_in_process(source: str, target: str, model: str, options: Mapping[str, Any]) -> None:
    """The body of a process: one run on a small LLM."""
    torch.set_num_threads(1)
    run_batch(source, target, model, quiet=True, **{**DEFAULTS, **options})
