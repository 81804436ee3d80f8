"""What each line of a batch file gets: an answer in OpenAI's shape, or an error line that says why not."""

from __future__ import annotations

import bz2
import json
import lzma
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import answers, body, by_id, chat, completion, encode, read_results, run, write_lines
from conftest import MakeLLM
from llm_helpers import DEFAULTS, assert_idle, greedy, script_tokens
from test_detokenizer import byte_fallback, byte_level
from tiny_models import make_tiny_model, tiny_tokenizer

from nanoapc import LLM, SamplingParams
from nanoapc.batch_file import run_batch
from nanoapc.batch_format import GROUP_BYTES, LEAST_LOGPROB, MAX_LINE_BYTES, SAMPLING, RequestReader, parse_line
from nanoapc.batch_plan import MAX_MODELS

GOOD = [completion("a"), chat("b"), completion("c", "the lazy dog", max_tokens=7)]


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """One LLM for all lines; at the end nothing is left in it."""
    with LLM(model_dir, **DEFAULTS) as llm:
        yield llm
        assert_idle(llm)


def error_of(result: dict[str, Any]) -> dict[str, Any]:
    """The error of a result, which must be seen by every kind of reader."""
    response = result["response"]
    assert 400 <= response["status_code"] < 500
    assert "usage" not in response["body"] and "choices" not in response["body"]
    assert response["body"]["error"]["message"] == result["error"]["message"] and result["error"]["code"]
    return response["body"]["error"]


# -- answers -------------------------------------------------------------------------------------------------


def test_answers_are_those_of_generate_and_chat(tmp_path: Path, llm: LLM) -> None:
    results, summary = run(tmp_path, llm, GOOD)
    expected = llm.generate(["the quick brown fox", "the lazy dog"], [greedy(4), greedy(7)], use_tqdm=False)
    said = llm.chat([{"role": "user", "content": "who speaks first?"}], greedy(4), use_tqdm=False)
    found = by_id(results)
    assert body(found["a"])["choices"][0]["text"] == expected[0].outputs[0].text
    assert body(found["c"])["choices"][0]["text"] == expected[1].outputs[0].text
    assert body(found["b"])["choices"][0]["message"] == {
        "role": "assistant",
        "content": said[0].outputs[0].text,
        "refusal": None,
    }
    assert [body(found[name])["object"] for name in "abc"] == ["text_completion", "chat.completion", "text_completion"]
    assert body(found["c"])["usage"]["prompt_tokens"] == len(expected[1].prompt_token_ids)
    assert body(found["c"])["usage"]["completion_tokens"] == len(expected[1].outputs[0].token_ids)
    assert (summary.total, summary.done, summary.failed, summary.exit_code) == (3, 3, 0, 0)


def test_usage_tells_cached_tokens_and_summary_adds_them_up(tmp_path: Path, llm: LLM) -> None:
    llm.reset_prefix_cache()
    shared = list(range(40, 76))
    lines = [completion(f"r{i}", [*shared, 80 + i, 90 + i], max_tokens=1) for i in range(100)]
    results, summary = run(tmp_path, llm, lines)
    usages = [body(result)["usage"] for result in results]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached.count(0) == 1 and sum(value >= len(shared) - 4 for value in cached) == 99
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (3800, sum(cached), 100)
    # The prompt rate counts computed tokens only.
    assert f"prompt {(3800 - sum(cached)) / summary.seconds:.0f} tok/s" in str(summary)
    assert f"{sum(cached)} of 3800 prompt tokens saved" in str(summary)


def test_logprobs_have_the_shapes_of_openai(tmp_path: Path, llm: LLM) -> None:
    lines = [
        chat("chat", logprobs=True, top_logprobs=3),
        chat("chosen only", logprobs=True),
        completion("legacy", logprobs=2),
        completion("none"),
    ]
    found = by_id(run(tmp_path, llm, lines)[0])
    content = body(found["chat"])["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    for entry in content:  # greedy: the chosen one is the best
        assert {key: entry[key] for key in ("token", "logprob", "bytes")} == entry["top_logprobs"][0]
        assert LEAST_LOGPROB <= entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]  # a part of a character has bytes, too
    only = body(found["chosen only"])["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in only] == [[]] * 4
    assert [entry["logprob"] for entry in only] == [entry["logprob"] for entry in content]
    legacy = body(found["legacy"])["choices"][0]
    tokens, offsets = legacy["logprobs"]["tokens"], legacy["logprobs"]["text_offset"]
    assert all(legacy["text"].startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
    best = [max(top.values()) for top in legacy["logprobs"]["top_logprobs"]]
    assert best == legacy["logprobs"]["token_logprobs"]
    assert body(found["none"])["choices"][0]["logprobs"] is None


def test_offsets_point_into_the_text(tmp_path: Path, make_llm: MakeLLM) -> None:
    llm = make_llm()
    script = tiny_tokenizer().encode("\u4e2da<|endoftext|>\U0001f600 the fox", add_special_tokens=False)
    assert len(script) > len("\u4e2da\U0001f600") + 2  # characters of several tokens
    script_tokens(llm, script)
    results, _ = run(tmp_path, llm, [completion("a", logprobs=0, max_tokens=len(script), ignore_eos=True)])
    choice = body(results[0])["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == tiny_tokenizer().decode(script, skip_special_tokens=True)
    assert offsets == sorted(offsets) and offsets[0] == 0
    shown = [(token, at) for token, at in zip(tokens, offsets, strict=True) if token != "<|endoftext|>"]
    assert len(shown) == len(script) - 1
    assert all(choice["text"].startswith(token, at) for token, at in shown if "\ufffd" not in token)


@pytest.mark.parametrize(
    ("make", "prompt", "text", "stop", "expected"),
    [
        (byte_fallback, [1], "It ends", None, [0, 0, 2, 6]),  # the first token, a blank, is not in the text
        (byte_fallback, "a", "It ends", None, [0, 1, 3, 7]),
        (byte_level, "a", "It ends. It", "s. I", [0, 2, 6, 6]),
    ],
)
def test_offsets_where_the_text_lacks_a_part_of_a_token(
    make: Any, prompt: Any, text: str, stop: str | None, expected: list[int], tmp_path: Path, make_llm: MakeLLM
) -> None:
    make_tiny_model(tmp_path, vocab_size=512, tokenizer=False)
    make().save_pretrained(tmp_path)
    llm, script = make_llm(tmp_path), make().encode(text, add_special_tokens=False)
    script_tokens(llm, script)
    line = completion("a", prompt, logprobs=0, max_tokens=len(script), ignore_eos=True, stop=stop)
    results, _ = run(tmp_path, llm, [line])
    assert body(results[0])["choices"][0]["logprobs"]["text_offset"] == expected


def test_top_logprobs_are_the_best_in_order_whatever_was_chosen(tmp_path: Path, llm: LLM) -> None:
    chosen = {"logit_bias": {"77": 100}, "ignore_eos": True}
    lines = [chat("chat", logprobs=True, top_logprobs=3, **chosen), completion("legacy", logprobs=3, **chosen)]
    found = by_id(run(tmp_path, llm, lines)[0])
    for entry in body(found["chat"])["choices"][0]["logprobs"]["content"]:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True) and entry["logprob"] < best[-1]
    legacy = body(found["legacy"])["choices"][0]["logprobs"]
    for token, top in zip(legacy["tokens"], legacy["top_logprobs"], strict=True):
        assert list(top.values()) == sorted(top.values(), reverse=True) and list(top)[-1] == token


def test_fields_change_the_answer_as_sampling_params_do(tmp_path: Path, llm: LLM) -> None:
    prompt = "the quick brown fox"
    cases: dict[str, dict[str, Any]] = {
        "n": {"n": 3, "temperature": 1.0, "seed": 7},
        "bias": {"logit_bias": {"77": 100}},
        "allowed": {"allowed_token_ids": [50, 60]},
        "eos": {"ignore_eos": True, "min_tokens": 3},
        "penalty": {"repetition_penalty": 1.7, "presence_penalty": 1, "frequency_penalty": 0.5},
        "nucleus": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 3},
    }
    found = by_id(run(tmp_path, llm, [completion(name, prompt, **case) for name, case in cases.items()])[0])
    for name, case in cases.items():
        params = SamplingParams(**{"temperature": 0, "max_tokens": 4, **case})
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert [choice["text"] for choice in body(found[name])["choices"]] == [output.text for output in expected], name
        assert [choice["index"] for choice in body(found[name])["choices"]] == list(range(len(expected)))


def test_max_completion_tokens_comes_before_max_tokens_and_defaults_are_openais(tmp_path: Path, llm: LLM) -> None:
    endless = {"ignore_eos": True}
    lines = [
        completion("both", max_tokens=3, max_completion_tokens=5, **endless),
        completion("new", max_tokens=None, max_completion_tokens=6, **endless),
        completion("neither", max_tokens=None, **endless),
        chat("chat", max_tokens=None, **endless),
        chat("too many", max_tokens=10**6, **endless),
    ]
    found = by_id(run(tmp_path, llm, lines)[0])
    used = {name: body(result)["usage"] for name, result in found.items()}
    assert [used[name]["completion_tokens"] for name in ("both", "new", "neither")] == [5, 6, 16]
    assert used["chat"]["total_tokens"] == used["too many"]["total_tokens"] == llm.inputs.max_model_len
    assert body(found["chat"])["choices"][0]["finish_reason"] == "length"


def test_a_string_stop_ends_the_text(tmp_path: Path, llm: LLM) -> None:
    whole = body(run(tmp_path, llm, [completion("a", max_tokens=12)])[0][0])["choices"][0]["text"]
    stop = next(whole[i] for i in range(3, len(whole)) if whole[i] != "\ufffd" and whole[i] not in whole[:i])
    choice = body(run(tmp_path, llm, [completion("a", max_tokens=12, stop=stop)])[0][0])["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"


def test_a_drawn_answer_depends_on_its_id_and_on_nothing_else(tmp_path: Path, llm: LLM) -> None:
    lines = [completion(f"r{i}", temperature=1, max_tokens=8) for i in range(20)]
    found = answers(run(tmp_path, llm, lines)[0])
    assert len({str(choices) for choices in found.values()}) > 15
    alone = answers(run(tmp_path, llm, [lines[13], completion("x", "something else", temperature=1)])[0])
    assert alone["r13"] == found["r13"]


def test_salted_lines_share_no_prefix(tmp_path: Path, llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = list(range(100, 160))
    lines = [completion(f"{salt}{i}", ids, cache_salt=salt) for salt in ("s", "t") for i in range(2)]
    results, _ = run(tmp_path, llm, lines)
    cached = [body(result)["usage"]["prompt_tokens_details"]["cached_tokens"] for result in results]
    assert sorted(cached) == [0, 0, 59, 59]


def test_text_parts_and_template_fields_reach_the_template(tmp_path: Path, llm: LLM) -> None:
    parts = [{"type": "text", "text": "who speaks"}, {"type": "text", "text": "first?"}]
    template = "{{ messages[0].content }}{{ tools | length if tools else 0 }}{{ mood }}{{ add_generation_prompt }}"
    tool = {"type": "function", "function": {"name": "f"}}
    lines = [
        chat("parts", messages=[{"role": "user", "content": parts}]),
        chat("joined", "who speaks\nfirst?"),
        chat(
            "template",
            "Q",
            chat_template=template,
            tools=[tool],
            chat_template_kwargs={"mood": "!"},
            add_generation_prompt=False,
        ),
    ]
    found = by_id(run(tmp_path, llm, lines)[0])
    assert body(found["parts"])["choices"] == body(found["joined"])["choices"]
    expected = llm.generate("Q1!False", greedy(4, ignore_eos=False), use_tqdm=False)[0]
    assert body(found["template"])["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert body(found["template"])["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_arguments_of_tool_calls_reach_the_template_parsed(tmp_path: Path, llm: LLM) -> None:
    function = {"name": "weather", "arguments": '{"city": "York"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    expected = llm.generate("York", greedy(4, ignore_eos=False), use_tqdm=False)[0]
    without = {name: value for name, value in call.items() if name != "content"}
    for message in (call, without):  # who calls tools need not say anything
        (result,) = run(tmp_path, llm, [chat("a", messages=[message], chat_template=template)])[0]
        assert body(result)["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_a_message_without_content_is_named(tmp_path: Path, llm: LLM) -> None:
    results, _ = run(tmp_path, llm, [chat("bad", messages=[{"role": "user"}]), chat("good")])
    assert error_of(by_id(results)["bad"])["message"].startswith("message 0 of messages has no content; give it a text")
    assert body(by_id(results)["good"])


# -- errors --------------------------------------------------------------------------------------------------


def test_bad_lines_get_error_lines_and_good_ones_their_answers(tmp_path: Path, llm: LLM) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    bad = [b"{bad", b"[1,2]", b"null", b'"text"', b"\xff\xfe", b'{"custom_id": "x", "body": "x"}', b"[" * 5000,
           b'{"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": "x"}']  # fmt: skip
    results, summary = run(tmp_path, llm, [GOOD[0], *bad, *GOOD[1:]])
    assert len(results) == len(GOOD) + len(bad)
    good = [result for result in results if result["error"] is None]
    assert answers(good) == clean
    messages = [error_of(result)["message"] for result in results if result["error"] is not None]
    for number in (2, 3, 4, 5, 6, 8):
        assert any(f"line {number} " in message for message in messages), number
    assert (summary.done, summary.failed, summary.exit_code) == (3, len(bad), 1)


@pytest.mark.parametrize(
    "text", ["{0}\n{1}\n{2}", "{0}\n{1}\n{2}\n\n", "\n{0}\n\n{1}\n   \t\n{2}\n", "{0}\r\n{1}\r\n{2}\r\n"]
)
def test_blank_lines_and_line_ends_do_not_matter(tmp_path: Path, llm: LLM, text: str) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    content = (
        text.replace("{0}", json.dumps(GOOD[0])).replace("{1}", json.dumps(GOOD[1])).replace("{2}", json.dumps(GOOD[2]))
    )
    results, summary = run(tmp_path, llm, [content.encode()])
    assert answers(results) == clean and summary.total == 3


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_gives_an_empty_output(tmp_path: Path, llm: LLM, content: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    summary = run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm, quiet=True)
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and (summary.total, summary.exit_code) == (0, 0)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, llm: LLM) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    mark = b"\xef\xbb\xbf"
    assert answers(run(tmp_path, llm, [mark + encode(GOOD[0]), *GOOD[1:]])[0]) == clean
    assert answers(run(tmp_path, llm, [mark + b"\r", *GOOD])[0]) == clean


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "utf-16-be"])
def test_other_encodings_are_refused_by_name(tmp_path: Path, llm: LLM, encoding: str) -> None:
    text = "".join(json.dumps(line) + "\n" for line in GOOD)
    (tmp_path / "in.jsonl").write_bytes(("\ufeff" * encoding.islower() + text).encode(encoding))
    with pytest.raises(ValueError, match=encoding.upper()[:6]):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)
    assert not (tmp_path / "out.jsonl").exists()
    if encoding.islower():
        (tmp_path / "in.jsonl").write_bytes(text.encode(encoding))  # without a mark
        with pytest.raises(ValueError, match="is UTF-16BE text"):
            run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)


@pytest.mark.parametrize(
    ("pack", "what"),
    [(bz2.compress, "compressed by bzip2"), (lzma.compress, "compressed by xz"), (None, "a zip archive")],
)
def test_other_archives_are_refused_by_name(
    tmp_path: Path, llm: LLM, pack: Callable[[bytes], bytes] | None, what: str
) -> None:
    path, data = tmp_path / "in.jsonl", encode(completion("a"))
    if pack is not None:
        path.write_bytes(pack(data))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("in.jsonl", data)
    with pytest.raises(ValueError, match=f"in.jsonl is {what}; unpack it first"):
        run_batch(path, tmp_path / "out.jsonl", llm, quiet=True)


def test_line_ends_of_unicode_end_no_line(tmp_path: Path, llm: LLM) -> None:
    """U+2028 and others, of which some readers of lines think so, come and go as any character of a text."""
    odd = "a\u2028b\u2029c\x85d"
    lines = [completion(odd, odd), completion("escaped", odd), completion("good")]
    raw = json.dumps(lines[0], ensure_ascii=False).encode()
    results, summary = run(tmp_path, llm, [raw, *lines[1:]])
    assert summary.done == 3 and answers(results)[odd] == answers(results)["escaped"]
    assert len((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_a_repeated_id_is_refused_naming_both_lines(tmp_path: Path, llm: LLM) -> None:
    lines = [completion("x"), b"", completion("same", "one"), completion("y"), completion("same", "two")]
    source = write_lines(tmp_path / "in.jsonl", lines)
    with pytest.raises(ValueError, match=r"lines 3 and 5 .*'same'"):
        run_batch(source, tmp_path / "out.jsonl", llm)
    assert not (tmp_path / "out.jsonl").exists()


def test_unusable_ids_get_error_lines_and_long_ones_work(tmp_path: Path, llm: LLM) -> None:
    odd = ["x" * 10_000, "\ud800 half", "line\nbreak", "\0", "../../x", "/etc/x", "con"]
    lines = [completion(""), completion(7), completion(None), {"method": "POST"}, *map(completion, odd)]
    before = set(tmp_path.parent.iterdir())
    results, _ = run(tmp_path, llm, lines)
    assert {name for name in (result["custom_id"] for result in results) if name} == set(odd)
    errors = [error_of(result) for result in results if result["custom_id"] is None]
    assert [error["param"] for error in errors] == ["custom_id"] * 4
    assert all(f"line {i + 1} " in "".join(error["message"] for error in errors) for i in range(4))
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}  # ids are only data
    assert set(tmp_path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": "/v1/foo"}, "url"),
        ({"url": None}, "url"),
        ({"url": ["/v1/completions"]}, "url"),
        ({"method": "GET"}, "method"),
        ({"body": None}, "body"),
        ({"body": {"prompt": "x", "stream": True}}, "stream"),
        ({"body": {}}, "prompt"),
        ({"body": {"prompt": ["one", "two"]}}, "prompt"),
        ({"body": {"prompt": "\ud800"}}, "prompt"),
        ({"body": {"prompt": ""}}, "prompt"),
        ({"body": {"prompt": [1, 2.5]}}, "prompt"),
        ({"body": {"prompt": [10**6]}}, "prompt"),
        ({"body": {"prompt": list(range(100)) * 2}}, "prompt"),
        ({"body": {"prompt": "x", "messages": []}}, "messages"),
        ({"body": {"prompt": "x", "max_tokens": 0}}, "max_tokens"),
        ({"body": {"prompt": "x", "top_p": 1.5}}, "top_p"),
        ({"body": {"prompt": "x", "temperature": float("nan")}}, "temperature"),
        ({"body": {"prompt": "x", "n": 10**9}}, "n"),
        ({"body": {"prompt": "x", "logprobs": 21}}, "logprobs"),
        ({"body": {"prompt": "x", "cache_salt": ""}}, "cache_salt"),
        ({"body": {"prompt": "x", "echo": True}}, "echo"),
        ({"body": {"prompt": "x", "response_format": {"type": "json_object"}}}, "response_format"),
        ({"body": {"prompt": "x", "tempratur": 0.1}}, "tempratur"),
        ({"body": {"prompt": "x", "stop_token_ids": [10**7]}}, "stop_token_ids"),
        ({"body": {"prompt": "x", "bad_words": ["\ud800"]}}, "bad_words"),
        ({"body": {"prompt": "x", "logit_bias": {"5": None}}}, "logit_bias"),
        ({"body": {"prompt": "x", "logit_bias": {"1" * 5000: 1}}}, "logit_bias"),
        ({"body": {"prompt": "x", "logit_bias": {"5": 3e38}, "repetition_penalty": 0.1}}, "logit_bias"),
        ({"body": {"prompt": "x", "repetition_penalty": 1e-40}}, "repetition_penalty"),
        ({"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": 5}]}}, "messages"),
        (
            {"url": "/v1/chat/completions", "body": {"messages": [], "logprobs": True, "top_logprobs": 21}},
            "top_logprobs",
        ),
        (
            {"url": "/v1/chat/completions", "body": {"messages": [], "logprobs": True, "top_logprobs": True}},
            "top_logprobs",
        ),
        ({"url": "/v1/chat/completions", "body": {}}, "messages"),
        ({"url": "/v1/chat/completions", "body": {"messages": "hello"}}, "messages"),
        ({"body": {"prompt": "x", "allowed_token_ids": [96], "bad_words": ["~"]}}, "allowed_token_ids"),
        (
            {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}], "tools": 3}},
            "tools",
        ),
        ({"url": "/v1/chat/completions", "body": {"messages": [], "logprobs": 3}}, "logprobs"),
        ({"url": "/v1/chat/completions", "body": {"messages": [], "top_logprobs": 3}}, "top_logprobs"),
    ],
)
def test_each_fault_is_named_and_the_next_line_runs(
    tmp_path: Path, llm: LLM, change: dict[str, Any], param: str
) -> None:
    results, summary = run(tmp_path, llm, [{**completion("bad"), **change}, completion("good")])
    found = by_id(results)
    error = error_of(found["bad"])
    assert error["param"] == param and param in error["message"]
    assert found["bad"]["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert body(found["good"])["choices"][0]["text"] and summary.exit_code == 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_line_whose_parameters_leave_no_token_fails_alone_and_stays_so(tmp_path: Path, llm: LLM, n: int) -> None:
    excluding = {"allowed_token_ids": [96], "bad_words": ["~~"], "n": n}
    good = [completion(f"good {i}", f"the lazy dog {i}") for i in range(9)]
    lines = [*good[:4], completion("bad", **excluding), chat("bad chat", **excluding), *good[4:]]
    expected = answers(run(tmp_path, llm, good)[0])
    results, summary = run(tmp_path, llm, lines)
    found, failed = by_id(results), {"bad", "bad chat"}
    assert (summary.done, summary.failed, summary.exit_code) == (9, 2, 1)
    assert {name: found[name]["response"]["body"].get("choices") for name in found.keys() - failed} == expected
    for name in failed:
        error = error_of(found[name])
        assert found[name]["response"]["status_code"] == 400 and error["param"] == "allowed_token_ids"
        assert "allowed_token_ids and bad_words leave no token id to choose for output token 2" in error["message"]
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"".join(target.read_bytes().splitlines(True)[:5]))
    again = run_batch(tmp_path / "in.jsonl", target, llm, quiet=True)
    assert (again.resumed, again.done, again.failed, again.exit_code) == (5, 9, 2, 1)
    assert answers(read_results(target)) == answers(results)


@pytest.mark.parametrize("name", ["temperature", "model", "messages", "stream", "comment", "custom_ID"])
def test_a_field_beside_body_is_named_and_counts_as_asked(tmp_path: Path, llm: LLM, name: str) -> None:
    """Nobody may think that it had an effect; who then leaves it out, asks for something else."""
    results, summary = run(tmp_path, llm, [{**completion("bad"), name: 0}, completion("good")])
    error = error_of(by_id(results)["bad"])
    assert error["param"] == name and f"{name}=0 stands beside body; put it into body" in error["message"]
    assert (summary.done, summary.failed) == (1, 1)
    write_lines(tmp_path / "in.jsonl", [completion("bad"), completion("good")])
    again = run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm, quiet=True)
    assert (again.changed, again.exit_code) == (1, 1)


def test_what_changes_nothing_may_stand_beside_body(tmp_path: Path, llm: LLM) -> None:
    harmless = {"metadata": {"a": 1}, "user": "me", "request_id": "7", "temperature": None, "anything": None}
    found = answers(run(tmp_path, llm, [completion("a"), {**completion("b"), **harmless}])[0])
    assert found["a"] == found["b"] is not None


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"temperature": 0', '"temperature": 0, "temperature": 1', "temperature"),
        ('"max_tokens": 4', '"max_tokens": 4, "top_p": 1, "max_tokens": 4', "max_tokens"),
        ('"method"', '"custom_id": "other", "method"', "custom_id"),
        ('"role"', '"role": "system", "role"', "role"),
        ('"max_tokens"', '"metadata": [{"a": {"x": 1, "\\u0078": 2}}], "max_tokens"', "x"),
    ],
)
def test_a_key_that_stands_twice_is_named(tmp_path: Path, llm: LLM, old: str, new: str, key: str) -> None:
    """Of two values Python's json takes the last one and drops the other."""
    line = json.dumps(chat("bad")).replace(old, new, 1)
    results, summary = run(tmp_path, llm, [completion("good"), line.encode()])
    error = error_of(by_id(results)[None if key == "custom_id" else "bad"])
    assert error["param"] == key and f"line 2 has the key '{key}' twice" in error["message"]
    assert (summary.done, summary.failed) == (1, 1)


def test_lines_that_end_with_cr_alone_are_told_so(tmp_path: Path, llm: LLM) -> None:
    results, _ = run(tmp_path, llm, [b"\r".join(map(encode, GOOD))])
    assert "a line must end with LF or CRLF, not with CR alone" in error_of(results[0])["message"]
    results, _ = run(tmp_path, llm, [b"{bad\r", json.dumps(GOOD[0], indent=1).replace("\n", "\r").encode()])
    assert "CR alone" not in error_of(results[1] if results[0]["custom_id"] else results[0])["message"]
    assert sum(result["error"] is None for result in results) == 1  # inside a line CR is white space, as JSON says


@pytest.mark.parametrize("key", ["method", "url", "body"])
def test_a_missing_key_is_named(tmp_path: Path, llm: LLM, key: str) -> None:
    line = completion("a")
    del line[key]
    (result,) = run(tmp_path, llm, [line])[0]
    assert error_of(result)["param"] == key


def test_fields_that_change_nothing_are_taken(tmp_path: Path, llm: LLM) -> None:
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "top_p": None, "stop": None}
    harmless = {
        "stream": False,
        "suffix": "",
        "best_of": 1,
        "echo": False,
        "response_format": {"type": "text"},
        **ignored,
    }
    found = answers(run(tmp_path, llm, [completion("a"), completion("b", **harmless)])[0])
    assert found["a"] == found["b"]


@pytest.mark.parametrize(
    "field",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "none"},
        {"function_call": "auto"},
        {"n": 1},
        {"n": 1, "best_of": 1},
        {"logit_bias": {}},
        {"stop": []},
        {"bad_words": []},
        {"stop_token_ids": []},
        {"use_beam_search": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logprobs": False, "top_logprobs": 0},
        {"stream_options": {"include_usage": True}},
        {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_taken(tmp_path: Path, llm: LLM, field: dict[str, Any]) -> None:
    found = answers(run(tmp_path, llm, [chat("a"), chat("b", **field)])[0])
    assert found["a"] == found["b"] is not None


def test_as_many_candidates_as_answers_are_taken(tmp_path: Path, llm: LLM) -> None:
    found = by_id(run(tmp_path, llm, [completion("a", n=2, best_of=2), completion("b", n=1, best_of=2)])[0])
    assert len(body(found["a"])["choices"]) == 2 and error_of(found["b"])["param"] == "best_of"


@pytest.mark.parametrize("choice", ["none", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_choice_among_tools_is_not_ignored(tmp_path: Path, llm: LLM, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    results, _ = run(tmp_path, llm, [chat("a", tools=tools, tool_choice=choice)])
    assert error_of(results[0])["param"] == "tool_choice"


def test_the_model_of_a_line_must_be_the_loaded_one(tmp_path: Path, llm: LLM, model_dir: Path) -> None:
    lines = [completion("a", model=str(model_dir)), completion("b", model=model_dir.name), completion("c", model="gpt"),
             completion("d")]  # fmt: skip
    found = by_id(run(tmp_path, llm, lines)[0])
    assert error_of(found["c"])["param"] == "model" and found["c"]["response"]["status_code"] == 404
    assert [body(found[name])["model"] for name in "abd"] == [str(model_dir), model_dir.name, str(model_dir)]
    for names in (["gpt"], ("other", "gpt"), "gpt"):
        found = by_id(run(tmp_path, llm, lines, served_model_names=names)[0])
        assert body(found["c"])["model"] == "gpt"
    found = by_id(run(tmp_path, llm, [completion("a"), completion("g", model="g")], served_model_names="gpt")[0])
    assert error_of(found["g"])["param"] == "model"


def test_a_file_for_another_model_is_refused_as_a_whole(tmp_path: Path, llm: LLM) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("a", model="gpt"), completion("b", model="gpt-2")])
    with pytest.raises(ValueError, match=r"'gpt', 'gpt-2'.*--served-model-name"):
        run_batch(source, tmp_path / "out.jsonl", llm)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_for_very_many_models_is_not_refused(tmp_path: Path, llm: LLM, model_dir: Path) -> None:
    """Only so many names are kept; the loaded one may be behind them."""
    lines = [completion(str(i), model=f"gpt-{i}") for i in range(MAX_MODELS)]
    results, _ = run(tmp_path, llm, [*lines, completion("ours", model=model_dir.name)])
    assert [result["custom_id"] for result in results if result["error"] is None] == ["ours"]


def test_a_line_without_end_is_an_error_line_and_not_held(tmp_path: Path, llm: LLM) -> None:
    long = completion("long", metadata="x" * (MAX_LINE_BYTES + 100))
    results, _ = run(tmp_path, llm, [completion("a"), long, completion("b")])
    assert {result["custom_id"] for result in results if result["error"] is None} == {"a", "b"}
    (error,) = [error_of(result) for result in results if result["error"]]
    assert "line 2 is longer than 64 MiB" in error["message"]


def test_nesting_of_any_depth_is_an_error_line(tmp_path: Path, llm: LLM) -> None:
    """Around the depth where Python gives up, where reading, writing and printing of a value each may fail."""
    lines: list[Any] = [completion("good")]
    for depth in (*range(100, 1000, 9), 5000, 100_000):
        deep = "[" * depth + "]" * depth
        for name in ("unknown", "stop", "logit_bias", "prompt", "messages"):
            line = (chat if name == "messages" else completion)(f"{name} {depth}", **{name: 0})
            lines.append(encode(line).replace(f'"{name}": 0'.encode(), f'"{name}": {deep}'.encode()))
        lines.append(f'{{"custom_id": {deep}}}'.encode())
        lines.append(f'{{"custom_id": "m {depth}", "method": {deep}, "url": "x", "body": {{}}}}'.encode())
    results, summary = run(tmp_path, llm, lines)
    assert len(results) == len(lines) and summary.done == 1
    for result in results:
        assert result["custom_id"] == "good" or error_of(result)


# -- anything at all -----------------------------------------------------------------------------------------

VALUES: list[Any] = [None, True, False, 0, -1, 10**40, 0.5, 1e308, "", "x", "\ud800", [], [[]], [None], {}, {"a": {}},
                     [{"role": "user"}], [1, "2"], "\0", [3] * 500, 2**63, 1e-40, {"5": 3e38}]  # fmt: skip


def mutate(line: dict[str, Any], rng: random.Random) -> bytes:
    """Changes a value, a key or bytes of a line; its custom_id can only become one that no other line has."""
    line = json.loads(json.dumps(line))
    kind = rng.randrange(5)
    if kind < 3:
        target = rng.choice([line, *[line["body"]] * 5]) if isinstance(line.get("body"), dict) else line
        key = rng.choice([key for key in target if key != "custom_id"] + ["logprobs", *sorted(SAMPLING)])
        if rng.random() < 0.15:
            target.pop(key, None)
        else:
            target[key] = rng.choice(VALUES)
        if kind == 2:
            return mutate(line, rng)
        return json.dumps(line).encode()
    data = bytearray(json.dumps(line).encode())
    if kind == 3:
        return bytes(data[: rng.randrange(1, len(data))])
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data.replace(b"\n", b" "))


def test_two_thousand_mutated_lines_harm_no_good_one(tmp_path: Path, llm: LLM) -> None:
    rng = random.Random(0)
    good = [(chat if i % 2 else completion)(f"good {i}", f"question {i % 10}", max_tokens=1) for i in range(100)]
    make = [lambda i: chat(f"{i:030x}", "q", max_tokens=1), lambda i: completion(f"{i:030x}", "q", max_tokens=1, n=1)]
    lines = [mutate(make[i % 2](rng.getrandbits(120)), rng) for i in range(2000)]
    for line in good:
        lines.insert(rng.randrange(len(lines)), encode(line))
    results, summary = run(tmp_path, llm, lines)
    assert len(results) == summary.total == sum(bool(line.strip()) for line in lines)
    found = {result["custom_id"]: result for result in results}
    clean = answers(run(tmp_path, llm, good)[0])
    assert {name: body(found[name])["choices"] for name in clean} == clean
    assert summary.failed > 500 and summary.done > 300  # both kinds are there
    assert summary.failed + summary.done == summary.total


def test_the_digest_of_a_line_says_what_is_asked_not_how_it_is_written() -> None:
    line = completion("a")
    spaced = json.dumps({key: line[key] for key in reversed(line)}, indent=1).replace("\n", " ").encode()
    assert parse_line(1, encode(line)).digest == parse_line(9, spaced).digest
    assert parse_line(1, encode(line)).digest != parse_line(1, encode(completion("a", seed=1))).digest
    assert parse_line(1, b"{bad").digest != parse_line(2, b"{bad").digest  # two lines, two results


def test_read_results_is_strict(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        read_results(write_lines(tmp_path / "x", [b"{}"], end=b""))


def test_long_lines_are_read_a_few_at_a_time(llm: LLM) -> None:
    taken: list[int] = []

    def lines() -> Iterator[tuple[int, bytes]]:
        for number in range(1, 20):
            taken.append(number)
            yield number, json.dumps(completion(f"line {number}", user="x" * (GROUP_BYTES // 3))).encode()

    requests = RequestReader(llm.inputs, ["m"], seed=0).read(lines())
    assert next(requests).error is None and taken == [1, 2, 3]
    assert [line.number for line in requests] == list(range(2, 20))
