"""More than one machine: Ray Data spreads a batch over workers with one LLM each (needs the extra `ray`).

    dataset = partition_by_prefix(ray.data.read_json("prompts/"), num_partitions=64)
    engine = {"model": "Qwen/Qwen3-0.6B", "sampling_params": {"max_tokens": 64}}
    pool = ray.data.ActorPoolStrategy(size=8)
    dataset.map_batches(LLMWorker, fn_constructor_kwargs=engine, compute=pool, batch_size=None, num_gpus=1)

Ray starts the workers, hands each a partition at a time, and starts those that die again, with the partition they had.
Invariant: a partition is a range of the prefix order, so what its prompts share is computed by one worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

try:
    import pyarrow  # type: ignore[import-not-found]
    import ray
    import ray.data
except ImportError as error:
    raise ImportError(f"several machines need Ray ({error}): pip install 'nanoapc[ray]'") from None

from nanoapc.batch_file import Emit, answer
from nanoapc.batch_format import Line, encode_line
from nanoapc.batch_plan import prefix_key
from nanoapc.inputs import groups
from nanoapc.llm import LLM
from nanoapc.sampling_params import SamplingParams

KEY = "prefix_key"
MAX_PARTITION_LINES = 2048
"""Enough to keep a worker busy between two partitions, few enough to be lost with a worker."""


class LLMWorker:
    """For `Dataset.map_batches`: one LLM in each worker.

    Args:
        model, engine_options: as for `LLM`.
        sampling_params: fields of SamplingParams, for all rows.

    A batch has a column "prompt" (texts, or lists of token ids) or "messages" (conversations). It comes back with
    "generated_text" and "finish_reason" (of the first output), "num_prompt_tokens" and "num_cached_tokens".
    """

    def __init__(self, model: str, sampling_params: Mapping[str, Any] | None = None, **engine_options: Any):
        self._llm = LLM(model, **engine_options)
        self._params = SamplingParams(**(sampling_params or {}))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Answers the rows of one batch, columns [n]."""
        if "messages" in batch:
            outputs = self._llm.chat(list(batch["messages"]), self._params, use_tqdm=False)
        else:
            outputs = self._llm.generate(list(batch["prompt"]), self._params, use_tqdm=False)
        return batch | {
            "generated_text": [output.outputs[0].text for output in outputs],
            "finish_reason": [output.outputs[0].finish_reason for output in outputs],
            "num_prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        }


def partition_by_prefix(dataset: ray.data.Dataset, num_partitions: int, column: str = "prompt") -> ray.data.Dataset:
    """The dataset in the order of its prefixes, in num_partitions blocks (a few for each worker are best).

    `column` holds texts, lists of token ids or conversations. Give `map_batches` batch_size=None, so that a block
    goes to one worker as a whole. The sorted dataset stays in Ray's object store, which spills to disk.
    """

    def add_key(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return batch | {KEY: [prefix_key(value).hex() for value in batch[column]]}

    keyed = dataset.repartition(num_partitions).map_batches(add_key)
    # Sorted before the workers start: they would take the CPUs that sorting needs.
    return keyed.sort(KEY).drop_columns([KEY]).materialize()


def answer_on_workers(
    model: str,
    engine_options: Mapping[str, Any],
    model_names: Sequence[str],
    num_workers: int,
    num_lines: int,
    lines: Iterable[Line],
    emit: Emit,
) -> None:
    """Runs (number, line) pairs on a Ray cluster: calls emit(number, result) for each as partitions finish.

    The lines wait in Ray's object store, which spills to disk. A partition is a run of lines as they come.
    """
    size = min(MAX_PARTITION_LINES, max(1, num_lines // (4 * num_workers)))
    tables = (pyarrow.table([*zip(*group, strict=True)], names=["number", "line"]) for group in groups(lines, size))
    # A worker has a working directory of its own, where another directory (or none) may have such a name.
    named = {"model": model, "tokenizer": engine_options.get("tokenizer")}
    places = {name: os.path.abspath(place) for name, place in named.items() if place and os.path.isdir(place)}
    engine = {"model": model, **engine_options, **places}
    with _connected():
        partitions = [ray.put(table) for table in tables]
        uses_gpu = engine_options.get("device") != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        answered = ray.data.from_arrow_refs(partitions).map_batches(
            _LineWorker,
            fn_constructor_args=(engine, list(model_names)),
            compute=ray.data.ActorPoolStrategy(size=num_workers),
            batch_size=None,
            num_gpus=int(uses_gpu),
        )
        for batch in answered.iter_batches(batch_size=None):
            for number, result in zip(batch["number"].tolist(), batch["result"], strict=True):
                emit(number, json.loads(result))


@contextmanager
def _connected() -> Iterator[None]:
    """This process's connection to Ray, or one for the block. What Ray prints goes to standard error, because results
    may go to standard output, and SIGTERM keeps its handler: Ray's would end the process in the middle of a write."""
    with redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield
            return
        handler = signal.getsignal(signal.SIGTERM)
        ray.init()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        try:
            yield
        finally:
            ray.shutdown()


class _LineWorker:
    """Answers lines of a batch file."""

    def __init__(self, engine: Mapping[str, Any], model_names: Sequence[str]):
        self._llm, self._names = LLM(**engine), model_names

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        results: dict[int, Mapping[str, Any]] = {}
        lines = zip(batch["number"].tolist(), batch["line"], strict=True)
        answer(self._llm, self._names, lines, results.__setitem__)
        return {"number": list(results), "result": [*map(encode_line, results.values())]}
