"""Nothing is lost: a run that is killed, stopped or out of disk goes on where it was, and touches no other file."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import answers, by_id, chat, completion, encode, processes, read_results, run_in_process, write_lines
from llm_helpers import DEFAULTS, assert_idle

from nanoapc import LLM
from nanoapc.batch_file import BatchStopped, StoppedBySignal, _Signals, run_batch
from nanoapc.batch_journal import Journal
from nanoapc.engine.output_file import replace_file

LINES = [
    *(completion(f"c{i}", f"the lazy dog {i % 4} {i}") for i in range(8)),
    chat("chat"),
    {"custom_id": "bad"},
    b"{",
]
SMALL = {"max_num_seqs": 4, "num_kv_blocks": 96}


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """An LLM that finishes lines in many steps."""
    with LLM(model_dir, **{**DEFAULTS, "max_num_seqs": 4}) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """LINES as a file."""
    return write_lines(tmp_path / "in.jsonl", LINES)


def results_by_digest(path: Path) -> dict[str, Any]:
    """id -> what was answered, of all results; no id twice."""
    results = read_results(path)
    found = {result["id"]: (result["custom_id"], result["response"]["body"].get("choices")) for result in results}
    assert len(found) == len(results)
    return found


# -- torn files ----------------------------------------------------------------------------------------------


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines(
    tmp_path: Path, source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    data = b"".join(target.read_bytes().splitlines(True)[:3])
    for size in range(len(data) + 1):
        target.write_bytes(data[:size])
        with Journal(str(target)) as journal:
            num_whole = len(list(journal.finished()))
            journal.write(b'{"id": "batch_req_", "custom_id": "new"}\n')
        # A line whose newline alone is missing is whole.
        assert num_whole == data[:size].count(b"\n") + (data[size : size + 1] == b"\n")
        whole = b"".join(data.splitlines(True)[:num_whole])
        assert target.read_bytes() == whole + b'{"id": "batch_req_", "custom_id": "new"}\n'


@pytest.mark.parametrize("options", [{}, {"ordered": True}])
def test_a_torn_output_is_continued_to_the_same_results(
    tmp_path: Path, source: Path, llm: LLM, options: dict[str, Any]
) -> None:
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_batch(source, whole, llm, quiet=True, **options)
    data, expected = whole.read_bytes(), results_by_digest(whole)
    for size in random.Random(0).sample(range(len(data)), 12):
        target.write_bytes(data[:size])
        summary = run_batch(source, target, llm, quiet=True, **options)
        assert results_by_digest(target) == expected
        assert (summary.total, summary.done, summary.failed) == (11, 9, 2)
        assert summary.resumed == data[:size].count(b"\n") + (data[size : size + 1] == b"\n")


def test_zeros_that_a_power_failure_leaves_are_cut(tmp_path: Path, source: Path, llm: LLM) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    expected, lines = results_by_digest(target), target.read_bytes().splitlines(True)
    target.write_bytes(lines[0] + b"\0" * 700 + lines[3] + lines[4])
    assert run_batch(source, target, llm, quiet=True).resumed == 1
    assert results_by_digest(target) == expected


@pytest.mark.parametrize("content", [b"my notes\n", b"my notes", b'{"id": 7}\n', b"\0\0\0", b'[1, 2]\n{"a": 1}\n'])
def test_a_file_that_holds_no_results_is_left_alone(tmp_path: Path, source: Path, llm: LLM, content: bytes) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    with pytest.raises(ValueError, match="choose another output"):
        run_batch(source, target, llm)
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        {"response": None},
        {"response": []},
        {"response": {"body": "text"}},
        {"response": {"status_code": 200}},
        {"error": "broken"},
        {"error": ...},
        {"custom_id": ["c0"]},
        {"custom_id": ...},
        {"id": "chatcmpl-1"},
        {"id": None},
    ],
    ids=str,
)
def test_a_result_of_another_shape_is_refused_by_its_line(
    tmp_path: Path, source: Path, llm: LLM, change: dict[str, Any]
) -> None:
    """... of a tool that also writes "batch_req_", say, whether the last line has its newline or not."""
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    lines = target.read_bytes().splitlines(True)
    other = {name: value for name, value in {**json.loads(lines[1]), **change}.items() if value is not ...}
    for end in (b"", b"\n", b"\n" + lines[2]):
        content = lines[0] + encode(other) + end
        target.write_bytes(content)
        with pytest.raises(ValueError, match="line 2, is no result of a batch; choose another output"):
            run_batch(source, target, llm)
        assert target.read_bytes() == content


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \n\n", b" \t"])
def test_blank_lines_in_the_output_do_not_matter(tmp_path: Path, source: Path, llm: LLM, blank: bytes) -> None:
    """Who removes a result, to have it answered anew, may leave them."""
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    expected, lines = answers(read_results(target)), target.read_bytes().splitlines(True)
    for content in ([blank + b"\n", *lines[1:]], [lines[0], blank + b"\n", *lines[2:]], [*lines[1:], blank]):
        target.write_bytes(b"".join(content))
        summary = run_batch(source, target, llm, quiet=True)
        assert (summary.resumed, summary.done, summary.failed) == (10, 9, 2)
        results = [json.loads(line) for line in target.read_bytes().split(b"\n") if line.strip()]
        assert answers(results) == expected


# -- what is finished ----------------------------------------------------------------------------------------


def test_a_finished_file_needs_no_model(tmp_path: Path, source: Path, llm: LLM, model_dir: Path) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    before = target.read_bytes()
    summary = run_batch(source, target, model_dir, load_format="auto", num_kv_blocks=1, quiet=True)  # cannot be built
    assert target.read_bytes() == before and (summary.resumed, summary.exit_code) == (11, 1)


def test_lines_added_to_the_input_are_run(tmp_path: Path, source: Path, llm: LLM) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    before = target.read_bytes()
    write_lines(source, [*LINES, completion("new")])
    assert run_batch(source, target, llm, quiet=True).done == 10
    assert target.read_bytes().startswith(before) and len(read_results(target)) == 12


def test_changed_and_foreign_lines_are_reported_and_kept(
    tmp_path: Path, source: Path, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    before = target.read_bytes()
    reordered = dict(reversed(list(LINES[4].items())))  # type: ignore[union-attr]
    write_lines(source, [LINES[0], completion("c1", "something else"), LINES[2], reordered])
    with caplog.at_level(logging.WARNING):
        summary = run_batch(source, target, llm, quiet=True)
    assert target.read_bytes() == before
    assert (summary.changed, summary.foreign, summary.resumed, summary.exit_code) == (1, 7, 4, 1)
    assert "1 lines ask for something else" in caplog.text and "'c1'" in caplog.text and "7 results" in caplog.text


def test_results_of_another_input_are_refused(tmp_path: Path, source: Path, llm: LLM) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    write_lines(source, [completion("other")])
    with pytest.raises(ValueError, match="another input"):
        run_batch(source, target, llm)


def test_repeated_results_count_once(tmp_path: Path, source: Path, llm: LLM) -> None:
    """As in an output that somebody has joined from parts."""
    target = tmp_path / "out.jsonl"
    first = run_batch(source, target, llm, quiet=True)
    target.write_bytes(target.read_bytes() * 2)
    again = run_batch(source, target, llm, quiet=True)
    assert (again.done, again.failed, again.foreign) == (first.done, first.failed, first.total)
    assert again.exit_code == first.exit_code


def test_answers_of_another_model_are_not_mixed_in(tmp_path: Path, source: Path, llm: LLM, model_dir: Path) -> None:
    target, other = tmp_path / "out.jsonl", tmp_path / "other-model"
    run_batch(source, target, llm, quiet=True)
    other.symlink_to(model_dir)
    with pytest.raises(ValueError, match=r"holds answers of the model .*other-model.*--served-model-name"):
        run_batch(source, target, other, quiet=True)
    assert run_batch(source, target, other, quiet=True, served_model_names=[str(model_dir)]).resumed == len(
        read_results(target)
    )


def test_a_directory_spelled_otherwise_is_the_same_model(
    tmp_path: Path, llm: LLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir.parent)
    name, whole = model_dir.name, str(model_dir)
    spellings = [whole, f"{whole}/", f"{model_dir.parent}//./{name}", f"../{model_dir.parent.name}/{name}", f"{name}/"]
    lines, target = [completion("a"), completion("b")], tmp_path / "out.jsonl"
    for first, second in itertools.permutations(spellings, 2):
        source = write_lines(tmp_path / "in.jsonl", lines[:1])
        target.unlink(missing_ok=True)
        run_batch(source, target, first, quiet=True, **DEFAULTS)
        write_lines(source, [lines[0], completion("b", model=first)])
        summary = run_batch(source, target, second, quiet=True, **DEFAULTS)
        assert (summary.resumed, summary.done) == (1, 2), (first, second)
    write_lines(source, [completion("b", model=first)])
    assert run_batch(source, tmp_path / "only.jsonl", second, quiet=True, **DEFAULTS).done == 1


def test_ordered_does_not_continue_what_is_in_another_order(tmp_path: Path, source: Path, llm: LLM) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True, ordered=True)
    lines = target.read_bytes().splitlines(True)
    target.write_bytes(b"".join(lines[3:5]))
    with pytest.raises(ValueError, match="not in input order"):
        run_batch(source, target, llm, ordered=True)
    target.write_bytes(b"".join(lines[:5]))
    run_batch(source, target, llm, quiet=True, ordered=True)
    assert [result["custom_id"] for result in read_results(target)] == [json.loads(line)["custom_id"] for line in lines]


# -- files that must not be written --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same", "dots", "symlink", "hard link", "error file"])
def test_output_onto_input_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path, llm: LLM, kind: str
) -> None:
    before, link = source.read_bytes(), tmp_path / "link.jsonl"
    if kind == "symlink":
        link.symlink_to(source)
    if kind == "hard link":
        link.hardlink_to(source)
    output = {"same": source, "dots": tmp_path / "x" / ".." / "in.jsonl", "error file": tmp_path / "o"}.get(kind, link)
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="same file"):
        run_batch(source, output, llm, error_file=source if kind == "error file" else None)
    assert source.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"in.jsonl", "link.jsonl", "x"}


@pytest.mark.parametrize("output", ["no/folder/out.jsonl", "in.jsonl/out.jsonl", "."])
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, source: Path, llm: LLM, output: str) -> None:
    with pytest.raises((ValueError, OSError)):
        run_batch(source, tmp_path / output, llm)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.parametrize(
    ("output", "taken"),
    [
        ("x.jsonl", "x.jsonl.lock"),
        ("x.jsonl.gz", "x.jsonl.gz.lock"),
        ("x.jsonl.gz", "x.jsonl.gz.partial"),
        ("./x.jsonl", "x.jsonl.lock"),
        ("link", "folder/x.jsonl.lock"),
        ("link.gz", "folder/x.jsonl.gz.partial"),
    ],
)
@pytest.mark.parametrize("role", ["input_path", "output_path", "error_file", "trace", "prefix_cache_file"])
def test_what_a_run_makes_beside_an_output_is_no_file_that_it_was_given(
    tmp_path: Path, llm: LLM, model_dir: Path, output: str, taken: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder/x.jsonl")
    Path("link.gz").symlink_to("folder/x.jsonl.gz")
    write_lines(Path("in.jsonl"), LINES)
    write_lines(Path(taken), LINES)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files = {"input_path": "in.jsonl", "output_path": output, role: taken}
    if role == "output_path":
        files["error_file"] = output
    with pytest.raises(ValueError, match="or what a run makes beside it"):
        run_batch(files.pop("input_path"), files.pop("output_path"), str(model_dir), **files)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("option", ["trace", "metrics_file", "prefix_cache_file"])
def test_a_file_of_the_engine_is_no_file_of_the_batch(
    tmp_path: Path, source: Path, model_dir: Path, option: str
) -> None:
    before = source.read_bytes()
    for name in ("in.jsonl", "out.jsonl"):
        with pytest.raises(ValueError, match="same file"):
            run_batch(source, tmp_path / "out.jsonl", model_dir, **{option: tmp_path / name})
    with LLM(model_dir, **DEFAULTS, **{option: str(tmp_path / "own")}) as llm, pytest.raises(ValueError, match="same"):
        run_batch(source, tmp_path / "own", llm)
    assert source.read_bytes() == before and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_only_has_the_name_of_a_lock_is_left_alone(
    tmp_path: Path, source: Path, llm: LLM, suffix: str
) -> None:
    target, lock = tmp_path / f"out.jsonl{suffix}", tmp_path / f"out.jsonl{suffix}.lock"
    os.mkfifo(lock)
    with pytest.raises(ValueError, match=r"out.jsonl.*lock is no lock file"):
        run_batch(source, target, llm, quiet=True)
    lock.unlink()
    lock.write_text("my notes")
    with pytest.raises(ValueError, match=r"out.jsonl.*lock is no lock file, it holds something"):
        run_batch(source, target, llm)
    assert lock.read_text() == "my notes" and not target.exists()
    lock.write_text("")  # as a process that was killed leaves it
    assert run_batch(source, target, llm, quiet=True).done == 9
    assert not lock.exists()


def test_packing_leaves_every_other_file_alone(tmp_path: Path, source: Path, llm: LLM) -> None:
    (tmp_path / "out.jsonl.gz.tmp").write_text("my notes")
    for _ in range(2):  # packs, then unpacks
        assert run_batch(source, tmp_path / "out.jsonl.gz", llm, quiet=True).done == 9
    assert (tmp_path / "out.jsonl.gz.tmp").read_text() == "my notes"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl.gz", "out.jsonl.gz.tmp"}
    assert (tmp_path / "out.jsonl.gz").stat().st_mode == source.stat().st_mode


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for content, mode in ((b"old", 0o600), (b"new", 0o666)):
        with replace_file(target, mode) as file:
            file.write(content)
            assert not target.exists() or target.read_bytes() == b"old"
        assert target.read_bytes() == content and target.stat().st_mode & 0o700 == 0o600
        assert mode == 0o666 or target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyboardInterrupt), replace_file(target) as file:
        file.write(b"half of it")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"new" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_output_that_is_a_link_is_written_where_it_points(
    tmp_path: Path, source: Path, llm: LLM, suffix: str
) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / f"link.jsonl{suffix}", tmp_path / "folder" / f"out.jsonl{suffix}"
    link.symlink_to(target)
    for num_before in (0, 11):  # at first it points to nothing
        assert run_batch(source, link, llm, quiet=True).resumed == num_before
        assert link.is_symlink() and [path.name for path in target.parent.iterdir()] == [target.name]
    with Journal(str(target)), pytest.raises(ValueError, match="being written by another run"):
        run_batch(source, link, llm)


def test_two_runs_never_share_an_output(tmp_path: Path, source: Path, llm: LLM) -> None:
    target = tmp_path / "out.jsonl"
    with Journal(str(target)):
        with pytest.raises(ValueError, match=r"out.jsonl is being written by another run"):
            run_batch(source, target, llm)
        assert target.read_bytes() == b""
    run_batch(source, target, llm, quiet=True)
    assert not (tmp_path / "out.jsonl.lock").exists()


# -- interruptions -------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_with_whole_lines(
    tmp_path: Path, source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    run_batch(source, target, llm, quiet=True)
    expected, size = results_by_digest(target), target.stat().st_size
    target.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))  # the write that crosses it is done in part
    try:
        with pytest.raises(BatchStopped, match="same command goes on") as stopped:
            run_batch(source, target, llm, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert isinstance(stopped.value.__cause__, OSError) and stopped.value.__cause__.errno == errno.EFBIG
    assert 0 < len(read_results(target)) < len(LINES)
    run_batch(source, target, llm, quiet=True)
    assert results_by_digest(target) == expected


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("loss", ["removed", "replaced", "cut", "folder"])
def test_a_file_that_gets_lost_stops_the_run(
    tmp_path: Path, source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, loss: str, seconds: float, suffix: str
) -> None:
    folder, calls, write = tmp_path / "folder", iter(range(100)), Journal.write
    folder.mkdir()

    def lose(journal: Journal, line: bytes) -> None:
        if next(calls) == 3 and loss == "folder":
            shutil.rmtree(folder)
        elif loss == "cut" and journal.path.exists():
            os.truncate(journal.path, 0)
        elif loss in ("removed", "replaced") and journal.path.exists():
            journal.path.unlink()
        if loss == "replaced":
            journal.path.write_text("another")
        write(journal, line)

    monkeypatch.setattr("nanoapc.batch_journal.SYNC_SECONDS", seconds)
    with monkeypatch.context() as patch, pytest.raises(BatchStopped, match="was removed, replaced or cut while"):
        patch.setattr(Journal, "write", lose)
        run_batch(source, folder / f"out.jsonl{suffix}", llm, quiet=True)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert names <= {"out.jsonl" + ".gz.partial" * bool(suffix)}
    if loss == "replaced":
        assert (folder / names.pop()).read_text() == "another"


@pytest.mark.parametrize("change", ["cut", "shifted", "same length"])
def test_an_input_that_changes_under_the_run_stops_it(
    tmp_path: Path, llm: LLM, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion(f"q{i}", f"hello {i}") for i in range(600)])
    good, output, numbers = source.read_bytes(), tmp_path / "out.jsonl", itertools.count()
    changed = {"cut": good[:1000], "shifted": b"\n" + good, "same length": good.replace(b"hello", b"jelly")}[change]

    def write_once(self: Journal, line: bytes) -> None:
        if next(numbers) == 5:
            source.write_bytes(changed)
        write(self, line)

    write = Journal.write
    monkeypatch.setattr(Journal, "write", write_once)
    with pytest.raises(BatchStopped, match=r"in\.jsonl was changed while the run read it .line \d+."):
        run_batch(source, output, llm, quiet=True)
    assert all(result["error"] is None for result in read_results(output))
    source.write_bytes(good)
    summary = run_batch(source, output, llm, quiet=True)
    assert (summary.done, summary.failed, summary.foreign) == (600, 0, 0) and 5 <= summary.resumed < 600
    assert len(results_by_digest(output)) == 600


def test_a_failed_step_stops_the_run_and_the_next_goes_on(
    tmp_path: Path, source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, steps, run = tmp_path / "out.jsonl", iter(range(100)), llm.engine.runner.launch

    def fail(batch: Any) -> Any:
        if next(steps) == 6:
            raise RuntimeError("out of memory")
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "launch", fail)
    with pytest.raises(BatchStopped, match="out of memory"):
        run_batch(source, target, llm, quiet=True)
    assert 0 < len(read_results(target)) < len(LINES)
    summary = run_batch(source, target, llm, quiet=True)
    assert summary.done == 9 and len(by_id(r for r in read_results(target) if r["custom_id"])) == 10


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["write", "step"])
def test_a_signal_finishes_the_write_in_flight_and_leaves_a_resumable_file(
    tmp_path: Path, source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, signum: int
) -> None:
    target, calls = tmp_path / "out.jsonl", iter(range(1000))
    owner: Any = Journal if place == "write" else llm.engine
    function = Journal.write if place == "write" else llm.engine.step

    def interrupted(*args: Any) -> Any:
        if next(calls) == 6:
            os.kill(os.getpid(), signum)
            time.sleep(0.01)
        return function(*args)

    monkeypatch.setattr(owner, "write" if place == "write" else "step", interrupted)
    before = signal.getsignal(signum)
    with pytest.raises(StoppedBySignal) as stopped:
        run_batch(source, target, llm, quiet=True)
    assert stopped.value.signum == signum and isinstance(stopped.value, KeyboardInterrupt)
    assert signal.getsignal(signum) == before
    assert len(read_results(target)) == 7 if place == "write" else 0 < len(read_results(target)) < len(LINES)
    run_batch(source, target, llm, quiet=True)
    assert len(read_results(target)) == len(LINES)


def test_a_second_signal_ends_the_process_at_once() -> None:
    with _Signals() as signals:
        with pytest.raises(StoppedBySignal):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(StoppedBySignal), signals.held():
            pass
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_killed_again_and_again_a_run_ends_with_each_result_once(tmp_path: Path, model_dir: Path) -> None:
    kill_loop(tmp_path, model_dir, num_kills=10, seed=0)


def kill_loop(tmp_path: Path, model_dir: Path, num_kills: int, seed: int) -> None:
    """Kills runs over a 300-line file with SIGKILL at random moments; then compares with a run that was left alone."""
    rng = random.Random(seed)
    lines = [(chat if i % 2 else completion)(f"r{i}", f"dog {rng.randrange(40)}", max_tokens=3) for i in range(297)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, b"{", completion("bad", top_p=7), completion("bad too", x=1)])
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    context = processes()

    def start(target: Path) -> Any:
        process = context.Process(target=run_in_process, args=(str(source), str(target), str(model_dir), SMALL))
        process.start()
        return process

    start(whole).join()
    num_interrupted = num_advanced = 0
    for _ in range(num_kills):
        process = start(target)
        size = target.stat().st_size if target.exists() else 0
        goal = size + rng.randrange(int(2.0 * whole.stat().st_size / num_kills))
        while process.is_alive() and not (target.exists() and target.stat().st_size > goal):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.01)
        num_interrupted += process.is_alive()
        process.kill()
        process.join()
        num_advanced += target.stat().st_size > size
        if rng.random() < 0.5:  # a kill seldom tears a line by itself: the page cache survives
            os.truncate(target, max(size, target.stat().st_size - rng.randrange(2000)))
    assert num_interrupted > num_kills // 3 and num_advanced > num_kills // 3
    final = start(target)
    final.join()
    assert final.exitcode == 0
    assert results_by_digest(target) == results_by_digest(whole)
    assert len(read_results(target)) == 300
    assert answers(read_results(target)) == answers(read_results(whole))
    assert encode(lines[0]) in source.read_bytes()
