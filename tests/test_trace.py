"""A trace says everything: replaying its events gives the pool's exact state after each step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeLLM
from host_helpers import NullEngine
from llm_helpers import greedy, run
from replay import EMPTY, ROOT, Replay
from test_metrics import TEN_BLOCKS, run_ten_blocks
from tiny_models import random_ids

from nanoapc.engine.attention_plan import AttentionPlanner
from nanoapc.engine.block_hash import decode_tokens
from nanoapc.engine.block_pool import BlockPool, Prefix
from nanoapc.engine.events import Events
from nanoapc.engine.sequence import Sequence
from nanoapc.trace import make_page, read_trace


def content(prefix: Prefix | None, block_size: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of a Prefix, block by block from the root on."""
    blocks = []
    while prefix is not None and prefix.parent is not None:
        blocks.append(tuple(decode_tokens(prefix.label[len(prefix.label) - 4 * block_size :])))
        prefix = prefix.parent
    return tuple(reversed(blocks))


def pool_state(pool: BlockPool, block_size: int = 4) -> tuple[Any, ...]:
    """Reference counts, contents and both queues of a pool."""
    return (
        [block.ref_count for block in pool.blocks],
        [content(block.prefix, block_size) for block in pool.blocks],
        [block.block_id for block in pool.free],
        [block.block_id for block in pool.spared],
    )


def replay_state(replay: Replay) -> tuple[Any, ...]:
    """The same of a replay."""
    numbers = {number: key for key, number in replay.prefixes.items()}

    def chain(number: int) -> tuple[tuple[int, ...], ...]:
        blocks = []
        while number not in (ROOT, EMPTY):
            number, tokens, _ = numbers[number]
            blocks.append(tokens)
        return tuple(reversed(blocks))

    return replay.ref_counts, [chain(number) for number in replay.contents], list(replay.free), list(replay.spared)


class Traced:
    """A NullEngine whose events are written to a file, and what its pool looked like after each step."""

    def __init__(self, path: Path, **options: Any):
        self.engine = NullEngine(**options)
        self.size = self.engine.manager.block_size
        header = {
            "block_size": self.size,
            "num_blocks": len(self.engine.pool.blocks),
            "model": "null",
            "tokenizer": None,
        }
        self.events = Events(str(path), header)
        self.engine.manager.events = self.engine.pool.events = self.engine.scheduler.events = self.events
        self.planner = AttentionPlanner(self.size)
        self.states: list[Any] = []
        self.tables: list[dict[int, list[int]]] = []

    def step(self, fail: bool = False) -> list[Sequence]:
        """One step, or one whose model raises."""
        batch = self.engine.schedule()
        if batch is None:
            return []
        if fail:
            self.engine.fail_step()
            return []
        finished = self.engine.finish_step(batch)
        tiles, _ = self.planner.tiles(batch.block_tables, batch.starts, batch.counts, batch.key)
        self.events.end_step(batch, tiles, 0.001)
        self.remember()
        return finished

    def remember(self) -> None:
        """What the replay of the lines so far must give."""
        self.states.append(pool_state(self.engine.pool, self.size))
        running = self.engine.scheduler.running
        self.tables.append({seq.seq_id: [block.block_id for block in seq.blocks] for seq in running})


def play_anything(traced: Traced, seed: int, num_steps: int = 60) -> None:
    """Arrivals with shared prefixes and salts, aborts, failing steps, resets, in a pool that is too small."""
    rng = random.Random(seed)
    stems = [[rng.randrange(50) for _ in range(rng.randrange(20))] for _ in range(4)]
    alive: list[Sequence] = []
    for _ in range(num_steps):
        if rng.random() < 0.4:
            stem = rng.choice(stems)
            prompts = [
                stem + [rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(rng.randrange(1, 5))
            ]
            skip = rng.random() < 0.1
            salt = rng.choice([None, None, "a"])
            alive += traced.engine.add(prompts, rng.randrange(1, 25), salt=salt, skip_reading_prefix_cache=skip)
        if alive and rng.random() < 0.1:
            traced.engine.scheduler.abort([rng.choice(alive)])
        if rng.random() < 0.1:
            traced.engine.manager.reset()
        traced.step(fail=rng.random() < 0.04)
        alive = [seq for seq in alive if seq.finish_reason is None]


@pytest.mark.parametrize("seed", range(8))
def test_replay_gives_the_exact_state_after_every_step(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    traced = Traced(path, num_blocks=24, max_model_len=90, constant_hash=seed == 7)
    play_anything(traced, seed)
    traced.events.close()
    trace = read_trace(path)
    replay = Replay(24, 4)
    steps = [line for line in trace.lines if "step" in line]
    assert len(steps) == len(traced.states) > 30
    for line, state, tables in zip(steps, traced.states, traced.tables, strict=True):
        replay.apply(line["events"])
        assert replay_state(replay) == state
        assert {seq: table for seq, table in replay.tables.items() if table} == tables
    for line in trace.lines[len(steps) :]:  # what happened after the last step
        replay.apply(line["events"])
    assert replay_state(replay) == pool_state(traced.engine.pool)


def test_the_random_runs_see_every_kind_of_event(tmp_path: Path) -> None:
    kinds: set[str] = set()
    for seed in range(8):
        traced = Traced(tmp_path / f"{seed}.jsonl", num_blocks=24, max_model_len=90)
        play_anything(traced, seed)
        traced.events.close()
        kinds |= {event[0] for line in read_trace(tmp_path / f"{seed}.jsonl").lines for event in line["events"]}
    blocks = {"hit", "copied", "taken", "evicted", "stored", "withdrawn", "freed", "released", "moved", "cleared"}
    assert kinds == blocks | {"added", "admitted", "preempted", "finished"}


def test_an_llm_writes_what_the_ten_block_example_does(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = make_llm(**TEN_BLOCKS, trace=path)
    run_ten_blocks(llm)
    trace = read_trace(path)  # an idle engine has written everything
    assert trace.header["num_blocks"] == 10 and trace.header["block_size"] == 4
    assert [line["step"] for line in trace.lines] == list(range(1, 11))
    ran = [sum(count for _, _, count in line["run"]) if "run" in line else None for line in trace.lines]
    assert ran == [15, 1, None, 5, 1, 17, 1, None, None, None]
    events = [event for line in trace.lines for event in line["events"]]
    assert [event for event in events if event[0] in ("hit", "copied", "evicted")] == [
        ["hit", 1, [0, 1]],
        ["copied", 1, 2, 2],
        ["hit", 2, [0, 1, 2]],
        ["evicted", 3, 0],
    ]
    assert [event[2] for event in events if event[0] == "admitted"] == [0, 10, 12]
    replay = Replay(10, 4)
    replay.apply(events)
    assert replay_state(replay) == pool_state(llm.engine.manager.pool)
    assert list(replay.free)[-3:] == [2, 1, 0]


def test_steps_say_what_ran_and_what_attention_read(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = make_llm(trace=path, num_kv_blocks=512, max_model_len=512, block_size=16)
    shared = random_ids(256 + 16, 1)
    run(llm, [shared + random_ids(4, seed) for seed in range(5)], max_tokens=4)
    lines = read_trace(path).lines
    assert all(line["s"] > 0 and line["t"] > 0 for line in lines)
    decode = lines[-1]
    lengths = 272 + 4 + 3  # the last token's query sees itself
    assert decode["unshared"] == 5 * lengths
    assert decode["shared"] == 1 and decode["tiles"] == 6
    assert decode["read"] == 256 + 5 * (lengths - 256)
    run(llm, [[5, 6, 7]], max_tokens=1)
    assert read_trace(path).lines[-1]["run"] == [[5, 0, 3]]


def test_salts_do_not_stand_in_a_trace(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = make_llm(trace=path)
    prompt = random_ids(9)
    run(llm, [{"prompt_token_ids": prompt, "cache_salt": "tenant-7"}, prompt], max_tokens=1)
    assert "tenant-7" not in path.read_text()
    stored = [event for line in read_trace(path).lines for event in line["events"] if event[0] == "stored"]
    assert sorted(event[4] == "" for event in stored) == [False, True]
    replay = Replay(256, 4)
    replay.apply(event for line in read_trace(path).lines for event in line["events"])
    assert len(replay.prefixes) == 4  # the same tokens twice, kept apart


def test_tracing_changes_no_output(make_llm: MakeLLM, tmp_path: Path) -> None:
    prompts = [random_ids(9 + i, seed=i % 3) for i in range(6)]
    plain = run(make_llm(), prompts, max_tokens=8)
    traced = run(make_llm(trace=tmp_path / "run.jsonl"), prompts, max_tokens=8)
    assert [output.outputs for output in plain] == [output.outputs for output in traced]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["nowhere/run.jsonl", "."])
def test_a_file_that_cannot_be_written_is_named(name: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace='.*' cannot be written .*; choose another file"):
        make_llm(trace=str(tmp_path / name))


def test_a_full_disk_ends_the_trace_and_not_the_run(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(trace="/dev/full")
    for _ in range(2):
        assert len(run(llm, [random_ids(9)], max_tokens=4)[0].outputs[0].token_ids) == 4
    assert caplog.text.count("the trace ends here") == 1
    llm.close()


def test_a_closed_llm_has_closed_its_trace(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = make_llm(trace=path)
    llm.add_request(random_ids(9), greedy(8))
    llm.step()
    llm.close()
    last = read_trace(path).lines[-1]
    assert last["events"][-1] == ["finished", 0, "abort"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{}\n", "is no trace that this version reads"),
        ('{"format": "nanoapc trace", "version": 99}\n', "is no trace that this version reads"),
        ("hello\n", "line 1, is not JSON"),
        ("[1]\n", "is no trace"),
        ('{"format": "nanoapc trace", "version": 1}\n', "is no trace that this version reads"),
        ("\udcff\udcfe\n", "line 1, is not JSON"),
        ("[" * 100_000 + "\n", "line 1, is not JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_trace(path)


@pytest.mark.parametrize("line", ["{}", "[]", "null", "7", '"text"', '{"events": 3}', '{"events": [[], 5]}'])
def test_a_line_that_is_no_step_is_named(make_llm: MakeLLM, tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.jsonl"
    run(make_llm(trace=path), [random_ids(9)])
    lines = path.read_text().splitlines()
    for place in (2, len(lines)):
        path.write_text("\n".join([*lines[:place], line, *lines[place:]]) + "\n")
        with pytest.raises(ValueError, match=f"run.jsonl, line {place + 1}, is no step of a trace"):
            read_trace(path)


def test_two_traces_in_one_file_are_told_apart(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(make_llm(trace=path), [random_ids(9)])
    text = path.read_text()
    path.write_text(text * 2)
    with pytest.raises(ValueError, match=rf"line {text.count(chr(10)) + 1}, begins another trace"):
        read_trace(path)


@pytest.mark.parametrize("kind", ["same", "dots", "symlink", "hard link", "default"])
def test_a_page_never_takes_the_place_of_its_trace(
    make_llm: MakeLLM, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanoapc.cli import main

    path, link = tmp_path / "run.html", tmp_path / "link.html"
    run(make_llm(trace=path), [random_ids(9)])
    before = path.read_bytes()
    if kind == "symlink":
        link.symlink_to(path)
    if kind == "hard link":
        link.hardlink_to(path)
    output = {"same": path, "dots": tmp_path / ".." / tmp_path.name / "run.html"}.get(kind, link)
    assert main(["trace", str(path), *([] if kind == "default" else ["-o", str(output)])]) == 2
    assert "is the trace itself; give the page another name" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_line_that_was_cut_off_is_left_out(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(make_llm(trace=path), [random_ids(9)])
    whole = read_trace(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_trace(path).lines == whole.lines[:-1]


def page_data(page: str) -> dict[str, Any]:
    """The data that a page shows."""
    return json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])


def test_the_page_is_made_by_the_command(make_llm: MakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nanoapc.cli import main

    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    run(make_llm(trace=path), ["The quick brown fox jumps over the lazy dog."])
    assert main(["trace", str(path), "-o", str(page)]) == 0
    assert "".join(page_data(page.read_text())["texts"]).startswith("The quick brown fox")
    assert main(["trace", str(path)]) == 0
    assert (tmp_path / "run.html").read_text() == page.read_text()
    capsys.readouterr()
    assert main(["trace", str(path), "-o", "-"]) == 0
    assert capsys.readouterr().out == page.read_text()
    assert main(["trace", str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl" in capsys.readouterr().err
    assert main(["trace", str(path), "-o", str(page), "--tokenizer", str(tmp_path)]) == 0
    assert "only token ids" in capsys.readouterr().err


def test_a_page_holds_the_trace_and_loads_nothing(make_llm: MakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(make_llm(trace=path), [random_ids(9)])
    hostile = "</script><script>alert(1)</script><!--"
    page = make_page(read_trace(path), lambda token_ids: hostile)
    assert hostile not in page and "</script><script>alert" not in page
    assert page_data(page)["texts"][0] == hostile
    for forbidden in ("http:", "https:", "src=", "href=", "@import", "url("):
        assert forbidden not in page
    assert "default-src 'none'" in page


def test_writing_costs_no_numpy_types(tmp_path: Path) -> None:
    """Everything that is written is plain JSON, whatever the arrays' types are."""
    traced = Traced(tmp_path / "run.jsonl", num_blocks=24)
    traced.engine.add([np.arange(9), np.arange(7)], 3)
    while traced.engine.scheduler.has_unfinished:
        traced.step()
    traced.events.close()
    assert len(read_trace(tmp_path / "run.jsonl").lines) == 3
