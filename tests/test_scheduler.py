"""The scheduler runs every sequence as if it were alone, whatever shares its steps, its blocks and its pool.

The model is a null model over a fake cache (see host_helpers), so ids change if a block is wrong; NullEngine checks
pool, tables, slots, budget and blocks held in every step.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from host_helpers import VOCAB_SIZE, NullEngine, make_sequence, solo

import nanoapc
from nanoapc.config import EngineConfig
from nanoapc.engine.kv_memory import count_blocks
from nanoapc.engine.scheduler import WATERMARK
from nanoapc.engine.sequence import Sequence

HOST_MODULES = ("scheduler", "block_hash", "block_pool", "block_manager", "sequence", "step_batch", "prefix_order")


def random_prompts(seed: int, number: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 2000) for _ in range(length)] for _ in range(number)]


def outputs(sequences: list[Sequence]) -> list[list[int]]:
    return [seq.output_token_ids for seq in sequences]


def solo_outputs(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    return [solo(prompt, max_tokens)[0] for prompt in prompts]


# -- the fuzz ----------------------------------------------------------------------------------------------


def random_sequence(rng: random.Random, bases: list[list[int]], vocab_size: int, seq_id: int) -> Sequence:
    """A prompt that shares a start with others, and random reasons to end."""
    base = rng.choice(bases)
    prompt = base[: rng.randrange(1, len(base) - 1)]
    if rng.random() < 0.5:
        prompt = [*prompt[: rng.randrange(len(prompt) + 1)], rng.randrange(vocab_size), *prompt[:2]][: len(base) - 1]
    room = len(base) - len(prompt)
    max_tokens = rng.randrange(1, room + 1) if rng.random() < 0.5 else room
    return make_sequence(
        prompt,
        max_tokens,
        seq_id=seq_id,
        salt=rng.choice((None, None, None, "a", "b")),
        ignore_eos=rng.random() < 0.6,
        min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.3 else 0,
        stop_token_ids=(rng.randrange(vocab_size),) if rng.random() < 0.2 else (),
        skip_reading_prefix_cache=rng.random() < 0.1,
    )


def run_random_case(seed: int, engine_class: Callable[..., NullEngine]) -> Counter[str]:
    """One engine of random size under random requests; returns what has happened."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    block_size, max_model_len = rng.choice((1, 2, 3, 4, 8)), rng.randrange(8, 49)
    smallest = -(-max_model_len // block_size)
    vocab_size = rng.choice((2, 6, VOCAB_SIZE))
    eos = () if vocab_size == 2 else (0, 1)
    engine = engine_class(
        rng.randrange(smallest, 3 * smallest + 2),
        block_size,
        max_num_seqs=rng.randrange(1, 10),
        max_num_batched_tokens=rng.choice((1, 3, 7, 16, 64, 1000)),
        max_model_len=max_model_len,
        eos=eos,
        policy=rng.choice(("prefix", "fcfs")),
        enable_caching=rng.random() < 0.9,
        constant_hash=rng.random() < 0.15,
        vocab_size=vocab_size,
    )
    bases = [[rng.randrange(vocab_size) for _ in range(max_model_len)] for _ in range(2)]
    sequences: list[Sequence] = []
    for _ in range(rng.randrange(1, 5)):
        new = [random_sequence(rng, bases, vocab_size, len(sequences) + i) for i in range(rng.randrange(1, 10))]
        sequences += new
        engine.queue(new)
        for _ in range(rng.randrange(1, 40)):
            event = rng.random()
            if event < 0.02:
                victims = rng.choices(sequences, k=2)
                seen["an abort while running"] += any(seq.row >= 0 for seq in victims)
                seen["an abort while waiting"] += any(seq in engine.scheduler.waiting for seq in victims)
                engine.scheduler.abort(victims)
                engine.check()
            elif event < 0.03:
                seen["a reset"] += engine.manager.reset()
                engine.check()
            elif event < 0.035 and engine.fail():
                seen["a failed step"] += 1
                assert not engine.scheduler.has_unfinished
                assert engine.manager.num_free_blocks == len(engine.pool.blocks)
            else:
                engine.step()
    engine.run()
    seen += engine.seen

    for seq in sequences:
        expected, reason = solo(
            seq.prompt.tolist(),
            seq.max_tokens,
            eos=() if seq.params.ignore_eos else eos,
            stop_token_ids=seq.stop_token_ids,
            min_tokens=seq.params.min_tokens,
            vocab_size=vocab_size,
        )
        if seq.finish_reason == "abort":
            assert seq.output_token_ids == expected[: len(seq.output_token_ids)]
        else:
            assert (seq.output_token_ids, seq.finish_reason) == (expected, reason)
        seen["several preemptions of one sequence"] += seq.num_preemptions > 1
        seen["an end by " + seq.finish_reason] += 1
    num_growths = sum(-(-(seq.num_prompt_tokens + seq.max_tokens) // block_size) for seq in sequences)
    assert engine.stats.num_preemptions <= num_growths, "a victim pays for one block of an older sequence"
    seen["a preemption"] += engine.stats.num_preemptions
    seen["a hit"] += engine.stats.hit_tokens
    seen["a copied token"] += engine.stats.copied_tokens
    seen["a block shared in its own step"] += engine.num_pending_hits
    seen["an eviction"] += engine.pool.num_evictions
    seen["a recomputed token"] += engine.stats.recomputed_tokens
    assert not engine.pool.wanted, "nobody waits"
    assert engine.stats.hit_tokens <= engine.stats.queried_tokens
    assert engine.stats.generated_tokens == sum(len(seq.output_token_ids) for seq in sequences)
    return seen


def run_random_cases(engine_class: Callable[..., NullEngine] = NullEngine) -> Counter[str]:
    """What has happened in 150 of them."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        try:
            seen += run_random_case(seed, engine_class)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return seen


def test_random_engines_give_every_sequence_what_it_gets_alone() -> None:
    seen = run_random_cases()
    assert set(seen) >= {
        "an abort while running",
        "an abort while waiting",
        "a reset",
        "a failed step",
        "a chunk that is not a prompt's last",
        "prefill and decode in one step",
        "several preemptions of one sequence",
        "an end by stop",
        "an end by length",
        "an end by abort",
        "a preemption",
        "a hit",
        "a copied token",
        "a block shared in its own step",
        "an eviction",
        "a recomputed token",
    }
    assert min(seen.values()) >= 5, seen


# -- blocks that are held ----------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_sequence_holds_exactly_the_blocks_that_its_tokens_fill(enable_caching: bool) -> None:
    """All edges between block, prompt and output lengths; that no other block is written is checked in each step."""
    for length in range(1, 10):
        for max_tokens in range(1, 10):
            engine = NullEngine(8, 4, enable_caching=enable_caching, max_model_len=20)
            prompt = list(range(100, 100 + length))
            (seq,) = engine.add([prompt], max_tokens)
            num_computed = 0
            while engine.scheduler.has_unfinished:
                batch = engine.schedule()
                num_computed += batch.num_tokens
                assert len(seq.blocks) == -(-num_computed // 4)
                engine.finish_step(batch)
            assert num_computed == length + max_tokens - 1, "the last token is never computed"
            assert seq.output_token_ids == solo(prompt, max_tokens)[0]


def test_thousands_of_requests_leak_no_block() -> None:
    rng = random.Random(22)
    engine = NullEngine(40, 4, eos=(0, 1), max_num_seqs=16, max_num_batched_tokens=64, max_model_len=40)
    duplicates = random_prompts(1, 5, 13)
    reasons: Counter[str] = Counter()
    for _ in range(20):
        prompts = [rng.choice(duplicates)[: rng.randrange(1, 14)] for _ in range(100)]
        sequences = engine.add(prompts, [rng.randrange(1, 9) for _ in prompts], stop_token_ids=(7, 8, 9))
        for _ in range(rng.randrange(5)):
            engine.step()
        engine.scheduler.abort(rng.choices(sequences, k=5))
        engine.run()
        pool = engine.pool
        pool.check_invariants([])
        num_cached = sum(block.prefix is not None for block in pool.blocks)
        assert sum(1 for queue in (pool.free, pool.spared) for _ in queue) == 40 and num_cached > 0
        assert all(block.ref_count == 0 for block in pool.blocks) and not pool.wanted
        reasons.update(seq.finish_reason for seq in sequences)
    assert sum(reasons.values()) == 2000 and min(reasons[r] for r in ("stop", "length", "abort")) > 20


# -- prefix cache ------------------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_share_the_blocks_that_it_fills() -> None:
    engine = NullEngine(64, 4)
    prompt = list(range(100, 112))
    prompts = [prompt] * 8 + [[*prompt, 7]] * 8
    expected = solo_outputs(prompts, 6)
    sequences = engine.add(prompts, max_tokens=6)
    batch = engine.schedule()
    assert len(batch.sequences) == 16 and batch.num_tokens == 12 + 7 + 8, "one computes the prompt, fifteen one token"
    assert engine.num_pending_hits == 15 * 3
    assert (batch.slots == -1).sum() == 7, "who finds the whole prompt writes nothing"
    engine.finish_step(batch)
    engine.run()
    assert outputs(sequences) == expected
    assert [seq.num_cached_tokens for seq in sequences] == [0, *[11] * 7, *[12] * 8]
    warm = engine.add(prompts, max_tokens=6)
    engine.run()
    assert outputs(warm) == expected and [seq.num_cached_tokens for seq in warm] == [11] * 8 + [12] * 8
    assert NullEngine(64, 4, enable_caching=False).generate(prompts, max_tokens=6) == expected


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_found_whole_computes_one_token_and_gives_the_same(length: int) -> None:
    engine = NullEngine(64, 4)
    prompt = list(range(100, 100 + length))
    expected = solo(prompt, 6)[0]
    cached = []
    for _ in range(2):
        sequences = engine.add([prompt, prompt], max_tokens=6)
        engine.run()
        assert outputs(sequences) == [expected, expected]
        cached.append([seq.num_cached_tokens for seq in sequences])
    assert cached == [[0, length - 1], [length - 1, length - 1]]
    (longer,) = engine.add([[*prompt, 7]])
    engine.run()
    assert longer.num_cached_tokens == length


@pytest.mark.parametrize("how", ["the step fails", "the step fails with a copy", "aborted before its first step"])
def test_blocks_that_were_never_filled_are_never_found(how: str) -> None:
    engine = NullEngine(64, 4)
    prompt = list(range(100, 112))
    if how == "the step fails with a copy":
        engine.generate([[*prompt[:2], 1, 2, 3]])
    (failed,) = engine.add([prompt])
    if how.startswith("the step fails"):
        batch = engine.schedule()
        assert len(batch.copies) == (how == "the step fails with a copy")
        assert sum(b.prefix is not None and b.ref_count > 0 for b in engine.pool.blocks) >= 3, "they were pending"
        engine.fail_step()
    else:
        engine.scheduler.abort([failed])
    assert failed.finish_reason == "abort" and not engine.scheduler.has_unfinished

    first, second = engine.add([prompt, [*prompt, 7]], max_tokens=6)
    engine.run()
    assert first.num_cached_tokens == (2 if how == "the step fails with a copy" else 0)
    assert second.num_cached_tokens == 12
    assert outputs([first, second]) == solo_outputs([prompt, [*prompt, 7]], 6)


def test_the_cache_is_reset_only_between_requests() -> None:
    engine = NullEngine(64, 4)
    prompt = list(range(100, 113))
    (seq,) = engine.add([prompt], max_tokens=8)
    engine.step()
    num_free = engine.manager.num_free_blocks
    assert engine.manager.reset() is False and engine.manager.num_free_blocks == num_free
    (sharer,) = engine.add([prompt], max_tokens=8)
    engine.run()
    assert sharer.num_cached_tokens == 12, "a refused reset has left the cache as it was"
    assert outputs([seq, sharer]) == [solo(prompt, 8)[0]] * 2

    assert engine.manager.reset() is True and engine.manager.num_free_blocks == 64
    (cold,) = engine.add([prompt], max_tokens=8)
    (warm,) = engine.add([[*prompt, 1]], max_tokens=8)
    engine.run()
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens >= 12
    assert cold.output_token_ids == solo(prompt, 8)[0]


def test_the_cache_can_be_reset_while_sequences_wait() -> None:
    engine = NullEngine(64, 4)
    prompt = list(range(100, 113))
    engine.generate([prompt])
    (seq,) = engine.add([prompt])
    assert len(engine.pool.spared) == 3
    assert engine.manager.reset() is True
    engine.check()
    engine.run()
    assert seq.num_cached_tokens == 0 and seq.output_token_ids == solo(prompt, 8)[0]


def test_hits_reach_past_a_chunk_and_may_end_before_inside_or_after_it() -> None:
    engine = NullEngine(64, 4, max_num_batched_tokens=8)
    prompt, other = list(range(100, 140)), [*range(100, 118), *range(300, 315)]
    cached = []
    for each in (prompt, prompt, other):
        (seq,) = engine.add([each], max_tokens=5)
        engine.run()
        cached.append(seq.num_cached_tokens)
        assert seq.output_token_ids == solo(each, 5)[0]
    # All 40 are found, one is computed. Of `other`, whole blocks give 16, a copy 2 more.
    assert cached == [0, 39, 18]

    engine.manager.reset()
    (decoding,) = engine.add([[1, 2, 3]], max_tokens=40)
    engine.step()
    first, second = engine.add([prompt, other], max_tokens=5)
    engine.run()
    assert outputs([decoding, first, second]) == [solo([1, 2, 3], 40)[0], *solo_outputs([prompt, other], 5)]
    assert second.num_cached_tokens >= 16, "a later sequence finds what an earlier one has computed in chunks"


def test_in_prefix_order_a_shared_prefix_is_computed_once_though_the_pool_holds_only_one() -> None:
    """Four documents of ten blocks with five questions each, asked in turn, in a pool of one and a half documents."""
    documents = random_prompts(3, 4, 40)
    prompts = [[*document, 5000 + question] for question in range(5) for document in documents]
    computed = {}
    for policy in ("prefix", "fcfs"):
        engine = NullEngine(16, 4, policy=policy, max_num_seqs=2, max_model_len=44)
        assert engine.generate(prompts, max_tokens=2) == solo_outputs(prompts, 2)
        computed[policy] = engine.stats.computed_tokens - engine.stats.recomputed_tokens
    assert computed["prefix"] == 4 * 40 + 20 * 2, "each document once, of each prompt its question and one output"
    assert computed["fcfs"] > 3 * computed["prefix"]


def test_what_waiting_sequences_will_use_is_evicted_last() -> None:
    """The prefix of a waiting sequence is the least recently used in the cache, and survives."""
    engine = NullEngine(16, 4, policy="fcfs", max_num_seqs=1, max_model_len=44)
    wanted, *others = random_prompts(4, 3, 16)
    engine.generate([wanted, others[0]], max_tokens=1)
    long, waiting = engine.add([random_prompts(5, 1, 40)[0], [*wanted, 1]], max_tokens=2)
    engine.run()
    assert engine.pool.num_evictions > 0 and engine.pool.num_wanted_evictions == 0
    assert waiting.num_cached_tokens == 16 and long.num_cached_tokens == 0


# -- preemption --------------------------------------------------------------------------------------------


def watch_preemptions(engine: NullEngine) -> list[Sequence]:
    """Runs everything; returns the victims. The victim is always the newest, never an older one for a newer."""
    victims: list[Sequence] = []
    while engine.scheduler.has_unfinished:
        before = list(engine.scheduler.running)
        counts = {seq: seq.num_preemptions for seq in before}
        batch = engine.schedule()
        new_victims = [seq for seq in before if seq.num_preemptions > counts[seq]]
        if new_victims:
            assert before[-len(new_victims) :] == new_victims
            assert engine.scheduler.running == before[: -len(new_victims)], "nobody is admitted in such a step"
            assert list(engine.scheduler.waiting)[: len(new_victims)] == new_victims, "they come back in their order"
        victims += new_victims
        engine.finish_step(batch)
    engine.run()
    return victims


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "length", "max_tokens"), [(24, 9, 30), (12, 4, 40)])
def test_preempted_sequences_lose_and_double_nothing(
    num_blocks: int, length: int, max_tokens: int, enable_caching: bool
) -> None:
    prompts = random_prompts(7, 12, length)
    engine = NullEngine(num_blocks, 4, enable_caching=enable_caching, max_model_len=length + max_tokens)
    sequences = engine.add(prompts, max_tokens)
    victims = watch_preemptions(engine)
    assert len(victims) == engine.stats.num_preemptions >= 5
    assert outputs(sequences) == solo_outputs(prompts, max_tokens)
    assert {len(seq.output_token_ids) for seq in sequences} == {max_tokens}
    if num_blocks == 12:
        assert sum(seq.num_preemptions >= 3 for seq in sequences) >= 5, "most are preempted again and again"
    # Every token that ran is accounted for: once for each sequence, and again after a preemption.
    assert engine.stats.computed_tokens == 12 * (length + max_tokens - 1) + engine.stats.recomputed_tokens
    assert engine.stats.recomputed_tokens > 0
    big = NullEngine(200, 4, enable_caching=enable_caching, max_model_len=length + max_tokens)
    assert big.generate(prompts, max_tokens) == outputs(sequences) and big.stats.num_preemptions == 0


def test_what_is_still_cached_is_not_computed_again_after_a_preemption() -> None:
    """Ten blocks hold two sequences of 20 tokens. The older one's next block costs the newer one its last."""
    prompts = random_prompts(8, 2, 16)
    for enable_caching, num_recomputed in ((True, 4), (False, 20)):
        engine = NullEngine(10, 4, enable_caching=enable_caching, max_model_len=24)
        older, newer = engine.add(sorted(prompts), max_tokens=8)
        engine.run()
        assert outputs([older, newer]) == solo_outputs(sorted(prompts), 8)
        assert (older.num_preemptions, newer.num_preemptions) == (0, 1)
        assert engine.stats.recomputed_tokens == num_recomputed
        assert engine.pool.num_evictions >= enable_caching


def test_preemption_is_no_livelock() -> None:
    """Eight requests, of which the pool holds one and a half at their end."""
    prompts = random_prompts(9, 8, 8)
    engine = NullEngine(10, 4, max_model_len=32)
    sequences = engine.add(prompts, max_tokens=24)
    victims = watch_preemptions(engine)
    assert outputs(sequences) == solo_outputs(prompts, 24)
    # A victim pays for one block of an older sequence; what one has grown to it gets at once when it comes back.
    assert 8 <= len(victims) <= 8 * (8 - 2)
    assert engine.num_steps <= 8 * 24 + len(victims)


def test_the_oldest_sequence_ends_as_if_it_were_alone() -> None:
    engine = NullEngine(10, 4, max_model_len=32, policy="fcfs")
    oldest, *others = engine.add(random_prompts(10, 6, 8), max_tokens=24)
    for _ in range(24):
        assert oldest.finish_reason is None
        engine.step()
    assert oldest.finish_reason == "length" and oldest.num_preemptions == 0
    assert sum(seq.num_preemptions for seq in others) > 0
    engine.run()


def test_output_goes_on_where_it_was_preempted_with_prompt_and_output_apart() -> None:
    prompts = random_prompts(11, 4, 8)
    engine = NullEngine(10, 4, max_model_len=32)
    sequences = engine.add(prompts, max_tokens=24)
    while engine.stats.num_preemptions < 1:
        engine.step()
    (victim,) = [seq for seq in sequences if seq.num_preemptions]
    num_output = len(victim.output_token_ids)
    assert 0 < num_output < 24 and victim.num_prompt_tokens == 8 and victim.blocks == []
    assert victim.num_tokens == 8 + num_output
    expected = solo(victim.prompt.tolist(), 24)[0]
    assert victim.output_token_ids == expected[:num_output]
    engine.run()
    assert victim.output_token_ids == expected and victim.num_cached_tokens == 0, "cached at its first admission"


# -- pools that are too small ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(8, 64), (3, 31), (7, 31)])
def test_a_pool_that_cannot_hold_one_longest_sequence_is_refused(num_blocks: int, max_model_len: int) -> None:
    config = EngineConfig.from_arguments("model", num_kv_blocks=num_blocks, block_size=4)
    model = SimpleNamespace(kv_bytes=64)
    with pytest.raises(ValueError, match="lower max_model_len to at most") as error:
        count_blocks(config, model, max_model_len, None)
    for number in (max_model_len, -(-max_model_len // 4), num_blocks, num_blocks * 4):
        assert str(number) in str(error.value)


def test_a_pool_that_holds_one_longest_sequence_runs_any_number_of_them() -> None:
    for max_model_len in (31, 32):
        engine = NullEngine(8, 4, max_model_len=max_model_len)
        prompts = [*random_prompts(12, 3, 11), [5] * (max_model_len - 1), *random_prompts(13, 2, 5)]
        limits = [max_model_len - len(prompt) for prompt in prompts]
        expected = [solo(prompt, limit)[0] for prompt, limit in zip(prompts, limits, strict=True)]
        assert engine.generate(prompts, limits) == expected
        assert engine.stats.num_preemptions > 0


# -- the token budget --------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_runs_in_chunks() -> None:
    engine = NullEngine(64, 4, max_num_batched_tokens=16, max_model_len=64, policy="fcfs")
    prompts = random_prompts(14, 1, 8) + random_prompts(15, 1, 40) + random_prompts(16, 1, 8)
    sequences = engine.add(prompts, max_tokens=5)
    steps = []
    while engine.scheduler.has_unfinished:
        batch = engine.schedule()
        names = [sequences.index(seq) for seq in batch.sequences]
        steps.append(dict(zip(names, batch.counts.tolist(), strict=True)))
        engine.finish_step(batch)
    # 8 of the long prompt fill the first step; then a decode and a chunk fill each step; the rest makes room for the
    # third prompt.
    assert steps[:4] == [{0: 8, 1: 8}, {0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 2, 2: 8}]
    assert outputs(sequences) == solo_outputs(prompts, 5)


def test_running_sequences_come_before_waiting_ones() -> None:
    engine = NullEngine(64, 4, max_num_batched_tokens=4)
    decoding = engine.add(random_prompts(17, 3, 2), max_tokens=30)
    while not all(seq.row >= 0 and engine.scheduler.table.num_tokens[seq.row] > 2 for seq in decoding):
        engine.step()
    engine.add(random_prompts(18, 2, 20))
    for _ in range(15):
        batch = engine.schedule()
        assert set(decoding) <= set(batch.sequences), "a prefill holds up no decode"
        assert batch.num_tokens == 4, "and fills what is left"
        engine.finish_step(batch)
    engine.run()


def test_a_budget_below_the_number_of_running_sequences_serves_the_oldest() -> None:
    engine = NullEngine(64, 4, max_num_batched_tokens=3, policy="fcfs")
    prompts = random_prompts(19, 6, 1)
    sequences = engine.add(prompts, max_tokens=4)
    batch = engine.schedule()
    engine.finish_step(batch)
    assert engine.scheduler.running == sequences[:3]
    engine.scheduler.max_num_batched_tokens = 2
    batch = engine.schedule()
    assert sorted(seq.seq_id for seq in batch.sequences) == [0, 1]
    assert batch.key is None, "a passing composition has no name"
    engine.finish_step(batch)
    engine.run()
    assert outputs(sequences) == solo_outputs(prompts, 4)


def test_admission_leaves_a_watermark_while_others_run() -> None:
    num_blocks = 300
    num_spared = int(WATERMARK * num_blocks)
    assert num_spared > 0
    for excess in (0, 1):
        engine = NullEngine(num_blocks, 4, max_model_len=1200, max_num_batched_tokens=2000)
        (first,) = engine.add([range(400)], max_tokens=2)
        length = (num_blocks - 100 - num_spared + excess) * 4
        (second,) = engine.add([range(1000, 1000 + length)], max_tokens=2)
        engine.step()
        assert first.row >= 0 and (second.row >= 0) == (excess == 0)
        engine.run()
    engine = NullEngine(num_blocks, 4, max_model_len=1200, max_num_batched_tokens=2000)
    assert engine.generate([range(1199)], max_tokens=1) == [solo(range(1199), 1)[0]], "alone it may take all"


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    engine = NullEngine(64, 4, max_num_seqs=3)
    engine.add(random_prompts(20, 8, 5))
    most = 0
    while engine.scheduler.has_unfinished:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3


def test_the_oldest_take_the_budget_first_wherever_their_blocks_are() -> None:
    engine = NullEngine(64, 4, max_num_batched_tokens=6, policy="fcfs")
    cached = list(range(100, 108))
    engine.generate([cached])
    (old,) = engine.add([[1, 2, 3]], max_tokens=20)
    engine.step()
    (new,) = engine.add([[*cached, *range(200, 230)]])
    counts = []
    while not counts or counts[-1] > 1:
        batch = engine.schedule()
        assert [seq is old for seq in batch.sequences] == [False, True], "the new one's blocks come first"
        counts.append(int(batch.counts[0]))
        assert batch.counts[1] == 1
        engine.finish_step(batch)
    assert counts == [5] * 6 + [1]
    engine.run()
    assert outputs([old, new]) == [solo([1, 2, 3], 20)[0], solo(new.prompt.tolist(), 8)[0]]


# -- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["prefix", "fcfs"])
def test_each_sequence_gets_its_own_output_in_every_call(policy: str) -> None:
    engine = NullEngine(32, 4, policy=policy, max_num_seqs=4)
    first, second = random_prompts(21, 10, 6), random_prompts(22, 10, 7)
    limits = list(range(10, 0, -1))
    expected = [solo(prompt, limit)[0] for prompt, limit in zip(first, limits, strict=True)]
    assert engine.generate(first, limits) == expected
    assert engine.generate(second) == solo_outputs(second, 8)
    assert engine.generate([first[0]] * 5) == solo_outputs([first[0]] * 5, 8)


def test_the_policy_is_the_order_of_admission() -> None:
    prompts = [[1, 9], [2, 8], [1, 7], [2, 6], [1, 9, 5]]
    for policy, order in (("prefix", [2, 0, 4, 3, 1]), ("fcfs", [0, 1, 2, 3, 4])):
        engine = NullEngine(32, 4, policy=policy)
        sequences = engine.add(prompts)
        engine.step()
        assert engine.scheduler.running == [sequences[i] for i in order]
        engine.run()


def test_why_a_sequence_ends() -> None:
    prompt = random_prompts(23, 1, 6)[0]
    ids = solo(prompt, 12)[0]
    eos, stop = ids[4], ids[7]
    assert eos not in ids[:4] and stop not in ids[:7]
    cases = [
        ({}, 5, "stop", None),
        ({"ignore_eos": True}, 12, "length", None),
        ({"stop_token_ids": (stop,)}, 5, "stop", None),
        ({"ignore_eos": True, "stop_token_ids": (stop,)}, 8, "stop", stop),
        ({"ignore_eos": True, "stop_token_ids": (eos,)}, 5, "stop", eos),
        ({"min_tokens": 4}, 5, "stop", None),
        ({"min_tokens": 5}, 12, "length", None),
        ({"min_tokens": 7, "stop_token_ids": (stop,)}, 8, "stop", stop),
        ({"min_tokens": 8, "stop_token_ids": (stop,)}, 12, "length", None),
    ]
    for params, length, finish_reason, stop_reason in cases:
        engine = NullEngine(eos=(eos,))
        (seq,) = engine.add([prompt], max_tokens=12, **params)
        engine.run()
        assert seq.output_token_ids == ids[:length], params
        assert (seq.finish_reason, seq.stop_reason) == (finish_reason, stop_reason), params


def test_aborting_drops_what_is_unfinished_and_nothing_else() -> None:
    engine = NullEngine(32, 4, max_num_seqs=2, policy="fcfs")
    prompts = random_prompts(24, 4, 6)
    finished, running, waiting, other = engine.add(prompts, max_tokens=[1, 8, 8, 8])
    engine.step()
    assert finished.finish_reason == "length" and running.row >= 0 and waiting.row == -1
    engine.scheduler.abort([finished, running, waiting, waiting])
    engine.check()
    assert [seq.finish_reason for seq in (finished, running, waiting)] == ["length", "abort", "abort"]
    assert running.output_token_ids == solo(prompts[1], 1)[0] and waiting.output_token_ids == []
    engine.run()
    assert other.output_token_ids == solo(prompts[3], 8)[0]


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    engine = NullEngine()
    assert engine.schedule() is None and not engine.scheduler.has_unfinished
    engine.scheduler.add([])
    assert engine.schedule() is None


# -- what a step is made of --------------------------------------------------------------------------------


def test_the_key_names_the_composition_of_a_batch() -> None:
    engine = NullEngine(64, 4, policy="fcfs")
    engine.add(random_prompts(25, 3, 6), max_tokens=[4, 9, 9])
    keys, compositions = [], []
    while engine.scheduler.has_unfinished:
        if engine.num_steps == 6:
            engine.add(random_prompts(26, 1, 6), max_tokens=2)
        batch = engine.schedule()
        keys.append(batch.key)
        compositions.append(tuple(seq.seq_id for seq in batch.sequences))
        engine.finish_step(batch)
    assert len(set(keys)) == 4, "three start, one ends, one joins, it ends"
    assert len(set(zip(keys, compositions, strict=True))) == 4, "a key names one composition"
    assert None not in keys
    for step in range(1, len(keys)):
        assert (keys[step] == keys[step - 1]) == (compositions[step] == compositions[step - 1])


def count_trace_events(num_sequences: int, prompt_length: int) -> int:
    """Lines, calls and returns of Python code in a decode step that fills no block and ends no sequence."""
    engine = NullEngine(600, 16, max_num_seqs=64, max_num_batched_tokens=10_000)
    engine.add(random_prompts(27, num_sequences, prompt_length), max_tokens=9)
    for _ in range(3):
        engine.step()
    num_events = 0

    def trace(*_: object) -> object:
        nonlocal num_events
        num_events += 1
        return trace

    scheduler = engine.scheduler
    tokens = np.full(num_sequences, 7)
    sys.settrace(trace)
    try:
        batch = scheduler.schedule()
        scheduler.advance(batch)
        finished = scheduler.settle(batch, tokens)
    finally:
        sys.settrace(None)
    assert batch.num_tokens == num_sequences and not finished
    return num_events


def test_a_decode_step_in_which_nothing_changes_runs_no_python_per_sequence() -> None:
    few = count_trace_events(num_sequences=2, prompt_length=17)
    assert 0 < few == count_trace_events(num_sequences=60, prompt_length=17)
    assert few == count_trace_events(num_sequences=2, prompt_length=161), "nor per token"


def test_the_host_side_imports_no_torch() -> None:
    program = f"""
import sys, types
package = types.ModuleType("nanoapc")  # the package without what its __init__ imports
package.__path__ = [{str(Path(nanoapc.__file__).parent)!r}]
sys.modules.update(nanoapc=package, torch=None, transformers=None)
for name in {HOST_MODULES!r}:
    __import__("nanoapc.engine." + name)
assert "nanoapc.engine.scheduler" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
