"""run_batch: an OpenAI batch file in, a file of results out, nothing lost.

    input -> Plan (checked, in prefix order) -> RequestReader -> LLM.stream -> result lines -> Journal (appended)

Invariant: every line of the input has exactly one result in the end, however often the run is killed and repeated in
between; memory does not grow with the file.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoapc.batch_format import RequestLine, RequestReader, encode_line, error_line, result_line
from nanoapc.batch_journal import Journal
from nanoapc.batch_plan import Plan, count_forest
from nanoapc.batch_report import BatchSummary, DryRun
from nanoapc.config import EngineConfig
from nanoapc.engine.engine import load_tokenizer, resolve_max_model_len
from nanoapc.inputs import InputProcessor
from nanoapc.llm import LLM
from nanoapc.models.checkpoint import resolve_model
from nanoapc.models.config import ModelConfig

logger = logging.getLogger(__name__)

GROUP_LINES, GROUP_BYTES = 256, 4 * 2**20
"""Lines that are read and tokenised together, at most."""
MAX_NAMED = 20
"""Bad lines that a message names."""

Line = tuple[int, bytes]
Emit = Callable[[int, Mapping[str, Any]], None]


class BatchStopped(RuntimeError):
    """The run ended early; what is finished is in the output, and the same call goes on from there."""


class StoppedBySignal(KeyboardInterrupt):
    """SIGINT or SIGTERM (signum) ended the run, between two results."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


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
    paths = [os.fspath(path) for path in (input_path, output_path, *([error_file] if error_file else []))]
    _check_paths(paths)
    names = _model_names(llm.engine.config.model if isinstance(llm, LLM) else os.fspath(llm), served_model_names)
    with ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        plan = stack.enter_context(_checked_plan(paths[0], names, quiet))
        journals = [stack.enter_context(Journal(path)) for path in paths[1:]]
        summary = _resume(plan, journals)
        if ordered and not plan.in_order_so_far():
            raise ValueError(f"{paths[1]} has results that are not in input order; continue it without ordered")
        answer_lines = None
        if plan.num_left and ray_workers is not None:
            answer_lines = _on_ray(llm, engine_options, names, ray_workers, plan.num_left)
        elif plan.num_left:
            engine = llm if isinstance(llm, LLM) else stack.enter_context(LLM(llm, **engine_options))
            answer_lines = partial(answer, engine, names)
        with _Writer(plan, journals, summary, signals, ordered, quiet) as writer:
            if answer_lines is not None:
                answer_lines(plan.lines(ordered), writer.emit)
            for journal in journals:
                journal.complete()
    return summary


def answer(llm: LLM, model_names: Sequence[str], lines: Iterable[Line], emit: Emit) -> None:
    """Runs (number, line) pairs, read as they are needed; calls emit(number, result) as each finishes."""
    reader = RequestReader(llm.inputs, model_names, llm.engine.config.seed)
    running: dict[int, RequestLine] = {}

    def requests() -> Iterator[RequestLine]:
        index = 0
        for group in _groups(lines):
            for line in reader.read(group):
                if line.error is not None:
                    emit(line.number, error_line(line, line.error))
                    continue
                running[index] = line
                index += 1
                yield line

    prompts, params = tee(requests())  # `stream` reads both in step
    for output in llm.stream((line.prompt for line in prompts), (line.params for line in params if line.params)):
        line = running.pop(output.index)
        emit(line.number, result_line(line, output, model_names[0]))


def _groups(lines: Iterable[Line]) -> Iterator[list[Line]]:
    group: list[Line] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line[1])
        if len(group) == GROUP_LINES or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def _on_ray(
    llm: Any, options: dict[str, Any], names: Sequence[str], num_workers: int, num_lines: int
) -> Callable[[Iterable[Line], Emit], None]:
    if isinstance(llm, LLM):
        raise ValueError("ray_workers needs a model's name instead of an LLM: each worker makes its own")
    from nanoapc.ray import answer_on_workers

    EngineConfig.from_arguments(llm, **options)  # a bad option is found here, not in a worker
    return partial(answer_on_workers, os.fspath(llm), options, names, num_workers, num_lines)


# -- before anything runs ------------------------------------------------------------------------------------


def _check_paths(paths: Sequence[str]) -> None:
    """Refuses outputs that are the input or each other (links are followed), or whose folder is not there."""
    if paths[1:].count("-") > 1:
        raise ValueError("output and error file are both standard output; give one of them a file")
    files = [Path(path) for path in paths if path != "-"]
    for i, path in enumerate(files):
        for other in files[:i]:
            linked = path.is_file() and other.is_file() and path.samefile(other)
            if linked or path.resolve() == other.resolve():
                raise ValueError(f"{other} and {path} are the same file; input, output and error file must differ")
    for path in map(Path, paths[1:]):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")


def _model_names(model: str, others: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([model, Path(model).name, *others]))


def _checked_plan(path: str, names: Sequence[str], quiet: bool) -> Plan:
    plan = Plan(path, quiet)
    if plan.models and plan.models.isdisjoint({None, *names}):
        plan.close()
        asked = ", ".join(sorted(map(repr, plan.models))[:5])
        remedy = "to let it answer all the same, add the name with --served-model-name (served_model_names)"
        raise ValueError(f"{path} asks for the model {asked}, but {names[0]!r} is loaded; {remedy}")
    return plan


def _resume(plan: Plan, journals: Sequence[Journal]) -> BatchSummary:
    """Takes what is finished out of the plan."""
    summary = BatchSummary(total=plan.total)
    changed: list[str] = []
    for journal in journals:
        for result in journal.finished():
            same = plan.mark_done(result["custom_id"], result["id"].removeprefix("batch_req_"))
            if same is None:
                summary.foreign += 1
                continue
            summary.resumed += 1
            summary.done += result["error"] is None
            summary.failed += result["error"] is not None
            if not same:
                summary.changed += 1
                changed += [repr(result["custom_id"])] * (len(changed) < MAX_NAMED)
    if summary.foreign and not summary.resumed:
        raise ValueError(f"{journals[0].path} holds results of another input; choose another output")
    if summary.foreign:
        logger.warning("%d results in the output belong to no line of the input; they stay", summary.foreign)
    if changed:
        what = "lines ask for something else than when they were answered; their old results stay"
        logger.warning("%d %s until you remove them: %s", summary.changed, what, ", ".join(changed))
    return summary


# -- while it runs -------------------------------------------------------------------------------------------


class _Writer:
    """Appends results, counts them and shows how far the run is; turns an exception into BatchStopped."""

    def __init__(
        self,
        plan: Plan,
        journals: Sequence[Journal],
        summary: BatchSummary,
        signals: _Signals,
        ordered: bool,
        quiet: bool,
    ):
        self._journals, self._summary, self._signals = journals, summary, signals
        self._put = plan.in_input_order(self._write) if ordered else lambda number, *result: self._write(*result)
        self._start = time.perf_counter()
        wait = 0.5 if sys.stderr.isatty() else 10
        self._bar = tqdm(total=plan.total, initial=summary.resumed, unit="line", disable=quiet, mininterval=wait)

    def emit(self, number: int, result: Mapping[str, Any]) -> None:
        """One more result."""
        with self._signals.held():
            self._put(number, encode_line(result), result["error"] is not None)
        self._summary.count(result)
        self._summary.seconds = time.perf_counter() - self._start
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{self._summary.failed} failed, {self._summary.rates()}", refresh=False)
            self._bar.update()

    def _write(self, line: bytes, failed: bool) -> None:
        self._journals[-1 if failed else 0].write(line)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bar.close()
        if isinstance(error, Exception):
            finished = f"{self._summary.done + self._summary.failed} of {self._summary.total} lines are finished"
            message = f"{type(error).__name__}: {error}. {finished}; the same command goes on from there"
            raise BatchStopped(message) from error


class _Signals:
    """SIGINT and SIGTERM raise StoppedBySignal, but not inside `held`; a second one ends the process at once."""

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}
        self._received = 0
        self._is_held = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():  # only there handlers can be set
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) != signal.SIG_IGN:
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
    names = _model_names(os.fspath(model), served_model_names)
    config = EngineConfig.from_arguments(model, **engine_options)
    directory = resolve_model(config.model)
    model_config = ModelConfig.from_directory(directory)
    tokenizer = load_tokenizer(config, str(directory))
    inputs = InputProcessor(tokenizer, model_config.vocab_size, resolve_max_model_len(config, model_config))
    reader = RequestReader(inputs, names, config.seed)
    result = DryRun()

    def prompts(plan: Plan) -> Iterator[Mapping[str, Any]]:
        for group in _groups(tqdm(plan.lines(ordered=True), "Checking", plan.total, leave=False, disable=quiet)):
            for line in reader.read(group):
                if line.error is None:
                    yield line.prompt
                    continue
                result.failed += 1
                result.errors += [f"line {line.number} ({line.custom_id}): {line.error}"] * (result.failed <= MAX_NAMED)

    with _checked_plan(os.fspath(input_path), names, quiet) as plan:
        result.total = plan.total
        result.prompt_tokens, result.unique_tokens, result.hit_tokens = count_forest(prompts(plan))
    return result
