"""A batch file: checked, planned, answered, interrupted and continued.

    python examples/batch_file.py
    python examples/batch_file.py --model Qwen/Qwen3-0.6B --lines 500

The same from the command line:

    nanoapc run-batch -i in.jsonl --dry-run --model MODEL
    nanoapc run-batch -i in.jsonl -o out.jsonl --model MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import nanoapc
from nanoapc import LLM
from nanoapc.batch_file import dry_run, run_batch

EMBEDDED = Path(nanoapc.__file__).parent / "embedded"
SPEAKERS = ("ROMEO", "JULIET", "KING RICHARD III", "First Citizen")
RULES = "You are {name}. Answer as {name} would, in verse, and never say that you are on a stage. "


def batch_line(number: int) -> str:
    """One request: lines of one speaker share the system message, and they come in turn."""
    system = {"role": "system", "content": RULES.format(name=SPEAKERS[number % len(SPEAKERS)]) * 4}
    body = {"messages": [system, {"role": "user", "content": f"Question {number}: what news?"}], "max_tokens": 12}
    line = {"custom_id": f"question-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line)


def main(argv: list[str] | None = None) -> None:
    """Writes a batch file, runs it, tears its output, and continues."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED), help="a directory or a Hugging Face hub name")
    parser.add_argument("--lines", type=int, default=60)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/in.jsonl", f"{folder}/out.jsonl"
        good = [batch_line(i) for i in range(args.lines)]
        bad = json.dumps({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}})
        Path(source).write_text("\n".join([*good, bad]) + "\n")
        print("plan:", dry_run(source, args.model, quiet=True), "\n")
        with LLM(args.model) as llm:
            print("run:", run_batch(source, target, llm, quiet=True), "\n")
            for line in Path(target).read_text().splitlines()[:3]:
                result = json.loads(line)
                body = result["response"]["body"]
                print(result["custom_id"], "->", json.dumps(body.get("choices", body.get("error")))[:160], "\n")
            os.truncate(target, os.path.getsize(target) // 2)  # as if the run had been killed in a write
            print("continued:", run_batch(source, target, llm, quiet=True))
        ids = [json.loads(line)["custom_id"] for line in Path(target).read_text().splitlines()]
        print(f"{len(ids)} results, {len(set(ids))} ids")


if __name__ == "__main__":
    main()
