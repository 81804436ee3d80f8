"""Replay: the state of a pool, rebuilt from nothing but the events of a trace (see `nanoapc/engine/events.py`).

The oracle of the traces: it must end in the pool's exact state, and so must the trace page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

ROOT = -1
EMPTY = -2
"""Contents that are no prefix number: what first blocks continue, and nothing."""


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
        for block in range(len(self.contents)):
            self._moved(block, "t")
        self.contents = [EMPTY] * len(self.contents)
