"""The order of a batch is a depth-first walk of its prefix tree."""

from __future__ import annotations

import itertools
import random

import pytest
from host_helpers import make_sequence

from nanoapc.engine.prefix_order import prefix_order
from nanoapc.engine.sequence import Sequence


def make(prompts: list[list[int]], salts: list[str | None] | None = None) -> list[Sequence]:
    salts = salts or [None] * len(prompts)
    pairs = zip(prompts, salts, strict=True)
    return [make_sequence(prompt, seq_id=i, salt=salt) for i, (prompt, salt) in enumerate(pairs)]


def random_batch(seed: int) -> list[Sequence]:
    """Prompts that grow out of each other, with ids of one to four bytes, and some salts."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[rng.randrange(200_000)]]
    for _ in range(60):
        parent = rng.choice(prompts)
        tail = [rng.choice((0, 1, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1)) for _ in range(rng.randrange(4))]
        prompts.append(parent[: rng.randrange(1, len(parent) + 1)] + tail)
    return make(prompts, [rng.choice((None, None, "a", "b")) for _ in prompts])


def test_the_order_of_the_docstrings_example() -> None:
    a, b, x, y, z, w, q = 1, 2, 10, 11, 12, 13, 14
    batch = make([[a, x], [b, y], [a, z], [b, w], [a, x, q]])
    assert [seq.seq_id for seq in prefix_order(batch)] == [0, 4, 2, 1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_token_lists(seed: int) -> None:
    batch = random_batch(seed)
    given = list(batch)
    expected = sorted(batch, key=lambda seq: (seq.extra, seq.prompt.tolist()))
    ordered = prefix_order(batch)
    assert [seq.seq_id for seq in ordered] == [seq.seq_id for seq in expected]
    assert batch == given, "the caller's list is not changed"


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_share_a_prefix_of_any_length_stand_together(seed: int) -> None:
    ordered = prefix_order(random_batch(seed))
    for depth in range(1, 8):
        prefixes = [(s.extra, *s.prompt[:depth].tolist()) if len(s.prompt) >= depth else s.seq_id for s in ordered]
        num_runs = 1 + sum(p != q for p, q in itertools.pairwise(prefixes))
        assert num_runs == len(set(prefixes))


def test_a_prompt_stands_before_those_that_continue_it() -> None:
    batch = make([[5, 6, 7, 8], [5, 6, 7], [5, 6], [5]])
    assert [seq.seq_id for seq in prefix_order(batch)] == [3, 2, 1, 0]


def test_equal_prompts_keep_their_order_of_arrival() -> None:
    batch = make([[1, 2], [1], [1, 2], [1], [1, 2]])
    assert [seq.seq_id for seq in prefix_order(batch)] == [1, 3, 0, 2, 4]


def test_an_empty_batch_has_an_empty_order() -> None:
    assert prefix_order([]) == []
