"""Lesson 1: one prompt. What becomes of it, what stays in the cache, and what a second run finds there.

    python examples/01_one_prompt.py

A prompt becomes tokens, and tokens lie in blocks of 16. A full block gets a key, made of its tokens and the key of the
block before it, and can be found under that key from then on - also after its request has ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
PROMPT = "KING RICHARD:\nWhat news from the north, my lord? Speak plainly, for the night is short and our horses wait."


def main(argv: list[str] | None = None) -> None:
    """Runs the prompt twice and looks into the cache in between."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(args.model, block_size=16) as llm:
        tokens = llm.get_tokenizer()(PROMPT)["input_ids"]
        print(f"{len(PROMPT)} characters are {len(tokens)} tokens, in {-(-len(tokens) // 16)} blocks of 16:\n")
        for start in range(0, len(tokens), 16):
            block = tokens[start : start + 16]
            state = "full, so it will be cached" if len(block) == 16 else f"{len(block)} of 16 tokens"
            print(f"  block {start // 16}: {llm.get_tokenizer().decode(block)!r} ({state})")

        print(f"\nbefore the first run: {llm.explain(PROMPT)}")
        (first,) = llm.generate(PROMPT, params, use_tqdm=False)
        print(f"first run:  {first.num_cached_tokens} prompt tokens cached. It says: {first.outputs[0].text!r}")
        print(f"\nbefore the second run: {llm.explain(PROMPT)}")
        (second,) = llm.generate(PROMPT, params, use_tqdm=False)
        print(f"second run: {second.num_cached_tokens} prompt tokens cached. The same text: ", end="")
        print(second.outputs[0].text == first.outputs[0].text)

        print(f"\nanother beginning: {llm.explain('QUEEN: ' + PROMPT)}")
        print(f"another ending:    {llm.explain(PROMPT[:-20] + 'and the king is dead.')}")


if __name__ == "__main__":
    main()
