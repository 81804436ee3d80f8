"""Events: what happened to which block in which step, for traces (trace="run.jsonl") and the debug log.

    Scheduler, BlockManager, BlockPool -- one call an event --> Events --+--> trace: one JSON line a step
    Engine ------------------------------ one call a step ----> Events --'    log: one line an event

An engine that does neither has no Events: each place asks `if self.events is not None` and that is all it costs.
Invariant: applied in order to an empty pool, the events of a trace give the pool's state exactly: reference counts,
contents, block tables and the order of both queues (the trace page does it). A trace that can no longer be written is
given up with a warning; the run goes on.

    added      seq, request id, prompt tokens            preempted, finished   seq (and the finish reason)
    admitted   seq, tokens found in the cache (-1: it did not look)
    hit        seq, blocks: shared with it               copied    seq, source (held until released), tokens
    taken      seq, blocks: from the queues' heads
    evicted    block, whether something waiting wants it (before it is taken)
    stored     seq, number of its first block, tokens of these blocks, digest of the extra keys ("" for none)
    withdrawn  blocks: the step that should have filled them has not run
    freed      seq, for each of its blocks, last first, where it went: - still used, h head, t tail, s spared
    released   block, where it went                      moved     block, the queue that it went to
    cleared    (all content is forgotten, and the free queue is in the order of ids again)

A line: {"step", "t": seconds since the start, "s": seconds it took, "run": [[seq, first position, tokens], ...],
"tiles", "shared": of those, tiles of several sequences, "read" and "unshared": KV positions that attention reads, and
would read without sharing, "events"}. A decode step of the same sequences as in the line before has no "run".
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from nanoapc.engine.attention_plan import KV_END, KV_START, NUM_ROWS, ROW_START, TABLE
from nanoapc.engine.block_hash import decode_tokens

if TYPE_CHECKING:
    from nanoapc.engine.block_manager import Match
    from nanoapc.engine.block_pool import Block, BlockPool
    from nanoapc.engine.sequence import Sequence
    from nanoapc.engine.step_batch import StepBatch

logger = logging.getLogger(__name__)

FORMAT = {"format": "nanoapc trace", "version": 1}
LEVELS = ("debug", "info", "warning", "error")


def configure_logging() -> bool:
    """Sends this package's log to standard error at the level NANOAPC_LOG says; whether events are to be logged."""
    level = os.environ.get("NANOAPC_LOG", "").lower()
    package = logging.getLogger("nanoapc")
    if level:
        if level not in LEVELS:
            raise ValueError(f"NANOAPC_LOG={level!r} in the environment; it must be one of {', '.join(LEVELS)}")
        package.setLevel(level.upper())
        if not package.hasHandlers():
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    return logger.isEnabledFor(logging.DEBUG)


class Events:
    """Takes events down: a method for each kind; the table at the top of this file says what they mean.

    Args:
        trace: the file to write; None only logs.
        header: what a reader must know before the first step (block_size, num_blocks, ...).
    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, trace: str | None, header: dict[str, Any]):
        try:
            self._file = None if trace is None else _opened(trace)
        except OSError as error:
            reason = "another LLM is writing it" if isinstance(error, BlockingIOError) else error
            raise ValueError(f"trace={trace!r} cannot be written ({reason}); choose another file") from error
        self._log = logger.isEnabledFor(logging.DEBUG)
        self._start = time.perf_counter()
        self._step = 0
        self._events: list[tuple[Any, ...]] = []
        self._last_run: int | None = None  # composition of the line before
        self._write({**FORMAT, **header})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            logger.warning("the trace ends here, it cannot be written: %s", error)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _add(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            self._events.append((kind, *values.values()))
        if self._log:
            logger.debug("step %d: %s %s", self._step, kind, " ".join(f"{name}={v}" for name, v in values.items()))

    # -- sequences ---------------------------------------------------------------------------------------

    def added(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            request = getattr(seq.request, "request_id", "")
            self._add("added", seq=seq.seq_id, request=request, tokens=seq.num_prompt_tokens)

    def looked_up(self, seq: Sequence, match: Match) -> None:
        """A waiting sequence was looked up; it is admitted if the rest of it fits (only the log wants the others)."""
        if self._log:
            found = f"seq={seq.seq_id} tokens={seq.num_tokens} cached={match.num_cached_tokens}"
            logger.debug("step %d: looked_up %s blocks=%s", self._step, found, [b.block_id for b in match.shared])

    def preempted(self, seq: Sequence) -> None:
        self._add("preempted", seq=seq.seq_id)

    def finished(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self._add("finished", seq=seq.seq_id, reason=seq.finish_reason)

    # -- blocks ------------------------------------------------------------------------------------------

    def admitted(self, seq: Sequence, match: Match) -> None:
        self._add("admitted", seq=seq.seq_id, cached=match.num_cached_tokens if seq.reads_cache else -1)
        if match.shared:
            self._add("hit", seq=seq.seq_id, blocks=[block.block_id for block in match.shared])
        if match.copy is not None:
            self._add("copied", seq=seq.seq_id, source=match.copy[0].block_id, tokens=match.copy[1])

    def evicted(self, block: Block, wanted: bool) -> None:
        self._add("evicted", block=block.block_id, wanted=int(wanted))

    def taken(self, seq: Sequence, blocks: list[Block]) -> None:
        if blocks:
            self._add("taken", seq=seq.seq_id, blocks=[block.block_id for block in blocks])

    def stored(self, seq: Sequence, first: int, end: int) -> None:
        """Blocks first ... end - 1 of a sequence are in the index; this step fills them."""
        if self._file is None:
            self._add("stored", seq=seq.seq_id, blocks=[block.block_id for block in seq.blocks[first:end]])
            return
        labels = seq.labels[first:end]
        salt = ""
        if first == 0 and seq.extra:
            labels[0] = labels[0][len(seq.extra) :]
            salt = hashlib.blake2b(seq.extra, digest_size=8).hexdigest()  # a salt is a secret
        self._add("stored", seq=seq.seq_id, first=first, tokens=decode_tokens(b"".join(labels)), salt=salt)

    def withdrawn(self, blocks: list[Block]) -> None:
        if blocks:
            self._add("withdrawn", blocks=[block.block_id for block in blocks])

    def freed(self, seq: Sequence, pool: BlockPool) -> None:
        if seq.blocks:
            places = "".join(_place(block, pool) for block in reversed(seq.blocks))
            self._add("freed", seq=seq.seq_id, places=places)

    def released(self, block: Block, pool: BlockPool) -> None:
        self._add("released", block=block.block_id, place=_place(block, pool))

    def moved(self, block: Block, pool: BlockPool) -> None:
        self._add("moved", block=block.block_id, place=_place(block, pool))

    def cleared(self) -> None:
        self._add("cleared")

    # -- steps -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self._step = step

    def end_step(self, batch: StepBatch, tiles: np.ndarray, seconds: float) -> None:
        """The step has run, with these attention tiles [num_tiles, 6], in so many seconds."""
        if self._file is None:
            return
        reads = tiles[:, KV_END].astype(np.int64) - tiles[:, KV_START]
        # A sequence's own tiles end with the position of their last row; shared ones end before it.
        offset = batch.starts + batch.counts - np.cumsum(batch.counts)  # position - row
        own = tiles[:, KV_END] == tiles[:, ROW_START] + tiles[:, NUM_ROWS] + offset[tiles[:, TABLE]]
        line: dict[str, Any] = {
            "step": self._step,
            "t": round(time.perf_counter() - self._start, 6),
            "s": round(seconds, 6),
            "tiles": len(tiles),
            "shared": len(tiles) - int(own.sum()),
            "read": int(reads.sum()),
            "unshared": int(tiles[own, KV_END].sum()),
        }
        decode = len(batch.counts) == batch.num_tokens
        if batch.key is None or not decode or batch.key != self._last_run:
            ids = [seq.seq_id for seq in batch.sequences]
            line["run"] = list(zip(ids, batch.starts.tolist(), batch.counts.tolist(), strict=True))
        self._last_run = batch.key if decode else None
        line["events"], self._events = self._events, []
        self._write(line)

    def flush(self) -> None:
        """Everything so far is in the file, so that it can be read while the engine is idle."""
        if self._events:
            self._write({"events": self._events})
            self._events = []

    def close(self) -> None:
        """Writes the rest; afterwards events go to the log alone."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(trace: str) -> TextIO:
    """The file, emptied and locked, to be written line by line."""
    private = partial(os.open, mode=0o600)  # prompts are in it
    file = open(trace, "a", 1, encoding="utf-8", opener=private)  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if os.path.isfile(trace):  # and no pipe
        file.truncate(0)
    return file


def _place(block: Block, pool: BlockPool) -> str:
    if block.queue is None:
        return "-"
    if block.prefix is None:
        return "h"
    return "s" if block.queue is pool.spared else "t"
