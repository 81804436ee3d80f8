"""explain: how far a prompt would hit the prefix cache now, and why it stops there.

    tokens    |-- block 0 --|-- block 1 --|-- block 2 --|--
                shared        shared        ^ the first block that is not: why?

Invariant: it looks and changes nothing - no reference, no queue, no count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoapc.engine.block_hash import encode_tokens
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.block_pool import Prefix
from nanoapc.engine.sequence import Sequence

Reason = Literal[
    "caching_off",
    "prompt_logprobs",
    "skip_reading_prefix_cache",
    "last_token",
    "below_one_block",
    "evicted",
    "other_salt",
    "no_such_block",
]


@dataclass(frozen=True)
class Explanation:
    """num_cached_tokens of num_prompt_tokens would be found: whole shared blocks (their ids), then copied tokens.

    reason: why no more; text: the same in a sentence. evicted_steps_ago: with reason "evicted".
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    shared_blocks: list[int]
    num_copied_tokens: int
    reason: Reason
    text: str
    evicted_steps_ago: int | None = None

    def __str__(self) -> str:
        copied = f", {self.num_copied_tokens} copied tokens" if self.num_copied_tokens else ""
        found = f"{len(self.shared_blocks)} blocks{copied}"
        return f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens are cached ({found}): {self.text}"


def explain(manager: BlockManager, seq: Sequence) -> Explanation:
    """What a sequence that is in no queue would find, and why no more."""
    if manager.enable_caching:
        manager.extend_keys(seq, seq.prompt)
    match = manager.match(seq)
    reason, text, steps = _reason(manager, seq, len(match.shared), match.num_cached_tokens)
    return Explanation(
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=match.num_cached_tokens,
        shared_blocks=[block.block_id for block in match.shared],
        num_copied_tokens=match.copy[1] if match.copy else 0,
        reason=reason,
        text=text,
        evicted_steps_ago=steps,
    )


def _reason(manager: BlockManager, seq: Sequence, num_shared: int, num_cached: int) -> tuple[Reason, str, int | None]:
    pool, size = manager.pool, manager.block_size
    rest = seq.num_prompt_tokens - num_shared * size
    if not manager.enable_caching:
        return "caching_off", "this LLM was made with enable_prefix_caching=False", None
    if seq.params.prompt_logprobs is not None:
        return "prompt_logprobs", "prompt_logprobs needs the logits of every prompt token, so all are computed", None
    if not seq.reads_cache:
        return "skip_reading_prefix_cache", "skip_reading_prefix_cache=True asks for it", None
    if num_cached == seq.num_prompt_tokens - 1:
        return "last_token", "the last token is always computed: its logits choose the first output token", None
    if num_shared < len(seq.keys) and seq.keys[num_shared] in pool.evicted:
        steps = manager.step + 1 - pool.evicted[seq.keys[num_shared]]  # seen from the next step
        ago = f"{steps} step{'s' if steps > 1 else ''} ago"
        return "evicted", f"block {num_shared} of the prompt was cached, but evicted {ago}", steps
    other = _blocks_under_another_salt(manager, seq)
    if other > num_shared:
        return "other_salt", f"{other} of its blocks are cached under another salt (or none), which is kept apart", None
    if num_cached > num_shared * size:
        return "no_such_block", f"what is cached goes on with another token at position {num_cached}", None
    if rest < size:
        return "below_one_block", f"only full blocks are cached; the last {rest} tokens fill none of {size}", None
    return "no_such_block", f"no cached block holds the tokens from position {num_cached} on", None


def _blocks_under_another_salt(manager: BlockManager, seq: Sequence) -> int:
    """How many of the prompt's full blocks another salt has cached."""
    size = manager.block_size
    blocks = [encode_tokens(seq.prompt[i * size : (i + 1) * size]) for i in range(len(seq.keys))]
    if not blocks:
        return 0
    roots = [p for p in manager.pool.root.cached or () if p.label.endswith(blocks[0]) and p.label != seq.labels[0]]
    return max((_depth(prefix, blocks) for prefix in roots), default=0)


def _depth(prefix: Prefix, blocks: list[bytes]) -> int:
    """How many of the blocks are cached, given that `prefix` holds the first."""
    for depth, label in enumerate(blocks[1:], 1):
        found = next((child for child in prefix.cached or () if child.label == label), None)
        if found is None:
            return depth
        prefix = found
    return len(blocks)
