"""The OpenAI batch format: what a line asks for, and what its result line says.

    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}  ->
    {"id": ..., "custom_id": ..., "response": {"status_code": 200, "body": {...}}, "error": null}

Invariant: no line raises. Whatever is wrong with it becomes its error line (status code not 200 *and* "error" set, no
usage), and no field that could change a result is ignored. "id" is a digest of what was asked, so a result says which
request it answers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from nanoapc.engine.detokenizer import REPLACEMENT, Detokenizer, partial_bytes
from nanoapc.inputs import InputProcessor
from nanoapc.layers.sampler import request_seed
from nanoapc.outputs import CompletionOutput, Logprob, RequestOutput
from nanoapc.sampling_params import SamplingParams, check_unicode, short

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_LINE_BYTES = 64 * 2**20
GROUP_LINES, GROUP_BYTES = 256, 4 * 2**20
"""Lines that are tokenised together, at most: so many, or one more than has so many bytes."""
MOST = {"n": 128, "logprobs": 20}
"""OpenAI's limits: no line shall take the whole engine."""
LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Python's str.splitlines and some other readers of lines end one there."""

SAMPLING = {item.name for item in dataclasses.fields(SamplingParams)} - {
    *("max_tokens", "logprobs", "prompt_logprobs", "detokenize", "skip_reading_prefix_cache")
}
"""Fields that go to SamplingParams as they are."""
TEMPLATE_OPTIONS = {"tools": list, "add_generation_prompt": bool, "continue_final_message": bool}
TEMPLATE = {"chat_template": str, "chat_template_kwargs": dict, **TEMPLATE_OPTIONS}
"""The chat template and the fields that go to it, and their types."""
COMMON = SAMPLING | {"model", "max_tokens", "max_completion_tokens", "cache_salt", "logprobs"}
FIELDS = {CHAT: COMMON | {"messages", "top_logprobs", *TEMPLATE}, COMPLETIONS: COMMON | {"prompt"}}
NO_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("priority", "request_id", "stream_options", "parallel_tool_calls"),
}
"""Fields that change no result here."""
ENVELOPE = ("custom_id", "method", "url", "body")
MAY_STAND_BESIDE_BODY = NO_EFFECT.union(ENVELOPE)
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
"""Fields that are not supported, and the values with which they change nothing (see `_check_fields`, too)."""


Line = tuple[int, bytes]
"""Its number (from 1, blank lines counted), and what stands there."""


class LineError(ValueError):
    """Why a line has no answer. param: the field at fault; status: as an HTTP server would say it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message if len(message) <= 1000 else message[:1000] + " ...")
        self.param, self.status = param, status


@dataclass
class RequestLine:
    """A line of the input. `parse_line` makes it; `RequestReader.read` adds prompt and params, or the error."""

    number: int
    custom_id: str | None  # None: it has none that can be used
    digest: str  # of what is asked (without a custom_id: of number and line)
    url: str = ""
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: LineError | None = None
    prompt: Any = None  # what `LLM.stream` takes
    params: SamplingParams | None = None


def _guarded(line: RequestLine, check: Callable[..., None], *arguments: Any) -> None:
    """check(line, *arguments), unless there is an error already; what it raises for the line's content becomes one."""
    if line.error is not None:
        return
    try:
        check(line, *arguments)
    except LineError as error:
        error.__traceback__ = error.__context__ = None  # their frames hold the line: a circle, which is freed late
        line.error = error
    except ValueError as error:  # the first field that its message names is the one at fault
        names = (word for word in re.findall(r"\w+", str(error)) if word in FIELDS[line.url])
        line.error = LineError(str(error), next(names, None))
    except RecursionError:
        line.error = LineError(f"line {line.number} is nested too deeply")


def parse_line(number: int, data: bytes) -> RequestLine:
    """The envelope of a line that is not blank; raises nothing."""
    line = RequestLine(number, None, _digest(b"%d:" % number + data))
    _guarded(line, _parse, data)
    return line


def _parse(line: RequestLine, data: bytes) -> None:
    where, twice = f"line {line.number}", list[str]()
    fields = _json_object(data, where, twice)
    custom_id = fields.get("custom_id")
    beside = {name: fields[name] for name in fields.keys() - MAY_STAND_BESIDE_BODY if fields[name] is not None}
    if isinstance(custom_id, str) and custom_id and "custom_id" not in twice:
        line.custom_id = custom_id
        asked = [*map(fields.get, ENVELOPE), *([beside] if beside else []), *twice]
        line.digest = _digest(json.dumps(asked, sort_keys=True).encode())
    if twice:
        raise LineError(f"{where} has the key {short(twice[0])} twice in one object; keep one", twice[0])
    if line.custom_id is None:
        raise LineError(f"{where} has custom_id {short(custom_id)}; it must be a non-empty text", "custom_id")
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    _expect(method == "POST", "method", method, "'POST'", 405)
    _expect(url in (CHAT, COMPLETIONS), "url", url, f"{CHAT} or {COMPLETIONS}", 404)
    _expect(isinstance(body, dict), "body", body, "an object")
    for name, value in sorted(beside.items()):
        raise LineError(f"{name}={short(value)} stands beside body; put it into body, or leave it out", name)
    line.url = fields["url"]
    line.body = {name: value for name, value in fields["body"].items() if value is not None}


def _json_object(data: bytes, where: str, twice: list[str]) -> dict[str, Any]:
    """The object on a line; `twice` gets the keys that stand more than once in one object (the last value counts)."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.append(Counter(name for name, _ in pairs).most_common(1)[0][0])
        return found

    if len(data) > MAX_LINE_BYTES:
        raise LineError(f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        value = json.loads(data.decode().removeprefix("\ufeff"), object_pairs_hook=as_dict)
    except ValueError as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        hint = "; a line must end with LF or CRLF, not with CR alone" if b"\r" in data.strip() else ""
        raise LineError(f"{where} is not {kind}: {error}{hint}") from None
    if not isinstance(value, dict):
        raise LineError(f"{where} is {short(value)}; it must be an object")
    return value


def _expect(is_good: bool, name: str, value: Any, allowed: str, status: int = 400) -> None:
    if not is_good:
        raise LineError(f"{name} is {short(value)}; it must be {allowed}", name, status)


@dataclass
class RequestReader:
    """Turns lines into requests for one model, whose name is the first of model_names.

    seed: root of the seeds of requests that bring none. Such a seed depends on the custom_id, not on the order, so that
    a resumed run draws what an uninterrupted one would have drawn.
    """

    inputs: InputProcessor
    model_names: Sequence[str]
    seed: int

    def read(self, lines: Iterable[Line]) -> Iterator[RequestLine]:
        """Lines with prompt and params, or with an error. They are read as they are needed, a group at a time."""
        for group in _groups(lines):
            parsed = [parse_line(*line) for line in group]
            for line in parsed:
                _guarded(line, self._check)
            for url in (CHAT, COMPLETIONS):  # a rendered conversation has its special tokens already
                texts = [line for line in parsed if not line.error and line.url == url and isinstance(line.prompt, str)]
                token_ids = self.inputs.tokenize([line.prompt for line in texts], add_special_tokens=url == COMPLETIONS)
                for line, ids in zip(texts, token_ids, strict=True):
                    line.prompt = ids
            for line in parsed:
                _guarded(line, self._check_token_ids)
            yield from parsed

    def _check_token_ids(self, line: RequestLine) -> None:
        checked = self.inputs.check_token_ids(line.prompt, "messages" if line.url == CHAT else "prompt")
        line.prompt = {"prompt_token_ids": checked, "cache_salt": line.body.get("cache_salt")}

    def _check(self, line: RequestLine) -> None:
        body = line.body
        _check_fields(body, line.url)
        model, loaded = body.get("model", self.model_names[0]), self.model_names[0]
        names = f"{loaded!r}, which is loaded, or a name that --served-model-name adds"
        _expect(is_named(model, self.model_names), "model", model, names, 404)
        line.params = self._sampling_params(line)
        line.prompt = self._conversation(body) if line.url == CHAT else _completion_prompt(body)
        if isinstance(line.prompt, str) and self.inputs.tokenizer is None:
            raise LineError("prompt is a text, but there is no tokenizer (skip_tokenizer_init)", "prompt")

    def _sampling_params(self, line: RequestLine) -> SamplingParams:
        body, is_chat = line.body, line.url == CHAT
        arguments = {name: body[name] for name in SAMPLING & body.keys()}
        arguments["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", None if is_chat else 16))
        arguments["logprobs"] = _chat_logprobs(body) if is_chat else body.get("logprobs")
        for name, most in MOST.items():
            if isinstance(value := arguments.get(name), int) and value > most:
                raise LineError(f"{name}={short(value)} is too many; at most {most}", name)
        if arguments.get("seed", -1) == -1 and arguments.get("temperature") != 0:
            arguments["seed"] = request_seed(self.seed, line.custom_id)
        params = SamplingParams(**arguments)
        params.verify(self.inputs.num_valid_ids, self.inputs.tokenizer)
        return params

    def _conversation(self, body: Mapping[str, Any]) -> str:
        given = {name: body[name] for name in TEMPLATE_OPTIONS.keys() & body.keys()}
        options = {"add_generation_prompt": True, **given, **body.get("chat_template_kwargs", {})}
        return self.inputs.render_chat(body.get("messages"), "messages", body.get("chat_template"), options)


def _groups(lines: Iterable[Line]) -> Iterator[list[Line]]:
    group, size = list[Line](), 0
    for line in lines:
        group.append(line)
        size += len(line[1])
        if len(group) == GROUP_LINES or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def is_named(model: Any, names: Sequence[str]) -> bool:
    """Whether this is one of the loaded model's names, or its directory spelled otherwise."""
    return model in names or (isinstance(model, str) and os.path.abspath(model) in names)


def _check_fields(body: Mapping[str, Any], url: str) -> None:
    """Refuses what is not supported, unless it asks for nothing, and what no other check looks at."""
    no_tools = () if body.get("tools") else ("none",)
    asks_nothing = {**ASKS_NOTHING, "tool_choice": ("auto", *no_tools), "best_of": (1, body.get("n"))}
    known = FIELDS[url] | NO_EFFECT
    for name, value in body.items():
        if name not in known and value not in asks_nothing.get(name, ()):
            raise LineError(f"the field {name}={short(value)} is not supported; leave it out", name)
        if kind := TEMPLATE.get(name):
            _expect(isinstance(value, kind), name, value, f"a {kind.__name__}")
    salt = body.get("cache_salt")
    _expect(salt is None or (isinstance(salt, str) and salt != ""), "cache_salt", salt, "a non-empty text")


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """OpenAI's logprobs (a flag) and top_logprobs (a number) -> how many of the best to report."""
    wanted, count = body.get("logprobs", False), body.get("top_logprobs", 0)
    _expect(isinstance(wanted, bool), "logprobs", wanted, "true or false in a chat")
    is_number = isinstance(count, int) and not isinstance(count, bool)
    _expect(is_number and 0 <= count <= MOST["logprobs"], "top_logprobs", count, f"a number up to {MOST['logprobs']}")
    if count and not wanted:
        raise LineError("top_logprobs needs logprobs: true", "top_logprobs")
    return count if wanted else None


def _completion_prompt(body: Mapping[str, Any]) -> Any:
    """A text or a list of token ids (which are still to be checked)."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    _expect(isinstance(prompt, str | list), "prompt", prompt, "a text or a list of token ids")
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        raise LineError("prompt holds several prompts; give each a line of its own", "prompt")
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
    return prompt


# -- result lines --------------------------------------------------------------------------------------------


def result_line(line: RequestLine, output: RequestOutput, default_model: str, tokenizer: Any) -> dict[str, Any]:
    """The result of a line that has run. OpenAI has no finish reason "error": one such output makes an error line."""
    if output.error is not None:
        return error_line(line, LineError(output.error, output.error.split(" ")[0]))
    is_chat = line.url == CHAT
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)
    body = {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + line.digest,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": line.body.get("model", default_model),
        "choices": [_choice(choice, line, tokenizer) for choice in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    return _line(line, 200, body, None)


def error_line(line: RequestLine, error: LineError) -> dict[str, Any]:
    """The result of a line that cannot be answered: both places where readers look for an error say so."""
    brief = {"code": "invalid_request", "message": str(error)}
    return _line(line, error.status, {"error": {**brief, "type": "invalid_request_error", "param": error.param}}, brief)


def _line(line: RequestLine, status: int, body: Mapping[str, Any], error: Mapping[str, str] | None) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{line.digest}", "body": body}
    return {"id": f"batch_req_{line.digest}", "custom_id": line.custom_id, "response": response, "error": error}


def encode_line(result: Mapping[str, Any]) -> bytes:
    """A result as one line of UTF-8 JSON, for every reader: what Unicode calls a line end is escaped, and so is half a
    surrogate pair (in a custom_id)."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS)
    return (text + "\n").encode(errors="backslashreplace")


def _choice(output: CompletionOutput, line: RequestLine, tokenizer: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {
        "index": output.index,
        **({"message": message} if line.url == CHAT else {"text": output.text}),
        "logprobs": None if output.logprobs is None else _logprobs(output, line, tokenizer),
        "finish_reason": output.finish_reason,
    }


def _logprobs(output: CompletionOutput, line: RequestLine, tokenizer: Any) -> dict[str, Any]:
    """OpenAI's two shapes of what each token, and the best in its place, have got."""
    token = partial(_token, tokenizer)
    steps = list(zip(output.token_ids, output.logprobs or (), strict=True))
    chosen = [token(token_id, entries[token_id]) for token_id, entries in steps]
    # The best ids come first, of ties the lowest one.
    best = [sorted(entries.items(), key=lambda entry: (entry[1].rank or 0, entry[0])) for _, entries in steps]
    if line.url == CHAT:
        num_top = line.body.get("top_logprobs", 0)
        tops = [{"top_logprobs": [token(*entry) for entry in entries[:num_top]]} for entries in best]
        return {"content": [{**own, **top} for own, top in zip(chosen, tops, strict=True)], "refusal": None}
    tokens = [own["token"] for own in chosen]
    return {
        "tokens": tokens,
        "token_logprobs": [own["logprob"] for own in chosen],
        "top_logprobs": [_by_text([token(*entry) for entry in entries]) for entries in best],
        "text_offset": _offsets(output, tokens, line, tokenizer),
    }


def _offsets(output: CompletionOutput, tokens: list[str], line: RequestLine, tokenizer: Any) -> list[int]:
    """Where each token begins in the text. Parts of a character begin where it does; what is not in the text (a special
    token, a stop string) takes no place."""
    if tokenizer is None or line.params is None:
        return [0] * len(tokens)
    detokenizer, text, offsets = Detokenizer(tokenizer, line.prompt["prompt_token_ids"], line.params), "", list[int]()
    for token_id, token in zip(output.token_ids, tokens, strict=True):
        detokenizer.append(token_id)
        start, text = len(text), detokenizer.text
        if not token.startswith(REPLACEMENT):  # before it a part of a character may have stayed a torso
            start = len(text) - len(text[start:].lstrip(REPLACEMENT))
        offsets.append(min(start, len(output.text)))
    return offsets


def _by_text(tokens: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(token["token"], token["logprob"])  # of two ids with the same text the better one counts
    return found


def _token(tokenizer: Any, token_id: int, logprob: Logprob) -> dict[str, Any]:
    """Readers join the bytes of tokens that are parts of a character; these have no text of their own."""
    text = f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token
    data = partial_bytes(tokenizer, token_id) if REPLACEMENT in text else text.encode()
    return {
        "token": text,
        "logprob": max(LEAST_LOGPROB, logprob.logprob),
        "bytes": None if data is None else list(data),
    }


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
