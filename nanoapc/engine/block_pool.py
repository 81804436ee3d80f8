"""BlockPool: the physical KV blocks, the index of what they hold, and the order of eviction.

Every block is in exactly one state:

    free, no prefix    in a queue,        ref_count == 0, prefix is None
    cached             in a queue,        ref_count == 0, prefix set: can be found until it is evicted
    in use             in no queue,       ref_count >= 1, prefix set once the block is full

What a block holds is a `Prefix`: its tokens, its extra keys and the Prefix before it. Equal content is ONE
Prefix (interned), so "the same prefix" is identity all the way to the root, and a hash collision costs a look at
two candidates, never a wrong answer. Several blocks may hold the same Prefix; evicting one never hides another.
A Prefix lives while a block holds it or a child refers to it, so a recomputed parent finds its cached children.

    root -- [the cat sat on] -- [the mat . It]      <- Prefix, label = extra keys + tokens
        \\__ [the cat ran to] -- [...]
                 |  |
              block 7, block 12                     <- blocks that hold it

Eviction takes the head of the free queue; blocks that waiting sequences want are in a queue of their own, which
is used last. Source: vLLM, "Automatic Prefix Caching" (design document), which keeps no Prefix (it trusts the
key), appends blocks without a key to the tail, and does not know what waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort_left
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoapc.engine.events import Events

NEVER = -1
REMEMBERED_EVICTIONS = 65536
"""Keys of evicted blocks that the pool remembers, to tell why a prompt misses."""
NEIGHBOURS = 32
"""Children on each side of a label that are looked at for a part of a block to copy."""
_label = attrgetter("label")


class Prefix:
    """The content of a full block together with everything before it.

    label: the block's own content as bytes, extra key and tokens; tells siblings apart and sorts like their tokens.
    key: the block key that the index files it under.
    blocks: the blocks that hold it now.
    num_children: interned children, cached or not.
    cached: the children that a block holds, sorted by label; None before the first.
    """

    __slots__ = ("blocks", "cached", "key", "label", "num_children", "parent")

    def __init__(self, parent: Prefix | None, label: bytes, key: bytes):
        self.parent = parent
        self.label = label
        self.key = key
        self.blocks: list[Block] = []
        self.num_children = 0
        self.cached: list[Prefix] | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether no child of it is cached."""
        return not self.cached

    def block_filled_before(self, step: int) -> Block | None:
        """A block that holds it since an earlier step."""
        return next((block for block in self.blocks if block.filled_step < step), None)


class Block:
    """A physical block. `filled_step`: the step that fills (or filled) it once it has a prefix."""

    __slots__ = ("block_id", "filled_step", "next", "prefix", "previous", "queue", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: Prefix | None = None
        self.filled_step = NEVER
        self.queue: FreeBlockQueue | None = None
        self.previous: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.prefix is not None})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: O(1) removal from the middle, no allocation.

    A sentinel closes the ring: sentinel.next is the head, sentinel.previous the tail.
    """

    def __init__(self) -> None:
        self._sentinel = Block(-1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next
        while block is not self._sentinel:
            yield block
            block = block.next

    def _insert(self, block: Block, before: Block) -> None:
        last = before.previous
        last.next = before.previous = block
        block.previous, block.next = last, before
        block.queue = self
        self._length += 1

    def append(self, block: Block) -> None:
        """To the tail: evicted last."""
        self._insert(block, self._sentinel)

    def append_left(self, block: Block) -> None:
        """To the head: taken next."""
        self._insert(block, self._sentinel.next)

    def remove(self, block: Block) -> None:
        """From wherever it is."""
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = block
        block.queue = None
        self._length -= 1

    def pop_left(self, num_blocks: int) -> list[Block]:
        """The first blocks, from the head on; there must be so many."""
        blocks = []
        block = self._sentinel.next
        for _ in range(num_blocks):
            blocks.append(block)
            following = block.next
            block.previous = block.next = block
            block.queue = None
            block = following
        self._sentinel.next, block.previous = block, self._sentinel
        self._length -= num_blocks
        return blocks


class BlockPool:
    """All blocks, the free queues and the index.

    Attributes:
        free, spared: idle blocks in the order of eviction; what waiting sequences want is spared, and taken last.
        root: the Prefix of nothing, parent of all first blocks.
        index: key -> the Prefixes filed under it (one, unless keys collide).
        wanted: key -> how many waiting sequences would use a block with this key.
        num_evictions, num_wanted_evictions: since the start.
        evicted: key -> the step in which a block with this key was last evicted; the latest ones only.
        step: the current one, as the manager counts them.
    """

    def __init__(self, num_blocks: int, root_key: bytes = b"", events: Events | None = None):
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free = FreeBlockQueue()
        self.spared = FreeBlockQueue()
        for block in self.blocks:
            self.free.append(block)
        self.root = Prefix(None, b"", root_key)
        self.index: dict[bytes, list[Prefix]] = {}
        self.wanted: dict[bytes, int] = {}
        self.num_evictions = 0
        self.num_wanted_evictions = 0
        self.evicted: dict[bytes, int] = {}
        self.step = 0
        self.events = events

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now: free ones and cached ones that nobody uses."""
        return len(self.free) + len(self.spared)

    # -- finding -----------------------------------------------------------------------------------------

    def find(self, parent: Prefix, key: bytes, label: bytes) -> Prefix | None:
        """The interned Prefix with exactly this content, or None. The key only finds candidates."""
        for prefix in self.index.get(key, ()):
            if prefix.parent is parent and prefix.label == label:
                return prefix
        return None

    def find_chain(self, keys: list[bytes], labels: list[bytes]) -> list[Prefix]:
        """The Prefixes of consecutive blocks from the first on, as far as blocks hold them."""
        found, parent = [], self.root
        for key, label in zip(keys, labels, strict=True):
            prefix = self.find(parent, key, label)
            if prefix is None or not prefix.blocks:
                break
            found.append(prefix)
            parent = prefix
        return found

    def closest_child(self, parent: Prefix, label: bytes, step: int) -> tuple[Block, int] | None:
        """The cached child of `parent` that agrees with `label` longest, and the number of bytes in common.

        Children are sorted, so agreement only falls with the distance from where `label` would stand. Blocks that
        are filled in this very step are no use as a source and are passed over (in prefix order, they are the nearest),
        but only so many of them: a step may fill hundreds.
        """
        siblings = parent.cached or []
        at = bisect_left(siblings, label, key=_label)
        best: tuple[Block, int] | None = None
        for side in (range(at - 1, -1, -1)[:NEIGHBOURS], range(at, len(siblings))[:NEIGHBOURS]):
            for child in map(siblings.__getitem__, side):
                if child.label[:4] != label[:4]:  # not a token in common, and fewer further out
                    break
                block = child.block_filled_before(step)
                if block is not None:
                    same_salt = len(child.label) == len(label)  # at least: of one length
                    length = _common_prefix(child.label, label) if same_salt else 0
                    if best is None or length > best[1]:
                        best = block, length
                    break
        return best

    # -- taking and giving back --------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[Block]:
        """The next free blocks, evicted from the index if they were cached; their ref_count becomes 1."""
        num_plain = min(num_blocks, len(self.free))
        blocks = self.free.pop_left(num_plain)
        if num_plain < num_blocks:
            blocks += self.spared.pop_left(num_blocks - num_plain)
        for block in blocks:
            block.ref_count = 1
            if block.prefix is not None:
                self._evict(block, block.prefix.key)
        return blocks

    def _evict(self, block: Block, key: bytes) -> None:
        wanted = key in self.wanted
        self.num_evictions += 1
        self.num_wanted_evictions += wanted
        self.evicted.pop(key, None)
        self.evicted[key] = self.step  # the youngest is the last
        if len(self.evicted) > REMEMBERED_EVICTIONS:
            del self.evicted[next(iter(self.evicted))]
        if self.events is not None:
            self.events.evicted(block, wanted)
        self.unindex(block)

    def touch(self, block: Block) -> None:
        """One more user of a block that holds a prefix."""
        if block.queue is not None:
            block.queue.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One user less. The last one puts it into a queue: cached blocks to the tail, others to the head."""
        block.ref_count -= 1
        if block.ref_count == 0:
            self._enqueue(block)

    def _enqueue(self, block: Block) -> None:
        if block.prefix is None:
            self.free.append_left(block)
        elif block.prefix.key in self.wanted:
            self.spared.append(block)
        else:
            self.free.append(block)

    # -- the index ---------------------------------------------------------------------------------------

    def put(self, blocks: list[Block], parent: Prefix, keys: list[bytes], labels: list[bytes], step: int) -> Prefix:
        """Files consecutive blocks that are full (or filled in `step`) under their content; returns the last's Prefix.

        parent: the Prefix before the first of them.
        """
        for block, key, label in zip(blocks, keys, labels, strict=True):
            prefix = self.find(parent, key, label)
            if prefix is None:
                prefix = Prefix(parent, label, key)
                parent.num_children += 1
                self.index.setdefault(key, []).append(prefix)
            if not prefix.blocks:
                if parent.cached:
                    insort_left(parent.cached, prefix, key=_label)
                else:
                    parent.cached = [prefix]
            prefix.blocks.append(block)
            block.prefix, block.filled_step = prefix, step
            parent = prefix
        return parent

    def unindex(self, block: Block) -> None:
        """Takes a block out of the index; its Prefix goes too unless another block or a child keeps it."""
        prefix = block.prefix
        if prefix is None:
            return
        block.prefix, block.filled_step = None, NEVER
        prefix.blocks.remove(block)
        if not prefix.blocks and prefix.parent is not None and prefix.parent.cached:
            siblings = prefix.parent.cached
            del siblings[bisect_left(siblings, prefix.label, key=_label)]
        self._forget(prefix)

    def _forget(self, prefix: Prefix) -> None:
        """Drops a Prefix that nothing refers to, and then perhaps its parents."""
        while prefix.parent is not None and not prefix.blocks and not prefix.num_children:
            candidates = self.index[prefix.key]
            candidates.remove(prefix)
            if not candidates:
                del self.index[prefix.key]
            prefix.parent.num_children -= 1
            prefix = prefix.parent

    def clear(self) -> bool:
        """Forgets all content; False (and nothing changes) while a block is in use."""
        if self.num_free_blocks < len(self.blocks):
            return False
        self.start_over()
        return True

    def start_over(self) -> None:
        """Nothing is cached or in use any more, whatever was, even if a change was interrupted in the middle."""
        self.root.cached, self.root.num_children = None, 0
        self.index.clear()
        self.evicted.clear()
        # In their first order again, so that memory that has been used before is used first.
        self.free, self.spared = FreeBlockQueue(), FreeBlockQueue()
        for block in self.blocks:
            block.prefix, block.filled_step, block.ref_count = None, NEVER, 0
            self.free.append(block)
        if self.events is not None:
            self.events.cleared()

    # -- what waiting sequences want ---------------------------------------------------------------------

    def want(self, keys: list[bytes]) -> None:
        """A waiting sequence has these keys: their idle blocks are evicted last from now on, the deepest first."""
        for key in reversed(keys):
            count = self.wanted.get(key, 0)
            self.wanted[key] = count + 1
            if count == 0 and key in self.index:
                self._requeue(key)

    def unwant(self, keys: list[bytes]) -> None:
        """The sequence does not wait any more."""
        for key in reversed(keys):
            count = self.wanted.pop(key) - 1
            if count:
                self.wanted[key] = count
            elif key in self.index:
                self._requeue(key)

    def _requeue(self, key: bytes) -> None:
        """Idle blocks with this key go to the queue that is theirs now."""
        for prefix in self.index[key]:
            for block in prefix.blocks:
                if block.queue is not None:
                    block.queue.remove(block)
                    self._enqueue(block)
                    if self.events is not None:
                        self.events.moved(block, self)

    # -- looking in --------------------------------------------------------------------------------------

    def prefixes(self) -> Iterator[Prefix]:
        """All interned Prefixes."""
        return chain.from_iterable(self.index.values())

    def check_invariants(self, tables: list[list[Block]]) -> None:
        """Raises AssertionError unless pool, queues, index and the given block tables agree (for tests)."""
        queued = list(self.free) + list(self.spared)
        assert len(queued) == len(set(map(id, queued))) == self.num_free_blocks, "a block is queued twice"
        for queue in (self.free, self.spared):
            assert all(b.queue is queue and b.next.previous is b and b.previous.next is b for b in queue)
        references = Counter(block.block_id for block in chain.from_iterable(tables))
        for block in self.blocks:
            assert block.ref_count == references[block.block_id], f"{block} is used {references[block.block_id]} times"
            assert (block.queue is None) == (block.ref_count > 0), f"{block} is in use and free"
            if block.prefix is not None:
                assert any(b is block for b in block.prefix.blocks), f"{block} is not where its prefix looks"
                spared = block.prefix.key in self.wanted
                assert block.queue is None or (block.queue is self.spared) == spared, f"{block} in the wrong queue"
        for key, prefixes in self.index.items():
            for prefix in prefixes:
                assert prefix.parent is not None and prefix.key == key and (prefix.blocks or prefix.num_children)
                assert all(b.prefix is prefix for b in prefix.blocks)
                assert (prefix in (prefix.parent.cached or ())) == bool(prefix.blocks)
        children = Counter(id(prefix.parent) for prefix in self.prefixes())
        for prefix in (self.root, *self.prefixes()):
            assert prefix.num_children == children[id(prefix)], "children are miscounted"
            labels = [child.label for child in prefix.cached or ()]
            assert labels == sorted(set(labels)), "cached children are out of order"


def _common_prefix(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two byte strings of one length."""
    differing = int.from_bytes(a, "big") ^ int.from_bytes(b, "big")
    return len(a) - (differing.bit_length() + 7) // 8
