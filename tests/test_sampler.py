"""The sampler: each row alone decides its token; order of the filters; penalties as in transformers."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.kernels.reference_sampling import keep_top, largest
from nanoapc.layers.sampler import Sampler, SamplingRows, make_state, sequence_seed
from nanoapc.outputs import logprob_entries
from nanoapc.sampling_params import SamplingParams

NEG_INF = float("-inf")
GREEDY = SamplingParams(temperature=0)


class Row:
    """One sequence of a test batch: its parameters, prompt, output so far and seed."""

    def __init__(self, params, prompt=(), output=(), seed=0, eos=(), bad_words=()):
        self.params, self.seed = params, seed
        state = make_state(params, eos, bad_words)
        self.state = state and state.for_prompt(prompt)
        for token_id in output:
            if self.state is not None:
                self.state.output_ids.append(token_id)


def sample(logits, rows, positions=0, num_valid_ids=None):
    """SampledTokens of rows with these logits [n, V] (or [V] for all)."""
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(len(rows), -1)
    num_valid_ids = num_valid_ids or logits.shape[1]
    batch = SamplingRows([(r.params, r.state, r.seed) for r in rows], num_valid_ids)
    batch.positions = torch.as_tensor(positions).expand(len(rows))
    return Sampler(ReferenceKernels(), num_valid_ids).forward(logits, batch)


def draws(logits, params, count=4000):
    """Counts of the ids drawn at `count` positions."""
    return Counter(sample(logits, [Row(params)] * count, torch.arange(count)).token_ids.tolist())


def edited(logits, row):
    """The row's logits [V] after bias, bans and penalties."""
    logits = torch.as_tensor(logits, dtype=torch.float32)[None]
    return SamplingRows([(row.params, row.state, 0)], logits.shape[1]).edit(logits)[0].tolist()


def some_params(rng):
    """Parameters of every kind, with bad word ids."""
    greedy = rng.random() < 0.3
    params = SamplingParams(
        temperature=0 if greedy else float(rng.choice([1e-4, 0.5, 1.0, 2.0])),
        top_k=int(rng.choice([0, 0, 1, 7, 500])),
        top_p=float(rng.choice([1.0, 0.3, 0.9, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.05])),
        repetition_penalty=float(rng.choice([1.0, 1.8])),
        presence_penalty=float(rng.choice([0.0, 0.7])),
        frequency_penalty=float(rng.choice([0.0, -0.3])),
        logit_bias={3: 2.5, 500: -1.0} if rng.random() < 0.3 else None,
        allowed_token_ids=range(100, 900, 3) if rng.random() < 0.2 else None,
        min_tokens=int(rng.choice([0, 9])),
        stop_token_ids=[4, 5],
        logprobs=[None, 0, 5, 20][rng.integers(4)],
    )
    return params, ([(7,), (8, 9)] if rng.random() < 0.3 else ())


# -- a row alone decides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [997, 4099])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_token_and_logprobs_do_not_depend_on_its_neighbours(vocab_size, num_threads):
    rng = np.random.default_rng(vocab_size)
    n = 48
    logits = torch.from_numpy(rng.normal(0, 2, (n, vocab_size)).astype(np.float32))
    logits[::3] = logits[::3].bfloat16().float()  # ties
    rows = []
    for i in range(n):
        params, bad_words = some_params(rng)
        prompt, output = rng.integers(0, vocab_size, (2, 6)).tolist()
        rows.append(Row(params, prompt, output, seed=i * 7919, eos=(2,), bad_words=bad_words))
    positions = torch.from_numpy(rng.integers(0, 9999, n))
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = sample(logits, rows, positions)
        order = torch.from_numpy(rng.permutation(n))
        shuffled = sample(logits[order], [rows[i] for i in order], positions[order]).token_ids
        alone = [sample(logits[i : i + 1], [rows[i]], positions[i]) for i in range(n)]
    finally:
        torch.set_num_threads(threads)
    assert together.token_ids.tolist() == [a.token_ids.item() for a in alone]
    assert shuffled.tolist() == together.token_ids[order].tolist()
    asking = [i for i in range(n) if rows[i].params.logprobs is not None]
    assert 0 < len(asking) < n and together.logprobs.chosen.shape == (len(asking),)
    for at, i in enumerate(asking):
        k = rows[i].params.logprobs
        assert together.logprobs.chosen[at] == alone[i].logprobs.chosen[0]
        assert together.logprobs.rank[at] == alone[i].logprobs.rank[0]
        assert together.logprobs.top_ids[at, :k].tolist() == alone[i].logprobs.top_ids[0].tolist()
        assert together.logprobs.top_logprobs[at, :k].tolist() == alone[i].logprobs.top_logprobs[0].tolist()


def test_greedy_and_random_rows_mix():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [Row(SamplingParams(temperature=t), seed=5) for t in (0, 0.7, 0, 1.3)]
    ids = sample(logits, rows).token_ids.tolist()
    best = logits.argmax(dim=-1).tolist()
    assert [ids[0], ids[2]] == [best[0], best[2]]
    assert [ids[1], ids[3]] == sample(logits[[1, 3]], [rows[1], rows[3]]).token_ids.tolist()


def test_a_penalised_row_and_a_plain_one_do_not_depend_on_their_order():
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    penalised = Row(SamplingParams(repetition_penalty=1.8, temperature=0), prompt=[int(logits[0].argmax())])
    plain = Row(SamplingParams(top_k=1, seed=3), seed=3)
    forward = sample(logits, [penalised, plain]).token_ids.tolist()
    assert sample(logits.flip(0), [plain, penalised]).token_ids.tolist() == forward[::-1]
    assert [sample(logits[i : i + 1], [r]).token_ids.tolist()[0] for i, r in enumerate((penalised, plain))] == forward


def test_the_callers_logits_are_left_as_they_are():
    logits = torch.randn(2, 20)
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 9}, repetition_penalty=2.0, top_k=3, min_p=0.1, allowed_token_ids=[1, 2])
    sample(logits, [Row(params, prompt=[1]), Row(GREEDY)])
    assert torch.equal(logits, before)


# -- draws --------------------------------------------------------------------------------------------------


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, NEG_INF])
    for temperature in (0.5, 1.0, 2.0):
        counts = draws(logits, SamplingParams(temperature=temperature), 20000)
        for token_id, p in enumerate((logits / temperature).softmax(0).tolist()):
            assert abs(counts[token_id] / 20000 - p) < 4 * math.sqrt(p * (1 - p) / 20000) + 1e-9


def test_a_draw_is_a_function_of_seed_and_position():
    logits = torch.zeros(64, 1000)
    rows = [Row(SamplingParams(), seed=seed) for seed in range(8)] * 8
    positions = torch.arange(64) // 8
    first = sample(logits, rows, positions).token_ids.tolist()
    assert first == sample(logits, rows, positions).token_ids.tolist()
    assert len(set(first)) > 50


def test_sequences_of_a_request_have_different_seeds_and_the_first_its_own():
    seeds = [sequence_seed(5, index) for index in range(100)]
    assert seeds[0] == 5 and len(set(seeds)) == 100
    assert seeds == [sequence_seed(5, index) for index in range(100)]
    assert not set(seeds[1:]) & {sequence_seed(6, index) for index in range(100)}
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        torch.tensor([sequence_seed(seed, index) for index in range(5)], dtype=torch.int64)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-12, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_temperatures_are_greedy(temperature, dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(32, 500, generator=generator) * 60).to(dtype).float()
    top = logits.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 0.01
    assert clear.sum() > 10
    ids = sample(logits, [Row(SamplingParams(temperature=temperature))] * 32)
    assert ids.token_ids[clear].tolist() == logits.argmax(dim=-1)[clear].tolist()


def test_extreme_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -2.9e38]])
    assert sample(logits, [Row(SamplingParams(temperature=1e-5))] * 2).token_ids.tolist() == [0, 2]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_ties_go_to_the_lowest_id(params):
    logits = torch.zeros(40, 3000)
    for i in range(40):
        logits[i, i * 37 + 5 :: 11] = 1.0
    assert sample(logits, [Row(params, seed=i) for i in range(40)]).token_ids.tolist() == [
        i * 37 + 5 for i in range(40)
    ]


# -- filters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [-1, 0, 300, 310])
def test_top_k_is_off_below_one_and_from_the_vocabulary_on(top_k):
    logits = torch.zeros(300)
    assert len(draws(logits, SamplingParams(top_k=top_k), 200)) > 100
    assert draws(logits, SamplingParams(top_k=top_k), 200) == draws(logits, SamplingParams(), 200)


def test_top_k_keeps_the_k_best():
    logits = torch.tensor([0.0, 1.0, 0.5, 0.9, -5.0])
    assert set(draws(logits, SamplingParams(top_k=3))) == {1, 3, 2}


@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize("top_k", [1, 2])
def test_top_p_works_on_what_top_k_left(temperature, top_k):
    kept = set(draws(torch.zeros(100), SamplingParams(top_k=top_k, top_p=0.8, temperature=temperature)))
    assert kept == set(range(top_k))  # 0.01 each of the whole: without renormalising, 80 would be kept
    assert set(draws(torch.zeros(100), SamplingParams(top_k=2, top_p=0.5))) == {0}


@pytest.mark.parametrize(("temperature", "kept"), [(0.5, {0}), (1.0, {0, 1}), (3.0, {0, 1, 2})])
def test_min_p_acts_after_temperature(temperature, kept):
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    # ratios to the best: 1/2 and 1/6; squared at temperature 0.5, cube roots at 3
    assert set(draws(logits, SamplingParams(min_p=0.3, temperature=temperature))) == kept
    assert set(draws(logits, SamplingParams(min_p=1.0, temperature=temperature))) == {0}
    assert set(draws(logits, SamplingParams(min_p=0.0, temperature=temperature))) == {0, 1, 2}


def test_min_p_acts_before_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(logits, SamplingParams(top_p=0.65))) == {0, 1}
    # min_p leaves 4/7 and 3/7
    assert set(draws(logits, SamplingParams(top_p=0.55, min_p=0.7))) == {0}
    assert set(draws(logits, SamplingParams(top_p=0.6, min_p=0.7))) == {0, 1}


def naive_keep(x, top_k, top_p):
    """The ids kept in a row of logits, in float64."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[:top_k]
    weights = [math.exp(x[i]) for i in order]
    kept, mass, margin = [], 0.0, 1.0
    for i, weight in zip(order, weights, strict=True):
        margin = min(margin, abs(mass - top_p * sum(weights)) / sum(weights))
        if mass < top_p * sum(weights) or top_p >= 1:
            kept.append(i)
        mass += weight
    return kept, margin


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_filters_keep_what_the_naive_ones_keep(data):
    V = data.draw(st.integers(1, 30))
    n = data.draw(st.integers(1, 4))
    values = st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.25, -7.0, NEG_INF])
    x = data.draw(st.lists(st.lists(values, min_size=V, max_size=V), min_size=n, max_size=n))
    for row in x:
        row[data.draw(st.integers(0, V - 1))] = 0.0
    top_k = data.draw(st.lists(st.integers(1, V), min_size=n, max_size=n))
    top_p = data.draw(st.lists(st.sampled_from([0.1, 0.37, 0.62, 0.93, 1.0]), min_size=n, max_size=n))
    expected = [naive_keep(*row) for row in zip(x, top_k, top_p, strict=True)]
    assume(all(margin > 1e-5 for _, margin in expected))
    out = keep_top(torch.tensor(x), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64))
    for given_row, row, (kept, _) in zip(x, out.tolist(), expected, strict=True):
        assert row == [v if i in kept else NEG_INF for i, v in enumerate(given_row)]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_largest_orders_by_value_then_id(data):
    V = data.draw(st.integers(1, 100))
    row = st.lists(st.sampled_from([0.0, -0.0, 1.5, -1.5, 2.0**-99, -(2.0**127), NEG_INF]), min_size=V, max_size=V)
    x = data.draw(st.lists(row, min_size=1, max_size=4))
    k = data.draw(st.integers(0, min(V, 20)))
    values, ids = largest(torch.tensor(x), k)
    for given_row, row_values, row_ids in zip(x, values.tolist(), ids.tolist(), strict=True):
        order = sorted(range(V), key=lambda i: (-given_row[i], i))[:k]
        assert row_values == [given_row[i] for i in order]
        finite = [i for i in order if given_row[i] > NEG_INF]
        assert row_ids[: len(finite)] == finite and len(set(row_ids)) == k


# -- edits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_that_of_transformers(penalty):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(60, generator=generator) * 4
    prompt, output = [5, 5, 5, 5, 9], [11, 5, 30, 30]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())
    row = Row(SamplingParams(repetition_penalty=penalty), prompt, output)
    assert edited(logits, row) == expected[0].tolist()


def test_presence_and_frequency_count_the_output_only():
    row = Row(SamplingParams(presence_penalty=2, frequency_penalty=0.5, temperature=0), [0, 1, 1], [1, 2, 2])
    assert edited([4.0, 4.0, 4.0, 4.0], row) == [4.0, 1.5, 1.0, 4.0]
    on_top = Row(SamplingParams(presence_penalty=2, temperature=0), prompt=[3], output=[1])
    assert sample([0.0, 0.0, 0.0, 1.0], [on_top]).token_ids.tolist() == [3]


def test_bias_comes_before_penalties():
    row = Row(SamplingParams(logit_bias={1: -3}, repetition_penalty=2.0), output=[1])
    assert edited([1.0, 1.0], row) == [1.0, -4.0]


def test_only_allowed_ids_are_drawn():
    params = SamplingParams(allowed_token_ids=[3, 5])
    assert set(sample(torch.zeros(500, 8), [Row(params, seed=i) for i in range(500)]).token_ids.tolist()) == {3, 5}


def test_a_phrase_is_forbidden_only_at_its_last_token():
    params = SamplingParams(temperature=0, bad_words=["some"])
    bad_words = [(7,), (1, 2), (1, 2, 3)]
    expected = {
        (): {7},
        (1,): {7, 2},
        (2,): {7},
        (5, 1): {7, 2},
        (1, 2): {7, 3},
        (1, 2, 4): {7},
        (2, 1): {7, 2},
    }
    for output, banned in expected.items():
        logits = edited(torch.zeros(9), Row(params, prompt=[1], output=output, bad_words=bad_words))
        assert {i for i, value in enumerate(logits) if value == NEG_INF} == banned


def test_stop_tokens_are_suppressed_until_min_tokens():
    logits = [0.0, 1.0, 2.0, 3.0]
    ids = [1, 1, 3]
    for ignore_eos in (False, True):
        params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2], ignore_eos=ignore_eos)
        row = Row(params, eos=[3])
        batch = SamplingRows([(row.params, row.state, 0)], 4)
        batch.positions = torch.zeros(1, dtype=torch.int64)
        found = []
        for _ in ids:
            found += Sampler(ReferenceKernels(), 4).forward(torch.tensor([logits]), batch).token_ids.tolist()
            row.state.output_ids.append(found[-1])
        assert found == ids


def test_ids_outside_the_vocabulary_touch_no_other_row():
    params = SamplingParams(
        min_tokens=4, stop_token_ids=[8, 12], logit_bias={9: 50.0}, repetition_penalty=2.0, max_tokens=8
    )
    logits = torch.ones(2, 8)
    rows = [Row(params, prompt=[8, 15], output=[8], eos=[10], bad_words=[(11,)]), Row(GREEDY)]
    batch = SamplingRows([(r.params, r.state, 0) for r in rows], 8)
    assert torch.equal(batch.edit(logits), logits)


def test_rows_without_edits_have_no_state():
    for params in (
        SamplingParams(),
        GREEDY,
        SamplingParams(top_k=5, stop_token_ids=[1], min_p=0.1, logprobs=3),
    ):
        assert make_state(params, eos_token_ids=[3]) is None
    assert make_state(SamplingParams(min_tokens=2)) is None  # nothing could stop it
    assert make_state(SamplingParams(min_tokens=2), eos_token_ids=[3]) is not None


def test_ids_of_a_padded_vocabulary_are_never_emitted():
    logits = torch.zeros(64, 320)
    logits[:, 300:] = 50.0
    rows = [Row(SamplingParams(temperature=i % 2, logprobs=5, top_k=i % 3), seed=i) for i in range(64)]
    result = sample(logits, rows, num_valid_ids=300)
    assert max(result.token_ids.tolist()) < 300 and result.logprobs.top_ids.max() < 300
    assert result.logprobs.rank.max() == 1
    expected = logits.log_softmax(dim=-1)[0, 0].item()  # of the model's whole distribution
    assert result.logprobs.chosen.tolist() == pytest.approx([expected] * 64)


# -- log-probs ----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    params = SamplingParams(
        temperature=0, logprobs=2, logit_bias={0: 100}, repetition_penalty=5.0, top_k=1, max_tokens=9
    )
    result = sample(logits, [Row(params, output=[2])])
    assert result.token_ids.tolist() == [0]
    raw = logits.log_softmax(dim=-1)[0].tolist()
    assert (result.logprobs.chosen.item(), result.logprobs.rank.item()) == (raw[0], 3)
    assert (result.logprobs.top_ids.tolist(), result.logprobs.top_logprobs.tolist()) == (
        [[2, 1]],
        [[raw[2], raw[1]]],
    )


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprob_entries_are_k_or_one_more_with_the_chosen_id(k):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(6))
    count = 200
    result = sample(logits, [Row(SamplingParams(logprobs=k, temperature=2.0))] * count, torch.arange(count))
    sizes = set()
    columns = zip(result.token_ids.tolist(), *(column.tolist() for column in result.logprobs), strict=True)
    for token_id, logprob, rank, top_ids, top_logprobs in columns:
        entries = logprob_entries(token_id, logprob, rank, top_ids, top_logprobs, decode=str)
        sizes.add(len(entries))
        assert entries[token_id].rank == 1 + (logits > logits[token_id]).sum()
        assert entries[token_id].decoded_token == str(token_id)
        assert list(entries) == [token_id, *(i for i in top_ids if i != token_id)]
        assert [entries[i].rank for i in top_ids] == list(range(1, k + 1))
    assert sizes == ({1} if k == 0 else {k, k + 1})


def test_tied_logprobs_share_a_rank():
    scored = Sampler(ReferenceKernels(), 5).gather_logprobs(
        torch.tensor([[1.0, 2.0, 2.0, 1.0, 0.0]]), torch.tensor([3]), 5
    )
    chosen, rank, top_ids, top_logprobs = (column.tolist()[0] for column in scored)
    entries = logprob_entries(3, chosen, rank, top_ids, top_logprobs)
    assert list(entries) == [3, 1, 2, 0, 4]
    assert [entry.rank for entry in entries.values()] == [3, 1, 1, 3, 5]


# -- what cannot be sampled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=2)])
def test_nan_and_infinite_logits_have_no_token(value, params):
    logits = torch.zeros(3, 6)
    logits[1, 4] = value
    sampled = sample(logits, [Row(GREEDY), Row(params), Row(GREEDY)])
    assert sampled.token_ids.tolist() == [0, -1, 0]


@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_p": 0.5, "top_k": 2, "logprobs": 2}])
def test_a_row_with_nothing_left_has_no_token_and_knows_why(changes):
    row = Row(SamplingParams(allowed_token_ids=[2], min_tokens=1, **changes), eos=[2])
    assert sample(torch.zeros(2, 6), [row, Row(GREEDY)]).token_ids.tolist() == [-1, 0]
    assert row.state.leaves_none(6)


def test_what_is_excluded_depends_on_the_output_so_far():
    row = Row(SamplingParams(allowed_token_ids=[2, 3], min_tokens=2), eos=[3], bad_words=[(2, 2)])
    found = [row.state.leaves_none(6)]
    for token_id in (2, 2, 4):
        row.state.output_ids.append(token_id)
        found.append(row.state.leaves_none(6))
    assert found == [False, True, False, False]  # after one token both are excluded, then the 3 is not any more
    everything = Row(GREEDY, bad_words=[(i,) for i in range(6)])
    assert everything.state.leaves_none(6) and not everything.state.leaves_none(7)


# -- cost ---------------------------------------------------------------------------------------------------


def test_counts_are_kept_up_not_counted_again_and_survive_a_new_batch():
    row = Row(SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5), prompt=[1])
    batch = SamplingRows([(row.params, row.state, 0)], 300)
    logits = torch.ones(1, 300)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 4000).tolist()
    seconds = []
    for token_id in tokens:
        row.state.output_ids.append(token_id)
        start = time.thread_time()
        kept_up = batch.edit(logits)
        seconds.append(time.thread_time() - start)
    counts = np.bincount(tokens, minlength=300)
    expected = np.where(counts + (np.arange(300) == 1) > 0, 1 / np.float32(1.5), 1) - 0.5 * counts
    assert kept_up[0].numpy() == pytest.approx(expected, abs=1e-3)
    assert torch.equal(kept_up, SamplingRows([(row.params, row.state, 0)], 300).edit(logits))
    assert np.median(seconds[3500:]) < 2 * np.median(seconds[250:750]) + 1e-4
