"""Lesson 8: a forest of prefixes. Sharing at several depths, and what decoding costs then.

    python examples/08_forest.py

Prompts form trees: one system prompt, under it a few documents, under each its questions. Prefix caching saves the
prefill of what is shared. Decode steps have to read the K/V of all that came before, again for each token; with
forest attention a shared part is read once for all who share it, so a step costs what the UNIQUE tokens cost.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams
from nanoapc.engine.block_pool import Prefix
from nanoapc.trace import read_trace

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"


def draw(prefix: Prefix, depth: int = 0) -> Iterator[str]:
    """The cached contents below a Prefix, a line each; a chain without branches stands on one line."""
    for child in prefix.cached or ():
        length, end = 1, child
        while end.cached and len(end.cached) == 1:
            length, end = length + 1, end.cached[0]
        yield f"{'  ' * depth}|-- {length} block{'s' if length > 1 else ''}"
        yield from draw(end, depth + 1)


def main(argv: list[str] | None = None) -> None:
    """Runs a small forest with and without forest attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--questions", type=int, default=8, help="about each document")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args(argv)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 1000) for _ in range(count)]

    system = tokens(512)
    documents = [[*system, *tokens(512)] for _ in range(args.documents)]
    prompts = [[*document, *tokens(32)] for document in documents for _ in range(args.questions)]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    results = []
    for enabled in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            trace = f"{folder}/run.jsonl"
            with LLM(args.model, enable_forest_attention=enabled, trace=trace) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                results.append([output.outputs[0].token_ids for output in outputs])
                decode = llm.metrics().steps["decode"]
                last = read_trace(trace).lines[-1]
                print(
                    f"forest attention {'on ' if enabled else 'off'}: "
                    f"{decode.seconds / decode.steps * 1e3:6.2f} ms a decode step, attention reads "
                    f"{last['read']:6} KV positions in {last['tiles']} tiles, {last['shared']} shared"
                )
                if enabled:
                    picture = list(draw(llm.engine.manager.pool.root))
    print("the outputs are the same:", results[0] == results[1])
    print(f"\nwhat the cache holds, {len(prompts)} prompts in {len(picture)} lines:")
    print("\n".join(picture[:20]))


if __name__ == "__main__":
    main()
