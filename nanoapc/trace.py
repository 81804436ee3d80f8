"""Traces: reading what `LLM(..., trace="run.jsonl")` has written, and making one page of it.

    run.jsonl --read_trace--> Trace --make_page--> one self-contained HTML file (trace_page.html + the data)

Invariant: the page replays the trace's events (see `engine/events.py`) in the browser, and needs nothing else to show
the pool's exact state after any step. It loads nothing, and text is only data there, whatever a prompt holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoapc.engine.events import FORMAT
from nanoapc.models.checkpoint import TOKENIZER_PATTERNS, load_tokenizer, resolve_model

TEMPLATE = Path(__file__).with_name("trace_page.html")
COLUMNS = ("step", "t", "s", "tiles", "shared", "read", "unshared", "run")


@dataclass(frozen=True)
class Trace:
    """header: block_size, num_blocks, model, tokenizer; lines: one a step, see `engine/events.py`."""

    header: dict[str, Any]
    lines: list[dict[str, Any]]


def read_trace(path: str | Path) -> Trace:
    """A trace from its file. A last line that is cut off (the process was killed) is left out.

    Raises:
        ValueError: the file is no trace, or of another version.
    """
    lines: list[Any] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}, is not JSON; is it a trace?") from None
                break
            if number == 1 and not _is_header(lines[0]):
                raise ValueError(f"{path} is no trace that this version reads; make one with LLM(..., trace=...)")
            if number > 1 and _is_header(lines[-1]):
                raise ValueError(f"{path}, line {number}, begins another trace; give each a file of its own")
            if number > 1 and not _is_step(lines[-1]):
                raise ValueError(f"{path}, line {number}, is no step of a trace; remove it, or trace the run again")
    if not lines:
        raise ValueError(f"{path} is empty; make a trace with LLM(..., trace=...)")
    return Trace(lines[0], lines[1:])


def _is_header(line: Any) -> bool:
    return isinstance(line, dict) and FORMAT.items() <= line.items() and isinstance(line.get("block_size"), int)


def _is_step(line: Any) -> bool:
    events = line.get("events") if isinstance(line, dict) else None
    return isinstance(events, list) and all(isinstance(event, list) and event for event in events)


def make_page(trace: Trace, decode: Callable[[list[int]], str] | None = None) -> str:
    """The HTML page of a trace; decode turns tokens into text (None: the ids are shown)."""
    blocks: dict[tuple[int, ...], int] = {}
    columns = {name: [line.get(name) for line in trace.lines] for name in COLUMNS}
    columns["events"] = [
        [_page_event(event, trace.header["block_size"], blocks) for event in line["events"]] for line in trace.lines
    ]
    show = decode or (lambda token_ids: " ".join(map(str, token_ids)) + " ")
    info = {name: trace.header.get(name) for name in ("model", "block_size", "num_blocks")}
    texts = [show(list(tokens)) for tokens in blocks]
    data = json.dumps({"info": info, "texts": texts, "steps": columns}, separators=(",", ":"))
    # In a script element only "<" could end the data; JSON may write it as an escape.
    return TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", data.replace("<", "\\u003c"))


def _page_event(event: list[Any], size: int, blocks: dict[tuple[int, ...], int]) -> list[Any]:
    """An event for the page: the tokens of each stored block become their number in `blocks`, each content once."""
    if event[0] != "stored":
        return event
    kind, seq, first, tokens, salt = event
    parts = [tuple(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [kind, seq, first, [blocks.setdefault(part, len(blocks)) for part in parts], salt]


def add_parser(subparsers: Any) -> None:
    """`nanoapc trace run.jsonl -o run.html`."""
    parser = subparsers.add_parser("trace", help="turn a trace into a page that shows the cache step by step")
    parser.add_argument("trace", help="what LLM(..., trace=FILE) has written")
    parser.add_argument("-o", "--output", help="the page (default: the trace's name with .html); '-': standard output")
    parser.add_argument("--tokenizer", help="a directory or hub name (default: the one of the traced run)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the page; returns the exit status."""
    output = Path(args.output or Path(args.trace).with_suffix(".html"))
    try:
        trace = read_trace(args.trace)
        if output.exists() and output.samefile(args.trace):
            raise ValueError(f"{output} is the trace itself; give the page another name with -o")
        page = make_page(trace, _decoder(args.tokenizer or trace.header.get("tokenizer")))
        if args.output == "-":
            sys.stdout.write(page)
            return 0
        output.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"nanoapc trace: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {len(trace.lines)} steps; open it in a browser")
    return 0


def _decoder(tokenizer: str | None) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    try:
        return load_tokenizer(str(resolve_model(tokenizer, TOKENIZER_PATTERNS))).decode
    except Exception as error:  # transformers raises many kinds
        print(f"nanoapc trace: no text, only token ids: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
