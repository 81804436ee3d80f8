"""SamplingParams: everything is checked at construction, normalised, and checked against the model."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import numpy as np
import pytest
from test_detokenizer import byte_fallback, byte_level

from nanoapc.sampling_params import UNSUPPORTED, SamplingParams

NAN, INF = float("nan"), float("inf")
FLAGS = [
    *("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"),
    "spaces_between_special_tokens",
]
BAD_VALUES = {
    "n": [0, -1, 1.5, True, None, "2", 2**14 + 1],
    "presence_penalty": [-2.1, 2.1, NAN, None, "1"],
    "frequency_penalty": [-2.1, 2.1, NAN, None, True],
    "repetition_penalty": [0, -1.0, NAN, INF, None, 1e-40, 1e31],
    "temperature": [-1, -1e-12, NAN, INF, "0.5", True, None, 10**400],
    "top_p": [0, -0.1, 1.1, NAN, None, True],
    "top_k": [-2, 1.5, True, "5", None],
    "min_p": [-0.1, 1.1, NAN, None],
    "seed": [1.5, "1", True, 2**63, -(2**63) - 1],
    "stop": ["", [""], ["", "x"], [1], 5, {"x": 1}, b"x"],
    "stop_token_ids": [[-1], [1.0], ["1"], [True], 7, "12"],
    "bad_words": ["", [""], [None], 3],
    "max_tokens": [0, -1, 1.5, True, "3"],
    "min_tokens": [-1, 1.5, None, 17],
    "logprobs": [-1, -2, 1.0, False],
    "prompt_logprobs": [-1, 1.0, False],
    "logit_bias": [
        {-1: 5},
        {"x": 1},
        {"-1": 1},
        {1.0: 1},
        {12: NAN},
        {12: INF},
        {12: -3e38},
        {"1" * 5000: 1},
        {12: "1"},
        {1: 1, "1": 2},
        [1],
    ],
    "allowed_token_ids": [[], [-1], [1.5], "12", 3],
    "skip_reading_prefix_cache": [1, "yes"],
    **{flag: [1, None, "yes"] for flag in FLAGS},
}
CASES = [(name, value) for name, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={v!r}"[:40] for n, v in CASES])
def test_a_bad_value_is_an_error_that_names_parameter_value_and_remedy(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value) and "allowed: " in str(error.value)
    first = next(iter(value.items())) if isinstance(value, dict) and value else (value,)
    assert any(repr(part) in str(error.value) for part in (value, *first, *(value if isinstance(value, list) else ())))


def test_every_field_has_bad_values_in_this_test():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD_VALUES)


@pytest.mark.parametrize("name", ["use_beam_search", "topp"])
def test_an_unknown_parameter_is_an_error_that_names_it(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_parameter_that_only_vllm_has_may_ask_for_nothing(name):
    params = SamplingParams(**{name: None}, temperature=0.5)
    assert params == SamplingParams(**{name: False}, temperature=0.5) == SamplingParams(**{name: 0}, temperature=0.5)
    assert params == SamplingParams(temperature=0.5) and getattr(params, name) is None
    assert name not in repr(params) and copy.deepcopy(params) == dataclasses.replace(params) == params
    with pytest.raises(ValueError, match=f"{name}=1 is not possible; allowed: None, because it is not supported"):
        SamplingParams(**{name: 1})
    with pytest.raises(ValueError, match=f"{name}=1 is not possible; allowed: None, because it is not supported"):
        setattr(params, name, 1)
    for nothing in (None, False, 0):  # scripts set them back between two runs
        setattr(params, name, nothing)
    assert params == SamplingParams(temperature=0.5) and getattr(params, name) is None


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.stop == params.stop_token_ids == params.bad_words == ()
    assert not params.has_penalties and not params.is_greedy and params.detokenize and params.skip_special_tokens


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"stop_token_ids": None, "bad_words": None}, {"stop_token_ids": (), "bad_words": ()}),
        ({"stop_token_ids": [3, np.int64(4), 3]}, {"stop_token_ids": (3, 4)}),
        ({"allowed_token_ids": {7}}, {"allowed_token_ids": (7,)}),
        ({"logit_bias": {"12": -100}}, {"logit_bias": {12: -100.0}}),
        ({"logit_bias": {}}, {"logit_bias": None}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 10**9}),
        ({"seed": -1}, {"seed": None}),
        ({"max_tokens": None, "min_tokens": 99}, {"max_tokens": None}),
        ({"max_tokens": 10**9}, {"max_tokens": 10**9}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"prompt_logprobs": 0}, {"skips_cache": True}),
        ({}, {"skips_cache": False}),
        ({"skip_reading_prefix_cache": True}, {"skips_cache": True}),
    ],
)
def test_values_are_normalised(given, stored):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in stored} == stored


def test_numpy_scalars_become_plain_numbers():
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_k=np.int32(5), logit_bias={np.int64(3): np.float64(1)}
    )
    assert params == SamplingParams(n=2, temperature=0.5, top_k=5, logit_bias={3: 1.0})
    assert type(params.n) is int and type(params.temperature) is float and type(next(iter(params.logit_bias))) is int


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-12, True), (1e-6, True), (1e-5, False), (1e-4, False)]
)
def test_temperatures_next_to_zero_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy == greedy


def test_the_callers_objects_are_neither_changed_nor_kept():
    stop, ids, bias = ["a"], [5, 5], {"7": 1}
    params = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)
    assert (stop, ids, bias) == (["a"], [5, 5], {"7": 1})
    stop.append("b"), ids.append(6), bias.update({8: 1})
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a",), (5,), (5,))
    assert params.logit_bias == {7: 1.0}


def test_an_assigned_value_is_checked_and_normalised():
    params = SamplingParams(stop="x", min_tokens=4)
    params.stop, params.temperature, params.seed = ["a", "b"], np.float32(0), -1
    assert params == SamplingParams(stop=("a", "b"), min_tokens=4, temperature=0.0) and params.is_greedy
    for name, value in (("temperature", -1), ("max_tokens", 0), ("detokenize", 5), ("stop", ""), ("n", None)):
        with pytest.raises(ValueError, match="is not possible; allowed: "):
            setattr(params, name, value)
    with pytest.raises(AttributeError, match="SamplingParams has no parameter 'max_token'"):
        params.max_token = 3
    assert params == SamplingParams(stop=("a", "b"), min_tokens=4, temperature=0)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"min_tokens": 32}, {"max_tokens": 64}, "min_tokens=32 is not possible; allowed: at most max_tokens"),
        ({"detokenize": False}, {"stop": None}, "stop=.'x',. is not possible; allowed: none while detokenize=False"),
        ({"skip_reading_prefix_cache": False}, {"prompt_logprobs": None}, "skip_reading_prefix_cache=False"),
    ],
)
def test_values_that_are_assigned_have_to_go_together_when_they_are_used(first, second, named):
    params = SamplingParams(stop="x", prompt_logprobs=1)
    for name, value in first.items():
        setattr(params, name, value)
    with pytest.raises(ValueError, match=named):
        params.verify(100, Words())
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(params)
    for name, value in second.items():
        setattr(params, name, value)
    params.verify(100, Words())


def test_copies():
    params = SamplingParams(stop="x", logit_bias={1: 2})
    clone = params.clone()
    clone.max_tokens, clone.logit_bias[1] = 5, 3.0
    assert (params.max_tokens, params.logit_bias) == (16, {1: 2.0})
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_a_changed_copy_decides_anew_whether_it_reads_the_cache():
    reading, scoring = SamplingParams(), SamplingParams(prompt_logprobs=1)
    assert dataclasses.replace(reading, prompt_logprobs=1) == scoring
    assert dataclasses.replace(scoring, prompt_logprobs=None) == reading and not reading.skips_cache


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
    ],
)
def test_values_that_contradict_each_other_are_an_error(given, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"logit_bias": {320: 5}}, "320"),
        ({"allowed_token_ids": [1, 320]}, "320"),
        ({"stop_token_ids": [325], "min_tokens": 4}, "325"),
        ({"logprobs": 321}, "321"),
        ({"prompt_logprobs": 321}, "321"),
    ],
)
def test_ids_outside_the_vocabulary_are_an_error(given, value):
    params = SamplingParams(**given)
    with pytest.raises(ValueError, match=f"{next(iter(given))}={value} .*320"):
        params.verify(320, Words())


def test_the_last_id_of_the_vocabulary_is_inside():
    ids = [319]
    params = SamplingParams(
        logit_bias={319: 5}, allowed_token_ids=ids, stop_token_ids=ids, logprobs=320, prompt_logprobs=320
    )
    params.verify(320, None)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_need_a_tokenizer(name):
    params = SamplingParams(**{name: ["word"]})
    params.verify(320, Words())
    with pytest.raises(ValueError, match=f"{name}.*tokenizer"):
        params.verify(320, None)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair_is_an_error_that_says_where(name):
    with pytest.raises(ValueError, match=rf"^{name} is not valid Unicode: .*'\\ud800' in position 1.*repair the text"):
        SamplingParams(**{name: ["x", "x\ud800"]})


class Words:
    """A tokenizer with ' word' as one token and 'word' as two; control characters vanish."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        known = {
            "word": [1, 2],
            " word": [3],
            "§": [8],
            "\x00": [],
            " \x00": [9],
            " ": [9],
            "a word": [4, 3],
            " a word": [5, 3],
        }
        return known[text] if text in known else [*known["§"], *known[text.removeprefix("§")]]


def test_both_forms_of_a_bad_word_are_found_whatever_their_lengths():
    assert set(SamplingParams(bad_words=["word"]).bad_words_ids(Words())) == {(1, 2), (3,)}
    assert set(SamplingParams(bad_words=[" word"]).bad_words_ids(Words())) == {(1, 2), (3,)}
    assert set(SamplingParams(bad_words="a word").bad_words_ids(Words())) == {(4, 3), (5, 3)}
    assert SamplingParams(bad_words=[" "]).bad_words_ids(Words()) == ((9,),)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("word", ["begins", ".", "é", "begin it", "\n"])
def test_bad_words_are_found_behind_any_other_text(make, word):
    tokenizer = make()
    sequences = SamplingParams(bad_words=word).bad_words_ids(tokenizer)
    for before in ("", "(", "12", " x-"):  # SentencePiece writes "▁begins", but "( be gin s"
        ids = tokenizer.encode(before + word, add_special_tokens=False)
        assert any(tuple(ids[-len(sequence) :]) == sequence for sequence in sequences), before


def test_the_same_bad_words_are_tokenised_once_for_each_tokenizer_which_is_not_kept():
    class Counting(Words):
        num_calls = 0

        def encode(self, text, *, add_special_tokens):
            self.num_calls += 1
            return super().encode(text, add_special_tokens=add_special_tokens)

    first, second = Counting(), Counting()
    for tokenizer in (first, second):
        for _ in range(5):
            params = SamplingParams(bad_words=["word", "a word"])
            params.verify(320, tokenizer)
            assert len(params.bad_words_ids(tokenizer)) == 4
        assert tokenizer.num_calls == 9  # a text before, and each with and without a space, at the start and behind it
    SamplingParams(bad_words=["word"]).verify(320, first)
    assert first.num_calls == 14
    kept = weakref.ref(first)
    del first, tokenizer
    gc.collect()
    assert kept() is None


def test_a_bad_word_without_tokens_is_an_error():
    with pytest.raises(ValueError, match=r"bad_words='\\x00'"):
        SamplingParams(bad_words=["\x00"]).bad_words_ids(Words())
    with pytest.raises(ValueError, match=r"bad_words='\\x00'"):
        SamplingParams(bad_words=["\x00"]).verify(320, Words())


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [3], "bad_words": "word"},  # " word" is [3]
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
        {"allowed_token_ids": [3, 5], "bad_words": "word", "stop_token_ids": [5], "min_tokens": 1},
    ],
)
def test_allowed_ids_that_are_all_excluded_from_the_start_are_an_error(given):
    params = SamplingParams(**given)
    with pytest.raises(ValueError, match=r"allowed_token_ids=\(.*one id that bad_words and min_tokens do not exclude"):
        params.verify(320, Words())
    dataclasses.replace(params, min_tokens=0, bad_words=()).verify(320, Words())
    dataclasses.replace(params, allowed_token_ids=[*params.allowed_token_ids, 1]).verify(320, Words())


def test_what_excludes_ids_is_named_while_it_does():
    params = SamplingParams(allowed_token_ids=[1], bad_words="word", min_tokens=2)
    text = "allowed_token_ids and bad_words and min_tokens leave no token id to choose for output token 2; loosen them"
    assert params.exclusion(1) == text
    assert params.exclusion(2).startswith("allowed_token_ids and bad_words leave no")
