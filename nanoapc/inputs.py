"""From what a caller passes to token ids that the engine can run.

    str, [ids], {"prompt": ...}, {"prompt_token_ids": ..., "cache_salt": ...}  ->  Prompt(text, token_ids, extra)
    messages  ->  the model's chat template  ->  token ids

Invariant: a Prompt that exists is valid for the model: not empty, ids inside the vocabulary, room for one token. Every
error is a ValueError that names the index, the value and the remedy. The caller's objects are never changed.
"""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat, zip_longest
from typing import Any, TypeAlias, TypedDict

import numpy as np

from nanoapc.engine.block_hash import encode_extra_keys
from nanoapc.engine.detokenizer import TokenText
from nanoapc.sampling_params import SamplingParams, check_unicode, short


class _PromptOptions(TypedDict, total=False):
    cache_salt: str | None  # only requests with the same salt share cached prefixes


class TextPrompt(_PromptOptions):
    """A prompt that is still to be tokenised."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt of token ids."""

    prompt_token_ids: Sequence[int]


PromptType: TypeAlias = "str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]"
KNOWN_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
NO_EFFECT = {"multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "token_type_ids"}
"""Keys of vLLM's prompts that are not supported, but may be there without a value."""
TOKENIZER_GROUP = 1024
"""Prompts that are tokenised in one call: batches are fast, bounded ones show progress."""


@dataclass(frozen=True)
class Prompt:
    """A validated prompt: its text if there was one, token_ids [n] int32, the extra keys of its first block."""

    text: str | None
    token_ids: np.ndarray
    extra: bytes = b""


def _is_one(prompts: Any) -> bool:
    """Whether it is one text or dict (or something that is no prompt, which is refused where all are checked).

    ValueError for a table (a DataFrame, say): it would be read as the names of its columns.
    """
    if hasattr(prompts, "columns") and not isinstance(prompts, Mapping | Sequence):
        kind = type(prompts).__name__
        raise ValueError(f"prompts is a {kind}, a table; pass one of its columns as a list: df['prompt'].tolist()")
    return isinstance(prompts, str | Mapping) or _is_bytes(prompts) or not isinstance(prompts, Iterable)


def _is_bytes(value: Any) -> bool:
    """Whether it is a sequence of bytes, whose numbers are no token ids: most likely a text that was not decoded."""
    return isinstance(value, bytes | bytearray) or (isinstance(value, memoryview | array) and value.itemsize == 1)


def _unwrapped(prompts: Any) -> Any:
    """An array or a series as a list, anything else as it is."""
    return prompts.tolist() if hasattr(prompts, "tolist") and not _is_bytes(prompts) else prompts


def as_prompt_list(prompts: PromptType | Iterable[PromptType]) -> list[PromptType]:
    """One prompt or many -> a list; a list of whole numbers is one prompt of token ids."""
    prompts = _unwrapped(prompts)
    if _is_one(prompts):
        return [prompts]  # type: ignore[list-item]
    many = list(prompts)
    return [many] if many and isinstance(many[0], int | np.integer) else many  # type: ignore[list-item, return-value]


def _for_all(params: Any) -> SamplingParams | None:
    """The SamplingParams of all prompts; None if these are one for each."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise ValueError(f"sampling_params is {short(params)}; it must be a SamplingParams, or one for each prompt")
    return None


def pair_as_they_come(prompts: Any, params: Any) -> Iterator[tuple[Any, SamplingParams]]:
    """(prompt, its SamplingParams), read one by one; ValueError where one of the two ends before the other."""
    prompts, one = _unwrapped(prompts), _for_all(params)
    prompts = [prompts] if _is_one(prompts) else prompts
    return _in_step(prompts, params) if one is None else zip(prompts, repeat(one.clone()))


def _in_step(prompts: Iterable[Any], params: Iterable[SamplingParams]) -> Iterator[tuple[Any, SamplingParams]]:
    end: Any = object()
    for index, (prompt, item) in enumerate(zip_longest(prompts, params, fillvalue=end)):
        if prompt is end or item is end:
            more, fewer = ("sampling_params", "prompts") if prompt is end else ("prompts", "sampling_params")
            raise ValueError(f"there are only {index} {fewer}, but more {more}; give one for all or one for each")
        yield prompt, item


def until_error(items: Iterable[Any]) -> Iterator[Any]:
    """The items; if reading them fails, the exception comes as the last one."""
    try:
        yield from chain(items)  # which, unlike a generator, is not closed with this one
    except Exception as error:
        yield error


def groups(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Consecutive lists of at most `size` items."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


class InputProcessor:
    """Makes Prompts for one model.

    Args:
        tokenizer: a transformers tokenizer, or None if prompts are token ids only.
        vocab_size: rows of the embedding; token ids must be below it.
        max_model_len: tokens of a sequence; a prompt needs room for one more.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    @cached_property
    def token_text(self) -> TokenText | None:
        """Token id -> its text in the middle of a text; None without a tokenizer."""
        return None if self.tokenizer is None else TokenText(self.tokenizer)

    @cached_property
    def num_valid_ids(self) -> int:
        """Token ids below it can be emitted: those of the vocabulary up to the greatest that the tokenizer knows.

        Not its length: its ids may have gaps. (An id in a gap can be emitted, as in transformers, and has no text.)
        Tokens that are added to the tokenizer once the engine is there are for prompts only.
        """
        if self.tokenizer is None:
            return self.vocab_size
        return min(max(self.tokenizer.get_vocab().values()) + 1, self.vocab_size)

    def params(self, prompts: Sequence[Any], params: Any, first_index: int = 0) -> list[SamplingParams]:
        """One valid SamplingParams for each prompt: copies, because the caller may change his before they have run.

        ValueError for what is no SamplingParams, or cannot be for this model; first_index: of prompts[0], for messages.
        """
        pairs = list(params) if (one := _for_all(params)) is None else [one] * len(prompts)
        if len(pairs) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts but {len(pairs)} sampling_params; give one for all or one for each"
            )
        copies: dict[int, SamplingParams] = {}
        for index, item in enumerate(pairs, first_index):
            if not isinstance(item, SamplingParams):
                raise ValueError(f"sampling_params[{index}] is {short(item)}; it must be a SamplingParams")
            if id(item) not in copies:
                try:
                    copies[id(item)] = item.clone()
                    copies[id(item)].verify(self.num_valid_ids, self.tokenizer)
                except ValueError as error:
                    raise ValueError(f"sampling_params of prompt {index}: {error}") from None
        return [copies[id(item)] for item in pairs]

    def prompts(
        self, raw: Iterable[PromptType], first_index: int = 0, progress: Callable[[int], object] = lambda n: None
    ) -> list[Prompt]:
        """Validates and tokenises; `first_index` is the index of raw[0] in error messages.

        `progress` is called with the number of prompts done since the last call.
        """
        done: list[Prompt] = []
        for group in groups(raw, TOKENIZER_GROUP):
            done += self._group(group, first_index + len(done))
            progress(len(group))
        return done

    def conversations(
        self,
        many: Sequence[Any],
        template: str | None,
        options: Mapping[str, Any],
        cache_salt: str | None,
        progress: Callable[[int], object],
    ) -> list[Prompt]:
        """The prompts of conversations, rendered and tokenised in groups as those of `prompts` are."""

        def rendered() -> Iterator[PromptType]:
            for group in groups(enumerate(many), TOKENIZER_GROUP):
                texts = [self.render_chat(messages, f"conversation {i}", template, options) for i, messages in group]
                for text, ids in zip(texts, self.tokenize(texts, add_special_tokens=False), strict=True):
                    yield {"prompt": text, "prompt_token_ids": ids, "cache_salt": cache_salt}

        return self.prompts(rendered(), progress=progress)

    def _group(self, raw: Sequence[PromptType], first_index: int) -> list[Prompt]:
        parsed = [_parse(item, f"prompt {i}") for i, item in enumerate(raw, first_index)]
        texts = {i: item for i, (item, _, _) in enumerate(parsed, first_index) if isinstance(item, str)}
        for i, text in texts.items():
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt {i} is a text, but this LLM has no tokenizer (skip_tokenizer_init=True); pass token ids"
                )
            check_unicode(text, f"prompt {i}")
        token_ids = dict(zip(texts, self.tokenize(list(texts.values())), strict=True)) if texts else {}
        return [
            Prompt(text, self.check_token_ids(token_ids.get(i, item), f"prompt {i}"), extra)
            for i, (item, text, extra) in enumerate(parsed, first_index)
        ]

    def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of valid texts, all in one call; rendered conversations have their special tokens already."""
        if not texts:
            return []
        # verbose=False: what is too long gets an error of its own here.
        options = {"add_special_tokens": add_special_tokens, "verbose": False}
        batch = self.tokenizer(texts, **options)
        # Truncation and padding are states of a tokenizer: another thread that asks it for them asks for us, too.
        if any(encoding.overflowing or 0 in encoding.attention_mask for encoding in batch.encodings or ()):
            batch = copy.deepcopy(self.tokenizer)(texts, **options)
        return batch["input_ids"]

    def check_token_ids(self, token_ids: Any, name: str) -> np.ndarray:
        """token ids -> [n] int32; ValueError if one is not whole or outside the vocabulary, or if too many."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        if not ids:
            raise ValueError(f"{name} is empty (no token ids); give it at least one token")
        for kind in set(map(type, ids)):
            if kind is bool or not issubclass(kind, int | np.integer):
                bad = next(x for x in ids if type(x) is kind)
                raise ValueError(f"{name} has a token id {bad!r} of type {kind.__name__}; token ids are whole numbers")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(x for x in ids if not 0 <= x < self.vocab_size)
            raise ValueError(f"{name} has the token id {bad}, outside the model's vocabulary 0..{self.vocab_size - 1}")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with room for one output token max_model_len={self.max_model_len} "
                f"allows {self.max_model_len - 1}; shorten it or raise max_model_len"
            )
        return np.asarray(ids, np.int32)

    def render_chat(self, messages: Any, name: str, template: str | None, options: Mapping[str, Any]) -> str:
        """One conversation through the chat template -> text (with the template's own BOS, if it brings one)."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, but this LLM has none (skip_tokenizer_init=True)")
        plain = _plain_messages(messages, name)
        tools = options.get("tools") or None  # an empty list is none: templates would announce tools, and show nothing
        if template is not None or tools:
            self._check_template(template, tools, name)
        options = {**options, "tools": tools}
        try:
            text = self.tokenizer.apply_chat_template(plain, chat_template=template, tokenize=False, **options)
        except Exception as error:  # templates raise errors of their own kinds
            raise ValueError(f"the chat template does not take {name}: {error}") from error
        check_unicode(text, name)
        return text

    def _check_template(self, template: Any, tools: Any, name: str) -> None:
        """ValueError for what transformers would take for a template without tags, and for tools that none shows."""
        is_text = template is None or isinstance(template, str)
        used = self.tokenizer.get_chat_template(template, tools) if is_text else ""
        if template is not None and "{" not in used:
            raise ValueError(f"chat_template={short(template)} is no template; if it is a file, pass what it holds")
        if tools and "tools" not in used:
            raise ValueError(f"the chat template shows no tools, but {name} has some; pass a chat_template that does")


def as_conversations(messages: Any) -> list[Any]:
    """One conversation (a list of messages) or many -> a list of conversations."""
    if isinstance(messages, Mapping):
        raise ValueError(f"messages is one message, {short(messages)}; put it in a list, which is a conversation")
    many = [messages] if isinstance(messages, str) or not isinstance(messages, Iterable) else list(messages)
    return [many] if many and isinstance(many[0], Mapping) else many


def _plain_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """Checked copies as templates want them: text parts joined by newlines, arguments of tool calls parsed.

    ValueError unless `messages` is a non-empty list of {"role": ..., "content": text or text parts}; only an assistant
    that calls tools may have said nothing.
    """
    messages = _unwrapped(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{name} is {short(messages)}; it must be a non-empty list of messages")
    return [_plain_message(message, f"message {number} of {name}") for number, message in enumerate(messages)]


def _plain_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} is {short(message)}; it must be a dict with a 'role' and a 'content'")
    # Templates ask whether there is such a key, and rows of a table have every key that any of them has.
    plain = {key: _unwrapped(value) for key, value in message.items() if value is not None}
    content, calls = plain.get("content"), plain.get("tool_calls")
    if content is None and not (message["role"] == "assistant" and calls):
        raise ValueError(f"{name} has no content; give it a text (only an assistant's with tool_calls may lack it)")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"{name} has the content {short(content)}; it must be a text or a list of text parts")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise ValueError(f"{name} has a content part of type {kind!r}; only text is supported")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"{name} has a text part without a text: {short(part)}")
        plain["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""  # as in vLLM: many templates put it between two texts
    if not calls:
        plain.pop("tool_calls", None)
    elif isinstance(calls, list):
        plain["tool_calls"] = [_parsed_call(call) for call in calls]
    return plain


def _parsed_call(call: Any) -> Any:
    """The call with arguments as an object, which templates want; as in vLLM, what is none becomes an empty one."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call  # for the template to judge
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _parse(prompt: PromptType, name: str) -> tuple[Any, str | None, bytes]:
    """What is to be run (a text or token ids), the text to report, and the encoded extra keys of a prompt."""
    if isinstance(prompt, str):
        return prompt, prompt, b""
    if not isinstance(prompt, Mapping):
        if not _is_list(prompt):
            raise ValueError(f"{name} is {short(prompt)}; it must be a text, a list of token ids or a dict")
        return prompt, None, b""
    for key, value in prompt.items():
        is_nothing = value is None or (isinstance(value, Mapping) and not value)
        if key not in KNOWN_KEYS and not (key in NO_EFFECT and is_nothing):
            raise ValueError(f"{name} has {key!r}, which is not supported; known: {', '.join(sorted(KNOWN_KEYS))}")
    text, token_ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    if text is None and token_ids is None:
        raise ValueError(f"{name} has neither 'prompt' nor 'prompt_token_ids'; give it one of them")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} has 'prompt' {short(text)}; it must be a text (ids are 'prompt_token_ids')")
    if token_ids is not None and not _is_list(token_ids):
        raise ValueError(f"{name} has 'prompt_token_ids' {short(token_ids)}; they must be a list of token ids")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"{name} has cache_salt {short(salt)}; it must be a non-empty text (or None)")
    extra = b"" if salt is None else encode_extra_keys([("salt", salt)])
    return text if token_ids is None else token_ids, text, extra  # with both, the ids run (as in vLLM)


def _is_list(value: Any) -> bool:
    """Whether it may be a list of token ids: a sequence that is no text, or a vector of numpy or torch."""
    value = _unwrapped(value)
    return isinstance(value, Sequence) and not isinstance(value, str) and not _is_bytes(value)
