"""More than one worker: on a local Ray cluster of two, with one of them killed, nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import answers, body, chat, completion, read_results, write_lines

import nanoapc
from nanoapc import LLM, SamplingParams
from nanoapc.batch_file import run_batch

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")

EMBEDDED = str(Path(nanoapc.__file__).parent / "embedded")
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 512, "max_model_len": 256}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def workers() -> list[int]:
    """The processes of our cluster that hold an LLM for a batch file."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if b"ray::MapWorker(MapBatches(_LineWorker))" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has just ended
    return [pid for pid in found if parents.get(parents.get(pid, 0)) == os.getpid()]


def kill_a_worker(target: Path, killed: list[int]) -> None:
    """Kills one of two workers as soon as there are results."""
    while not killed:
        time.sleep(0.01)
        pids = workers()
        if len(pids) == 2 and target.exists() and target.stat().st_size:
            os.kill(pids[0], signal.SIGKILL)
            killed.append(pids[0])


def test_a_batch_file_survives_the_death_of_a_worker(tmp_path: Path, cluster: None) -> None:
    lines = [(chat if i % 2 else completion)(f"r{i}", f"KING {i % 9}:\nSpeak {i}", max_tokens=30) for i in range(200)]
    lines.append(completion("bad", top_p=2))
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker, args=(target, killed), daemon=True)
    killer.start()
    summary = run_batch(source, target, EMBEDDED, ray_workers=2, quiet=True, **ENGINE)
    assert killed and (summary.total, summary.done, summary.failed) == (201, 200, 1)
    assert summary.cached_tokens > 0
    run_batch(source, tmp_path / "alone.jsonl", EMBEDDED, quiet=True, **ENGINE)
    assert answers(read_results(target)) == answers(read_results(tmp_path / "alone.jsonl"))
    assert all(body(result)["model"] == EMBEDDED for result in read_results(target) if result["custom_id"] != "bad")
    assert run_batch(source, target, EMBEDDED, ray_workers=2, quiet=True, **ENGINE).resumed == 201


def test_workers_find_a_model_that_is_named_from_here(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run elsewhere, where a relative name is nothing, or another model."""
    source = write_lines(tmp_path / "in.jsonl", [completion("a", "KING:", max_tokens=3)])
    (tmp_path / "model").symlink_to(EMBEDDED)
    monkeypatch.chdir(tmp_path)
    names = {"llm": "model", "tokenizer": "model"}
    assert run_batch(source, tmp_path / "out.jsonl", **names, ray_workers=1, quiet=True, **ENGINE).done == 1
    assert body(read_results(tmp_path / "out.jsonl")[0])["model"] == "model"


@pytest.mark.slow
def test_sigterm_ends_a_run_as_without_ray_and_standard_output_holds_results_only(tmp_path: Path) -> None:
    lines = [completion(f"r{i}", f"Speak {i}", max_tokens=60) for i in range(2000)]
    source, options = write_lines(tmp_path / "in.jsonl", lines), ("--ray", "1", "--num-kv-blocks", "512")
    command = [sys.executable, "-m", "nanoapc", "run-batch", "-i", str(source), "-o", "-", "--model", EMBEDDED]
    with subprocess.Popen(
        [*command, *options, "--device", "cpu"], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate()
    assert run.returncode == 143
    assert b"nanoapc run-batch: stopped by SIGTERM" in err
    assert all(json.loads(line)["response"] for line in (first + out).splitlines())


def test_a_dataset_is_partitioned_by_prefix_and_answered_by_one_llm_a_worker(cluster: None) -> None:
    from nanoapc.ray import LLMWorker, partition_by_prefix

    prompts = [
        f"{'All the world is a stage. ' * 8}{name}: {i}" for i in range(10) for name in ("ROMEO", "JULIET", "YORK")
    ]
    prompts = [f"{name}{prompt}" for name, prompt in zip("abcdef" * 5, prompts, strict=True)]
    dataset = partition_by_prefix(ray.data.from_items([{"prompt": prompt} for prompt in prompts]), num_partitions=4)
    blocks = [batch["prompt"].tolist() for batch in dataset.iter_batches(batch_size=None)]
    assert sorted(itertools.chain(*blocks)) == sorted(prompts) and len(blocks) == 4
    parts = {(prompt[0], number) for number, block in enumerate(blocks) for prompt in block}
    assert len(parts) <= 6 + 3  # at most one prefix is cut at each border
    pool = ray.data.ActorPoolStrategy(size=1)
    arguments = {"model": EMBEDDED, "sampling_params": {"temperature": 0, "max_tokens": 8}, **ENGINE}
    answered = dataset.map_batches(LLMWorker, fn_constructor_kwargs=arguments, compute=pool, batch_size=None)
    found = {row["prompt"]: row for row in answered.iter_rows()}
    with LLM(EMBEDDED, **ENGINE) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert found[prompt]["generated_text"] == output.outputs[0].text
        assert found[prompt]["num_prompt_tokens"] == len(output.prompt_token_ids)
    assert sum(row["num_cached_tokens"] for row in found.values()) > 0
