"""Traces: reading what `LLM(..., trace="run.jsonl")` has written, and making one page of it.

    run.jsonl --read_trace--> Trace --Replay--> the pool's state after any event
                                    '--make_page--> one self-contained HTML file (trace_page.html + the data)

Invariant: `Replay` needs nothing but the trace's events (see `engine/events.py`) and ends in the pool's exact state.
The page replays the same events in the browser. It loads nothing, and text is only data there, whatever a prompt holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoapc.engine.events import FORMAT

ROOT = -1
EMPTY = -2
"""Contents that are no prefix number: what first blocks continue, and nothing."""
TEMPLATE = Path(__file__).with_name("trace_page.html")
COLUMNS = ("step", "t", "s", "tiles", "shared", "read", "unshared", "run", "events")


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
    lines: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                if line.endswith("\n"):
                    raise ValueError(f"{path}, line {number}, is not JSON; is it a trace?") from None
            if number == 1 and not (lines and isinstance(lines[0], dict) and FORMAT.items() <= lines[0].items()):
                raise ValueError(f"{path} is no trace that this version reads; make one with LLM(..., trace=...)")
    if not lines:
        raise ValueError(f"{path} is empty; make a trace with LLM(..., trace=...)")
    return Trace(lines[0], lines[1:])


class Replay:
    """A pool's state, rebuilt event by event.

    Attributes:
        ref_counts: [num_blocks]; contents: [num_blocks] prefix numbers, EMPTY for none.
        free, spared: the queues, block ids in the order of eviction.
        tables: seq -> block ids of running sequences.
        prefixes: (parent's number or ROOT, tokens, digest of the extra keys) of every content so far; equal ones once.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.contents = [EMPTY] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.spared: OrderedDict[int, None] = OrderedDict()
        self.tables: dict[int, list[int]] = {}
        self.prefixes: dict[tuple[int, tuple[int, ...], str], int] = {}

    def apply(self, events: Iterable[list[Any]]) -> None:
        """Brings the state forward; kinds that change no block are passed over."""
        for kind, *values in events:
            change = getattr(self, f"_{kind}", None)
            if change is not None:
                change(*values)

    def _dequeue(self, block: int) -> None:
        self.free.pop(block, None)
        self.spared.pop(block, None)

    def _enqueue(self, block: int, place: str) -> None:
        queue = self.spared if place == "s" else self.free
        queue[block] = None
        if place == "h":
            queue.move_to_end(block, last=False)

    def _touch(self, block: int) -> None:
        self._dequeue(block)
        self.ref_counts[block] += 1

    def _hit(self, seq: int, blocks: list[int]) -> None:
        for block in blocks:
            self._touch(block)
        self.tables[seq] = list(blocks)

    def _copied(self, seq: int, source: int, num_tokens: int) -> None:
        self._touch(source)

    def _evicted(self, block: int, wanted: int) -> None:
        self.contents[block] = EMPTY

    def _taken(self, seq: int, blocks: list[int]) -> None:
        for block in blocks:
            self._touch(block)
        self.tables.setdefault(seq, []).extend(blocks)

    def _stored(self, seq: int, first: int, tokens: list[int], salt: str) -> None:
        table, size = self.tables[seq], self.block_size
        parent = self.contents[table[first - 1]] if first else ROOT
        for i in range(len(tokens) // size):
            content = (parent, tuple(tokens[i * size : (i + 1) * size]), "" if i else salt)
            parent = self.prefixes.setdefault(content, len(self.prefixes))
            self.contents[table[first + i]] = parent

    def _withdrawn(self, blocks: list[int]) -> None:
        for block in blocks:
            self.contents[block] = EMPTY

    def _released(self, block: int, place: str) -> None:
        self.ref_counts[block] -= 1
        if place != "-":
            self._enqueue(block, place)

    def _freed(self, seq: int, places: str) -> None:
        for block, place in zip(reversed(self.tables.pop(seq)), places, strict=True):
            self._released(block, place)

    def _moved(self, block: int, place: str) -> None:
        self._dequeue(block)
        self._enqueue(block, place)

    def _cleared(self) -> None:
        for block, content in enumerate(self.contents):
            if content != EMPTY and block in self.spared:
                self._moved(block, "t")
        self.contents = [EMPTY] * len(self.contents)


def make_page(trace: Trace, decode: Callable[[list[int]], str] | None = None) -> str:
    """The HTML page of a trace; decode turns tokens into text (None: the ids are shown)."""
    header = trace.header
    replay = Replay(header["num_blocks"], header["block_size"])
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for line in trace.lines:
        events = []
        for event in line["events"]:
            lost = replay.contents[event[1]] if event[0] == "evicted" else EMPTY
            replay.apply([event])
            events.append(_page_event(event, replay, lost))
        for name in COLUMNS:
            columns[name].append(events if name == "events" else line.get(name))
    show = decode or (lambda token_ids: " ".join(map(str, token_ids)) + " ")
    prefixes = [[parent, show(list(tokens)), salt] for parent, tokens, salt in replay.prefixes]
    info = {name: header.get(name) for name in ("model", "block_size", "num_blocks")}
    data = json.dumps({"info": info, "prefixes": prefixes, "steps": columns}, separators=(",", ":"))
    # In a script element only "<" could end the data; JSON may write it as an escape.
    return TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", data.replace("<", "\\u003c"))


def _page_event(event: list[Any], replay: Replay, lost: int) -> list[Any]:
    """An event that was just applied, for the page: contents by their numbers, also what an evicted block held."""
    if event[0] == "evicted":
        return [*event, lost]
    if event[0] != "stored":
        return event
    _, seq, first, tokens, _ = event
    table = replay.tables[seq][first : first + len(tokens) // replay.block_size]
    return ["stored", seq, first, [replay.contents[block] for block in table]]


def add_parser(subparsers: Any) -> None:
    """`nanoapc trace run.jsonl -o run.html`."""
    parser = subparsers.add_parser("trace", help="turn a trace into a page that shows the cache step by step")
    parser.add_argument("trace", help="what LLM(..., trace=FILE) has written")
    parser.add_argument("-o", "--output", help="the page (default: the trace's name with .html)")
    parser.add_argument("--tokenizer", help="a directory or hub name (default: the one of the traced run)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the page; returns the exit status."""
    try:
        trace = read_trace(args.trace)
        page = make_page(trace, _decoder(args.tokenizer or trace.header.get("tokenizer")))
        output = Path(args.output or Path(args.trace).with_suffix(".html"))
        output.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"nanoapc trace: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {len(trace.lines)} steps; open it in a browser")
    return 0


def _decoder(tokenizer: str | None) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer).decode
    except Exception as error:  # transformers raises many kinds
        print(f"nanoapc trace: no text, only token ids: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
