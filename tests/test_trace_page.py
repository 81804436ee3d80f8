"""The trace page in a real browser: headless chromium (Debian's package); skipped where there is none.

Each test appends a script to a page, which works it as a user would and leaves its findings in the document.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from replay import EMPTY, Replay
from test_trace import Traced, play_anything

from nanoapc.trace import Trace, make_page, read_trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
    "--window-size=1400,1000",
]
HOSTILE = "</script><script>document.title = 'broken out'</script><img src=x onerror=\"document.title='broken out'\">"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium (Debian: apt-get install chromium)")


def work(page: str, script: str, tmp_path: Path, address: str = "") -> Any:
    """Opens the page, runs the script (a function body) and returns what it returns."""
    report = (
        "<script>const found = document.createElement('pre'); found.id = 'found';"
        f"try {{ found.textContent = JSON.stringify((() => {{ {script} }})()); }}"
        "catch (error) { found.textContent = JSON.stringify('' + error.stack); }"
        "document.body.append(found);</script></body>"
    )
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", report), encoding="utf-8")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{file}{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert '<pre id="found">' in done.stdout, done.stderr
    return json.loads(html.unescape(done.stdout.split('<pre id="found">')[1].split("</pre>")[0]))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A run that was short of blocks: everything happens in it."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    traced = Traced(path, num_blocks=24, max_model_len=90)
    play_anything(traced, seed=3)
    traced.events.close()
    return read_trace(path)


@pytest.fixture(scope="module")
def page(trace: Trace) -> str:
    """Its page; all text in it is hostile."""
    return make_page(trace, lambda token_ids: f"{token_ids}{HOSTILE}")


def test_it_replays_every_step_as_python_does(trace: Trace, page: str, tmp_path: Path) -> None:
    script = """
        const states = [];
        const look = () => [[...pool.refs], [...pool.content], pool.order(0), pool.order(1), [...pool.tables]];
        for (let i = 0; i < NS; i++) { goto(i); states.push(look()); }                       // forwards
        for (let i = NS - 1; i >= 0; i -= 7) { goto(i); states.push([i, look()]); }          // and back
        return [states, document.title];"""
    states, title = work(page, script, tmp_path)
    replay, expected = Replay(24, 4), []
    for line in trace.lines:
        replay.apply(line["events"])
        tables = [[seq, list(table)] for seq, table in replay.tables.items()]
        expected.append([[*replay.ref_counts], [*replay.contents], list(replay.free), list(replay.spared), tables])
    expected = json.loads(json.dumps(expected))
    count = len(trace.lines)
    assert count > 30 and states[:count] == expected
    assert all(state == expected[i] for i, state in states[count:])
    assert title == "nanoapc trace"  # no prompt has become markup


def test_the_picture_has_each_blocks_colour(trace: Trace, page: str, tmp_path: Path) -> None:
    script = """
        const seen = [];
        for (let i = 0; i < NS; i += 5) {
            goto(i);
            const ratio = devicePixelRatio, g = $("pool").getContext("2d");
            for (let b = 0; b < NB; b++) {
                const x = b % grid.columns * grid.cell + 5, y = Math.floor(b / grid.columns) * grid.cell + 5;
                const [r, green, blue] = g.getImageData(x * ratio, y * ratio, 1, 1).data;
                seen.push([i, b, "#" + [r, green, blue].map(v => v.toString(16).padStart(2, "0")).join("")]);
            }
        }
        return [seen, STATES];"""
    seen, states = work(page, script, tmp_path)
    colours = [colour for _, colour in states]
    replay, step, shown = Replay(24, 4), -1, set()
    for i, block, colour in seen:
        while step < i:
            step += 1
            replay.apply(trace.lines[step]["events"])
        refs, full = replay.ref_counts[block], replay.contents[block] != EMPTY
        state = 5 if refs > 1 else 3 + full if refs else 2 if block in replay.spared else int(full)
        assert colour == colours[state], f"block {block} at line {i}"
        shown.add(state)
    assert shown == set(range(6))


def test_keyboard_and_mouse(page: str, tmp_path: Path) -> None:
    script = """
        const press = (key, shiftKey) => { dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey })); return at; };
        const start = at;
        const keys = ["ArrowRight", "Shift", "ArrowLeft", "End", "Home", "ArrowLeft"].map(
            key => key === "Shift" ? press("ArrowRight", true) : press(key, false));
        $("next").click(); const button = at;
        $("step").value = 20; $("step").dispatchEvent(new Event("input")); const slider = at;
        const box = $("hits").getBoundingClientRect();
        const place = { clientX: box.left + box.width / 2, clientY: box.top + 5 };
        $("hits").dispatchEvent(new MouseEvent("click", place)); const curve = at;
        press(" "); const started = playing; press(" ");
        return { start, keys, button, slider, curve, started, playing, NS, hash: location.hash };"""
    found = work(page, script, tmp_path, "#step=5")
    last = found["NS"] - 1
    assert found["start"] == 5
    assert found["keys"] == [6, 16, 15, last, 0, 0]
    assert found["button"] == 1 and found["slider"] == 20
    assert abs(found["curve"] - found["NS"] / 2) <= 1
    assert found["started"] is True and found["playing"] is False
    assert found["hash"] == f"#step={found['curve']}"


def test_pointing_at_a_block_tells_its_state_owner_and_text(page: str, tmp_path: Path) -> None:
    script = """
        let i = 0, shared = -1;
        for (; i < NS && shared < 0; i++) {
            goto(i); shared = pool.refs.findIndex((n, b) => n > 1 && pool.content[b] >= 0);
        }
        const box = $("pool").getBoundingClientRect();
        const point = b => $("pool").dispatchEvent(new MouseEvent("mousemove", {
            clientX: box.left + b % grid.columns * grid.cell + 5,
            clientY: box.top + Math.floor(b / grid.columns) * grid.cell + 5 }));
        point(shared); const text = $("block").textContent, users = owners.get(shared);
        const words = textOf(pool.content[shared]), free = pool.order(0)[0];
        point(free); const idle = $("block").textContent, forest = $("forest").textContent;
        const chip = [...$("queue").querySelectorAll(".chip")].map(e => +e.dataset.block);
        return { shared, text, users, words, free, idle, chip, queue: pool.order(0).concat(pool.order(1)), forest };"""
    found = work(page, script, tmp_path)
    assert found["text"].startswith(f"Block {found['shared']}: shared by several")
    assert f"used by sequence {', '.join(map(str, found['users']))}" in found["text"]
    assert found["text"].endswith(found["words"]) and HOSTILE in found["words"]
    assert f"Block {found['free']}: " in found["idle"] and "1 of " in found["idle"]
    assert found["chip"] == found["queue"]
    assert "[" in found["forest"]


def test_an_empty_trace_is_said_to_be_empty(trace: Trace, tmp_path: Path) -> None:
    empty = make_page(Trace(trace.header, []))
    assert work(empty, "return $('now').textContent;", tmp_path) == "no step was traced"


def test_ten_thousand_blocks_and_steps(tmp_path: Path) -> None:
    header = {"num_blocks": 10_000, "block_size": 4, "model": "made up"}
    lines: list[dict[str, Any]] = []
    for i in range(10_000):
        events: list[Any] = [
            ["added", i, str(i), 9],
            ["admitted", i, 0],
            ["taken", i, [i, (i + 1) % 10_000, (i + 7) % 10_000]],
        ]
        lines.append(
            {
                "step": i,
                "t": i / 1000,
                "s": 0.001,
                "run": [[i, 0, 9]],
                "tiles": 1,
                "shared": 0,
                "read": 9,
                "unshared": 9,
            }
        )
        lines[-1]["events"] = [*events, ["stored", i, 0, [i % 50] * 8, ""], ["freed", i, "htt"]]
    replay = Replay(10_000, 4)
    for line in lines:
        replay.apply(line["events"])
    script = "goto(5000); goto(NS - 1); return [[...pool.content], pool.order(0), history.length, keys.length];"
    contents, order, _, num_keys = work(make_page(Trace(header, lines)), script, tmp_path)
    assert contents == replay.contents and order == list(replay.free)
    assert num_keys <= 64
