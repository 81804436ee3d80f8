"""Lesson 3: a long document and many questions about it, in one call.

    python examples/03_many_questions.py

Within one call it does not matter who comes first: a block can be shared from the moment that it is going to be filled,
so all questions run in one step with the first one's document. And while they are answered together, attention reads
the document's K/V once for all of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams
from nanoapc.trace import read_trace

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
SENTENCES = (
    "The king has called his lords to York before the winter.",
    "My lord of Derby brings four hundred horse and little love.",
    "The queen keeps her chamber and will speak with no one.",
    "A letter came by night, and who has read it will not say.",
    "They say the bridge at Kent is down and the river high.",
)


def main(argv: list[str] | None = None) -> None:
    """Asks all questions at once, and looks at the steps afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--sentences", type=int, default=45, help="of the document")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args(argv)
    document = " ".join(SENTENCES[i % len(SENTENCES)] for i in range(args.sentences))
    prompts = [f"{document}\n\nQuestion {i}: what does the king do next? Answer:" for i in range(args.questions)]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, trace=f"{folder}/run.jsonl") as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        metrics = llm.metrics()
        total = sum(len(output.prompt_token_ids) for output in outputs)
        print(f"{args.questions} questions, {total} prompt tokens, {seconds:.2f} s")
        print(f"computed {metrics.computed_prompt_tokens} of them; hit rate {metrics.hit_rate:.1%}")
        print(f"blocks in the cache: {metrics.cached_blocks}, so {metrics.cached_blocks * 16} tokens\n")
        print("step  sequences  tokens  KV positions read  without sharing")
        sequences = 0
        for line in read_trace(f"{folder}/run.jsonl").lines[:6]:
            sequences = len(line.get("run", ())) or sequences
            tokens = sum(count for _, _, count in line["run"]) if "run" in line else sequences
            print(f"{line['step']:4} {sequences:10} {tokens:7} {line['read']:18} {line['unshared']:16}")


if __name__ == "__main__":
    main()
