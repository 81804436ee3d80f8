"""How a batch file runs: files of every kind, orders, memory, progress, and the plan before any model."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_helpers import answers, by_id, chat, completion, encode, read_results, run, write_lines
from llm_helpers import DEFAULTS, assert_idle, load_script, memory_mib

from nanoapc import LLM
from nanoapc.batch_file import BatchStopped, dry_run, run_batch
from nanoapc.batch_io import compress, decompress
from nanoapc.batch_journal import Journal
from nanoapc.batch_plan import BatchPlan, count_forest
from nanoapc.config import FILES
from nanoapc.engine.step_batch import StepBatch

GOOD = [completion("a"), chat("b"), completion("c", "the lazy dog", max_tokens=7)]
HAS_ZSTD = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard") is not None


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """One LLM for all runs; at the end nothing is left in it."""
    with LLM(model_dir, **DEFAULTS) as llm:
        yield llm
        assert_idle(llm)


def grouped(num_groups: int, num_lines: int) -> list[dict[str, Any]]:
    """Lines of several long prefixes, dealt like cards."""
    return [completion(f"r{i}", [*range(60 + i % num_groups, 140 + i % num_groups), 9 + i // num_groups], max_tokens=1)
            for i in range(num_groups * num_lines)]  # fmt: skip


# -- files ---------------------------------------------------------------------------------------------------


def compressed(suffix: str, data: bytes) -> bytes:
    """Two members (frames), as tools that compress in parallel write them."""
    buffer = io.BytesIO()
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        compress(io.BytesIO(part), buffer, suffix)
    return buffer.getvalue()


ZSTD = pytest.param(".zst", marks=pytest.mark.skipif(not HAS_ZSTD, reason="no library for zstd"))


@pytest.mark.parametrize("suffix", [".gz", ZSTD])
def test_a_compressed_input_is_read_under_any_name(tmp_path: Path, llm: LLM, suffix: str) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    data = compressed(suffix, b"".join(encode(line) + b"\n" for line in GOOD))
    for name in ("in.jsonl" + suffix, "other.jsonl"):
        (tmp_path / name).write_bytes(data)
        run_batch(tmp_path / name, tmp_path / f"{name}.out", llm, quiet=True)
        assert answers(read_results(tmp_path / f"{name}.out")) == clean
    for fault, damaged in {"cut off": data[:-1], "damaged": data[:40] + b"?????" + data[45:]}.items():
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"bad is {fault}"):
            run_batch(tmp_path / "bad", tmp_path / "x", llm)


@pytest.mark.parametrize("suffix", [".gz", ZSTD])
def test_a_compressed_output_is_whole_or_not_there(
    tmp_path: Path, llm: LLM, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    source, target = tmp_path / "in.jsonl", tmp_path / f"out.jsonl{suffix}"

    def power_failure(journal: Journal) -> None:
        raise RuntimeError("power")

    with monkeypatch.context() as patch, pytest.raises(BatchStopped, match="power"):
        patch.setattr(Journal, "complete", power_failure)
        run_batch(source, target, llm, quiet=True)
    assert not target.exists() and len(read_results(Path(f"{target}.partial"))) == 3
    for lines in (GOOD, [*GOOD, completion("late")]):  # also continues a file that is compressed already
        write_lines(source, lines)
        summary = run_batch(source, target, llm, quiet=True)
        assert (summary.resumed, summary.done) == (3, len(lines))
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", target.name}
    with open(target, "rb") as packed, open(tmp_path / "plain", "wb") as plain:
        decompress(packed, plain, suffix, "it")
    assert {name: value for name, value in answers(read_results(tmp_path / "plain")).items() if name != "late"} == clean


def test_a_full_disk_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(compressed(".gz", b"text"))
    with open(tmp_path / "in.gz", "rb") as packed, open("/dev/full", "wb", 0) as full, pytest.raises(OSError):
        decompress(packed, full, ".gz", "in.gz")


def test_zstd_without_a_library_says_what_to_install(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.jsonl").write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with pytest.raises(ValueError, match="zstandard"):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)


def test_a_pipe_that_closes_is_no_place_to_go_on_from(tmp_path: Path, llm: LLM) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    with pytest.raises(BatchStopped) as stopped:
        run_batch(source, "/dev/full", llm, quiet=True)
    assert "No space left" in str(stopped.value) and str(stopped.value).endswith("lines are finished")


def test_pipes_are_read_and_written(tmp_path: Path, llm: LLM) -> None:
    clean = answers(run(tmp_path, llm, GOOD)[0])
    source, target = tmp_path / "source", tmp_path / "target"
    os.mkfifo(source)
    os.mkfifo(target)
    received: list[bytes] = []
    writer = threading.Thread(target=write_lines, args=(source, GOOD))
    reader = threading.Thread(target=lambda: received.append(target.read_bytes()))
    writer.start(), reader.start()
    run_batch(source, target, llm, quiet=True)
    writer.join(), reader.join()
    (tmp_path / "plain").write_bytes(received[0])
    assert answers(read_results(tmp_path / "plain")) == clean


def test_failed_lines_go_to_the_error_file_and_both_files_are_the_journal(tmp_path: Path, llm: LLM) -> None:
    lines = [completion("bad", n=0), *GOOD, b"{", completion("worse", max_tokens=-1)]
    results, _ = run(tmp_path, llm, lines, error_file=tmp_path / "errors.jsonl")
    assert set(by_id(results)) == {"a", "b", "c"} and all(result["error"] is None for result in results)
    errors = read_results(tmp_path / "errors.jsonl")
    assert {result["custom_id"] for result in errors} == {"bad", None, "worse"}
    before = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "errors.jsonl")]
    options: dict[str, Any] = {"error_file": tmp_path / "errors.jsonl", "quiet": True}
    summary = run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm, **options)
    assert (summary.resumed, summary.failed, summary.exit_code) == (6, 3, 1)
    assert before == [(tmp_path / name).read_bytes() for name in ("out.jsonl", "errors.jsonl")]


def test_options_of_an_engine_that_is_there_already_are_refused(tmp_path: Path, llm: LLM) -> None:
    for options in ({"max_num_seqs": 1}, {"ray_workers": 2}):
        with pytest.raises(ValueError, match="need a model's name instead of an LLM"):
            run(tmp_path, llm, GOOD, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_workers": 0}, r"ray_workers=0 \(--ray\) must be at least 1"),
        ({"ray_workers": -1}, "ray_workers=-1"),
        *(({"ray_workers": 2, name: "x"}, f"{name} is for one process") for name in FILES),
    ],
)
def test_what_several_workers_cannot_do_is_refused_at_once(
    tmp_path: Path, model_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", model_dir, **options)


# -- order ---------------------------------------------------------------------------------------------------


def test_lines_run_in_the_order_of_their_prefixes_whatever_their_place(tmp_path: Path, model_dir: Path) -> None:
    """A cache that holds two prefixes: dealt in input order, every line would have lost its prefix."""
    lines = grouped(num_groups=16, num_lines=40)
    with LLM(model_dir, **{**DEFAULTS, "num_kv_blocks": 64, "max_num_seqs": 2}) as llm:
        _, summary = run(tmp_path, llm, lines)
        assert llm.metrics().evictions > 0  # it did not all fit
    assert summary.cached_tokens >= 0.9 * summary.prompt_tokens
    with closing(BatchPlan(str(tmp_path / "in.jsonl"))) as plan:
        groups = [json.loads(data)["body"]["prompt"][0] for _, data in plan.lines()]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 15


@pytest.mark.parametrize("window", [7, 100000])
def test_ordered_results_come_in_input_order(
    tmp_path: Path, llm: LLM, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoapc.batch_plan.ORDERED_WINDOW", window)
    lines = [
        *grouped(3, 20),
        b"{",
        completion("bad", n=0),
        *(completion(f"x{i}", max_tokens=1 + i % 9) for i in range(30)),
    ]
    unordered, _ = run(tmp_path, llm, lines)
    ids = [json.loads(line)["custom_id"] if isinstance(line, bytes) and line != b"{" else None if line == b"{" else
           line["custom_id"] for line in lines]  # fmt: skip
    assert [result["custom_id"] for result in unordered] != ids
    results, _ = run(tmp_path, llm, lines, ordered=True)
    assert [result["custom_id"] for result in results] == ids
    assert answers(results) == answers(unordered)


# -- memory and time -----------------------------------------------------------------------------------------


def null_model(llm: LLM) -> None:
    """From now on every step gives token 5, at no cost."""
    tiles = np.zeros((0, 6), np.int32)

    def launch(batch: StepBatch) -> Any:
        return SimpleNamespace(batch=batch, tiles=tiles, wait=lambda: np.full(len(batch.samples), 5))

    llm.engine.runner.launch = launch  # type: ignore[method-assign]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc to measure the peak of a phase")
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, model_dir: Path, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of lines and 17 MB of results (the ids have 4 kB), half of them errors, in less than 30 MiB."""
    monkeypatch.setattr("nanoapc.batch_plan.PLAN_MEMORY_BYTES", 4 * 2**20)
    source, name = tmp_path / "in.jsonl", "x" * 4000
    with open(source, "wb") as file:
        for i in range(4000):
            line = completion(
                f"{name}{i}", f"{i % 50} and {i}", max_tokens=1, metadata={"filler": "y" * 12000}, n=i % 2
            )
            file.write(encode(line) + b"\n")
    with LLM(model_dir, **DEFAULTS) as llm:
        null_model(llm)
        (tmp_path / "warm").mkdir()
        run(tmp_path / "warm", llm, [completion(f"warm {i}") for i in range(300)])
        base = memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        summary = run_batch(source, tmp_path / "out.jsonl", llm, quiet=True, ordered=ordered)
        peak = memory_mib("VmHWM")
    assert (summary.done, summary.failed) == (2000, 2000)
    assert source.stat().st_size > 64 * 10**6 and (tmp_path / "out.jsonl").stat().st_size > 17 * 10**6
    assert peak - base < 30, f"{peak - base:.0f} MiB more than before the run"


def test_lines_are_tokenised_in_bounded_groups_and_results_begin_early(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [(chat if i % 2 else completion)(f"r{i}", f"question {i}", max_tokens=1) for i in range(3000)]
    calls: list[int] = []
    num_before_first: list[int] = []
    tokenize, write = llm.inputs.tokenize, Journal.write

    def counted(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        calls.append(len(texts))
        token_ids = tokenize(texts, add_special_tokens)
        assert token_ids[::50] == [tokenize([text], add_special_tokens)[0] for text in texts[::50]]
        return token_ids

    def first_write(journal: Journal, line: bytes) -> None:
        num_before_first.append(sum(calls))
        write(journal, line)

    monkeypatch.setattr(llm.inputs, "tokenize", counted)
    monkeypatch.setattr(Journal, "write", first_write)
    results, _ = run(tmp_path, llm, lines)
    assert len(results) == 3000 and sum(calls) == 3000
    assert len(calls) <= 2 * (3000 // 256 + 1) and max(calls) <= 256
    assert num_before_first[0] < 1000


# -- before any model ----------------------------------------------------------------------------------------


def test_a_dry_run_checks_every_line_and_sizes_the_forest_without_weights(
    tmp_path: Path, llm: LLM, model_dir: Path
) -> None:
    weightless = tmp_path / "model"
    weightless.mkdir()
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (weightless / path.name).write_bytes(path.read_bytes())
    lines = [*grouped(5, 30), completion("bad", n=0), b"{", completion("long", [9] * 1000), chat("chat")]
    source = write_lines(tmp_path / "in.jsonl", lines)
    checked = dry_run(source, weightless, quiet=True, max_model_len=DEFAULTS["max_model_len"])
    assert (checked.total, checked.failed) == (154, 3)
    assert [error.split(":")[0] for error in sorted(checked.errors)] == [
        "line 151 (bad)",
        "line 152 is not JSON",
        "line 153 (long)",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "model"}
    llm.reset_prefix_cache()
    _, summary = run(tmp_path, llm, lines)
    assert summary.prompt_tokens == checked.prompt_tokens


@pytest.mark.parametrize("block_size", [4, 7, 16])
@pytest.mark.parametrize("num_shared", [31, 48])
def test_the_planned_hit_rate_is_what_the_engine_then_finds_at_least(
    tmp_path: Path, model_dir: Path, block_size: int, num_shared: int
) -> None:
    """Whole blocks are found as planned; parts of blocks come on top, where a step before has filled them."""
    options = {**DEFAULTS, "block_size": block_size, "num_kv_blocks": 1024}
    lines = [completion(f"a{i}", [*range(100, 100 + num_shared), i + 10], max_tokens=1) for i in range(40)]
    lines += [completion(f"b{i}", [*range(9, 9 + i)], max_tokens=1) for i in range(1, 60)]
    lines += [completion(f"c{i}", [*range(9, 60)], max_tokens=1, cache_salt="s") for i in range(3)]
    planned = dry_run(write_lines(tmp_path / "in.jsonl", lines), model_dir, quiet=True, **options)
    with LLM(model_dir, **options) as llm:
        _, summary = run(tmp_path, llm, lines)
    assert summary.prompt_tokens == planned.prompt_tokens
    assert 0 < planned.hit_tokens <= summary.cached_tokens < planned.hit_tokens + len(lines) * block_size
    assert f"planned hit rate {planned.hit_tokens / planned.prompt_tokens:.1%} (whole blocks)" in str(planned)
    off = dry_run(tmp_path / "in.jsonl", model_dir, quiet=True, enable_prefix_caching=False, **options)
    assert (off.hit_tokens, off.unique_tokens) == (0, planned.unique_tokens)


def test_prompts_of_one_step_share_whole_blocks_and_the_plan_says_so(tmp_path: Path, model_dir: Path) -> None:
    lines = [completion(f"r{i}", [*range(40, 71), 10 + i], max_tokens=1) for i in range(40)]
    options = {**DEFAULTS, "block_size": 16, "num_kv_blocks": 256, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    planned = dry_run(write_lines(tmp_path / "in.jsonl", lines), model_dir, quiet=True, **options)
    with LLM(model_dir, **options) as llm:
        assert run(tmp_path, llm, lines)[1].cached_tokens == planned.hit_tokens == 39 * 16


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_forest_is_counted_as_a_tree_would_count_it(block_size: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 3, rng.integers(1, 9)), "cache_salt": rng.choice([None, "s"])}
               for _ in range(300)]  # fmt: skip
    paths = [(str(prompt["cache_salt"]), *prompt["prompt_token_ids"].tolist()) for prompt in prompts]
    nodes = {path[:size] for path in paths for size in range(2, len(path) + 1)}
    hits, seen = 0, set()
    for path in sorted(paths):
        found = max(size for size in range(1, len(path) + 1) if size == 1 or path[:size] in seen) - 1
        hits += min(found, len(path) - 2) // block_size * block_size
        seen |= {path[:size] for size in range(2, len(path) + 1)}
    assert count_forest(prompts, block_size) == (sum(len(path) - 1 for path in paths), len(nodes), hits)


# -- what a user sees ----------------------------------------------------------------------------------------


def test_progress_tells_lines_rates_and_time_left(tmp_path: Path, llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*grouped(3, 5), completion("bad", n=0)])
    run_batch(source, tmp_path / "out.jsonl", llm)
    shown = capfd.readouterr().err.split("\r")[-1]
    assert re.search(
        r"16/16 \[00:\d\d<00:00, .*1 failed, prompt \d+ tok/s, output \d+ tok/s, hit rate \d+\.\d%", shown
    ), shown
    run_batch(source, tmp_path / "quiet.jsonl", llm, quiet=True)
    assert capfd.readouterr() == ("", "")


def test_results_are_synced_at_intervals_and_at_the_end(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def note(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not the folder
            synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr("nanoapc.batch_journal.SYNC_SECONDS", 0.0)
    run(tmp_path, llm, grouped(3, 5))
    size = (tmp_path / "out.jsonl").stat().st_size
    assert synced[-1] == size and len([value for value in synced if 0 < value < size]) == 14
    monkeypatch.setattr("nanoapc.batch_journal.SYNC_SECONDS", 3600.0)
    synced.clear()
    run(tmp_path, llm, grouped(3, 5))
    assert len(synced) <= 4 and synced[-1] == size


def test_the_example_shows_plan_run_and_continuation(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "examples" / "batch_file.py"
    load_script(path).main(["--lines", "12"])
    text = capsys.readouterr().out
    assert "plan: 13 lines, 1 with errors" in text and "run: 12 of 13 lines answered, 1 failed" in text
    assert re.search(r"continued: 12 of 13 lines answered, 1 failed \(6 before this run\)", text)
    assert "13 results, 13 ids" in text
