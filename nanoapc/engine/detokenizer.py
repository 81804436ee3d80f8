"""Text of an output: all of it at its end, and, for sequences with stop strings, incrementally.

Invariants: the final text is tokenizer.decode(output ids) - with the space that a SentencePiece tokenizer
drops at the start of a text kept where the output continues a prompt. The incremental text is a prefix of it
(a character is held back until its last byte is there), costs a bounded amount of work per token, and ends
at the first stop string, wherever the boundaries of tokens lie. (Bytes that are not UTF-8 may be shown
differently in the incremental text. A tokenizer that cleans up spaces may take back a text's end when the next
token comes: there all is decoded anew for each token.)

    ids      ... |  prefix window  |  new ids  |        decode(window + new) minus decode(window) is new text;
                 prefix            read                 the window gives the decoder its context
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from nanoapc.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not (yet) a character
MAX_CONTEXT_TOKENS = 8  # of the prompt: a character has up to 4 of them, and special tokens may follow
MAX_HELD_TOKENS = 32  # no character takes so many: what is held longer is not text


def output_text(
    tokenizer: Any,
    prompt_token_ids: Sequence[int] | np.ndarray,
    output_token_ids: Sequence[int] | np.ndarray,
    params: SamplingParams,
    ended_by_token: bool = False,
) -> str:
    """The text of a whole output that no stop string ended.

    ended_by_token: a stop token or end-of-sequence id ended it; that id has no text unless
    `include_stop_str_in_output`.
    """
    ids = [int(i) for i in output_token_ids]
    if ended_by_token and not params.include_stop_str_in_output:
        ids.pop()
    decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
    context = _context(tokenizer, prompt_token_ids, params.skip_special_tokens)
    before, text = decode(context), decode(context + ids)
    # A text that begins otherwise continues a run of byte tokens of the prompt, and makes it invalid.
    return text[len(before) :] if text.startswith(before) else decode(ids)


def _context(tokenizer: Any, prompt_token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool) -> list[int]:
    """The shortest end of the prompt that is visible text; none if the prompt ends inside a character."""
    tail, text = [int(i) for i in prompt_token_ids[-MAX_CONTEXT_TOKENS:]], ""
    for size in range(1, len(tail) + 1):
        text = tokenizer.decode(tail[-size:], skip_special_tokens=skip_special_tokens)
        if text and REPLACEMENT not in text:
            return tail[-size:]
    return [] if REPLACEMENT in text else tail


class TokenText:
    """Token id -> its own text, as it is behind other text: at the start of one a decoder may drop a space."""

    def __init__(self, tokenizer: Any):
        self._decode = tokenizer.decode
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._text_before: str = tokenizer.decode(self._before)
        self._texts: dict[int, str] = {}  # a call of the tokenizer takes longer than a token of a small model

    def __call__(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._decode([*self._before, token_id])[len(self._text_before) :]
        return self._texts[token_id]


class Detokenizer:
    """The incremental text of one sequence that has stop strings; `append` each token as it is sampled."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._whole = partial(output_text, tokenizer, prompt_token_ids) if _cleans_up(tokenizer) else None
        self._ids: list[int] = []  # the output, where it is decoded as a whole
        self._window = _context(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._read = len(self._window)  # ids of the window whose text is out
        self._num_chars_out = len(self._decode(self._window))  # characters of the window's text that are out
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text in which a stop string may have begun
        self._num_tokens = 0
        self._max_stop_chars = max(map(len, params.stop), default=0)
        hidden = tuple(params.stop) if params.skip_special_tokens else ()
        self._stop_tokens = _stop_tokens(hidden, weakref.ref(tokenizer))

    @property
    def text(self) -> str:
        """The text so far, without characters that are incomplete; after a stop string the final text."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> str | None:
        """Take in an output token; the stop string that is now complete, or None.

        Of several the one whose end comes first is taken (then the longest), as if the text came character by
        character. Stop strings that end in the text of the first `min_tokens` tokens do not count.
        """
        self._num_tokens += 1
        new = self._new_text(token_id)
        self._pieces.append(new)
        if token_id in self._stop_tokens and self._num_tokens > self._params.min_tokens:
            stop = self._stop_tokens[token_id]
            self._pieces.append(stop if self._params.include_stop_str_in_output else "")
            return stop
        searched = self._tail + new
        hits = []
        if new and self._num_tokens > self._params.min_tokens:
            for stop in self._params.stop:
                start = searched.find(stop, max(0, len(self._tail) - len(stop) + 1))
                if start >= 0:
                    hits.append((start + len(stop), start, stop))
        self._tail = searched[max(0, len(searched) - self._max_stop_chars + 1) :]
        if not hits:
            return None
        end, start, stop = min(hits)
        keep = end if self._params.include_stop_str_in_output else start
        text = self.text
        self._pieces = [text[: len(text) - len(searched) + keep]]
        return stop

    def _new_text(self, token_id: int) -> str:
        """What the token adds to the text that is certain by now; what it changes is taken out of it first."""
        if self._whole is not None:
            self._ids.append(token_id)
            text = self._whole(self._ids, self._params).rstrip(REPLACEMENT)
            pairs = enumerate(zip(self.text, text))
            same = next((i for i, (old, new) in pairs if old != new), min(len(self.text), len(text)))
            self._pieces, self._tail = [text[:same]], text[max(0, same - self._max_stop_chars + 1) : same]
            return text[same:]
        window = [*self._window, token_id]
        text = self._decode(window)
        held = len(window) - self._read > MAX_HELD_TOKENS
        certain = text if held else text.rstrip(REPLACEMENT)
        new = certain[self._num_chars_out :]
        self._num_chars_out = max(self._num_chars_out, len(certain))
        if held and not new:
            self._window = self._window[: self._read]  # special tokens: they have no text
        elif held or (new and certain == text):
            # Everything is out: the tokens since the last time are context enough for what follows.
            self._window = window[self._read :]
            self._read = len(self._window)
            self._num_chars_out = len(self._decode(self._window))
        else:
            self._window = window
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._params.skip_special_tokens)


@lru_cache(maxsize=1024)  # requests by the thousand have the same stop strings
def _stop_tokens(stops: tuple[str, ...], reference: weakref.ref[Any]) -> dict[int, str]:
    """The stop strings that are special tokens, which are left out of a text, by their ids."""
    added = getattr(reference(), "added_tokens_decoder", {})
    return {token_id: str(token) for token_id, token in added.items() if token.special and str(token) in stops}


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding takes spaces out of the text, which transformers does not do for BPE unless it is forced to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return forced or not is_bpe


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def partial_bytes(tokenizer: Any, token_id: int) -> bytes | None:
    """The bytes of a token that is a part of a character; None where the tokenizer's alphabet does not tell them.

    Byte-level tokenizers write each byte as a character of its own, those with byte fallback as <0xE4>.
    """
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(map(alphabet.__getitem__, piece)) if alphabet.keys() >= set(piece) else None
