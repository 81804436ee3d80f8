"""BlockManager: all that the scheduler may ask about blocks - match, admit, grow, index, free.

The order is match -> token budget -> admit. `match` changes nothing; what it found is what `admit` takes, so there
is one source of truth for how many tokens a sequence has to compute.

    tokens    |-- block 0 --|-- block 1 --|-- block 2 --|-- 3 ...
    match     |  shared     |  shared     |  copied|  to compute
                                            ^ sub-block hit: the cached sibling that agrees longest is copied
                                              (copy on write) into a fresh block, the rest of it is computed

At least one token is always computed, because its logits are needed. When whole blocks cover everything, the last
token is computed again: its query reads the cached K/V and its own K/V is not written (slot -1).

A block is indexed when it is allocated to be filled in this step ("pending"), so that a later sequence of the SAME
step can share it. This is sound because each layer writes K/V before it attends. If the step does not run
after all, `withdraw` takes the pending entries back. Steps run in the order in which they were started, so what one
step frees, the next may overwrite, even while the first still runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nanoapc.engine.block_hash import BlockHasher, encode_tokens
from nanoapc.engine.block_pool import Block, BlockPool, Prefix
from nanoapc.engine.sequence import Sequence

if TYPE_CHECKING:  # the host side imports no torch, and Events does
    from nanoapc.engine.events import Events

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Match:
    """What the cache has for a sequence.

    shared: blocks that can be used as they are.
    copy: (source block, tokens to copy from it) for the block after them, or None.
    num_cached_tokens: tokens that need not be computed.
    """

    shared: list[Block] = field(default_factory=list)
    copy: tuple[Block, int] | None = None
    num_cached_tokens: int = 0


class BlockManager:
    """Blocks of one engine.

    Attributes:
        pool: the physical blocks.
        step: number of the current step; the scheduler advances it with `begin_step`.
        events: who wants to know what happens, or None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        enable_caching: bool = True,
        events: Events | None = None,
    ):
        self.block_size = block_size
        self.hasher = hasher
        self.enable_caching = enable_caching
        self.events = events
        self.pool = BlockPool(num_blocks, hasher.root, events)
        self.step = 0
        self._pending: list[Block] = []
        self._pinned: list[Block] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.num_free_blocks

    # -- a sequence waits --------------------------------------------------------------------------------

    def start_waiting(self, seq: Sequence) -> None:
        """Hashes what is known of a sequence that begins to wait, and spares what it will use."""
        if self.enable_caching:
            self.extend_keys(seq, seq.all_tokens())
            if seq.reads_cache:
                self.pool.want(seq.keys)

    def stop_waiting(self, seq: Sequence) -> None:
        """It waits no longer."""
        if self.enable_caching and seq.reads_cache:
            self.pool.unwant(seq.keys)

    def extend_keys(self, seq: Sequence, tokens: np.ndarray) -> None:
        """Labels and keys of the full blocks of `tokens` that seq has none for; known ones are never recomputed."""
        first, end = len(seq.keys), len(tokens) // self.block_size
        if first >= end:
            return
        size = self.block_size * TOKEN_BYTES
        data = encode_tokens(tokens[first * self.block_size : end * self.block_size])
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        parent, extra = (seq.keys[-1], b"") if seq.keys else (self.hasher.root, seq.extra)
        seq.keys += self.hasher.keys(parent, extra, blocks)
        seq.labels += [extra + blocks[0], *blocks[1:]]

    # -- match -> admit ----------------------------------------------------------------------------------

    def match(self, seq: Sequence, step: int | None = None) -> Match:
        """What a waiting sequence finds in the cache in a step (None: the current one). Changes nothing."""
        if not self.enable_caching or not seq.reads_cache:
            return Match()
        num_tokens = seq.num_tokens
        chain = self.pool.find_chain(seq.keys, seq.labels)
        shared = [prefix.blocks[0] for prefix in chain]
        num_cached = len(shared) * self.block_size
        if num_cached >= num_tokens:
            return Match(shared, None, num_tokens - 1)
        parent = chain[-1] if chain else self.pool.root
        copy = self._sub_block_hit(seq, parent, len(shared), self.step if step is None else step)
        return Match(shared, copy, num_cached + (copy[1] if copy else 0))

    def _sub_block_hit(self, seq: Sequence, parent: Prefix, num_shared: int, step: int) -> tuple[Block, int] | None:
        start = num_shared * self.block_size
        extra = b"" if num_shared else seq.extra
        tokens = seq.all_tokens()[start : start + self.block_size]
        # A partial last block is padded with an id that no vocabulary has: it sorts after its longest agreement.
        label = extra + encode_tokens(tokens) + b"\xff" * (TOKEN_BYTES * (self.block_size - len(tokens)))
        found = self.pool.closest_child(parent, label, step)
        if found is None:
            return None
        block, num_bytes = found
        num_tokens = min((num_bytes - len(extra)) // TOKEN_BYTES, seq.num_tokens - 1 - start)
        return (block, num_tokens) if num_tokens > 0 else None

    def blocks_needed(self, seq: Sequence, match: Match) -> int:
        """Free blocks that admission takes: new ones, and idle ones that were hit (they are free, too)."""
        idle = sum(block.queue is not None for block in match.shared)
        if match.copy is not None:
            idle += match.copy[0].queue is not None
        return -(-seq.num_tokens // self.block_size) - len(match.shared) + idle

    def without_copy(self, match: Match) -> Match:
        """The match without its sub-block hit (whose source would have to be kept for this step)."""
        return Match(match.shared, None, len(match.shared) * self.block_size) if match.copy else match

    def admit(self, seq: Sequence, match: Match) -> tuple[int, int, int] | None:
        """Gives the sequence blocks for all its tokens: shared, copied, fresh.

        Returns the copy (source block id, destination block id, tokens) to run before the forward, or None.
        The source is kept until the step has ended, so nobody overwrites it before it is read.
        """
        for block in match.shared:
            self.pool.touch(block)
        seq.blocks = list(match.shared)
        seq.num_indexed_blocks = len(match.shared)
        if match.copy is not None:
            self.pool.touch(match.copy[0])
            self._pinned.append(match.copy[0])
        if self.events is not None:
            self.events.admitted(seq, match)
        self.grow(seq, -(-seq.num_tokens // self.block_size) - len(match.shared))
        if match.copy is None:
            return None
        return match.copy[0].block_id, seq.blocks[len(match.shared)].block_id, match.copy[1]

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Appends fresh blocks to the block table; the caller has made sure that they are free."""
        blocks = self.pool.take(num_blocks)
        seq.blocks += blocks
        if self.events is not None:
            self.events.taken(seq, blocks)

    def grow_each(self, seqs: list[Sequence]) -> list[int]:
        """Appends one fresh block to each of the sequences' block tables, as `grow`; returns the blocks' ids."""
        blocks = self.pool.take(len(seqs))
        for seq, block in zip(seqs, blocks, strict=True):
            seq.blocks.append(block)
            if self.events is not None:
                self.events.taken(seq, [block])
        return [block.block_id for block in blocks]

    def index_blocks(self, seq: Sequence, tokens: np.ndarray, num_computed_tokens: int) -> None:
        """Indexes the blocks that are full once `num_computed_tokens` tokens are computed in this step."""
        end = num_computed_tokens // self.block_size
        if not self.enable_caching or end <= seq.num_indexed_blocks:
            return
        self.extend_keys(seq, tokens[: end * self.block_size])
        first = seq.num_indexed_blocks
        before = seq.blocks[first - 1].prefix if first else self.pool.root
        assert before is not None, "a block before an indexed one has lost its prefix"
        self.pool.put(seq.blocks[first:end], before, seq.keys[first:end], seq.labels[first:end], self.step)
        if self.events is not None:
            self.events.stored(seq, first, end)
        self._pending.extend(seq.blocks[first:end])
        seq.num_indexed_blocks = end

    # -- the end of a step -------------------------------------------------------------------------------

    def begin_step(self, in_flight: bool = False) -> None:
        """A new step: what was pending is computed now, except, with `in_flight`, what the last step fills."""
        self._pending = [b for b in self._pending if b.filled_step == self.step] if in_flight else []
        self.step += 1
        self.pool.step = self.step
        if self.events is not None:
            self.events.begin_step(self.step)

    def end_step(self) -> None:
        """The step has been started: its copies come before all that later steps write, nothing need be kept."""
        for block in self._pinned:
            self.pool.release(block)
            if self.events is not None:
                self.events.released(block, self.pool)
        self._pinned.clear()

    def withdraw(self) -> None:
        """What the steps that were not known to have run should have filled holds nothing."""
        if self.events is not None:
            self.events.withdrawn(self._pending)
        for block in self._pending:
            self.pool.unindex(block)
        self._pending.clear()
        self.end_step()

    def free(self, seq: Sequence) -> None:
        """Gives the sequence's blocks back, last one first: the deepest prefix is the least likely to be used."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        if self.events is not None:
            self.events.freed(seq, self.pool)
        seq.blocks = []
        seq.num_indexed_blocks = 0

    def start_over(self) -> None:
        """Nothing is cached, held or wanted any more, whatever was."""
        self._pending.clear()
        self._pinned.clear()
        self.pool.wanted.clear()
        self.pool.start_over()

    def reset(self) -> bool:
        """Forgets all cached content; False (and nothing changes) while sequences hold blocks."""
        return self.pool.clear()
