"""Metrics: what the engine counts, and how it is shown.

    Scheduler -> PrefixCacheStats --+
    Engine ----> PhaseStats --------+-> Metrics, one moment's numbers -> LLM.metrics(), Prometheus text, metrics_file
    BlockPool ----------------------+

Invariant: a number is counted in one place, once, and what it means stands beside it; the rest is derived when somebody
asks. Counters start at 0 with the engine and only grow.

What cached tokens save is estimated from the model's shape: W weights in the linear layers, L layers, H query heads,
Hkv K/V heads, D head size. A request that found its first c tokens has skipped 2 FLOPs a weight for each of them, and
4 * H * D a layer (scores, weighted sum) for each position that each of them attends to, c * (c + 1) / 2 in all:

    flops_saved    = 2 * W * hit_tokens + 4 * L * H * D * sum of c * (c + 1) / 2
    kv_bytes_saved = (hit_tokens - copied_tokens) * 2 * L * Hkv * D * bytes an element

Shared tokens are stored once for all; copied ones are stored again. Norms, embeddings and logits (which a prompt
needs for its last token alone) are left out.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoapc.engine.output_file import output_file, replace_file

if TYPE_CHECKING:
    from nanoapc.engine.scheduler import Scheduler
    from nanoapc.models.config import ModelConfig

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 1000
"""Requests that the recent hit rate looks back on."""
INTERVAL_S = 10.0
"""Seconds between two versions of the metrics file while the engine is busy."""


def _counter(name: str, text: str, kind: str = "counter") -> Any:
    """A number that only grows: its name for Prometheus, and what it means."""
    return field(default=0, metadata={"name": name, "help": text, "kind": kind})


_gauge = partial(_counter, kind="gauge")
"""A number that goes up and down."""


@dataclass
class Counts:
    """What the scheduler counts. Requests that skip the look-up (prompt_logprobs) count in no query and no hit."""

    queried_tokens: int = _counter("prefix_cache_queries", "prompt tokens that were looked up in the cache")
    hit_tokens: int = _counter("prefix_cache_hits", "prompt tokens found in the cache, so not computed")
    copied_tokens: int = _counter("prefix_cache_copied_tokens", "prompt tokens found in partly equal blocks and copied")
    queried_blocks: int = _counter("prefix_cache_block_queries", "full blocks of prompts that were looked up")
    hit_blocks: int = _counter("prefix_cache_block_hits", "full blocks of prompts found and shared")
    computed_tokens: int = _counter("computed_tokens", "tokens that ran through the model")
    computed_prompt_tokens: int = _counter("prompt_tokens", "prompt tokens that ran through the model")
    recomputed_tokens: int = _counter("recomputed_tokens", "tokens that ran again, lost in a preemption")
    generated_tokens: int = _counter("generation_tokens", "tokens sampled")
    num_preemptions: int = _counter("num_preemptions", "running sequences that had to wait again")

    hit_pairs: int = 0
    """The sum of c * (c + 1) / 2."""

    @property
    def hit_rate(self) -> float:
        """hit / queried tokens, 0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixCacheStats(Counts):
    """The counts as they grow, and the latest requests."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_REQUESTS)

    def count_query(
        self, num_tokens: int, num_blocks: int, hit_tokens: int, hit_blocks: int, copied_tokens: int
    ) -> None:
        """A request was admitted that had looked its prompt up."""
        self.queried_tokens += num_tokens
        self.queried_blocks += num_blocks
        self.hit_tokens += hit_tokens
        self.hit_blocks += hit_blocks
        self.copied_tokens += copied_tokens
        self.hit_pairs += hit_tokens * (hit_tokens + 1) // 2
        self._recent.append((num_tokens, hit_tokens))

    @property
    def recent_hit_rate(self) -> float:
        """The hit rate of the last RECENT_REQUESTS requests."""
        queried = sum(tokens for tokens, _ in self._recent)
        return sum(hits for _, hits in self._recent) / queried if queried else 0.0


@dataclass
class PhaseStats:
    """Steps of one kind: "prefill" (prompt chunks only), "decode" (one new token a sequence) or "mixed"."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Metrics(Counts):
    """One moment's numbers; each field's metadata says what it is, the top of this file how savings are estimated."""

    recent_hit_rate: float = _gauge("prefix_cache_recent_hit_rate", f"hit rate of the last {RECENT_REQUESTS} requests")
    flops_saved: int = _counter("prefix_cache_saved_flops", "floating-point operations that hits have saved, estimated")
    kv_bytes_saved: int = _counter("prefix_cache_saved_kv_bytes", "bytes of K/V that shared blocks did not store again")
    evictions: int = _counter("prefix_cache_evictions", "cached blocks whose content was given up for a new one")
    wanted_evictions: int = _counter("prefix_cache_wanted_evictions", "evicted blocks that a waiting request wanted")
    num_blocks: int = _gauge("kv_cache_blocks", "blocks of the KV cache")
    used_blocks: int = _gauge("kv_cache_used_blocks", "blocks held by running sequences")
    cached_blocks: int = _gauge("prefix_cache_blocks", "blocks that can be found by their content, held or idle")
    duplicate_blocks: int = _gauge("prefix_cache_duplicate_blocks", "cached blocks with the content of another one")
    cached_prefixes: int = _gauge("prefix_cache_prefixes", "cached contents that no other continues (leaves)")
    num_running: int = _gauge("num_requests_running", "sequences that run")
    num_waiting: int = _gauge("num_requests_waiting", "sequences that wait")
    steps: dict[str, PhaseStats] = field(default_factory=dict)

    def to_prometheus(self) -> str:
        """Prometheus' text format, named as vLLM names its own ("nanoapc:prefix_cache_queries_total")."""
        lines: list[str] = []
        for item in fields(self):
            if item.metadata:
                lines += _family(**item.metadata, values={"": getattr(self, item.name)})
        for unit in ("steps", "tokens", "seconds"):
            values = {f'{{phase="{phase}"}}': getattr(stats, unit) for phase, stats in self.steps.items()}
            lines += _family(f"phase_{unit}", f"{unit} of the steps, by phase", "counter", values)
        return "\n".join(lines) + "\n"


def _family(name: str, help: str, kind: str, values: Mapping[str, float]) -> Iterator[str]:
    """The lines of one metric; values: labels -> number."""
    name = f"nanoapc:{name}" + ("_total" if kind == "counter" else "")
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{labels} {float(value)}"


def collect(scheduler: Scheduler, steps: dict[str, PhaseStats], model: ModelConfig) -> Metrics:
    """An engine's Metrics. Walks the index: some milliseconds for 10,000 cached blocks."""
    stats, pool = scheduler.stats, scheduler.manager.pool
    held = [prefix for prefix in pool.prefixes() if prefix.blocks]
    cached = sum(len(prefix.blocks) for prefix in held)
    heads = 2 * model.num_heads + 2 * model.num_kv_heads  # q and output, k and v
    weights = model.num_layers * model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim
    return Metrics(
        **asdict(stats),
        recent_hit_rate=stats.recent_hit_rate,
        flops_saved=2 * weights * stats.hit_tokens + attention * stats.hit_pairs,
        kv_bytes_saved=(stats.hit_tokens - stats.copied_tokens) * model.kv_bytes,
        evictions=pool.num_evictions,
        wanted_evictions=pool.num_wanted_evictions,
        num_blocks=len(pool.blocks),
        used_blocks=len(pool.blocks) - pool.num_free_blocks,
        cached_blocks=cached,
        duplicate_blocks=cached - len(held),
        cached_prefixes=sum(prefix.is_leaf for prefix in held),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        steps={phase: PhaseStats(**asdict(count)) for phase, count in steps.items()},
    )


class MetricsFile:
    """A textfile for the node exporter's collector (which reads *.prom); replaced as a whole, never half written.

    Raises:
        ValueError: see `output_file`.
    """

    def __init__(self, path: str):
        self._path = output_file("metrics_file", path)
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last version is INTERVAL_S old."""
        return time.monotonic() - self._written >= INTERVAL_S

    def write(self, metrics: Metrics) -> None:
        """Replaces the file. If that fails the run goes on: there is a warning, and another try when it is due."""
        self._written = time.monotonic()
        try:
            with replace_file(self._path, sync=False) as file:  # which is no *.prom before it is whole
                file.write(metrics.to_prometheus().encode())
        except OSError as error:
            logger.warning("the metrics file cannot be written: %s", error)
