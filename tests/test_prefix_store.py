"""The prefix cache in a file: what one LLM has computed the next one finds; a wrong file is refused, not used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llm_helpers import B, cached, greedy, observe, run, token_ids
from replay import Replay
from safetensors import safe_open
from tiny_models import edit_json, random_ids

from nanoapc import LLM
from nanoapc.engine import prefix_store
from nanoapc.trace import read_trace

MakeLLM = Callable[..., LLM]
P = random_ids(13, seed=1)
"""Three blocks and a token."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the prefixes go; not there yet."""
    return tmp_path / "prefixes"


def contents(llm: LLM) -> list[bytes]:
    """What the cache of an idle LLM holds, block by block, the least recently used first."""
    texts = []
    for block in llm.engine.manager.pool.free:
        prefix, text = block.prefix, b""
        while prefix is not None:
            prefix, text = prefix.parent, prefix.label + text
        texts += [text] if text else []
    return texts


class TestTheNextLLM:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_hits_what_the_last_one_computed_bit_for_bit(
        self, dtype: str, file: Path, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefix_store, "CHUNK_BYTES", 1)  # a block at a time
        prompts = [P, P[:8] + random_ids(9, seed=2), random_ids(30, seed=3)]
        with make_llm(dtype=dtype, prefix_cache_file=file) as llm:
            first = run(llm, prompts, logprobs=3)
        with make_llm(dtype=dtype, prefix_cache_file=file) as llm:
            log = observe(llm)
            second = run(llm, prompts, logprobs=3)
        assert log.steps and cached(second) == [12, 16, 29]
        assert token_ids(second) == token_ids(first)
        assert [o.outputs[0].logprobs for o in second] == [o.outputs[0].logprobs for o in first]

    def test_copies_a_part_of_a_block_that_was_read(self, file: Path, make_llm: MakeLLM, cache_off: LLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        prompt = P[:10] + random_ids(5, seed=4)
        (output,) = run(make_llm(prefix_cache_file=file), [prompt])
        assert output.num_cached_tokens == 10
        assert token_ids([output]) == token_ids(run(cache_off, [prompt]))

    def test_evicts_in_the_order_in_which_the_last_one_would_have(self, file: Path, make_llm: MakeLLM) -> None:
        prompts = [random_ids(17, seed=seed) for seed in range(5)]
        with make_llm(prefix_cache_file=file) as llm:
            for prompt in [*prompts, prompts[1][:8] + random_ids(9, seed=7), prompts[0]]:
                run(llm, [prompt], max_tokens=1)
            before = contents(llm)
        assert contents(make_llm(prefix_cache_file=file)) == before

    def test_keeps_salts_apart(self, file: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [{"prompt_token_ids": P, "cache_salt": "a"}])
        llm = make_llm(prefix_cache_file=file)
        salts = ("b", None, "a")
        prompts = [{"prompt_token_ids": P, "cache_salt": salt} if salt else P for salt in salts]
        assert [cached(run(llm, [prompt])) for prompt in prompts] == [[0], [0], [12]]

    def test_takes_the_most_recent_that_fits_a_smaller_cache(self, file: Path, make_llm: MakeLLM) -> None:
        prompts = [random_ids(4 * B + 1, seed=seed) for seed in range(4)]
        with make_llm(prefix_cache_file=file) as llm:
            for prompt in prompts:
                run(llm, [prompt], max_tokens=1)
        llm = make_llm(prefix_cache_file=file, num_kv_blocks=10, max_model_len=40)
        assert llm.metrics().cached_blocks == 10
        found = [llm.explain(prompt).num_cached_tokens for prompt in prompts]
        assert found == [0, 2 * B, 4 * B, 4 * B]
        assert cached(run(llm, [prompts[3]], max_tokens=1)) == [4 * B]

    def test_finds_them_in_another_process_with_keys_of_its_own(self, file: Path, model_dir: Path) -> None:
        program = (
            "import sys; from nanoapc import LLM, SamplingParams as S; ids = list(range(5, 30))\n"
            "llm = LLM(sys.argv[1], prefix_cache_file=sys.argv[2], block_size=4, max_model_len=64)\n"
            "print(llm.generate([ids], S(max_tokens=1), use_tqdm=False)[0].num_cached_tokens)"  # and no close()
        )
        command = [sys.executable, "-c", program, str(model_dir), str(file)]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
        assert [int(output) for output in outputs] == [0, 24]

    def test_writes_what_it_has_read_and_not_used(self, file: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [random_ids(9, seed=5)])
        assert cached(run(make_llm(prefix_cache_file=file), [P])) == [12]

    def test_traces_what_it_has_read(self, file: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P, P[:8] + random_ids(9, seed=2)])
        trace = tmp_path / "run.jsonl"
        llm = make_llm(prefix_cache_file=file, trace=trace)
        run(llm, [P])
        recorded = read_trace(trace)
        replay = Replay(recorded.header["num_blocks"], recorded.header["block_size"])
        for line in recorded.lines:
            replay.apply(line["events"])
        pool = llm.engine.manager.pool
        assert list(replay.free) == [block.block_id for block in pool.free]
        assert [content >= 0 for content in replay.contents] == [block.prefix is not None for block in pool.blocks]


class TestSaving:
    def test_while_requests_run_leaves_out_what_is_not_computed(self, file: Path, make_llm: MakeLLM) -> None:
        llm = make_llm(prefix_cache_file=file, max_num_batched_tokens=8, async_scheduling=True)
        llm.add_request({"prompt_token_ids": random_ids(33, seed=6)}, greedy(2))
        llm.step()
        # The first chunk has run, the second is in flight.
        assert llm.save_prefix_cache() == 2
        while llm.has_unfinished_requests():
            llm.step()
        assert llm.save_prefix_cache() == 8
        assert cached(run(make_llm(prefix_cache_file=file), [random_ids(33, seed=6)])) == [32]

    def test_nothing_leaves_the_file_as_it_is(self, file: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        before = file.read_bytes()
        with make_llm(prefix_cache_file=file) as llm:
            assert llm.reset_prefix_cache()
        assert file.read_bytes() == before

    def test_that_fails_keeps_the_old_file(
        self, file: Path, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        before = file.read_bytes()
        llm = make_llm(prefix_cache_file=file)
        run(llm, [random_ids(9, seed=5)])

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            llm.save_prefix_cache()
        with caplog.at_level(logging.WARNING):
            llm.close()
        assert "stays as it was: [Errno 28]" in caplog.text
        assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]

    def test_makes_a_file_that_only_its_owner_reads(self, file: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_makes_a_file_that_safetensors_opens(self, file: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P], max_tokens=1)
            (block,) = (b.block_id for b in llm.engine.manager.pool.blocks if b.prefix and b.prefix.is_leaf)
            last = llm.engine.runner.kv_memory[block].clone()
        with safe_open(file, framework="pt") as tensors:
            assert tensors.get_tensor("lengths").tolist() == [3]
            assert tensors.get_tensor("tokens").tolist() == P[:12]
            assert torch.equal(tensors.get_tensor("kv")[2], last)

    def test_without_a_file_says_what_to_do(self, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match="no file to save"):
            make_llm().save_prefix_cache()

    def test_a_weight_that_was_replaced_counts(self, file: Path, model_dir: Path, make_llm: MakeLLM) -> None:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
            with safe_open(model_dir / "model.safetensors", framework="pt") as tensors:
                weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            llm.load_weights(weights.items())
            run(llm, [P])
        # The same weights again, by another way.
        llm = make_llm(prefix_cache_file=file)
        assert cached(run(llm, [P])) == [12]
        weights["model.norm.weight"][3] += 0.125
        llm.load_weights(weights.items())
        run(llm, [P])
        llm.close()
        with pytest.raises(ValueError, match="other weights"):
            make_llm(prefix_cache_file=file)


class TestTheEndOfTheProgram:
    def test_in_the_middle_of_a_step_saves_only_what_is_computed(
        self, file: Path, model_dir: Path, make_llm: MakeLLM, cache_off: LLM
    ) -> None:
        program = (
            "import sys, threading, time; from nanoapc import LLM, SamplingParams as S\n"
            "llm = LLM(sys.argv[1], max_model_len=64, block_size=4, dtype='float32', prefix_cache_file=sys.argv[2])\n"
            "launch, in_step = llm.engine.runner.launch, threading.Event()\n"
            "def slow(batch): in_step.set(); time.sleep(1); return launch(batch)\n"
            "llm.engine.runner.launch = slow\n"
            f"call = lambda: llm.generate([{P}], S(max_tokens=9, temperature=0), use_tqdm=False)\n"
            "threading.Thread(target=call, daemon=True).start(); in_step.wait()"
        )
        command = [sys.executable, "-c", program, str(model_dir), str(file)]
        assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
        (output,) = run(make_llm(prefix_cache_file=file), [P], logprobs=3)
        assert output.num_cached_tokens == 12
        (expected,) = run(cache_off, [P], logprobs=3)
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs


class TestTheMiddleOfAStep:
    """Where a signal's handler runs."""

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("place", ["schedule", "launch", "settle"])
    @pytest.mark.parametrize("act", [LLM.close, LLM.save_prefix_cache])
    def test_saves_only_what_is_computed(
        self,
        act: Callable[[LLM], object],
        place: str,
        overlap: bool,
        file: Path,
        make_llm: MakeLLM,
        cache_off: LLM,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        llm = make_llm(prefix_cache_file=file, async_scheduling=overlap)
        run(llm, [P[:4]], max_tokens=1)
        part = llm.engine.runner if place == "launch" else llm.engine.scheduler
        method, done = getattr(part, place), []

        def interrupted(*arguments: object) -> object:
            result = method(*arguments) if place == "schedule" else None
            if not done:
                done.append(act(llm))
                shutil.copy(file, file.with_suffix(".then")) if file.exists() else None
            return result if place == "schedule" else method(*arguments)

        monkeypatch.setattr(part, place, interrupted)
        if act is LLM.close:
            with pytest.raises(RuntimeError, match="this LLM is closed"):
                run(llm, [P])
        else:
            run(llm, [P])
            shutil.copy(file.with_suffix(".then"), file)
        (output,) = run(make_llm(prefix_cache_file=file), [P], logprobs=3)
        (expected,) = run(cache_off, [P], logprobs=3)
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs
        assert output.num_cached_tokens >= 4


class TestAWrongFile:
    @pytest.fixture
    def good(self, file: Path, make_llm: MakeLLM) -> Path:
        with make_llm(prefix_cache_file=file) as llm:
            run(llm, [P])
        return file

    @pytest.mark.parametrize("what, arguments", [("dtype", {"dtype": "bfloat16"}), ("block_size", {"block_size": 8})])
    def test_of_another_engine_is_refused(
        self, what: str, arguments: dict[str, object], good: Path, make_llm: MakeLLM
    ) -> None:
        before = good.read_bytes()
        with pytest.raises(ValueError, match=f"other {what}.*name another file, or delete it"):
            make_llm(prefix_cache_file=good, **arguments)
        assert good.read_bytes() == before

    def test_of_another_config_is_refused(self, good: Path, model_dir: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
        other = shutil.copytree(model_dir, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        edit_json(other / "config.json", rms_norm_eps=config["rms_norm_eps"] * 2)
        with pytest.raises(ValueError, match="other config"):
            make_llm(other, prefix_cache_file=good)

    def test_cut_short_anywhere_is_refused(self, good: Path, make_llm: MakeLLM) -> None:
        whole = good.read_bytes()
        for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
            good.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"prefixes.*(delete it|name another)"):
                make_llm(prefix_cache_file=good)

    def test_with_a_byte_changed_anywhere_is_refused(self, good: Path, make_llm: MakeLLM) -> None:
        whole = good.read_bytes()
        for place in range(8, len(whole), max(1, len(whole) // 150)):
            good.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            if whole[place : place + 1] != b" ":  # the header is padded
                with pytest.raises(ValueError, match=r"prefixes.*(delete it|name another)"):
                    make_llm(prefix_cache_file=good)

    def test_of_another_kind_is_refused(self, file: Path, model_dir: Path, make_llm: MakeLLM) -> None:
        shutil.copy(model_dir / "model.safetensors", file)
        with pytest.raises(ValueError, match="is no prefix_cache_file"):
            make_llm(prefix_cache_file=file)

    def test_in_a_folder_that_is_not_there_is_refused(self, file: Path, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match="no folder"):
            make_llm(prefix_cache_file=file / "deeper")

    def test_with_the_cache_off_is_refused(self, file: Path, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match="enable_prefix_caching=False"):
            make_llm(prefix_cache_file=file, enable_prefix_caching=False)
