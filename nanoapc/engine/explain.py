"""explain: how far a prompt would hit the prefix cache now, and why it stops there.

    tokens    |-- block 0 --|-- block 1 --|-- block 2 --|--
                shared        shared        ^ the first block that is not: why?

Invariant: it looks and changes nothing - no reference, no queue, no count.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoapc.engine.block_hash import encode_tokens
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.sequence import Sequence


@dataclass(frozen=True)
class Explanation:
    """What the cache holds of a prompt, and why no more.

    reason: "caching_off", "prompt_logprobs", "skip_reading_prefix_cache", "last_token", "below_one_block", "evicted",
        "other_salt" or "no_such_block".
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # of the shared blocks, and copied
    shared_blocks: list[int]  # the ids of the whole blocks that would be shared
    num_copied_tokens: int
    reason: str
    text: str  # the reason in a sentence
    evicted_steps_ago: int | None = None  # with reason "evicted"

    def __str__(self) -> str:
        copied = f", {_count(self.num_copied_tokens, 'copied token')}" if self.num_copied_tokens else ""
        found = f"{_count(len(self.shared_blocks), 'block')}{copied}"
        return f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens are cached ({found}): {self.text}"


def explain(manager: BlockManager, seq: Sequence) -> Explanation:
    """What a sequence that is in no queue would find, and why no more."""
    if manager.enable_caching:
        manager.extend_keys(seq, seq.prompt)
    next_step = manager.step + 1
    match = manager.match(seq, next_step)
    num_shared, num_cached, steps = len(match.shared), match.num_cached_tokens, None
    if num_shared < len(seq.keys) and seq.keys[num_shared] in manager.pool.evicted:
        steps = next_step - manager.pool.evicted[seq.keys[num_shared]]
    reason, text = _reason(manager, seq, num_shared, num_cached, steps)
    return Explanation(
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=num_cached,
        shared_blocks=[block.block_id for block in match.shared],
        num_copied_tokens=match.copy[1] if match.copy else 0,
        reason=reason,
        text=text,
        evicted_steps_ago=steps if reason == "evicted" else None,
    )


def _reason(
    manager: BlockManager, seq: Sequence, num_shared: int, num_cached: int, evicted_steps_ago: int | None
) -> tuple[str, str]:
    size = manager.block_size
    rest = seq.num_prompt_tokens - num_shared * size
    if not manager.enable_caching:
        return "caching_off", "this LLM was made with enable_prefix_caching=False"
    if seq.params.prompt_logprobs is not None:
        return "prompt_logprobs", "prompt_logprobs needs the logits of every prompt token, so all are computed"
    if not seq.reads_cache:
        return "skip_reading_prefix_cache", "skip_reading_prefix_cache=True asks for it"
    if num_cached == seq.num_prompt_tokens - 1:
        return "last_token", "the last token is always computed: its logits choose the first output token"
    if evicted_steps_ago is not None:
        ago = _count(evicted_steps_ago, "step")
        return "evicted", f"block {num_shared} of the prompt was cached, but evicted {ago} ago"
    if (other := _blocks_under_another_salt(manager, seq)) > num_shared:
        return "other_salt", f"{other} of its blocks are cached under another salt (or none), which is kept apart"
    if num_cached > num_shared * size:
        return "no_such_block", f"what is cached goes on with another token at position {num_cached}"
    if rest < size:
        return "below_one_block", f"only full blocks are cached; the last {_count(rest, 'token')} fill none of {size}"
    return "no_such_block", f"no cached block holds the tokens from position {num_cached} on"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _blocks_under_another_salt(manager: BlockManager, seq: Sequence) -> int:
    """How many of the prompt's full blocks another salt has cached."""
    size = manager.block_size
    blocks = [encode_tokens(seq.prompt[i * size : (i + 1) * size]) for i in range(len(seq.keys))]
    if not blocks:
        return 0
    found = [p for p in manager.pool.root.cached or () if p.label.endswith(blocks[0]) and p.label != seq.labels[0]]
    depth = 0
    while found:
        depth += 1
        label = blocks[depth] if depth < len(blocks) else None
        found = [child for prefix in found for child in prefix.cached or () if child.label == label]
    return depth
