"""The lessons run on the model that ships with nanoapc, and show what they set out to show. Nothing asserts seconds."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from llm_helpers import load_script

EXAMPLES = Path(__file__).parent.parent / "examples"


def lesson(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs examples/<name>.py in this process; returns what it printed."""
    load_script(EXAMPLES / f"{name}.py").main(list(arguments))
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[tuple[int, ...]]:
    """All matches of a pattern, its groups as whole numbers."""
    found = [match.groups() for match in re.finditer(pattern, text)]
    assert found, f"{pattern!r} is nowhere in {text!r}"
    return [tuple(int(value) for value in groups) for groups in found]


def test_every_lesson_is_tested() -> None:
    lessons = {path.stem for path in EXAMPLES.glob("[0-9]*.py")}
    assert lessons == set(re.findall(r'lesson\("(\w+)"', Path(__file__).read_text()))
    assert sorted(name[:2] for name in lessons) == [f"{i:02}" for i in range(1, len(lessons) + 1)]


def test_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("01_one_prompt", capsys, "--max-tokens", "12")
    (num_tokens,) = numbers(r"characters are (\d+) tokens", text)[0]
    runs = numbers(r"run: +(\d+) prompt tokens cached", text)
    assert runs == [(0,), (num_tokens - 1,)]
    assert "The same text: True" in text


def test_caching_on_and_off(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("02_caching_on_and_off", capsys, "--rows", "20", "--max-tokens", "2")
    cached = numbers(r"(\d+) of (\d+) prompt tokens cached", text)
    assert [hits for hits, _ in cached[:3]] == [0, 0, 0]
    assert cached[3][0] > 0.9 * cached[3][1] > 100
    assert "token for token: True" in text


def test_many_questions(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("03_many_questions", capsys, "--sentences", "20", "--questions", "8", "--max-tokens", "3")
    (total,), (computed,) = numbers(r"questions, (\d+) prompt tokens", text)[0], numbers(r"computed (\d+) of", text)[0]
    assert computed < total / 4
    steps = numbers(r"\n +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", text)
    assert [sequences for _, sequences, *_ in steps] == [8, 8, 8]
    assert all(read < unshared for *_, read, unshared in steps)


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    turns = numbers(r"\[(\d+) of (\d+) prompt tokens cached", lesson("04_chat", capsys, "--max-tokens", "20"))
    assert turns[0][0] == 0 and len(turns) == 4
    for (_, before), (cached, _) in itertools.pairwise(turns):
        assert cached >= before - 16 + 1  # the whole conversation so far, up to its last full block


def test_salts(capsys: pytest.CaptureFixture[str]) -> None:
    cached = [hits for hits, _ in numbers(r"(\d+) of (\d+) cached", lesson("05_salts", capsys))]
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] == cached[4] > 100


def test_ten_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = lesson("06_ten_blocks", capsys, "--output", str(tmp_path / "ten"))
    queues = [queue.split() for queue in re.findall(r"free queue: ([\d ]*)", text)]
    assert queues[0] == list("0123456789")
    assert queues[4] == list("789")
    assert queues[5] == list("6478932510")
    assert queues[6] == list("35")
    assert "10 of 14 prompt tokens are cached" in text and "evictions 1" in text
    assert (tmp_path / "ten.html").stat().st_size > 20_000


def test_order_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("07_order_and_parts", capsys, "--documents", "5", "--questions", "3", "--tokens", "96")
    given, ordered = (computed for (computed,) in numbers(r"computed +(\d+)", text))
    assert ordered == 5 * 96 + 15 * 20 < given  # each document once, and the questions
    parts = numbers(r"(\d+) blocks shared, (\d+) tokens copied", text)
    assert parts == [(0, 0), (3, 40), (3, 40)]


def test_forest(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("08_forest", capsys, "--documents", "2", "--questions", "3", "--max-tokens", "3")
    (off, _, none), (on, _, shared) = numbers(r"reads +(\d+) KV positions in (\d+) tiles, (\d+) shared", text)
    assert on < off / 2 and none == 0 and shared == 3  # the system prompt, and the two documents
    assert "the outputs are the same: True" in text
    assert text.count("|-- 32 blocks") == 3


def test_the_next_process(capsys: pytest.CaptureFixture[str]) -> None:
    text = lesson("09_next_process", capsys, "--sentences", "10")
    (first, total), (second, _) = numbers(r"(\d+) of (\d+) prompt tokens computed", text)
    assert first > total / 4 and second < 4 * 16
    assert "The same texts: True" in text
