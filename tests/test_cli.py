"""The command line: options, exit codes, what goes to which stream."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import by_id, completion, encode, read_results, write_lines
from llm_helpers import DEFAULTS

import nanoapc.cli
from nanoapc.batch_file import BatchSummary, StoppedBySignal
from nanoapc.config import EngineConfig

ENGINE = [f"--{name.replace('_', '-')}={value}" for name, value in DEFAULTS.items()]


def main(*arguments: Any) -> int:
    """Runs run-batch in this process; returns the exit code, argparse's too."""
    try:
        return nanoapc.cli.main(["run-batch", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two lines, one of them bad."""
    return write_lines(tmp_path / "in.jsonl", [completion("a"), completion("bad", top_p=3)])


def test_python_dash_m_answers_a_file_and_says_what_it_did(tmp_path: Path, model_dir: Path, source: Path) -> None:
    command = [sys.executable, "-m", "nanoapc", "run-batch", "-i", source, "-o", tmp_path / "out.jsonl"]
    done = subprocess.run([*command, "--model", model_dir, *ENGINE], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert set(by_id(read_results(tmp_path / "out.jsonl"))) == {"a", "bad"}
    assert "1 of 2 lines answered, 1 failed" in done.stderr and "2/2" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-o", "{tmp}/out.jsonl"], 1),
        (["-o", "{tmp}/out.jsonl", "--error-file", "{tmp}/errors.jsonl", "--ordered"], 1),
        ([], 2),
        (["-o", "{tmp}/in.jsonl"], 2),
        (["-o", "{tmp}/no/out.jsonl"], 2),
        (["-o", "{tmp}/out.jsonl", "--max-num-seqs", "many"], 2),
        (["-o", "{tmp}/out.jsonl", "--max-num-seqs", "0"], 2),
        (["-o", "{tmp}/out.jsonl", "--max-num-sequences", "4"], 2),
        (["-o", "{tmp}/out.jsonl", "--model", "{tmp}"], 2),
        (["-o", "{tmp}/out.jsonl", "-i", "{tmp}/none.jsonl"], 2),
        (["--dry-run"], 1),
        (["-h"], 0),
    ],
)
def test_exit_codes(
    tmp_path: Path, model_dir: Path, source: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main("-i", source, "--model", model_dir, *ENGINE, *arguments) == code
    out, err = capfd.readouterr()
    if code == 2:
        assert "error: " in err and "Traceback" not in err and out == ""
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]  # nothing is left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "{tmp}/none.jsonl", "-o", "{tmp}/out"], "error: there is no file '{tmp}/none.jsonl'"),
        (["-i", "{tmp}/none.jsonl", "--dry-run"], "error: there is no file '{tmp}/none.jsonl'"),
        (["-i", "", "-o", "{tmp}/out"], "error: there is no file ''"),
        (["-i", "{tmp}", "-o", "{tmp}/out"], "error: {tmp} cannot be read: Is a directory"),
        (["-o", ""], "error: output or error file is no name of a file"),
        (["-o", "{tmp}/out/"], "error: output or error file is no name of a file"),
        (["-o", "{tmp}/out", "--error-file", ""], "error: output or error file is no name of a file"),
    ],
)
def test_a_file_that_cannot_be_is_named(
    tmp_path: Path, model_dir: Path, source: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main("-i", source, "--model", model_dir, *arguments) == 2
    err = capfd.readouterr().err
    assert message.replace("{tmp}", str(tmp_path)) in err and "Errno" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
@pytest.mark.parametrize("command", [["-i", "-", "-o", "{tmp}/out"], ["-o", "-"], ["-o", "{tmp}/out"], ["--dry-run"]])
def test_a_closed_stream_is_an_error_only_where_it_is_needed(
    tmp_path: Path,
    model_dir: Path,
    source: Path,
    stream: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with open(source) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, stream, None)
        command = [argument.replace("{tmp}", str(tmp_path)) for argument in command]
        code = main("-i", source, "--model", model_dir, *ENGINE, *command)
    out, err = capfd.readouterr()
    is_needed = "-" in command and stream == ("stdin" if "-i" in command else "stdout")
    assert code == (2 if is_needed else 1)
    assert not is_needed or "is closed; give the name of a file instead of -" in err
    for line in out.splitlines() if command == ["-o", "-"] else []:
        assert json.loads(line)["custom_id"]  # messages have not gone where results go


def test_all_lines_answered_is_zero_and_an_empty_file_says_so(
    tmp_path: Path, model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    options = ["-i", source, "--model", model_dir, *ENGINE, "--quiet"]
    assert main("-o", tmp_path / "out.jsonl", *options) == 0
    done_before = BatchSummary(total=1, done=1, resumed=1)
    assert str(done_before) == "1 of 1 lines answered, 0 failed (1 before this run)"  # and no rates of nothing
    assert capfd.readouterr() == ("", "")
    source.write_bytes(b"\n")
    assert main("-o", tmp_path / "empty.jsonl", *options) == 0
    assert "has no requests" in capfd.readouterr().err and (tmp_path / "empty.jsonl").read_bytes() == b""


def test_a_dash_is_standard_input_and_output(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = io.BytesIO(encode(completion("a")) + b"\n" + encode(completion("b")) + b"\n")
    read_end, write_end = os.pipe()
    os.write(write_end, lines.getvalue())
    os.close(write_end)
    with open(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main("-i", "-", "-o", "-", "--model", model_dir, *ENGINE) == 0
    out, err = capfd.readouterr()
    assert {json.loads(line)["custom_id"] for line in out.splitlines()} == {"a", "b"} and "2 of 2" in err


def test_a_dry_run_prints_the_forest_and_the_bad_lines(
    model_dir: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("-i", source, "--dry-run", "--quiet", "--model", model_dir, *ENGINE) == 1
    out, err = capfd.readouterr()
    assert out.startswith("2 lines, 1 with errors; ") and "planned hit rate" in out
    assert err.startswith("line 2 (bad): top_p=3") and err.endswith("\n")


def test_every_engine_option_is_there_with_its_meaning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    arguments: list[str] = []
    for field in dataclasses.fields(EngineConfig):
        flag, kind = "--" + field.name.replace("_", "-"), str(field.type).removesuffix(" | None")
        if kind == "bool":
            given[field.name] = not field.default
            arguments.append(flag if given[field.name] else "--no" + flag[1:])
        else:
            given[field.name] = {"int": 3, "float": 0.5}.get(kind, "text")
            arguments += [flag, str(given[field.name])]
    seen: list[Any] = []
    monkeypatch.setattr(
        nanoapc.cli, "run_batch", lambda *args, **options: seen.append((args, options)) or BatchSummary()
    )
    assert main("-i", "x", "-o", "y", *arguments, "--served-model-name", "m", "--served-model-name", "n") == 0
    args, options = seen.pop()
    assert args == ("x", "y", given.pop("model"))
    assert options.pop("served_model_names") == ["m", "n"]
    assert {name: value for name, value in options.items() if name in given} == given
    as_in_python = ["--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in arguments]
    assert main("-i", "x", "-o", "y", *as_in_python) == 0
    assert {name: value for name, value in seen.pop()[1].items() if name in given} == given
    assert main("-i", "x", "-o", "y", "--model", "m") == 0
    assert seen[0][1].keys().isdisjoint(given)  # what is not given keeps the default of EngineConfig
    capfd.readouterr()
    main("-h")
    text = " ".join(capfd.readouterr().out.split())
    assert "tokens a KV block. (default: 16)" in text and "--no-enable-prefix-caching" in text


def test_a_signal_shows_in_the_exit_code(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise StoppedBySignal(15)

    monkeypatch.setattr(nanoapc.cli, "run_batch", stopped)
    assert main("-i", "x", "-o", "y", "--model", "m") == 143
    assert capfd.readouterr().err.endswith("stopped by SIGTERM; repeat the command to go on\n")
    assert main("-i", "x", "-o", "-", "--model", "m") == 143
    assert capfd.readouterr().err.endswith("stopped by SIGTERM\n")


def test_ctrl_c_ends_a_dry_run_with_a_word(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nanoapc.cli, "dry_run", stopped)
    assert main("-i", "x", "--dry-run", "--model", "m") == 130
    assert capfd.readouterr().err == "nanoapc run-batch: stopped\n"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="Ray may be there")
def test_ray_that_is_missing_is_named_before_the_input_is_read(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("-i", tmp_path / "none", "-o", tmp_path / "out", "--model", "m", "--ray", "2") == 2
    assert "pip install 'nanoapc[ray]'" in capfd.readouterr().err
