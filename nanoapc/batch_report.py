"""What is said about a batch file: BatchSummary after (and during) a run, DryRun before one.

Invariant: computed and cached prompt tokens are told apart; a rate of prompt tokens counts computed ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BatchSummary:
    """What stands in the results, and what this run did for it.

    total, done, failed: lines of the input, with an answer, with an error. resumed: had their result before this run.
    changed: of these, ask for something else now (the old result stays). foreign: results of no line of the input.
    prompt_tokens, cached_tokens, output_tokens, seconds: of this run. Cached prompt tokens were saved, the others
    computed.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    resumed: int = 0
    changed: int = 0
    foreign: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: every line has an answer to what it asks. 1: not so."""
        return int(self.done != self.total or self.changed > 0)

    def count(self, result: Mapping[str, Any]) -> None:
        """One more result of this run."""
        self.done += result["error"] is None
        self.failed += result["error"] is not None
        if usage := result["response"]["body"].get("usage"):
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            self.output_tokens += usage["completion_tokens"]

    def rates(self) -> str:
        """Tokens a second and hit rate."""
        seconds = max(self.seconds, 1e-9)
        computed, hit_rate = self.prompt_tokens - self.cached_tokens, self.cached_tokens / max(self.prompt_tokens, 1)
        prompt, output = f"prompt {computed / seconds:.0f} tok/s", f"output {self.output_tokens / seconds:.0f} tok/s"
        return f"{prompt}, {output}, hit rate {hit_rate:.1%}"

    def __str__(self) -> str:
        resumed = f" ({self.resumed} before this run)" if self.resumed else ""
        lines = f"{self.done} of {self.total} lines answered, {self.failed} failed{resumed}"
        saved = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens saved"
        return f"{lines}; {self.seconds:.1f} s, {self.rates()}, {saved}"


@dataclass
class DryRun:
    """What a file would ask of the engine.

    total, failed: lines, and those that would get an error line. errors: the first of these.
    prompt_tokens: of the good lines. unique_tokens: nodes of their prefix forest. hit_tokens: what an endless prefix
    cache would find.
    """

    total: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    unique_tokens: int = 0
    hit_tokens: int = 0

    def __str__(self) -> str:
        tokens = f"{self.prompt_tokens} prompt tokens, {self.unique_tokens} of them unique"
        hit_rate = self.hit_tokens / max(self.prompt_tokens, 1)
        return f"{self.total} lines, {self.failed} with errors; {tokens}; planned hit rate {hit_rate:.1%}"
