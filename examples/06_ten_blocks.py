"""Lesson 6: ten blocks of four tokens, three requests, step by step - and then as a page to play with.

    python examples/06_ten_blocks.py            writes ten_blocks.jsonl and ten_blocks.html

The example of vLLM's design document on prefix caching. Two rules differ here: a block without a key is taken first
when it is free again, and a block that agrees in part is copied as far as it agrees.

    #  full and in use      ~  in use, being filled     +  cached, used by nobody     .  free
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams
from nanoapc.cli import main as nanoapc_command

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
FIRST = "The king has called his lords to York before the winter, and all of them will come."
SECOND = "Who rides at night?"
THIRD = "More horses than the old bridge can bear, my good lord of Derby, and more yet to come by morning."


def show(llm: LLM, what: str) -> None:
    """One line for the pool and one for the free queue."""
    pool = llm.engine.manager.pool
    cells = []
    for block in pool.blocks:
        mark = ("#" if block.prefix else "~") if block.ref_count else "+" if block.prefix else "."
        cells.append(f"{block.block_id}{mark}{block.ref_count if block.ref_count > 1 else ' '}")
    print(f"{what:52} {' '.join(cells)}")
    print(f"{'':52} free queue: {' '.join(str(block.block_id) for block in pool.free)}")


def main(argv: list[str] | None = None) -> None:
    """Runs the example and makes its trace page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--output", default="ten_blocks", help="name of the trace and its page, without extension")
    args = parser.parse_args(argv)
    trace, page = f"{args.output}.jsonl", f"{args.output}.html"
    with LLM(args.model, block_size=4, num_kv_blocks=10, max_model_len=40, trace=trace) as llm:

        def tokens(text: str, count: int) -> list[int]:
            return llm.get_tokenizer()(text)["input_ids"][:count]

        def add(prompt: list[int], max_tokens: int) -> None:
            llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))

        first = tokens(FIRST, 15)
        second, third = first[:10] + tokens(SECOND, 4), first[:12] + tokens(THIRD, 17)
        show(llm, "ten free blocks")
        add(first, max_tokens=5)
        llm.step()
        show(llm, "request 0: 15 tokens, three full blocks and one more")
        llm.step()
        show(llm, "its first output token fills block 3")
        llm.step()
        show(llm, "its second goes to block 4")
        print(f"\n  request 1 shares 10 of its 14 tokens: {llm.explain(second)}\n")
        add(second, max_tokens=2)
        llm.step()
        show(llm, "request 1 shares 0 and 1, copies 2 tokens of 2 to 5")
        llm.step()
        show(llm, "both have ended; 6 and 4 have no key and go first")
        print(f"\n  request 2 shares 12 of its 29 tokens: {llm.explain(third)}\n")
        add(third, max_tokens=5)
        llm.step()
        show(llm, "request 2 shares 0 1 2 and takes 6 4 7 8 9")
        while llm.has_unfinished_requests():
            llm.step()
        show(llm, "its 33rd token took block 3, which was evicted")
        print(f"\n  request 0's prompt again: {llm.explain(first)}")
        print(f"  hit rate {llm.metrics().hit_rate:.0%}, evictions {llm.metrics().evictions}\n")
    nanoapc_command(["trace", trace, "-o", page])


if __name__ == "__main__":
    main()
