"""bench.py runs every workload, and says what is wrong with a command line before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm_helpers import load_script

BENCH = Path(__file__).parent.parent / "bench.py"
SMALL = [
    *("--num-requests", "8", "--shared-len", "128", "--own-len", "5", "--shared-output-len", "3"),
    *("--turns", "2", "--turn-len", "20", "--input-len", "3", "40", "--output-len", "2", "9"),
    *("--single-len", "7", "--single-output-len", "4"),
]


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_script(BENCH)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The figures of the last line."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_every_workload_gives_the_tokens_it_says(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--repeat", "2"])
    found = {row["workload"]: row for row in rows(capsys)}
    tokens = {name: (row["prompt_tokens"], row["output_tokens"]) for name, row in found.items()}
    assert list(tokens) == ["random", "shared", "forest", "chat", "single"]
    assert tokens["shared"] == tokens["forest"] == (8 * 133, 8 * 3)
    assert tokens["chat"] == (2 * (20 + 20 + 3 + 20), 2 * 2 * 3)  # the second turn resends the first
    assert tokens["single"] == (7, 4)
    assert found["random"]["cached_tokens"] == found["single"]["cached_tokens"] == 0
    assert found["shared"]["cached_tokens"] == 7 * 128
    assert found["forest"]["cached_tokens"] == 7 * 64 + (8 - 2) * 64
    assert all(row["seconds"] > 0 for row in found.values())


def test_engine_arguments_reach_the_engine(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["shared", *SMALL, "--set", "enable_prefix_caching=False"])
    assert [row["cached_tokens"] for row in rows(capsys)] == [0]


def test_the_other_measurements_run(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.host(num_seqs=4, prompt_len=40, shared_len=20, num_steps=8)
    assert [row["loop"] for row in report.rows] == ["plain", "overlapped"]
    assert all(row["us_decode_step"] > 0 for row in report.rows)
    bench.main(["single", *SMALL, "--profile"])
    printed = capsys.readouterr().out.split()
    for stage in ("schedule", "forward", "logits", "sample", "settle"):
        assert stage in printed


def test_a_plot_that_fails_costs_no_figures(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such folder")

    monkeypatch.setattr(bench, "plot", fail)
    with pytest.raises(OSError, match="no such folder"):
        bench.main(["single", *SMALL, "--plot", "nowhere/x.png"])
    assert [row["workload"] for row in rows(capsys)] == ["single"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown workload 'nosuch'"),
        (["--num-requests", "0"], "--num-requests: 0 is less than 1"),
        (["--repeat", "-1"], "--repeat: -1 is less than 1"),
        (["--output-len", "9", "8"], "--output-len 9 8: MIN must be at most MAX"),
        (["--shared-len", "-1"], "--shared-len: -1 is less than 0"),
        (["--host", "--plot", "x.png"], "leave one of them out"),
        (["--turns", "two"], "--turns: invalid positive value: 'two'"),
    ],
)
def test_bad_command_lines(bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert message in capsys.readouterr().err
