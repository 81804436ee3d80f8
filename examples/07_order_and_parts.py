"""Lesson 7: what the order of a batch is worth, and what parts of blocks are worth.

    python examples/07_order_and_parts.py

A batch is known before it runs, so it need not run in the order given. Sorted by their tokens, prompts that share a
prefix follow each other, and the prefix is still there for its last user, however small the cache. And where
two prompts part in the middle of a block, the equal half of it is copied instead of computed.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"


def measure(name: str, model: str, prompts: list[Any], params: SamplingParams, **options: Any) -> None:
    """Runs the prompts on a fresh engine and prints a line about it."""
    with LLM(model, **options) as llm:
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds, metrics = time.perf_counter() - start, llm.metrics()
        print(
            f"  {name:24} {seconds:6.2f} s, hit rate {metrics.hit_rate:6.1%}, "
            f"computed {metrics.computed_prompt_tokens:6} prompt tokens, evicted {metrics.evictions:4} blocks"
        )


def main(argv: list[str] | None = None) -> None:
    """Measures both effects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--questions", type=int, default=5, help="about each document")
    parser.add_argument("--tokens", type=int, default=320, help="of a document")
    args = parser.parse_args(argv)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 1000) for _ in range(count)]

    documents = [tokens(args.tokens) for _ in range(args.documents)]
    prompts = [[*document, *tokens(20)] for document in documents for _ in range(args.questions)]
    rng.shuffle(prompts)
    # A cache for three documents, and no more requests at once than it holds.
    blocks = 3 * -(-(args.tokens + 24) // 16) + 3
    small = {"num_kv_blocks": blocks, "max_model_len": args.tokens + 30, "max_num_seqs": 2}
    print(f"{args.documents} documents of {args.tokens} tokens, {args.questions} questions each, in a cache for three:")
    for policy in ("fcfs", "prefix"):
        measure(f'schedule_policy="{policy}"', args.model, prompts, params, schedule_policy=policy, **small)

    print("\nblocks of 64 tokens, and prompts that part 40 tokens into a block:")
    stem = tokens(3 * 64 + 40)
    with LLM(args.model, block_size=64) as llm:
        for number in range(args.questions):
            before = llm.metrics()
            (output,) = llm.generate([[*stem, *tokens(64)]], params, use_tqdm=False)
            after = llm.metrics()
            shared, copied = after.hit_blocks - before.hit_blocks, after.copied_tokens - before.copied_tokens
            print(
                f"  prompt {number}: {output.num_cached_tokens:3} of {len(output.prompt_token_ids)} tokens cached: "
                f"{shared} blocks shared, {copied} tokens copied"
            )


if __name__ == "__main__":
    main()
