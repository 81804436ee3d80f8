"""BlockManager against a naive model: what is found, what is shared, copied, evicted and given back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from host_helpers import ConstantHasher, NullEngine, make_sequence, solo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from nanoapc.engine.block_hash import BlockHasher
from nanoapc.engine.block_manager import BlockManager, Match
from nanoapc.engine.sequence import Sequence

Content = tuple[bytes, tuple[int, ...]]
"""What a full block stands for: the extra keys, and all tokens from the first to its own last."""


PROMPTS = ([0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1])
"""Few, so that hits of all kinds are common."""


class NaiveCache:
    """Lists and dicts that say what a block cache is: content of blocks, users of blocks, order of free blocks."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.content: dict[int, Content] = {}
        self.filled_step: dict[int, int] = {}
        self.holders: dict[Content, list[int]] = {}
        self.users: Counter[int] = Counter()
        self.wanted: Counter[Content] = Counter()
        self.free = list(range(num_blocks))
        self.spared: list[int] = []

    def full_blocks(self, extra: bytes, tokens: list[int]) -> list[Content]:
        size = self.block_size
        return [(extra, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def look_up(self, extra: bytes, tokens: list[int], step: int) -> tuple[list[int], int]:
        """The blocks to share, and the number of tokens of the next block that another one can give."""
        shared = []
        for content in self.full_blocks(extra, tokens):
            if content not in self.holders:
                break
            shared.append(self.holders[content][0])
        start = len(shared) * self.block_size
        longest = 0
        for block, (other_extra, other) in self.content.items():
            is_sibling = other_extra == extra and len(other) == start + self.block_size
            if is_sibling and self.filled_step[block] < step and list(other[:start]) == tokens[:start]:
                common = 0
                while start + common < min(len(tokens), len(other)) and other[start + common] == tokens[start + common]:
                    common += 1
                longest = max(longest, common)
        return shared, max(0, min(longest, len(tokens) - 1 - start))

    def take(self, num_blocks: int) -> list[int]:
        blocks = (self.free + self.spared)[:num_blocks]
        for block in blocks:
            (self.free if block in self.free else self.spared).remove(block)
            self.forget(block)
            self.users[block] = 1
        return blocks

    def use(self, block: int) -> None:
        for queue in (self.free, self.spared):
            if block in queue:
                queue.remove(block)
        self.users[block] += 1

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.enqueue(block)

    def enqueue(self, block: int) -> None:
        if block not in self.content:
            self.free.insert(0, block)
        else:
            (self.spared if self.wanted[self.content[block]] else self.free).append(block)

    def put(self, block: int, content: Content, step: int) -> None:
        self.content[block] = content
        self.filled_step[block] = step
        self.holders.setdefault(content, []).append(block)

    def forget(self, block: int) -> None:
        content = self.content.pop(block, None)
        if content is not None:
            self.holders[content].remove(block)
            if not self.holders[content]:
                del self.holders[content]

    def want(self, contents: list[Content], change: int) -> None:
        for content in reversed(contents):
            before = self.wanted[content]
            self.wanted[content] += change
            if (before > 0) != (self.wanted[content] > 0):
                for block in self.holders.get(content, []):
                    for queue in (self.free, self.spared):
                        if block in queue:
                            queue.remove(block)
                            self.enqueue(block)

    def clear(self) -> bool:
        if +self.users:
            return False
        self.free = sorted([*self.free, *self.spared])
        self.spared.clear()
        self.content.clear()
        self.holders.clear()
        return True


@dataclass
class Running:
    """What the model knows of a sequence that holds blocks."""

    seq: Sequence
    tokens: list[int]
    num_computed: int
    num_scheduled: int = 0
    blocks: list[int] = field(default_factory=list)
    num_indexed: int = 0


SITUATIONS = (
    "a shared block",
    "a block shared in its own step",
    "a copy",
    "a whole hit",
    "an eviction",
    "an eviction of a wanted block",
    "a withdrawn block",
    "a duplicate",
    "a reset",
    "a refused reset",
    "a readmission",
)
"""What the machine has to come across."""


ACTIONS = [*["arrive"] * 4, *["admit"] * 5, *["go on"] * 3, *["end"] * 4, *["stop"] * 3, "leave", "fail"] * 2
ACTIONS.append("reset")


class BlockManagerMachine(RuleBasedStateMachine):
    """The scheduler's calls in any order that it could make them; after each, the manager equals the model."""

    hasher_class: type[BlockHasher] = BlockHasher
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, self.hasher_class("xxhash"))
        self.model = NaiveCache(num_blocks, block_size)
        self.waiting: list[Sequence] = []
        self.running: list[Running] = []
        self.pinned: list[int] = []
        self.pending: list[int] = []
        self.in_step = False

    @rule(seed=st.integers(0, 2**32))
    def act(self, seed: int) -> None:
        """Some actions that are possible now. (From a seed: hypothesis' own draws are too alike to fill a pool.)"""
        rng = random.Random(seed)
        for action in rng.choices(ACTIONS, k=10):
            self.do(action, rng)
            self.check()

    def do(self, action: str, rng: random.Random) -> None:
        number = rng.randrange(1000)
        if action == "arrive":
            tail = rng.choices([0, 1], k=rng.randrange(4))
            prompt = [*rng.choice(PROMPTS)[: rng.choice((12, 12, 11, 8, 8, 7, 6, 5, 4, 3))], *tail]
            self.arrive(prompt, salt=rng.choice((None, None, None, "a")), reads=rng.random() < 0.8)
        elif action == "leave" and self.waiting:
            self._dequeue(self.waiting.pop(number % len(self.waiting)))
        elif action == "stop" and self.running and not self.in_step:
            self.stop(number)
        elif action == "reset" and not self.in_step:
            self.reset()
        elif action == "admit" and self.waiting:
            self.admit(number)
        elif action == "go on" and any(not run.num_scheduled for run in self.running):
            self.go_on(number)
        elif action == "end":
            self.end_step(number % 2)
        elif action == "fail" and self.in_step:
            self.fail_step()

    # -- between steps -----------------------------------------------------------------------------------

    def arrive(self, prompt: list[int], salt: str | None, reads: bool) -> None:
        self._enqueue(make_sequence(prompt, salt=salt, skip_reading_prefix_cache=not reads), prompt)

    def _enqueue(self, seq: Sequence, tokens: list[int]) -> None:
        self.waiting.append(seq)
        self.manager.start_waiting(seq)
        if seq.reads_cache:
            self.model.want(self.model.full_blocks(seq.extra, tokens), +1)

    def _dequeue(self, seq: Sequence) -> None:
        self.manager.stop_waiting(seq)
        if seq.reads_cache:
            self.model.want(self.model.full_blocks(seq.extra, seq.all_tokens().tolist()), -1)

    def stop(self, number: int) -> None:
        run = self.running.pop(number % len(self.running))
        self._free(run)
        if number % 3 == 0:  # preempted
            self._enqueue(run.seq, run.tokens)

    def _free(self, run: Running) -> None:
        run.seq.output_token_ids = run.tokens[len(run.seq.prompt) :]
        self.manager.free(run.seq)
        for block in reversed(run.blocks):
            self.model.release(block)

    def reset(self) -> None:
        done = self.model.clear()
        assert self.manager.reset() == done
        self.seen["a reset" if done else "a refused reset"] += 1

    # -- in a step ---------------------------------------------------------------------------------------

    def admit(self, number: int) -> None:
        seq = self.waiting[number % len(self.waiting)]
        match = self.manager.match(seq)
        num_free = len(self.model.free) + len(self.model.spared)
        if self.manager.blocks_needed(seq, match) > num_free:
            match = self.manager.without_copy(match)
            if self.manager.blocks_needed(seq, match) > num_free:
                return
        self.waiting.remove(seq)
        self.in_step = True
        tokens = seq.all_tokens().tolist()
        copy = self.manager.admit(seq, match)
        self.seen["a shared block"] += bool(match.shared)
        self.seen["a block shared in its own step"] += any(b.block_id in self.pending for b in match.shared)
        self.seen["a copy"] += copy is not None
        self.seen["a whole hit"] += len(match.shared) * self.model.block_size == len(tokens)
        self.seen["a readmission"] += bool(seq.output_token_ids)

        run = Running(seq, tokens, match.num_cached_tokens)
        run.blocks = [block.block_id for block in match.shared]
        run.num_indexed = len(run.blocks)
        for block in run.blocks:
            self.model.use(block)
        if match.copy is not None:
            source, num_tokens = match.copy[0].block_id, match.copy[1]
            assert source not in self.pending, "a block that this step fills is the source of a copy"
            self.model.use(source)
            self.pinned.append(source)
        num_shared = len(run.blocks)
        run.blocks += self.model.take(-(-len(tokens) // self.model.block_size) - num_shared)
        assert copy == (None if match.copy is None else (source, run.blocks[num_shared], num_tokens))
        self.running.append(run)
        self._dequeue(seq)
        self._compute(run, 1 + number % 14)

    def go_on(self, number: int) -> None:
        idle = [run for run in self.running if not run.num_scheduled]
        run, chunk = idle[number % len(idle)], 1 + number % 14
        end = min(run.num_computed + chunk, len(run.tokens))
        missing = -(-end // self.model.block_size) - len(run.blocks)
        if missing > len(self.model.free) + len(self.model.spared):
            return
        self.in_step = True
        if missing > 0:
            self.manager.grow(run.seq, missing)
            run.blocks += self.model.take(missing)
        self._compute(run, chunk)

    def _compute(self, run: Running, chunk: int) -> None:
        run.num_scheduled = min(chunk, len(run.tokens) - run.num_computed)
        end = run.num_computed + run.num_scheduled
        self.manager.index_blocks(run.seq, np.asarray([*run.tokens, 7, 7], np.int32), end)
        for content in self.model.full_blocks(run.seq.extra, run.tokens[:end])[run.num_indexed :]:
            block = run.blocks[run.num_indexed]
            self.model.put(block, content, self.manager.step)
            self.pending.append(block)
            run.num_indexed += 1

    def end_step(self, token: int) -> None:
        for run in self.running:
            run.num_computed += run.num_scheduled
            if run.num_scheduled and run.num_computed == len(run.tokens):
                run.tokens.append(token)
            run.num_scheduled = 0
        self.manager.end_step()
        self._next_step()

    def fail_step(self) -> None:
        self.manager.withdraw()
        self.seen["a withdrawn block"] += len(self.pending)
        for block in self.pending:
            self.model.forget(block)
        pinned, self.pinned = self.pinned, []
        for block in pinned:
            self.model.release(block)
        for run in self.running:
            self._free(run)
        self.running.clear()
        self._next_step()

    def _next_step(self) -> None:
        for block in self.pinned:
            self.model.release(block)
        self.pinned, self.pending, self.in_step = [], [], False
        self.manager.begin_step()

    def teardown(self) -> None:
        self.seen["an eviction"] += self.manager.pool.num_evictions
        self.seen["an eviction of a wanted block"] += self.manager.pool.num_wanted_evictions

    # -- what must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        self.pool_and_tables_agree()
        self.the_cache_is_the_models()
        self.the_queues_are_the_models()
        self.everybody_finds_what_the_model_finds()

    def pool_and_tables_agree(self) -> None:
        blocks = self.manager.pool.blocks
        pinned = [blocks[block] for block in self.pinned]
        self.manager.pool.check_invariants([*(run.seq.blocks for run in self.running), pinned])

    def the_cache_is_the_models(self) -> None:
        pool, model = self.manager.pool, self.model
        for run in self.running:
            assert [block.block_id for block in run.seq.blocks] == run.blocks
        assert {b.block_id for b in pool.blocks if b.prefix is not None} == set(model.content)
        assert {b.block_id: b.ref_count for b in pool.blocks if b.ref_count} == dict(+model.users)
        assert self.manager.num_free_blocks == len(model.free) + len(model.spared)
        self.seen["a duplicate"] += any(len(blocks) > 1 for blocks in model.holders.values())

    def the_queues_are_the_models(self) -> None:
        assert [block.block_id for block in self.manager.pool.free] == self.model.free
        assert [block.block_id for block in self.manager.pool.spared] == self.model.spared

    def everybody_finds_what_the_model_finds(self) -> None:
        for seq in self.waiting:
            match = self.manager.match(seq)
            tokens = seq.all_tokens().tolist()
            if not seq.reads_cache:
                assert match == Match()
                continue
            shared, num_copied = self.model.look_up(seq.extra, tokens, self.manager.step)
            assert [block.block_id for block in match.shared] == shared
            assert (match.copy[1] if match.copy else 0) == num_copied
            num_cached = len(shared) * self.model.block_size + num_copied
            assert match.num_cached_tokens == min(num_cached, len(tokens) - 1)
            if match.copy is not None:
                start, source = len(shared) * self.model.block_size, match.copy[0].block_id
                extra, content = self.model.content[source]
                assert extra == seq.extra and list(content[: start + num_copied]) == tokens[: start + num_copied]
            idle = {*shared, *([match.copy[0].block_id] if match.copy else [])} - set(+self.model.users)
            needed = -(-len(tokens) // self.model.block_size) - len(shared) + len(idle)
            assert self.manager.blocks_needed(seq, match) == needed


class CollidingBlockManagerMachine(BlockManagerMachine):
    """The same with one key for all blocks: all cached blocks are spared as soon as one is wanted."""

    hasher_class = ConstantHasher
    seen: ClassVar[Counter[str]] = Counter()

    def the_queues_are_the_models(self) -> None:
        pool, model = self.manager.pool, self.model
        free, spared = ([block.block_id for block in queue] for queue in (pool.free, pool.spared))
        assert set(free + spared) == set(model.free + model.spared)
        model.free, model.spared = free, spared  # which blocks are spared, and their order, is not the model's


@pytest.mark.parametrize("machine", [BlockManagerMachine, CollidingBlockManagerMachine])
def test_the_block_manager_equals_a_naive_model(machine: type[BlockManagerMachine]) -> None:
    machine.seen.clear()
    options = settings(deadline=None, max_examples=60, stateful_step_count=15, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=options)
    for situation in SITUATIONS:
        assert machine.seen[situation] >= 3, f"{situation} happened {machine.seen[situation]} times"


# -- what is found -----------------------------------------------------------------------------------------


class Steps:
    """A BlockManager, and the scheduler's calls for sequences that are computed in one step."""

    def __init__(self, num_blocks: int = 32, block_size: int = 4):
        self.manager = BlockManager(num_blocks, block_size, BlockHasher("xxhash"))

    def admit(self, prompt: Iterable[int], **options: Any) -> tuple[Sequence, Match, tuple[int, int, int] | None]:
        """Admits a sequence that computes all its prompt in this step."""
        seq = make_sequence(prompt, **options)
        self.manager.start_waiting(seq)
        match = self.manager.match(seq)
        copy = self.manager.admit(seq, match)
        self.manager.stop_waiting(seq)
        self.manager.index_blocks(seq, seq.prompt, seq.num_prompt_tokens)
        return seq, match, copy

    def end(self, *free: Sequence) -> None:
        """Ends the step, and the given sequences with it."""
        self.manager.end_step()
        for seq in free:
            self.manager.free(seq)
        self.manager.begin_step()

    def cache(self, prompt: Iterable[int], **options: Any) -> None:
        """A step that computes one prompt; it is cached and idle afterwards."""
        self.end(self.admit(prompt, **options)[0])


def test_a_prompt_found_whole_computes_one_token_and_takes_no_block() -> None:
    for length in (4, 8, 12):
        steps = Steps()
        steps.cache(range(length))
        num_free = steps.manager.num_free_blocks
        seq, match, copy = steps.admit(range(length))
        assert match.num_cached_tokens == length - 1 and copy is None
        assert len(seq.blocks) == len(match.shared) == length // 4
        assert steps.manager.num_free_blocks == num_free - length // 4
        steps.end(seq)
        _, match, _ = steps.admit([*range(length), 99])
        assert match.num_cached_tokens == length, "the last block of a whole hit stays cached"


@pytest.mark.parametrize("num_common", range(1, 8))
@pytest.mark.parametrize("length", [6, 7, 8, 13])
def test_past_the_last_whole_block_the_common_tokens_are_copied(num_common: int, length: int) -> None:
    steps = Steps()
    steps.cache(range(8))
    prompt = [*range(min(num_common, length)), *range(100, 100 + length - num_common)]
    seq, match, copy = steps.admit(prompt)
    num_found = min(num_common, length - 1)
    assert match.num_cached_tokens == num_found and len(match.shared) == num_common // 4
    if num_found % 4:
        source = steps.manager.match(make_sequence(range(8)))  # not queued: has no keys yet
        assert source.shared == [] and copy is not None
        assert copy[1:] == (seq.blocks[num_common // 4].block_id, num_found % 4)
        assert match.copy[0].prefix is not None and match.copy[0] not in seq.blocks
    else:
        assert copy is None


def test_the_longest_of_several_siblings_is_copied() -> None:
    steps = Steps()
    for prompt in ([1, 2, 3, 4, 50, 51, 0, 0], [1, 2, 3, 4, 50, 51, 52, 0], [1, 2, 3, 4, 50, 0, 0, 0]):
        steps.cache(prompt)
    _, match, copy = steps.admit([1, 2, 3, 4, 50, 51, 52, 53, 54])
    assert match.num_cached_tokens == 7 and copy is not None and copy[2] == 3


def test_siblings_of_this_step_do_not_hide_an_older_one_that_can_be_copied() -> None:
    """In prefix order the nearest sibling is always the one that was admitted just before."""
    steps = Steps()
    steps.cache([1, 2, 3, 0])
    for last in range(4, 9):
        _, match, _ = steps.admit([1, 2, 3, last])
        assert match.num_cached_tokens == 3


def test_a_block_is_shared_in_the_step_that_fills_it_but_never_copied_from() -> None:
    steps = Steps()
    owner, _, _ = steps.admit(range(10))
    sharer, match, copy = steps.admit([*range(8), 50, 51])
    assert match.num_cached_tokens == 8 and sharer.blocks[:2] == owner.blocks[:2]
    assert owner.blocks[0].ref_count == 2 and copy is None
    _, match, copy = steps.admit([0, 1, 2, 3, 4, 5, 50, 51])
    assert match.num_cached_tokens == 4 and copy is None, "block 1 is not filled when copies are made"
    steps.end()
    _, match, copy = steps.admit([0, 1, 2, 3, 4, 5, 60, 61])
    assert match.num_cached_tokens == 6 and copy is not None


def test_a_copys_source_is_kept_until_the_step_has_ended() -> None:
    steps = Steps(num_blocks=4)
    steps.cache(range(4))
    _, match, copy = steps.admit([0, 1, 2, 9, 9, 9, 9])
    assert copy is not None and match.copy is not None
    source = match.copy[0]
    assert source.ref_count == 1 and steps.manager.num_free_blocks == 1
    steps.manager.grow(make_sequence([1]), 1)
    assert source.prefix is not None, "nobody could take it"
    steps.manager.end_step()
    assert source.ref_count == 0 and steps.manager.num_free_blocks == 1


def test_blocks_of_a_step_that_did_not_run_are_withdrawn() -> None:
    steps = Steps()
    steps.cache(range(100, 104))
    first, _, _ = steps.admit(range(8))
    second, match, _ = steps.admit(range(9))
    third, copied, _ = steps.admit([100, 101, 0, 0, 0])
    assert match.num_cached_tokens == 8 and copied.num_cached_tokens == 2
    steps.manager.withdraw()
    for seq in (first, second, third):
        steps.manager.free(seq)
    steps.manager.pool.check_invariants([])
    steps.manager.begin_step()
    assert steps.admit(range(9))[1].num_cached_tokens == 0
    assert steps.admit(range(100, 105))[1].num_cached_tokens == 4, "what earlier steps have filled stays"


def test_salts_and_no_salt_never_share() -> None:
    steps = Steps()
    prompt = range(13)
    cached = []
    for salt in ("a", "a", "b", None, None, "x", "xx", "salt"):
        seq, match, _ = steps.admit(prompt, salt=salt)
        cached.append(match.num_cached_tokens)
        steps.end(seq)
    assert cached == [0, 12, 0, 0, 12, 0, 0, 0]
    assert steps.admit([0, 1, 2, 50], salt="a")[1].num_cached_tokens == 3, "a copy, from a sibling with the same salt"
    assert steps.admit([0, 1, 2, 50], salt="c")[1].num_cached_tokens == 0


def test_a_sequence_that_skips_the_look_up_still_fills_the_cache() -> None:
    steps = Steps()
    steps.cache(range(8))
    seq, match, copy = steps.admit(range(9), skip_reading_prefix_cache=True)
    assert match == Match() and copy is None and all(block.ref_count == 1 for block in seq.blocks)
    steps.cache(range(50, 58), skip_reading_prefix_cache=True)
    assert steps.admit(range(50, 59))[1].num_cached_tokens == 8
    assert steps.admit(range(60, 69), prompt_logprobs=1)[1] == Match(), "prompt_logprobs need all rows"


def test_caching_off_means_no_keys_and_no_look_ups() -> None:
    manager = BlockManager(8, 4, BlockHasher("xxhash"), enable_caching=False)
    seq = make_sequence(range(9))
    for _ in range(2):
        manager.start_waiting(seq)
        match = manager.match(seq)
        assert match == Match() and manager.admit(seq, match) is None
        manager.stop_waiting(seq)
        manager.index_blocks(seq, seq.prompt, 9)
        assert seq.keys == seq.labels == [] and not manager.pool.index and not manager.pool.wanted
        manager.free(seq)
        manager.begin_step()
    assert manager.num_free_blocks == 8


def test_a_prompt_shorter_than_a_block_is_never_cached() -> None:
    steps = Steps()
    for _ in range(20):
        seq, match, _ = steps.admit(range(3))
        assert match.num_cached_tokens == 0
        steps.end(seq)
    assert not steps.manager.pool.index


def test_reset_needs_all_blocks_free() -> None:
    steps = Steps()
    steps.admit(range(9))
    steps.end()
    assert not steps.manager.reset()
    assert steps.admit(range(9))[1].num_cached_tokens == 8, "a refused reset changes nothing"
    steps = Steps()
    steps.cache(range(9))
    assert steps.manager.reset() and steps.manager.num_free_blocks == 32
    assert steps.admit(range(9))[1].num_cached_tokens == 0


# -- admission ---------------------------------------------------------------------------------------------


def test_a_match_changes_nothing_however_often_it_is_asked() -> None:
    steps = Steps()
    steps.cache(range(8))
    pool = steps.manager.pool
    seq = make_sequence([*range(6), 50, 51, 52])
    steps.manager.start_waiting(seq)

    def state() -> list[Any]:
        queues = [[b.block_id for b in queue] for queue in (pool.free, pool.spared)]
        return [*queues, [(b.ref_count, b.prefix, b.filled_step) for b in pool.blocks], seq.blocks[:]]

    before = state()
    first = steps.manager.match(seq)
    assert first.num_cached_tokens == 6
    for _ in range(3):
        assert steps.manager.match(seq) == first
        steps.manager.blocks_needed(seq, first)
        steps.manager.without_copy(first)
        assert state() == before
    assert steps.manager.without_copy(first) == Match(first.shared, None, 4)


def test_hits_are_counted_once_when_admission_had_to_wait() -> None:
    """The prefix is cached, but the tail finds no blocks until another sequence ends."""
    engine = NullEngine(num_blocks=8, block_size=4, policy="fcfs", max_model_len=32)
    prefix = list(range(8))
    engine.generate([prefix], max_tokens=1)
    queried = engine.stats.queried_tokens
    (other,) = engine.add([range(100, 116)], max_tokens=8)  # 4 blocks, 6 at its end
    (waiter,) = engine.add([[*prefix, *range(200, 212)]], max_tokens=2)  # 5 blocks, 2 of them cached
    num_waited = 0
    while waiter.num_cached_tokens < 0:
        assert engine.stats.queried_tokens == queried + (16 if other.num_cached_tokens >= 0 else 0)
        engine.step()
        num_waited += 1
    assert num_waited > 5
    engine.run()
    assert waiter.num_cached_tokens == engine.stats.hit_tokens == 8
    assert engine.stats.queried_tokens == queried + 16 + 20
    assert engine.stats.num_preemptions == 0
    assert waiter.output_token_ids == solo([*prefix, *range(200, 212)], 2)[0]


def test_idle_blocks_that_are_hit_count_as_blocks_that_are_needed() -> None:
    """They stand in the free queue: who counts them as found and as free at once takes from an empty queue."""
    engine = NullEngine(num_blocks=7, block_size=4, policy="fcfs", max_model_len=28)
    cached, other = list(range(16)), list(range(100, 109))
    engine.generate([cached], max_tokens=1)
    assert [block.prefix is not None for block in engine.pool.blocks].count(True) == 4
    first = [*cached, *range(50, 59)]
    seq = make_sequence(first)
    engine.manager.start_waiting(seq)
    match = engine.manager.match(seq)
    assert len(match.shared) == 4 and engine.manager.blocks_needed(seq, match) == 7
    engine.manager.stop_waiting(seq)

    a, c = engine.add([first, other], max_tokens=3)
    engine.step()
    assert a.num_cached_tokens == 16 and c.num_cached_tokens == -1, "one of them has to wait"
    engine.run()
    assert [a.output_token_ids, c.output_token_ids] == [solo(first, 3)[0], solo(other, 3)[0]]


def test_a_copy_is_given_up_when_its_source_is_the_block_that_is_missing() -> None:
    engine = NullEngine(num_blocks=4, block_size=4, max_model_len=16)
    engine.generate([range(4)], max_tokens=1)
    prompt = [0, 1, 2, *range(50, 60)]  # 4 blocks: only without keeping the source
    (output,) = engine.generate([prompt], max_tokens=2)
    assert output == solo(prompt, 2)[0] and engine.stats.hit_tokens == 0
    assert engine.pool.num_evictions == 1
