"""Metrics are what a careful reader would count by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MakeLLM
from llm_helpers import greedy, run
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import random_ids

from nanoapc import LLM
from nanoapc.engine.metrics import RECENT_REQUESTS, PrefixCacheStats

TEN_BLOCKS: dict[str, Any] = {"num_kv_blocks": 10, "max_model_len": 40, "block_size": 4}
DOCUMENT = list(range(100, 115))


def run_ten_blocks(llm: LLM) -> None:
    """The example of vLLM's design document: ten blocks of four tokens, three requests.

    step  1   request 0 prefills 15 tokens: blocks 0 1 2 (full) 3
    step  2   its 16th token fills block 3;   step 3   its 17th goes to block 4
    step  4   it decodes once more and ends; request 1 (14 tokens, 10 in common) shares 0 1, copies 2 tokens of 2,
              computes 4: blocks 5 6
    step  5   request 1 decodes once and ends. Free queue: 6 4 7 8 9 3 2 5 1 0 (blocks without a key first)
    step  6   request 2 (29 tokens, 12 in common) shares 0 1 2, computes 17 into 6 4 7 8 9
    step  10  its 33rd token needs a ninth block: 3, which is evicted
    """
    prompts = [DOCUMENT, [*DOCUMENT[:10], 120, 121, 122, 123], [*DOCUMENT[:12], *range(130, 147)]]
    llm.add_request(prompts[0], greedy(4))
    for _ in range(3):
        llm.step()
    llm.add_request(prompts[1], greedy(2))
    llm.step()
    llm.step()
    llm.add_request(prompts[2], greedy(5))
    while llm.has_unfinished_requests():
        llm.step()


@pytest.fixture
def ten_blocks(make_llm: MakeLLM) -> LLM:
    """An LLM that has run the ten-block example."""
    llm = make_llm(**TEN_BLOCKS)
    run_ten_blocks(llm)
    return llm


class TestTenBlocks:
    def test_tokens(self, ten_blocks: LLM) -> None:
        metrics = ten_blocks.metrics()
        assert metrics.queried_tokens == 15 + 14 + 29
        assert metrics.hit_tokens == 0 + 10 + 12
        assert metrics.copied_tokens == 2
        assert metrics.hit_rate == metrics.recent_hit_rate == 22 / 58
        assert metrics.computed_prompt_tokens == 15 + 4 + 17
        assert metrics.computed_tokens == (15 + 3) + (4 + 1) + (17 + 4)
        assert metrics.generated_tokens == 4 + 2 + 5
        assert metrics.num_preemptions == metrics.recomputed_tokens == 0

    def test_blocks(self, ten_blocks: LLM) -> None:
        metrics = ten_blocks.metrics()
        assert metrics.queried_blocks == 3 + 3 + 7
        assert metrics.hit_blocks == 0 + 2 + 3
        assert metrics.evictions == 1 and metrics.wanted_evictions == 0
        assert metrics.num_blocks == 10 and metrics.used_blocks == 0
        assert metrics.cached_blocks == 9  # request 2's eight full ones and request 1's block 5; 3 is free again
        assert metrics.cached_prefixes == 2
        assert metrics.duplicate_blocks == 0

    def test_steps_by_phase(self, ten_blocks: LLM) -> None:
        phases = ten_blocks.metrics().steps
        assert {name: (phase.steps, phase.tokens) for name, phase in phases.items()} == {
            "prefill": (2, 15 + 17),
            "decode": (7, 7),
            "mixed": (1, 1 + 4),
        }
        assert all(phase.seconds > 0 for phase in phases.values())

    def test_savings_follow_from_the_weights(self, ten_blocks: LLM, hf_model: transformers.PreTrainedModel) -> None:
        metrics, config = ten_blocks.metrics(), hf_model.config
        linears = [m for m in hf_model.model.modules() if isinstance(m, torch.nn.Linear)]
        flops = 0
        for num_found in (10, 12):
            for position in range(num_found):
                flops += sum(2 * linear.weight.numel() for linear in linears)
                heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
                flops += (position + 1) * heads * (2 + 2)  # scores, and the weighted sum of values
        assert metrics.flops_saved == flops
        kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # float32
        assert metrics.kv_bytes_saved == (8 + 12) * kv_bytes  # two of the 22 were copied

    def test_a_running_sequence_is_seen(self, make_llm: MakeLLM) -> None:
        llm = make_llm(**TEN_BLOCKS, max_num_seqs=1)
        for _ in range(2):
            llm.add_request(DOCUMENT, greedy(4))
        llm.step()
        metrics = llm.metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.used_blocks) == (1, 1, 4)
        while llm.has_unfinished_requests():
            llm.step()
        metrics = llm.metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.used_blocks) == (0, 0, 0)


def test_equal_content_in_two_blocks_is_a_duplicate(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = random_ids(6)
    run(llm, [prompt], max_tokens=4)
    assert llm.metrics().duplicate_blocks == 0
    run(llm, [prompt], max_tokens=4)  # copies two tokens of the second block into a block of its own, and fills it
    metrics = llm.metrics()
    assert metrics.copied_tokens == 1 and metrics.cached_blocks == 3 and metrics.duplicate_blocks == 1


def test_an_eviction_that_a_waiting_request_regrets_is_counted(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=12, max_model_len=48, max_num_seqs=2, schedule_policy="fcfs")
    shared, other = random_ids(16, 1), random_ids(40, 2)
    run(llm, [shared], max_tokens=1)
    run(llm, [other, [*shared, 5]], max_tokens=8)  # `other` needs all blocks while `shared` waits
    metrics = llm.metrics()
    assert metrics.wanted_evictions > 0
    assert metrics.evictions >= metrics.wanted_evictions


def test_preempted_work_is_counted_apart(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=24, max_model_len=64)
    run(llm, [random_ids(9, seed) for seed in range(12)], max_tokens=30)
    metrics = llm.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.queried_tokens == 12 * 9  # once a request, at first admission
    assert metrics.generated_tokens == 12 * 30
    # Every token but the last of each output runs once, and again what was lost.
    assert metrics.computed_tokens == 12 * (9 + 29) - metrics.hit_tokens + metrics.recomputed_tokens


def test_requests_that_skip_the_look_up_count_in_nothing_but_work(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run(llm, [DOCUMENT], max_tokens=1)
    before = llm.metrics()
    run(llm, [DOCUMENT], max_tokens=1, prompt_logprobs=0)
    after = llm.metrics()
    assert (before.queried_tokens, before.hit_tokens) == (after.queried_tokens, after.hit_tokens) == (15, 0)
    assert after.computed_prompt_tokens == 30


def test_without_caching_nothing_is_queried(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=False)
    run(llm, [DOCUMENT, DOCUMENT])
    metrics = llm.metrics()
    assert metrics.queried_tokens == metrics.cached_blocks == metrics.flops_saved == 0
    assert metrics.computed_prompt_tokens == 30


def test_the_recent_hit_rate_forgets_old_requests() -> None:
    stats = PrefixCacheStats()
    for _ in range(10):
        stats.count_query(num_tokens=10, num_blocks=2, hit_tokens=0, hit_blocks=0, copied_tokens=0)
    assert stats.hit_rate == stats.recent_hit_rate == 0
    for _ in range(RECENT_REQUESTS):
        stats.count_query(num_tokens=10, num_blocks=2, hit_tokens=5, hit_blocks=1, copied_tokens=1)
    assert stats.recent_hit_rate == 0.5
    assert stats.hit_rate == 5 * RECENT_REQUESTS / (10 * RECENT_REQUESTS + 100)


class TestPrometheus:
    def test_the_text_has_every_number(self, ten_blocks: LLM) -> None:
        metrics = ten_blocks.metrics()
        families = {family.name: family for family in text_string_to_metric_families(metrics.to_prometheus())}
        values = {name: family.samples[0].value for name, family in families.items()}
        assert values["nanoapc:prefix_cache_queries"] == 58
        assert values["nanoapc:prefix_cache_hits"] == 22
        assert families["nanoapc:prefix_cache_hits"].type == "counter"
        assert families["nanoapc:kv_cache_blocks"].type == "gauge" and values["nanoapc:kv_cache_blocks"] == 10
        steps = {sample.labels["phase"]: sample.value for sample in families["nanoapc:phase_steps"].samples}
        assert steps == {"prefill": 2, "decode": 7, "mixed": 1}
        documented = [item for item in metrics.__dataclass_fields__.values() if item.metadata]
        assert len(families) == len(documented) + 3
        for item in documented:
            assert values[f"nanoapc:{item.metadata['name']}"] == getattr(metrics, item.name)

    def test_the_file_is_whole_after_each_call_and_at_the_end(self, make_llm: MakeLLM, tmp_path: Path) -> None:
        path = tmp_path / "x.prom"
        llm = make_llm(metrics_file=path)
        assert not path.exists()
        seen: list[float] = []
        for _ in range(2):
            run(llm, [DOCUMENT])
            seen.append(_value(path, "nanoapc:prefix_cache_queries_total"))
        assert seen == [15, 30]
        inode = path.stat().st_ino
        llm.close()
        assert path.stat().st_ino != inode  # replaced by a complete file, not rewritten in place
        assert [file.name for file in tmp_path.iterdir()] == ["x.prom"]

    def test_a_busy_engine_writes_at_intervals(
        self, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.prom"
        llm = make_llm(metrics_file=str(path))
        llm.add_request(DOCUMENT, greedy(8))
        llm.step()
        assert not path.exists()
        monkeypatch.setattr("nanoapc.engine.metrics.INTERVAL_S", 0.0)
        llm.step()
        assert _value(path, "nanoapc:num_requests_running") == 1
        while llm.has_unfinished_requests():
            llm.step()
        assert _value(path, "nanoapc:num_requests_running") == 0

    def test_a_missing_folder_is_named(self, make_llm: MakeLLM, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no folder"):
            make_llm(metrics_file=tmp_path / "nowhere" / "x.prom")

    def test_a_file_that_cannot_be_written_stops_nothing(
        self, make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        llm = make_llm(metrics_file=folder / "x.prom")
        folder.rmdir()
        assert len(run(llm, [DOCUMENT])) == 1
        assert "the metrics file cannot be written" in caplog.text

    @pytest.mark.parametrize("name", ["metrics_file", "trace"])
    @pytest.mark.parametrize("value", ["", "x\0y", 3])
    def test_a_bad_name_is_refused(self, name: str, value: Any, make_llm: MakeLLM) -> None:
        with pytest.raises(ValueError, match=f"{name} must be the name of a file"):
            make_llm(**{name: value})


def _value(path: Path, name: str) -> float:
    families = text_string_to_metric_families(path.read_text())
    return next(sample.value for family in families for sample in family.samples if sample.name == name)
