"""run_batch: an OpenAI batch file in, a file of results out, nothing lost.

    input -> BatchPlan (checked, in prefix order) -> RequestReader -> LLM.stream -> result lines -> Journal (appended)

Invariant: every line of the input has exactly one result in the end, however often the run is killed and repeated in
between; memory does not grow with the file. Computed and cached prompt tokens are told apart; a rate of prompt tokens
counts computed ones only.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, permutations, tee
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoapc.batch_format import Line, RequestLine, RequestReader, encode_line, error_line, is_named, result_line
from nanoapc.batch_journal import Journal, OutputLost, output_files
from nanoapc.batch_plan import BatchPlan, count_forest
from nanoapc.config import FILES, EngineConfig
from nanoapc.engine.engine import make_inputs
from nanoapc.llm import LLM
from nanoapc.models.checkpoint import TOKENIZER_PATTERNS, resolve_model
from nanoapc.models.config import ModelConfig

logger = logging.getLogger(__name__)

MAX_NAMED = 20
"""Bad lines that a message names."""
ADD = "add the name with --served-model-name (served_model_names)"
"""The remedy for a model of another name."""

Emit = Callable[[int, Mapping[str, Any]], None]


class BatchStopped(RuntimeError):
    """The run ended early; what is finished is in the output, and the same call goes on from there."""


class StoppedBySignal(KeyboardInterrupt):
    """SIGINT or SIGTERM (signum) ended the run, between two results."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass
class BatchSummary:
    """What stands in the results, and what this run did for it: tokens and seconds are of this run alone."""

    total: int = 0  # lines of the input
    done: int = 0  # lines with an answer
    failed: int = 0  # lines with an error
    resumed: int = 0  # lines that had their result before this run
    changed: int = 0  # of these, those that ask for something else now (the old result stays)
    foreign: int = 0  # results of no line of the input, or of one that has its result already
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those that were saved; the others were computed
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: every line has an answer to what it asks. 1: not so."""
        return int(self.done != self.total or self.changed > 0)

    def count(self, result: Mapping[str, Any], resumed: bool = False) -> None:
        """One more result, of this run or of one before it."""
        self.done += result["error"] is None
        self.failed += result["error"] is not None
        self.resumed += resumed
        if not resumed and (usage := result["response"]["body"].get("usage")):
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            self.output_tokens += usage["completion_tokens"]

    def rates(self) -> str:
        """Tokens a second and hit rate."""
        seconds = max(self.seconds, 1e-9)
        prompt, output = (self.prompt_tokens - self.cached_tokens) / seconds, self.output_tokens / seconds
        hit_rate = self.cached_tokens / max(self.prompt_tokens, 1)
        return f"prompt {prompt:.0f} tok/s, output {output:.0f} tok/s, hit rate {hit_rate:.1%}"

    def __str__(self) -> str:
        resumed = f" ({self.resumed} before this run)" if self.resumed else ""
        lines = f"{self.done} of {self.total} lines answered, {self.failed} failed{resumed}"
        if not self.prompt_tokens:
            return lines
        saved = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens saved"
        return f"{lines}; {self.seconds:.1f} s, {self.rates()}, {saved}"


def run_batch(
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    llm: LLM | str | os.PathLike[str],
    *,
    error_file: str | os.PathLike[str] | None = None,
    ordered: bool = False,
    quiet: bool = False,
    served_model_names: Sequence[str] = (),
    ray_workers: int | None = None,
    **engine_options: Any,
) -> BatchSummary:
    """Answers the lines of an OpenAI batch file that have no result yet.

    Args:
        input_path, output_path: files; "-" is standard input or output.
        llm: an LLM; or a model and engine_options (see `EngineConfig`) to make one with, once the input is checked.
        error_file: where results of failed lines go; None: to the output, too.
        ordered: results in the order of the input, not as they finish.
        quiet: no progress on standard error.
        served_model_names: what "model" may say in a line, besides the model's own name.
        ray_workers: run on so many workers of a Ray cluster (see `nanoapc.ray`).

    Raises:
        ValueError, OSError: nothing could start; the message says why. (sqlite3.Error: no room for temporary files.)
        BatchStopped: an error ended it half way. StoppedBySignal (a KeyboardInterrupt): a signal did.
        After these two everything finished is in the output, and the same call goes on from there.
    """
    if isinstance(llm, LLM) and (engine_options or ray_workers is not None):
        raise ValueError("engine options and ray_workers need a model's name instead of an LLM, which has its engine")
    config = llm.engine.config if isinstance(llm, LLM) else EngineConfig.from_arguments(llm, **engine_options)
    if ray_workers is not None:
        _check_workers(ray_workers, config)
        from nanoapc.ray import answer_on_workers  # now: Ray may be missing

    paths = [os.fspath(path) for path in (input_path, output_path, error_file) if path is not None]
    _check_paths(paths, [getattr(config, name) for name in FILES if getattr(config, name) is not None])
    quiet = quiet or sys.stderr is None
    names = _model_names(config.model, served_model_names)
    with ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        plan = stack.enter_context(closing(BatchPlan(paths[0], quiet)))
        _check_models(plan, names)
        journals = [stack.enter_context(Journal(path)) for path in paths[1:]]
        summary = _resume(plan, journals, names)
        if ordered and not plan.in_order_so_far():
            raise ValueError(f"{paths[1]} has results that are not in input order; continue it without ordered")
        engine = llm if isinstance(llm, LLM) else None
        if engine is None and ray_workers is None and plan.num_left:
            engine = stack.enter_context(LLM(config.model, **engine_options))
        with _writer(plan, journals, summary, signals, ordered, quiet) as emit:
            if engine is not None:
                answer(engine, names, plan.lines(ordered), emit)
            elif ray_workers is not None and plan.num_left:
                lines = plan.lines(ordered)
                answer_on_workers(config.model, engine_options, names, ray_workers, plan.num_left, lines, emit)
            for journal in journals:
                journal.complete()
    return summary


def answer(llm: LLM, model_names: Sequence[str], lines: Iterable[Line], emit: Emit) -> None:
    """Runs (number, line) pairs, read as they are needed; calls emit(number, result) as each finishes."""
    reader = RequestReader(llm.inputs, model_names, llm.engine.config.seed)
    running: dict[int, RequestLine] = {}

    def requests() -> Iterator[RequestLine]:
        index = 0
        for line in reader.read(lines):
            if line.error is not None:
                emit(line.number, error_line(line, line.error))
                continue
            running[index] = line
            index += 1
            yield line

    prompts, params = tee(requests())  # `stream` reads both in step
    for output in llm.stream((line.prompt for line in prompts), (line.params for line in params if line.params)):
        line = running.pop(output.index)
        emit(line.number, result_line(line, output, model_names[0], llm.inputs.tokenizer))


# -- before anything runs ------------------------------------------------------------------------------------


def _check_paths(paths: Sequence[str], engine_files: Sequence[str]) -> None:
    """Refuses outputs that are the input, each other or a file of the engine (links are followed), or whose folder is
    not there. What a run makes beside an output counts as the output."""
    if not all(map(os.path.basename, paths[1:])):
        raise ValueError("output or error file is no name of a file; give one, or - for standard output")
    if paths[1:].count("-") > 1:
        raise ValueError("output and error file are both standard output; give one of them a file")
    made = {path: output_files(path) for path in paths[1:] if path != "-"}
    for path, other in permutations([path for path in (*paths, *engine_files) if path != "-"], 2):
        if any(_is_same_file(file, Path(other)) for file in made.get(path, [Path(path)])):
            what = f"{path}, or what a run makes beside it (its lock, its part)"
            raise ValueError(f"{other} is the same file as {what}; input, outputs and the engine's files must differ")
    for path, files in made.items():
        if not files[0].parent.is_dir():
            raise ValueError(f"{path}: there is no folder {files[0].parent}")


def _check_workers(ray_workers: int, config: EngineConfig) -> None:
    if ray_workers < 1:
        raise ValueError(f"ray_workers={ray_workers} (--ray) must be at least 1")
    for name in FILES:
        if getattr(config, name) is not None:
            raise ValueError(f"{name} is for one process; leave it out where ray_workers make an LLM each")


def _is_same_file(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b) or (a.is_file() and b.is_file() and a.samefile(b))


def _model_names(model: str, others: Sequence[str]) -> list[str]:
    directory = os.path.abspath(model)
    others = [others] if isinstance(others, str) else others
    return list(dict.fromkeys([model, directory, os.path.basename(directory), *others]))


def _check_models(plan: BatchPlan, names: Sequence[str]) -> None:
    if plan.models and not any(model is None or is_named(model, names) for model in plan.models):
        asked = ", ".join(sorted(map(repr, plan.models))[:5])
        raise ValueError(f"{plan.path} asks for the model {asked}, but {names[0]!r} is loaded; to let it answer, {ADD}")


def _resume(plan: BatchPlan, journals: Sequence[Journal], names: Sequence[str]) -> BatchSummary:
    """Takes what is finished out of the plan."""
    summary = BatchSummary(total=plan.total)
    changed: list[str] = []
    for result in chain.from_iterable(journal.finished() for journal in journals):
        same = plan.mark_done(result["custom_id"], result["id"].removeprefix("batch_req_"))
        if same is None:
            summary.foreign += 1
            continue
        model = result["response"]["body"].get("model", names[0])
        if result["error"] is None and not is_named(model, names):
            what = f"answers of the model {model!r}, not of {names[0]!r}"
            raise ValueError(f"{journals[0].path} holds {what}; choose another output, or {ADD}")
        summary.count(result, resumed=True)
        if not same:
            summary.changed += 1
            changed += [repr(result["custom_id"])] * (len(changed) < MAX_NAMED)
    if summary.foreign and not summary.resumed:
        raise ValueError(f"{journals[0].path} holds results of another input; choose another output")
    if summary.foreign:
        logger.warning("%d results in the output are of no line of the input, or repeated; they stay", summary.foreign)
    if changed:
        what = "lines ask for something else than when they were answered; their old results stay"
        logger.warning("%d %s until you remove them: %s", summary.changed, what, ", ".join(changed))
    return summary


# -- while it runs -------------------------------------------------------------------------------------------


@contextmanager
def _writer(
    plan: BatchPlan, journals: Sequence[Journal], summary: BatchSummary, signals: _Signals, ordered: bool, quiet: bool
) -> Iterator[Emit]:
    """Gives a function that appends, counts and shows one more result; an exception becomes BatchStopped."""

    def write(number: int, line: bytes, failed: bool) -> None:
        journals[-1 if failed else 0].write(line)

    put = plan.in_input_order(write) if ordered else write
    start, wait = time.perf_counter(), 0.5 if sys.stderr and sys.stderr.isatty() else 10
    with tqdm(total=plan.total, initial=summary.resumed, unit="line", disable=quiet, mininterval=wait) as bar:

        def emit(number: int, result: Mapping[str, Any]) -> None:
            with signals.held():
                put(number, encode_line(result), result["error"] is not None)
            summary.count(result)
            summary.seconds = time.perf_counter() - start
            bar.set_postfix_str(f"{summary.failed} failed, {summary.rates()}", refresh=False)
            bar.update()

        try:
            yield emit
        except OutputLost as error:
            raise BatchStopped(str(error)) from error
        except Exception as error:
            finished = f"{summary.done + summary.failed} of {summary.total} lines are finished"
            again = "" if any(journal.is_stream for journal in journals) else "; the same command goes on from there"
            raise BatchStopped(f"{type(error).__name__}: {error}. {finished}{again}") from error


class _Signals:
    """SIGINT and SIGTERM raise StoppedBySignal, but not inside `held`; a second one ends the process at once."""

    def __enter__(self) -> _Signals:
        self._old: dict[int, Any] = {}
        self._received, self._is_held = 0, False
        is_main = threading.current_thread() is threading.main_thread()  # only there handlers can be set
        for signum in (signal.SIGINT, signal.SIGTERM):
            if is_main and signal.getsignal(signum) != signal.SIG_IGN:
                self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: object) -> None:
        for number in self._old:
            signal.signal(number, signal.SIG_DFL)
        self._received = signum
        if not self._is_held:
            raise StoppedBySignal(signum)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes inside is raised at the end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._received:
            raise StoppedBySignal(self._received)


# -- without a model -----------------------------------------------------------------------------------------


@dataclass
class DryRun:
    """What a file would ask of the engine."""

    total: int = 0
    failed: int = 0  # lines that would get an error line
    errors: list[str] = field(default_factory=list)  # the first of them
    prompt_tokens: int = 0  # of the good lines
    unique_tokens: int = 0  # nodes of their prefix forest
    hit_tokens: int = 0  # what an endless prefix cache would find in whole blocks; parts of blocks come on top

    def __str__(self) -> str:
        tokens = f"{self.prompt_tokens} prompt tokens, {self.unique_tokens} of them unique"
        hit_rate = f"{self.hit_tokens / max(self.prompt_tokens, 1):.1%}"
        return f"{self.total} lines, {self.failed} with errors; {tokens}; planned hit rate {hit_rate} (whole blocks)"


def dry_run(
    input_path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    quiet: bool = False,
    served_model_names: Sequence[str] = (),
    **engine_options: Any,
) -> DryRun:
    """Checks every line as `run_batch` does, with the model's tokenizer but without its weights.

    Raises:
        ValueError, OSError: as in `run_batch`.
    """
    names, quiet = _model_names(os.fspath(model), served_model_names), quiet or sys.stderr is None
    config = EngineConfig.from_arguments(model, **engine_options)
    directory = resolve_model(config.model, TOKENIZER_PATTERNS)
    inputs = make_inputs(config, directory, ModelConfig.from_directory(directory, "float32"))  # any: nothing runs
    reader = RequestReader(inputs, names, config.seed)
    result = DryRun()

    def prompts(plan: BatchPlan) -> Iterator[Mapping[str, Any]]:
        for line in reader.read(tqdm(plan.lines(ordered=True), "Checking", plan.total, leave=False, disable=quiet)):
            if line.error is None:
                yield line.prompt
                continue
            result.failed += 1
            # An error without a custom_id names the line itself.
            where = "" if line.custom_id is None else f"line {line.number} ({line.custom_id}): "
            result.errors += [f"{where}{line.error}"] * (result.failed <= MAX_NAMED)

    with closing(BatchPlan(os.fspath(input_path), quiet)) as plan:
        _check_models(plan, names)
        result.total = plan.total
        result.prompt_tokens, result.unique_tokens, hits = count_forest(prompts(plan), config.block_size)
    result.hit_tokens = hits if config.enable_prefix_caching else 0
    return result
