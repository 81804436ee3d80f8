"""Lesson 4: a chat of several turns. Each finds the whole conversation before it, the model's own answers included.

    python examples/04_chat.py

Blocks are filled by prompts and by generated tokens alike, so an answer is cached as it is written. The next turn's
prompt repeats it and adds a message; only the new message is computed. That holds as long as the prompt begins with
exactly the same tokens: a chat template that changes old turns (or puts the date first) makes every turn miss. What is
computed again, at most one block less one token, is the end of the conversation so far: it did not fill a block.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nanoapc
from nanoapc import LLM, SamplingParams

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
MESSAGES = (
    "Good morrow, my lord. What news from the king?",
    "And what says the queen to this?",
    "Then let us ride to York before the night.",
    "Who keeps the bridge, and with how many men?",
)


def main(argv: list[str] | None = None) -> None:
    """Chats, and says for each turn what was cached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=args.max_tokens)
    conversation = [{"role": "system", "content": "Answer as KING RICHARD III."}]
    with LLM(args.model) as llm:
        for message in MESSAGES:
            conversation.append({"role": "user", "content": message})
            (output,) = llm.chat(conversation, params, use_tqdm=False)
            answer = output.outputs[0].text
            conversation.append({"role": "assistant", "content": answer})
            total, cached = len(output.prompt_token_ids), output.num_cached_tokens
            print(f"[{cached} of {total} prompt tokens cached, {total - cached} computed]")
            print(f"you: {message}\nking: {answer.strip()}\n")
        print(f"all turns: hit rate {llm.metrics().hit_rate:.1%}")


if __name__ == "__main__":
    main()
