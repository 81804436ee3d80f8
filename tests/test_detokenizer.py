"""Detokenizing: text equals the tokenizer's own, no torn characters, stop strings wherever tokens end."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanoapc.engine.detokenizer import MAX_CONTEXT_TOKENS, MAX_HELD_TOKENS, Detokenizer, output_text, partial_bytes
from nanoapc.sampling_params import SamplingParams

TEXT = "It ends. It begins  twice.\n\n next time the end begins, and the beginning ends. " * 3
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"  # four people and three joiners, one glyph
TEXTS = {
    "chinese": "今天天气很好我们去公园散步。",
    "family": f"a {FAMILY} b",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "ascii": "It ends. It begins  twice.\n\n next",
    "mixed": "é̂ ไทย 🇨🇿 ﷽ \u200b|",
}


@functools.cache
def byte_level() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): every byte string is some sequence of ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [TEXT, *TEXTS.values()],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@functools.cache
def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """As SentencePiece makes them (Llama 2, Mistral): U+2581 for spaces, <0x..> for unknown characters."""
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    trained = json.loads(plain.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(pair) for pair in trained["merges"]]
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
tokenizers = pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)


class Pieces:
    """A tokenizer whose token i is the i-th piece of text; counts the ids that it is asked to decode."""

    def __init__(self, *pieces: str):
        self.pieces = pieces
        self.num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens):
        self.num_decoded += len(token_ids)
        return "".join(self.pieces[i] for i in token_ids)


def run(tokenizer, ids, stop, prompt=(), **params):
    """Appends until a stop string: (number of tokens, stop string or None, text)."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(stop=stop, max_tokens=None, **params))
    for count, token_id in enumerate(ids, start=1):
        hit = detokenizer.append(token_id)
        if hit is not None:
            return count, hit, detokenizer.text
    return len(ids), None, detokenizer.text


# -- text ---------------------------------------------------------------------------------------------------


@tokenizers
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_characters_split_over_tokens_come_out_whole(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    partial = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    if text != TEXTS["ascii"]:
        assert any("\ufffd" in p for p in partial)  # some token does end inside a character
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop="never in it"))
    for token_id in ids:
        detokenizer.append(token_id)
        assert "\ufffd" not in detokenizer.text
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text
    assert output_text(tokenizer, (), ids, SamplingParams()) == tokenizer.decode(ids) == text


@tokenizers
@pytest.mark.parametrize("include", [False, True])
def test_an_emoji_of_many_tokens_is_a_stop_string(make, include):
    tokenizer = make()
    ids = tokenizer.encode(f"ab{FAMILY}cd", add_special_tokens=False)
    count, hit, text = run(tokenizer, ids, FAMILY, include_stop_str_in_output=include)
    assert hit == FAMILY and count < len(ids)
    assert text == ("ab" + FAMILY if include else "ab")


@tokenizers
@pytest.mark.parametrize("prompt_text", ["It ends.", "It ends. ", "twice.\n", "今天", ""])
def test_prompt_text_and_output_text_join_as_one_decode(make, prompt_text):
    tokenizer = make()
    prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
    output = tokenizer.encode(TEXTS["ascii"], add_special_tokens=False)
    text = output_text(tokenizer, np.array(prompt, np.int32), output, SamplingParams())
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)
    assert run(tokenizer, output, "never in it", prompt)[2] == text


def test_the_space_that_sentencepiece_drops_is_kept_after_a_prompt():
    tokenizer = byte_fallback()
    prompt, output = tokenizer.encode("It ends.", add_special_tokens=False), tokenizer.encode("It begins")
    assert tokenizer.decode(output) == "It begins"
    assert output_text(tokenizer, prompt, output, SamplingParams()) == " It begins"
    # Special tokens at the prompt's end have no text; what stands before them still is the context.
    prompt += [tokenizer.eos_token_id] * 2
    assert output_text(tokenizer, prompt, output, SamplingParams()) == " It begins"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_text(cut):
    tokenizer = byte_level()
    byte_level_form = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\U0001f600")[0][0]
    byte_ids = tokenizer.convert_tokens_to_ids(list(byte_level_form))
    assert len(byte_ids) == 4
    output = [*byte_ids[cut:], *tokenizer.encode(" ok")]
    assert output_text(tokenizer, byte_ids[:cut], output, SamplingParams()) == tokenizer.decode(output)


@tokenizers
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_or_shown(make, skip):
    tokenizer = make()
    first, second = (tokenizer.encode(t, add_special_tokens=False) for t in ("It ends.", " It begins"))
    ids = [*first, tokenizer.eos_token_id, *second]
    text = output_text(tokenizer, (), ids, SamplingParams(skip_special_tokens=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("</s>" in text) != skip
    assert run(tokenizer, ids, "never in it", skip_special_tokens=skip)[2] == text


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ended_it_has_text_only_on_request(include):
    params = SamplingParams(include_stop_str_in_output=include)
    tokenizer = Pieces("ab", "cd")
    assert output_text(tokenizer, (), [0, 1], params, ended_by_token=True) == ("abcd" if include else "ab")
    assert output_text(tokenizer, (), [0, 1], params) == "abcd"


def test_any_number_of_special_tokens_keeps_the_context():
    tokenizer = byte_fallback()
    first, second = (tokenizer.encode(t, add_special_tokens=False) for t in ("It ends.", "It begins"))
    ids = [*first, *[tokenizer.eos_token_id] * (3 * MAX_HELD_TOKENS), *second]
    assert run(tokenizer, ids, "never in it")[2] == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 319), max_size=MAX_HELD_TOKENS), st.lists(st.integers(0, 319), max_size=6))
@settings(max_examples=150, deadline=None)
def test_text_of_any_byte_level_ids_is_the_tokenizers(ids, prompt):
    tokenizer = byte_level()
    whole = output_text(tokenizer, prompt, ids, SamplingParams())
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(stop="never in it"))
    for token_id in ids:
        detokenizer.append(token_id)
        assert whole.startswith(detokenizer.text)
    assert set(whole[len(detokenizer.text) :]) <= {"\ufffd"}  # held back: it might still become a character


characters = st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()])  # as byte tokens
chunks = st.one_of(characters, st.integers(259, 335).map(lambda i: [i]), st.sampled_from([[1], [2]]))
streams = st.lists(chunks, max_size=20).map(lambda parts: [i for part in parts for i in part])


@given(streams, streams)
@settings(max_examples=150, deadline=None)
def test_text_of_any_valid_byte_fallback_ids_continues_the_prompts(ids, prompt):
    tokenizer = byte_fallback()
    expected = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assume("\ufffd" not in expected)
    text = output_text(tokenizer, prompt, ids, SamplingParams())
    if before.strip():
        assert before + text == expected
        assert run(tokenizer, ids, "never in it", prompt)[2] == text
    if not prompt:
        assert text == expected


# -- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("pieces", [("ab#", "#EN", "D##c", "d"), tuple("ab##END##cd"), ("ab##END##cd",)])
def test_a_stop_string_over_or_inside_tokens_ends_the_text(pieces, include):
    _, hit, text = run(Pieces(*pieces), range(len(pieces)), ["##END##"], include_stop_str_in_output=include)
    assert (hit, text) == ("##END##", "ab##END##" if include else "ab")


@pytest.mark.parametrize(
    ("stops", "hit", "text"),
    [
        (["d", "b"], "b", "a"),  # not the first of the list, but of the text
        (["bcd", "c"], "c", "ab"),  # complete first
        (["c", "bc"], "bc", "a"),  # complete together: the longest
        (["x", "cd"], "cd", "ab"),
        (["x"], None, "abcdef"),
    ],
)
def test_the_stop_string_that_is_complete_first_wins_however_tokens_are_cut(stops, hit, text):
    for pieces in (("abcdef",), tuple("abcdef"), ("ab", "cd", "ef"), ("a", "bcd", "ef")):
        assert run(Pieces(*pieces), range(len(pieces)), stops)[1:] == (hit, text)


def test_the_prompts_tail_does_not_begin_a_stop_string():
    tokenizer = Pieces("xx##", "END", "##END")
    assert run(tokenizer, [1], "##END", prompt=[0]) == (1, None, "END")
    assert run(tokenizer, [1, 2], "##END", prompt=[0]) == (2, "##END", "END")


def test_stop_strings_count_after_min_tokens():
    tokenizer = Pieces("a", ".")
    ids = [0, 1, 0, 1, 0, 1]
    assert run(tokenizer, ids, ".") == (2, ".", "a")
    assert run(tokenizer, ids, ".", min_tokens=3) == (4, ".", "a.a")
    assert run(tokenizer, ids, ".", min_tokens=4) == (6, ".", "a.a.a")
    assert run(tokenizer, ids, ".a.", min_tokens=3) == (4, ".a.", "a")  # it may begin before


@tokenizers
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_is_a_stop_string_though_it_has_no_text(make, include):
    tokenizer = make()
    ids = tokenizer.encode("It ends</s> next</s>", add_special_tokens=False)
    text = "It ends" + "</s>" * include
    for skip in (True, False):
        options = {"include_stop_str_in_output": include, "skip_special_tokens": skip}
        assert run(tokenizer, ids, "</s>", **options)[1:] == ("</s>", text)
    count, hit, text = run(tokenizer, ids, "</s>", min_tokens=len(ids) - 1)
    assert (count, hit, text) == (len(ids), "</s>", tokenizer.decode(ids, skip_special_tokens=True))


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    tokenizer.add_tokens(["<end>"])
    ids = tokenizer.encode("It ends<end> next", add_special_tokens=False)
    assert run(tokenizer, ids, "<end>")[1:] == ("<end>", "It ends")
    assert run(tokenizer, ids, "<end>", include_stop_str_in_output=True)[1:] == ("<end>", "It ends<end>")


@tokenizers
def test_a_prompt_of_blanks_alone_is_a_context(make):
    tokenizer = make()
    prompt, output = (tokenizer.encode(text, add_special_tokens=False) for text in (" ", "It ends"))
    text = output_text(tokenizer, prompt, output, SamplingParams())
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_stop_strings_are_found_as_in_the_whole_text(data):
    tokenizer = byte_level()
    ids = tokenizer.encode(data.draw(st.sampled_from(sorted(TEXTS.values()))) + TEXT[:60])
    text = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stops = data.draw(st.lists(spans, min_size=1, max_size=3))
    end, size = min((text.find(stop) + len(stop), -len(stop)) for stop in stops)
    count, hit, cut = run(tokenizer, ids, stops)
    assert hit == text[end + size : end] and cut == text[: end + size]
    needed = next(i for i in range(1, len(ids) + 1) if tokenizer.decode(ids[:i]).startswith(text[:end]))
    assert count == needed  # as soon as it is there


@functools.cache
def cleaning():
    """Whole words, with the spaces before punctuation that transformers takes out when it decodes."""
    words = ["<unk>", "take", "'", "next", "hello", ".", "n't", "m", "\u00e9", "..", "'m"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", clean_up_tokenization_spaces=True
    )


def test_a_stop_string_ends_a_text_whose_spaces_are_cleaned_up():
    tokenizer, ids = cleaning(), [1, 2, 3, 4]
    assert tokenizer.decode(ids) == "take'next hello"
    assert run(tokenizer, ids, ["next"]) == (3, "next", "take'")
    assert run(tokenizer, ids, ["'n"], include_stop_str_in_output=True) == (3, "'n", "take'n")
    assert run(tokenizer, ids, ["take'next h"], min_tokens=3) == (4, "take'next h", "")
    assert run(tokenizer, [1, 5, 1, 5, 1], ["take."], min_tokens=3) == (4, "take.", "take. ")
    assert run(tokenizer, ids, ["next"], prompt=[4, 2]) == (3, "next", " take'")


@given(st.lists(st.integers(1, 10), max_size=12), st.lists(st.integers(1, 10), max_size=3))
@settings(max_examples=150, deadline=None)
def test_incremental_text_of_a_cleaned_up_one_is_the_final_text(ids, prompt):
    tokenizer = cleaning()
    text = output_text(tokenizer, prompt, ids, SamplingParams())
    assert run(tokenizer, ids, "never in it", prompt)[2] == text


# -- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["word ", "\ufffd", ""], ids=["text", "garbage", "no text"])
def test_work_per_token_is_bounded(piece):
    tokenizer = Pieces("context", piece)
    detokenizer = Detokenizer(tokenizer, [0] * 1000, SamplingParams(stop="never in it"))
    worst = 0
    for _ in range(4000):
        tokenizer.num_decoded = 0
        detokenizer.append(1)
        worst = max(worst, tokenizer.num_decoded)
    assert worst <= 4 * MAX_HELD_TOKENS + MAX_CONTEXT_TOKENS
    if piece == "word ":
        assert worst <= 4


@tokenizers
def test_the_bytes_of_a_characters_parts_make_the_character(make):
    tokenizer = make()
    ids = tokenizer.encode("\U0001f600\u0416", add_special_tokens=False)
    parts = [i for i in ids if "\ufffd" in tokenizer.decode([i])]
    assert len(parts) > 1
    whole = [partial_bytes(tokenizer, i) if i in parts else tokenizer.decode([i]).encode() for i in ids]
    assert b"".join(whole).decode().strip() == "\U0001f600\u0416"


def test_bytes_that_no_alphabet_tells_are_none():
    class Other:
        def convert_ids_to_tokens(self, token_id):
            return "\u2581\ufffd"

    assert partial_bytes(Other(), 5) is None
