"""Lesson 5: salts. Requests with different salts never share a block, so nobody can feel what others have asked.

    python examples/05_salts.py

A shared cache answers faster when somebody has asked the same before. Where that must not show - tenants on one
engine - each gets a salt of its own: it becomes part of the first block's key, and so of all keys after it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
SECRET = "The king will cross the river at night, with four hundred horse, and none but Derby knows of it. " * 12


def main(argv: list[str] | None = None) -> None:
    """One tenant asks, another guesses: without salts, then with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(args.model) as llm:

        def ask(who: str, salt: str | None) -> None:
            start = time.perf_counter()
            (output,) = llm.generate({"prompt": SECRET, "cache_salt": salt}, params, use_tqdm=False)
            milliseconds = (time.perf_counter() - start) * 1e3
            cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
            print(f"  {who} asks: {milliseconds:6.1f} ms, {cached} of {total} cached")

        llm.generate("Warm up.", params, use_tqdm=False)
        print("without salts, Mallory's guess is answered fast, so somebody has asked this before:")
        ask("Alice  ", None)
        ask("Mallory", None)
        print("\nwith a salt for each, it is as slow as any other; only Alice herself gains:")
        ask("Alice  ", "alice's salt")
        ask("Mallory", "mallory's salt")
        ask("Alice  ", "alice's salt")
        print(f"\nexplain, as Mallory: {llm.explain(SECRET, cache_salt='another one')}")
        metrics = llm.metrics()
        print(f"the price: the same text is cached {metrics.cached_prefixes} times, in {metrics.cached_blocks} blocks")


if __name__ == "__main__":
    main()
