"""Physical blocks: the published ten-block example state by state, duplicates, eviction order, collisions."""

from __future__ import annotations

import random

import pytest
from host_helpers import NullEngine, make_sequence, solo
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoapc.engine.block_hash import BlockHasher, encode_tokens
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.block_pool import NEVER, Block, BlockPool, FreeBlockQueue, Prefix
from nanoapc.engine.sequence import Sequence


def ids(blocks: list[Block] | FreeBlockQueue) -> list[int]:
    return [block.block_id for block in blocks]


def indexed(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.blocks if block.prefix is not None]


def ref_counts(pool: BlockPool) -> dict[int, int]:
    return {block.block_id: block.ref_count for block in pool.blocks if block.ref_count}


def fill(pool: BlockPool, parent: Prefix, token: int, step: int = 1) -> Block:
    """Takes the next block and files it as the child of `parent` that holds [token]."""
    (block,) = pool.take(1)
    pool.put([block], parent, [b"%d after " % token + parent.key], [encode_tokens([token])], step)
    return block


def cache(pool: BlockPool, *tokens: int) -> list[Block]:
    """A chain of one-token blocks, filled and given back last one first, as a sequence does."""
    blocks, parent = [], pool.root
    for token in tokens:
        blocks.append(fill(pool, parent, token))
        parent = blocks[-1].prefix
    for block in reversed(blocks):
        pool.release(block)
    return blocks


# -- the ten-block example ---------------------------------------------------------------------------------


def test_the_ten_block_example() -> None:
    engine = NullEngine(num_blocks=10, block_size=4)
    pool, scheduler = engine.pool, engine.scheduler
    prompt0 = list(range(100, 115))
    prompt1 = [*prompt0[:10], 201, 202, 203, 204]
    prompt2 = [*prompt0[:12], *range(300, 317)]
    assert ids(pool.free) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    # Request 0 arrives with 15 prompt tokens: three full blocks, a fourth with 3 of 4.
    (request0,) = engine.add([prompt0], max_tokens=4)
    batch = engine.schedule()
    assert ids(request0.blocks) == [0, 1, 2, 3]
    assert indexed(pool) == [0, 1, 2]
    assert ids(pool.free) == [4, 5, 6, 7, 8, 9]
    engine.finish_step(batch)

    # Time 3: it has filled block 3, which is indexed now, and decodes on in block 4.
    engine.step()
    assert ids(request0.blocks) == [0, 1, 2, 3] and indexed(pool) == [0, 1, 2, 3]
    engine.step()
    assert ids(request0.blocks) == [0, 1, 2, 3, 4] and indexed(pool) == [0, 1, 2, 3]
    assert ids(pool.free) == [5, 6, 7, 8, 9]

    # Time 4: request 1 arrives; its first 10 of 14 tokens are request 0's. It shares blocks 0 and 1 and takes 5 and 6.
    # Published: 8 tokens hit. Ours: 2 tokens of block 2 are copied into block 5, so 10 are cached.
    (request1,) = engine.add([prompt1], max_tokens=2)
    batch = engine.schedule()
    assert ids(request1.blocks) == [0, 1, 5, 6]
    assert batch.copies == [(2, 5, 2)] and request1.num_cached_tokens == 10
    assert ref_counts(pool) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}  # 2: request 0, and the copy until it is done
    assert ids(pool.free) == [7, 8, 9]

    # Time 5: request 0 ends. Published: 4, 3, 2 go to the tail. Ours: 4 has no key, so it goes to the head.
    assert engine.finish_step(batch) == [request0]
    assert ids(pool.free) == [4, 7, 8, 9, 3, 2]
    assert ref_counts(pool) == {0: 1, 1: 1, 5: 1, 6: 1}
    assert indexed(pool) == [0, 1, 2, 3, 5]

    # Time 6: request 1 ends. Published: 7 8 9 4 3 2 6 5 1 0. Ours: 6 is not full, so it goes to the head as well.
    assert engine.step() == [request1]
    assert ids(pool.free) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    assert ref_counts(pool) == {}

    # Time 7: request 2 arrives with 29 tokens, the first 12 request 0's. Blocks 0, 1, 2 are spared from now on, hit
    # and leave the queue. Published: 7 8 9 4 3 are taken and 3 is evicted. Ours: 3 is spared by 6.
    (request2,) = engine.add([prompt2], max_tokens=6)
    assert ids(pool.free) == [6, 4, 7, 8, 9, 3, 5] and ids(pool.spared) == [2, 1, 0]
    batch = engine.schedule()
    assert ids(request2.blocks) == [0, 1, 2, 6, 4, 7, 8, 9]
    assert request2.num_cached_tokens == 12 and batch.copies == []
    assert ids(pool.free) == [3, 5] and ids(pool.spared) == []
    assert indexed(pool) == [0, 1, 2, 3, 4, 5, 6, 7, 8] and pool.num_evictions == 0
    engine.finish_step(batch)

    # It decodes on and needs a ninth block: the least recently used cached one is evicted.
    while engine.scheduler.has_unfinished:
        last = ids(request2.blocks)
        engine.step()
    assert last == [0, 1, 2, 6, 4, 7, 8, 9, 3] and pool.num_evictions == 1
    assert ids(pool.free) == [3, 5, 9, 8, 7, 4, 6, 2, 1, 0]
    assert not scheduler.running and request0.output_token_ids == solo(prompt0, 4)[0]


def test_the_duplicate_block_example() -> None:
    engine = NullEngine(num_blocks=8, block_size=4)
    pool = engine.pool
    prompt = list(b"ABCDEF")
    (request1,) = engine.add([prompt], max_tokens=8)
    for _ in range(4):
        engine.step()
    output = request1.row >= 0 and engine.scheduler.table.tokens[request1.row, 6:9].tolist()
    assert ids(request1.blocks) == [0, 1, 2] and indexed(pool) == [0, 1]

    # The same prompt again. EF is all that block 1 has to offer; F is computed, because its logits are needed.
    (request2,) = engine.add([prompt], max_tokens=4)
    batch = engine.schedule()
    assert ids(request2.blocks) == [0, 3] and batch.copies == [(1, 3, 1)] and request2.num_cached_tokens == 5
    assert pool.blocks[3].prefix is None
    engine.finish_step(batch)
    engine.step()
    engine.step()

    # Block 3 holds EFGH like block 1: one key, two blocks, until request 2 is freed and later evicted.
    prefix = pool.blocks[3].prefix
    assert prefix is not None and prefix is pool.blocks[1].prefix
    assert prefix.label == encode_tokens([*b"EF", *output[:2]])
    assert ids(prefix.blocks) == [1, 3]
    engine.run()
    assert request2.output_token_ids == request1.output_token_ids[:4] == solo(prompt, 4)[0]
    assert ids(prefix.blocks) == [1, 3], "both stay cached while there is room"


# -- duplicates and collisions -----------------------------------------------------------------------------


def test_evicting_one_duplicate_never_hides_another() -> None:
    for evict_first in (True, False):
        pool = BlockPool(3)
        one, two = fill(pool, pool.root, 7), fill(pool, pool.root, 7)
        assert one.prefix is two.prefix and ids(one.prefix.blocks) == [0, 1]
        evicted, kept = (one, two) if evict_first else (two, one)
        pool.release(evicted)
        pool.take(2)  # the spare one and the duplicate
        assert pool.num_evictions == 1 and evicted.prefix is None
        found = pool.find(pool.root, kept.prefix.key, encode_tokens([7]))
        assert found is kept.prefix and found.blocks == [kept]
        pool.check_invariants([list(pool.blocks)])


def test_a_recomputed_parent_finds_its_cached_children() -> None:
    pool = BlockPool(3)
    parent, child = cache(pool, 1, 2)
    prefix, child_prefix = parent.prefix, child.prefix
    pool.touch(child)
    pool.take(2)  # the spare block, then the parent: the child is in use
    assert parent.prefix is None and prefix.blocks == [] and not child.prefix.parent.blocks
    assert pool.find(pool.root, prefix.key, prefix.label) is prefix, "a child keeps its parent's Prefix"
    assert pool.root.is_leaf, "no block holds the parent"

    pool.release(parent)
    again = fill(pool, pool.root, 1, step=2)
    assert again.prefix is prefix and prefix.blocks == [again]
    assert pool.find(again.prefix, child_prefix.key, child_prefix.label).blocks == [child]
    assert prefix.cached == [child_prefix]


def test_a_prefix_is_forgotten_with_its_last_descendant() -> None:
    pool = BlockPool(4)
    chain = cache(pool, 1, 2, 3)
    deepest = chain[2]
    pool.touch(deepest)
    pool.unindex(chain[0])
    pool.unindex(chain[1])
    assert len(list(pool.prefixes())) == 3, "the deepest block keeps all that leads to it"
    pool.unindex(deepest)
    assert not pool.index and pool.root.num_children == 0 and not list(pool.prefixes())


def test_colliding_keys_are_told_apart_all_the_way_to_the_root() -> None:
    """[B][C] must not take the C that was computed after A, although A, B and both C have one key."""
    pool = BlockPool(8)
    a, b = pool.take(2)
    after_a = pool.put([a], pool.root, [b"k"], [encode_tokens([1])], 1)
    after_b = pool.put([b], pool.root, [b"k"], [encode_tokens([2])], 1)
    (c,) = pool.take(1)
    a_c = pool.put([c], after_a, [b"k"], [encode_tokens([3])], 1)
    assert pool.find(after_a, b"k", encode_tokens([3])) is a_c
    assert pool.find(after_b, b"k", encode_tokens([3])) is None
    assert pool.find(pool.root, b"k", encode_tokens([3])) is None
    (d,) = pool.take(1)
    b_c = pool.put([d], after_b, [b"k"], [encode_tokens([3])], 1)
    assert b_c is not a_c and len(pool.index) == 1
    pool.check_invariants([[a, b, c, d]])
    for block in (c, a, d, b):  # from the chain's middle and its ends
        pool.unindex(block)
        pool.check_invariants([[a, b, c, d]])
    assert not pool.index


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_constant_hash_changes_no_output(enable_caching: bool) -> None:
    rng = random.Random(21)
    prompts = [[rng.randrange(3) for _ in range(12 + rng.randrange(3))] for _ in range(64)]
    engine = NullEngine(512, 4, constant_hash=True, enable_caching=enable_caching, max_num_batched_tokens=100)
    expected = [solo(prompt, 5)[0] for prompt in prompts]
    assert engine.generate(prompts, max_tokens=5) == expected
    cold = engine.stats.hit_tokens
    assert engine.generate(prompts, max_tokens=5) == expected
    assert len(engine.pool.index) == enable_caching
    if enable_caching:
        assert engine.stats.hit_tokens - cold == sum(len(prompt) - 1 for prompt in prompts)
    else:
        assert engine.stats.hit_tokens == 0


# -- the order of eviction ---------------------------------------------------------------------------------


def test_blocks_without_a_key_go_to_the_head_and_cached_ones_to_the_tail() -> None:
    pool = BlockPool(5)
    keyed = fill(pool, pool.root, 1)
    (plain,) = pool.take(1)
    pool.release(keyed)
    pool.release(plain)
    assert ids(pool.free) == [1, 2, 3, 4, 0]


def test_a_sequences_blocks_are_freed_last_one_first() -> None:
    pool = BlockPool(6)
    older = cache(pool, 1, 2, 3)
    newer = cache(pool, 4, 5)
    assert ids(pool.free) == [5, *ids(older[::-1]), *ids(newer[::-1])]
    pool.take(3)  # the spare block and the two deepest of the older chain
    assert indexed(pool) == [*ids(older[:1]), *ids(newer)]


def test_a_hit_makes_blocks_the_most_recently_used() -> None:
    pool = BlockPool(4)
    older, newer = cache(pool, 1, 2), cache(pool, 3, 4)
    for block in older:
        pool.touch(block)
    for block in reversed(older):
        pool.release(block)
    assert ids(pool.free) == ids(newer[::-1] + older[::-1])


def test_wanted_blocks_are_evicted_last() -> None:
    pool = BlockPool(5)
    wanted, other = cache(pool, 1, 2), cache(pool, 3, 4)
    keys = [block.prefix.key for block in wanted]
    pool.want([*keys, b"not cached yet"])
    assert ids(pool.free) == [4, *ids(other[::-1])]
    pool.check_invariants([])
    pool.take(3)
    assert indexed(pool) == ids(wanted) and pool.num_wanted_evictions == 0
    (evicted,) = pool.take(1)
    assert pool.num_evictions == 3 and pool.num_wanted_evictions == 1
    assert evicted is wanted[1], "of what is spared, too, the deepest goes first: a prefix without its start is useless"


def test_blocks_are_spared_as_long_as_anybody_wants_them() -> None:
    pool = BlockPool(3)
    (block,) = cache(pool, 1)
    keys = [block.prefix.key]
    pool.want(keys)
    pool.want(keys)
    pool.unwant(keys)
    assert ids(pool.spared) == [0]
    pool.touch(block)
    pool.release(block)
    assert ids(pool.spared) == [0], "also after it was used"
    pool.unwant(keys)
    assert ids(pool.spared) == [] and ids(pool.free) == [1, 2, 0] and not pool.wanted
    pool.check_invariants([])


def test_blocks_that_come_to_be_cached_are_spared_if_somebody_waits_for_them() -> None:
    pool = BlockPool(2)
    pool.want([b"1 after "])
    block = fill(pool, pool.root, 1)
    pool.release(block)
    assert ids(pool.spared) == [0]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["append", "append_left", "remove", "pop_left"]), st.integers(0, 5))))
def test_the_free_queue_behaves_as_a_list(operations: list[tuple[str, int]]) -> None:
    blocks = [Block(i) for i in range(6)]
    queue, model = FreeBlockQueue(), []
    for name, number in operations:
        block = blocks[number]
        if name == "pop_left":
            count = min(number, len(model))
            assert queue.pop_left(count) == model[:count]
            del model[:count]
        elif (name == "remove") == (block in model):
            getattr(queue, name)(block)
            {"append": model.append, "append_left": lambda b: model.insert(0, b), "remove": model.remove}[name](block)
        assert list(queue) == model and len(queue) == len(model)
        for block in blocks:
            assert (block.queue is queue) == (block in model)
            assert block.next.previous is block and block.previous.next is block


# -- reset and check ---------------------------------------------------------------------------------------


def test_clear_forgets_everything_or_changes_nothing() -> None:
    pool = BlockPool(4)
    chain = cache(pool, 1, 2)
    pool.want([chain[0].prefix.key])
    pool.touch(chain[0])
    assert not pool.clear() and indexed(pool) == [0, 1]
    pool.release(chain[0])
    assert ids(pool.spared) == [0]
    assert pool.clear()
    assert not pool.index and not indexed(pool) and pool.root.is_leaf
    assert sorted(ids(pool.free)) == [0, 1, 2, 3] and not len(pool.spared)
    assert all(block.filled_step == NEVER for block in pool.blocks)
    pool.check_invariants([])
    assert pool.clear(), "an empty cache can be cleared"


def test_the_invariant_check_sees_what_it_is_for() -> None:
    def broken(damage: str) -> BlockPool:
        pool = BlockPool(4)
        cache(pool, 1, 2)
        exec(damage, {"pool": pool, "block": pool.blocks[0]})
        return pool

    broken("pass").check_invariants([])
    for damage in (
        "block.ref_count = 1",
        "pool.free.remove(block)",
        "block.prefix = None",
        "block.prefix.blocks.clear()",
        "block.prefix.num_children += 1",
        "pool.index.clear()",
        "pool.root.cached.clear()",
        "pool.wanted[block.prefix.key] = 1",
        "block.next.previous = block.next",
    ):
        with pytest.raises(AssertionError):
            broken(damage).check_invariants([])
    with pytest.raises(AssertionError):
        broken("pass").check_invariants([[broken("pass").blocks[0]]])


# -- the closest sibling -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=8),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.integers(0, 255),
)
def test_the_closest_child_is_the_filled_sibling_with_the_longest_common_start(
    siblings: list[list[int]], tokens: list[int], pending: int
) -> None:
    pool = BlockPool(8)
    filled = []
    for i, sibling in enumerate(siblings):
        is_pending = pending >> i & 1
        (block,) = pool.take(1)
        pool.put([block], pool.root, [bytes(sibling)], [encode_tokens(sibling)], 2 if is_pending else 1)
        if not is_pending:
            filled.append(sibling)
    found = pool.closest_child(pool.root, encode_tokens(tokens), step=2)

    def common(sibling: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(sibling, tokens, strict=True)) if a != b), 4)

    longest = max(map(common, filled), default=0)
    assert (found[1] // 4 if found else 0) == longest
    if longest:
        block, _ = found
        assert block.filled_step < 2 and common(siblings[block.block_id]) == longest


def test_a_sequence_matches_through_a_recomputed_parent() -> None:
    manager = BlockManager(5, 2, BlockHasher("sha256"))
    first, second = make_sequence([1, 2, 3, 4, 5]), make_sequence([1, 2, 9])

    def run(seq: Sequence) -> None:
        manager.begin_step()
        manager.start_waiting(seq)
        manager.admit(seq, manager.match(seq))
        manager.stop_waiting(seq)
        manager.index_blocks(seq, seq.prompt, len(seq.prompt))
        manager.end_step()

    run(first)
    child = first.blocks[1]
    manager.free(first)
    manager.pool.touch(child)  # another sequence uses it meanwhile
    taken = manager.pool.take(4)
    assert manager.match(first).shared == []
    for block in taken:
        manager.pool.release(block)
    run(second)
    assert manager.match(first).shared == [second.blocks[0], child]
