"""Quickstart: a few prompts that share a beginning, on the model that ships with nanoapc.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B

The second call asks new questions about the same text: what the first has computed is reused.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"

SCENE = """DUKE VINCENTIO:
Good morrow to you, gentle friends. The night is gone,
And with the night our quarrel; let us speak of peace.

"""
SPEAKERS = ("ROMEO", "JULIET", "KING RICHARD III", "First Citizen")


def main() -> None:
    """Runs two calls and says what the prefix cache has done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--max-tokens", type=int, default=60)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=args.max_tokens)
    with LLM(args.model) as llm:
        for call in ("first call", "second call, same prompts"):
            start = time.perf_counter()
            outputs = llm.generate([f"{SCENE}{name}:\n" for name in SPEAKERS], params, use_tqdm=False)
            seconds = time.perf_counter() - start
            cached = sum(output.num_cached_tokens for output in outputs)
            total = sum(len(output.prompt_token_ids) for output in outputs)
            print(f"--- {call}: {seconds:.2f} s, {cached} of {total} prompt tokens came from the prefix cache\n")
        for name, output in zip(SPEAKERS, outputs, strict=True):
            print(f"{name}:\n{output.outputs[0].text.strip()}\n")
        answer = llm.chat([{"role": "user", "content": "What news, my lord?"}], params, use_tqdm=False)
        print(f"user: What news, my lord?\nassistant: {answer[0].outputs[0].text.strip()}\n")
        stats = llm.metrics()
        print(f"prefix cache: {stats.hit_tokens} of {stats.queried_tokens} prompt tokens found")


if __name__ == "__main__":
    main()
