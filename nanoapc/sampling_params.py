"""SamplingParams: how one request is sampled, with vLLM's names and defaults.

Invariant: every value is valid and normalised. It is checked when it is passed or assigned (a ValueError names the
parameter, the value and what is allowed), and sequences become tuples of their own. Whether values go together is
checked at construction and again by `verify`, before a request runs, with what depends on the model (token ids inside
the vocabulary, a tokenizer for strings). A request has a copy of its own: an assignment concerns later requests only.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: the best token has practically all of the probability."""
MAX_NUMBER = 1e30
"""Of any parameter: in float32, logits with a bias stay finite when penalties act on them."""
MAX_N = 2**14
"""Outputs per prompt: as in vLLM, so that a mistyped number is an error and not a full memory."""


@dataclass(kw_only=True)
class SamplingParams:
    """How to sample the outputs of one request.

    Order in which they act: logit_bias, allowed_token_ids, bad_words, min_tokens, penalties, temperature,
    min_p, top_k, top_p. Ties go to the lowest token id. Log-probs are those of the raw logits.
    """

    n: int = 1  # outputs per prompt; output 0 equals that of n=1, the others have seeds derived from `seed`
    presence_penalty: float = 0.0  # [-2, 2]: subtracted from the logit of each id that the output holds
    frequency_penalty: float = 0.0  # [-2, 2]: subtracted once per occurrence of the id in the output
    repetition_penalty: float = 1.0  # >= 1e-6: divides positive, multiplies negative logits of prompt and output ids
    temperature: float = 1.0  # >= 0; below 1e-5 it is greedy
    top_p: float = 1.0  # (0, 1]: keep the smallest set of best ids whose probability reaches it
    top_k: int = 0  # keep the k best ids; 0 and -1 keep all
    min_p: float = 0.0  # [0, 1]: keep ids with at least this share of the best id's probability
    seed: int | None = None  # signed 64-bit; a draw is a function of (seed, position). None, -1: the engine's
    stop: Sequence[str] = ()  # a string or several: the output ends where the first of them is complete
    stop_token_ids: Sequence[int] = ()  # end the output, beside the model's own end-of-sequence ids
    bad_words: Sequence[str] = ()  # never generated: the last token of each is forbidden after the others
    include_stop_str_in_output: bool = False  # whether the text keeps the stop string
    ignore_eos: bool = False  # whether to go on after an end-of-sequence id
    max_tokens: int | None = 16  # >= 1; cut to what `max_model_len` leaves, which is also what None means
    min_tokens: int = 0  # so many tokens contain no id that ends the output, and no stop string counts in their text
    logprobs: int | None = None  # log-probs of so many best ids, and of the chosen one, with each token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    detokenize: bool = True  # whether to make text at all
    skip_special_tokens: bool = True  # whether special tokens are left out of the text
    spaces_between_special_tokens: bool = True  # no effect: the tokenizers of the models here put no spaces there
    logit_bias: Mapping[int, float] | None = None  # id -> what is added to its logit; as in JSON "12" is 12
    allowed_token_ids: Sequence[int] | None = None  # if given, only these ids are generated
    skip_reading_prefix_cache: bool | None = None  # compute the prompt anew; None: iff prompt_logprobs

    # Parameters of vLLM that may ask for nothing (None, False, 0) and for nothing else.
    best_of: InitVar[None] = None
    extra_args: InitVar[None] = None
    flat_logprobs: InitVar[None] = None
    guided_decoding: InitVar[None] = None
    logits_processors: InitVar[None] = None
    logprob_token_ids: InitVar[None] = None
    prompt_logprob_start: InitVar[None] = None
    prompt_logprob_token_ids: InitVar[None] = None
    repetition_detection: InitVar[None] = None
    routed_experts_prompt_start: InitVar[None] = None
    skip_clone: InitVar[None] = None
    stream_interval: InitVar[None] = None
    structured_outputs: InitVar[None] = None
    thinking_token_budget: InitVar[None] = None
    trace_decode_token_ids: InitVar[None] = None
    truncate_prompt_tokens: InitVar[None] = None
    watermarking: InitVar[None] = None

    def __post_init__(self, *unsupported: Any) -> None:
        for name, value in zip(UNSUPPORTED, unsupported, strict=True):
            setattr(self, name, value)
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        """Takes a value that passes its own check; whether it goes with the others is seen before a request runs."""
        if name in KINDS:
            object.__setattr__(self, name, _normalised(name, value))
        elif name not in UNSUPPORTED:
            raise AttributeError(f"SamplingParams has no parameter {name!r}")
        elif value not in (None, False):  # 0 is False
            raise _error(name, value, "None, because it is not supported")

    def _check_together(self) -> None:
        """ValueError for parameters that exclude each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise _error("stop", self.stop, "none while detokenize=False, because they are found in the text")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            remedy = "True (or None) with prompt_logprobs, which need all logits of the prompt"
            raise _error("skip_reading_prefix_cache", False, remedy)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one that can change; what was changed in place is checked again."""
        twin = copy.copy(self)
        twin.logit_bias = self.logit_bias
        return twin

    @property
    def skips_cache(self) -> bool:
        """Whether the prompt is computed anew, whatever the prefix cache holds."""
        return bool(self.skip_reading_prefix_cache) or self.prompt_logprobs is not None

    @property
    def is_greedy(self) -> bool:
        """Whether the best id is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def exclusion(self, num_output_tokens: int) -> str:
        """What to say when these parameters exclude every id after so many output tokens."""
        acting = {
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "min_tokens": num_output_tokens < self.min_tokens,
        }
        names = " and ".join(name for name, acts in acting.items() if acts)
        return f"{names} leave no token id to choose for output token {num_output_tokens + 1}; loosen them"

    def verify(self, num_valid_ids: int, tokenizer: Any) -> None:
        """Check against a model that emits the ids below num_valid_ids; ValueError if something cannot be."""
        self._check_together()  # some may have been assigned
        ids: tuple[tuple[str, Iterable[int] | None], ...] = (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        )
        for name, token_ids in ids:
            for token_id in token_ids or ():
                if token_id >= num_valid_ids:
                    raise _error(name, token_id, f"ids below {num_valid_ids}, the size of the vocabulary")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > num_valid_ids:
                raise _error(name, count, f"at most {num_valid_ids}, the size of the vocabulary")
        for name, strings in (("stop", self.stop), ("bad_words", self.bad_words)):
            if strings and tokenizer is None:
                raise _error(name, strings, "only with a tokenizer; without one use token ids")
        excluded = set(self.stop_token_ids if self.min_tokens else ())
        if self.bad_words and tokenizer is not None:
            excluded.update(ids[0] for ids in self.bad_words_ids(tokenizer) if len(ids) == 1)
        if self.allowed_token_ids is not None and excluded.issuperset(self.allowed_token_ids):
            remedy = "at least one id that bad_words and min_tokens do not exclude"
            raise _error("allowed_token_ids", self.allowed_token_ids, remedy)

    def bad_words_ids(self, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
        """The token sequences of the bad words: each as it stands, and without and with a space before it.

        The forms may have different numbers of tokens, and all count: as a text begins, and behind other text, where
        SentencePiece puts no space of its own. ValueError for a word without tokens.
        """
        return _bad_words_ids(tuple(self.bad_words), weakref.ref(tokenizer))


@lru_cache(maxsize=1024)  # requests by the thousand have the same words
def _bad_words_ids(words: tuple[str, ...], tokenizer: Callable[[], Any]) -> tuple[tuple[int, ...], ...]:
    """See `SamplingParams.bad_words_ids`. tokenizer: a weak reference, as what is kept here is to keep no tokenizer."""
    encode = partial(tokenizer().encode, add_special_tokens=False)
    sequences: dict[tuple[int, ...], None] = {}
    other = encode("§")  # a text that merges with nothing
    for word in words:
        texts = dict.fromkeys((word, bare, " " + bare) if (bare := word.lstrip()) else (word,))
        forms = [encode(text) for text in texts]
        if not forms[0]:
            raise _error("bad_words", word, "words that the tokenizer turns into at least one token")
        behind = (encode("§" + text) for text in texts)
        forms += [ids[len(other) :] for ids in behind if ids[: len(other)] == other]
        sequences.update((tuple(form), None) for form in forms if form)
    return tuple(sequences)


def _normalised(name: str, value: Any) -> Any:
    """A parameter's value, checked and in the form in which it is kept."""
    kind = KINDS[name].removesuffix(" | None")
    if value is None and kind != KINDS[name]:
        return None
    if value is True and name in ("logprobs", "prompt_logprobs"):  # as in vLLM
        return 1
    value = CHECKS[kind](name, value)
    if name == "allowed_token_ids" and value == ():
        raise _error(name, [], "at least one id, or None for all")
    if name == "top_k":
        return max(0, value)
    return None if name == "seed" and value == -1 else value


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 500 else text[:500] + "..."


def _error(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{name}={short(value)} is not possible; allowed: {allowed}")


def _integer(name: str, value: Any) -> int:
    """A Python or numpy integer (bool is none) within the parameter's limits (see INTEGERS) -> int."""
    low, high = INTEGERS.get(name, (0, None))
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < low or (high is not None and int(value) > high):
        raise _error(name, value, f"an integer, at least {low}" + ("" if high is None else f", at most {high}"))
    return int(value)


def _number(name: str, value: Any) -> float:
    """A Python or numpy number (bool is none), at most MAX_NUMBER in size and as NUMBERS says -> float."""
    allowed, test = NUMBERS.get(name, ("", lambda x: True))
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not -MAX_NUMBER <= value <= MAX_NUMBER or not test(float(value)):
        raise _error(name, value, f"a finite number {allowed}".rstrip())
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error(name, value, "True or False")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _items(name, (value,) if isinstance(value, str) else value, "a string or a sequence of strings")
    if not all(isinstance(item, str) and item for item in items):
        raise _error(name, value, "strings that are not empty")
    for item in items:
        check_unicode(item, name)
    return items


def check_unicode(text: str, name: str) -> None:
    """ValueError if the text holds half of a surrogate pair, which JSON can hold, and no tokenizer takes or makes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}; repair the text") from None


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_integer(name, item) for item in _items(name, value, "a sequence of token ids")))


def _items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(value, Iterable):
        raise _error(name, value, allowed)
    return tuple(value)


def _bias(name: str, value: Any) -> dict[int, float] | None:
    """Ids may be decimal strings, as in JSON; an empty mapping is the same as None."""
    if not isinstance(value, Mapping):
        raise _error(name, value, "a mapping from token id to number")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _integer(name, int(key) if is_text else key)
        if token_id in bias:
            raise _error(name, key, "each token id once")
        bias[token_id] = _number(f"{name}[{key!r}]", amount)
    return bias or None


INTEGERS = {"n": (1, MAX_N), "top_k": (-1, None), "seed": (-(2**63), 2**63 - 1), "max_tokens": (1, None)}
"""The least and the greatest value; where nothing is said, 0 and none."""
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "presence_penalty": ("in [-2, 2]", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("in [-2, 2]", lambda x: -2 <= x <= 2),
    "repetition_penalty": ("of at least 1e-6 (1 is off)", lambda x: x >= 1e-6),
    "temperature": ("of at least 0 (0 is greedy)", lambda x: x >= 0),
    "top_p": ("in (0, 1] (1 is off)", lambda x: 0 < x <= 1),
    "min_p": ("in [0, 1] (0 is off)", lambda x: 0 <= x <= 1),
}
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "float": _number,
    "bool": _flag,
    "Sequence[str]": _strings,
    "Sequence[int]": _token_ids,
    "Mapping[int, float]": _bias,
}
"""What a field of this type must be, and what becomes of it. (A type with "| None" allows None, too.)"""
KINDS = {item.name: str(item.type) for item in fields(SamplingParams)}
"""The type of each parameter."""
UNSUPPORTED = [name for name in SamplingParams.__dataclass_fields__ if name not in KINDS]
"""Parameters of vLLM that may ask for nothing (None, False, 0) and nothing else."""
