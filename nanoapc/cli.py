"""The command line: `nanoapc run-batch`, `nanoapc trace`.

Engine options are the fields of `EngineConfig`, so a new one is here as soon as it is there.
Exit codes: 0 all lines are answered; 1 some are not; 2 nothing could start; 128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

from nanoapc import trace
from nanoapc.batch_file import BatchStopped, StoppedBySignal, dry_run, run_batch
from nanoapc.config import EngineConfig

TYPES = {"int": int, "float": float, "str": str}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nanoapc", description="Offline batch inference with prefix caching.")
    commands = parser.add_subparsers(title="commands", required=True)
    _add_run_batch(commands)
    trace.add_parser(commands)
    given = sys.argv[1:] if arguments is None else arguments
    # Options may be written as the arguments of LLM are.
    args = parser.parse_args([re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in given])
    return int(args.run(args))


def _add_run_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer an OpenAI batch file",
        description="Answers the lines of an OpenAI batch file. Repeated, it goes on where it was interrupted.",
        epilog="Exit codes: 0 all lines answered; 1 some not; 2 nothing could start; 130, 143 stopped by a signal.",
    )
    add = parser.add_argument
    add("-i", "--input-file", required=True, help="the batch file; '-' is standard input; .gz and .zst are read, too")
    add("-o", "--output-file", help="the results; '-' is standard output; a .gz or .zst is compressed at the end")
    add("--error-file", help="where results of failed lines go, if not to the output")
    add("--ordered", action="store_true", help="results in the order of the input, not as they finish")
    add("--served-model-name", action="append", default=[], help="a name that 'model' may have in a line (repeatable)")
    add("--dry-run", action="store_true", help="check all lines and count their tokens; no model is loaded")
    add("--quiet", action="store_true", help="no progress and no summary")
    add("--ray", type=int, metavar="WORKERS", help="run on so many workers of a Ray cluster (RAY_ADDRESS), or locally")
    _add_engine_options(parser.add_argument_group("engine options"))
    parser.set_defaults(run=_run_batch)


def _add_engine_options(group: Any) -> None:
    """One option for each field of EngineConfig; options that are not given are not in the result."""
    meanings = dict(re.findall(r"^(\w+): (.*(?:\n .*)*)", inspect.getdoc(EngineConfig) or "", re.MULTILINE))
    for field in dataclasses.fields(EngineConfig):
        kind = str(field.type).removesuffix(" | None")
        action: dict[str, Any] = {"type": TYPES.get(kind, str), "metavar": kind.upper()}
        if kind == "bool":
            action = {"action": argparse.BooleanOptionalAction}
        required = field.default is dataclasses.MISSING
        default = "" if required else f" (default: {field.default})"
        meaning = " ".join(meanings.get(field.name, "").split()) + default
        flag, text = "--" + field.name.replace("_", "-"), meaning.replace("%", "%%")
        group.add_argument(flag, help=text, required=required, default=argparse.SUPPRESS, **action)


def _run_batch(args: argparse.Namespace) -> int:
    given = [field.name for field in dataclasses.fields(EngineConfig) if field.name in args]
    options = {name: getattr(args, name) for name in given}
    model = options.pop("model")
    options |= {"quiet": args.quiet, "served_model_names": args.served_model_name}
    try:
        if args.dry_run:
            checked = dry_run(args.input_file, model, **options)
            unnamed = checked.failed - len(checked.errors)
            for text in (*checked.errors, *[f"... {unnamed} more"] * (unnamed > 0)):
                _print_error(text)
            print(checked)
            return int(checked.failed > 0)
        if args.output_file is None:
            raise ValueError("say where the results go: -o FILE, or -o - for standard output")
        options |= {"error_file": args.error_file, "ordered": args.ordered, "ray_workers": args.ray}
        summary = run_batch(args.input_file, args.output_file, model, **options)
    except StoppedBySignal as stop:
        _say(f"stopped by {stop}" + ("" if args.output_file == "-" else "; repeat the command to go on"))
        return 128 + stop.signum
    except KeyboardInterrupt:  # of a dry run, which leaves nothing to go on from
        _say("stopped")
        return 130
    except BatchStopped as error:
        _say(f"stopped: {error}")
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, sqlite3.Error) as error:
        _say(f"error: {error}")
        return 2
    if summary.total == 0:
        _say(f"{args.input_file} has no requests")
    elif not args.quiet:
        _say(str(summary))
    return summary.exit_code


def _say(text: str) -> None:
    _print_error(f"nanoapc run-batch: {text}")


def _print_error(text: str) -> None:
    if sys.stderr is not None:  # else print would take standard output, where results may go
        print(text, file=sys.stderr)
