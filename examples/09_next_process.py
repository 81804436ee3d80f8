"""Lesson 9: the next process. What one process has computed, the next one reads from a file instead of computing it.

    python examples/09_next_process.py

A job ends, and with it, in other engines, all that it has cached. `prefix_cache_file` keeps it: written when the LLM
is closed, read when one is made with the same model. Here the same questions about a document are asked twice.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
DOCUMENT = "The king hath many marching in his coats, and every one of them a crown beneath his helm. "
QUESTIONS = ["Who marches?", "In what?", "Whose coats?", "What is beneath the helm?"]


def main(argv: list[str] | None = None) -> None:
    """Asks the questions with a new LLM, and with another one after it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--sentences", type=int, default=60, help="length of the document")
    args = parser.parse_args(argv)
    prompts = [f"{DOCUMENT * args.sentences}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefixes"
        for which in ("first", "second"):
            with LLM(args.model, prefix_cache_file=file) as llm:
                llm.generate("Warm up.", params, use_tqdm=False)
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                milliseconds = (time.perf_counter() - start) * 1e3
            texts.append([output.outputs[0].text for output in outputs])
            cached = sum(output.num_cached_tokens for output in outputs)
            total = sum(len(output.prompt_token_ids) for output in outputs)
            print(f"the {which} LLM: {milliseconds:6.1f} ms, {total - cached} of {total} prompt tokens computed")
            print(f"  it leaves a file of {file.stat().st_size / 2**20:.1f} MiB behind")
    print(f"\nThe same texts: {texts[0] == texts[1]}. The file is used only with the same weights, config and kernels,")
    print("so the results are, to the last bit, those of a run without it.")


if __name__ == "__main__":
    main()
