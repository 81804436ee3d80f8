"""Lesson 2: the classic demonstration. A long table, two questions about it, with the prefix cache off and on.

    python examples/02_caching_on_and_off.py

Both questions begin with the same table. Without a cache it is computed twice; with it, the second question computes
its own few tokens. What is saved is prefill: the time to the first token. Each new token still costs its decode step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
NAMES = ("Ann", "Ben", "Cora", "Dan", "Eve", "Finn", "Gwen", "Hal", "Ida", "Jon", "Kate", "Leo", "May", "Ned", "Olive")
TOWNS = ("York", "Kent", "Bath", "Wells", "Dover", "Leeds", "Derby")


def make_table(num_rows: int) -> str:
    """A table of people, as one would paste it into a prompt."""
    rows = ["| number | name | age | town |", "|---|---|---|---|"]
    rows += [f"| {i} | {NAMES[i % 15]} | {20 + i * 7 % 60} | {TOWNS[i * 3 % 7]} |" for i in range(1, num_rows + 1)]
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    """Asks two questions with caching off, then on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--rows", type=int, default=80, help="of the table")
    parser.add_argument("--max-tokens", type=int, default=4)
    args = parser.parse_args(argv)
    table = f"Here is a table.\n\n{make_table(args.rows)}\n\n"
    questions = (f"Question: how old is {NAMES[7]}? Answer:", f"Question: where does {NAMES[11]} live? Answer:")
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    answers = []
    for enabled in (False, True):
        print(f"prefix caching {'on' if enabled else 'off'}")
        with LLM(args.model, enable_prefix_caching=enabled) as llm:
            llm.generate("Warm up.", params, use_tqdm=False)
            for question in questions:
                start = time.perf_counter()
                (output,) = llm.generate(table + question, params, use_tqdm=False)
                milliseconds = (time.perf_counter() - start) * 1e3
                total, cached = len(output.prompt_token_ids), output.num_cached_tokens
                print(f"  {milliseconds:7.1f} ms, {cached:4} of {total} prompt tokens cached: {question}")
                answers.append(output.outputs[0].token_ids)
            if enabled:
                metrics = llm.metrics()
                print(
                    f"\nsaved: {metrics.flops_saved / 1e9:.1f} GFLOP, {metrics.kv_bytes_saved / 2**20:.1f} MiB of K/V"
                )
    print("the answers are the same, token for token:", answers[:2] == answers[2:])


if __name__ == "__main__":
    main()
