"""What runs only on CUDA, without CUDA: the ring of pinned buffers, and an engine on a CPU that passes for a GPU.

The disguise is thin: tensors that are asked for on "cuda" are made on the CPU, pinned memory is plain, and the parts of
torch.cuda that the engine calls are replaced. Kernels are the Triton ones, in their interpreter.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from llm_helpers import assert_idle, greedy
from test_overlap import visible
from tiny_models import make_tiny_model, random_ids
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanoapc import LLM, EngineConfig
from nanoapc.engine.cuda_graphs import CudaBackend
from nanoapc.engine.kv_memory import MemoryUse, count_blocks, measure_memory
from nanoapc.engine.model_runner import ModelRunner
from nanoapc.engine.transfer import NUM_BUFFERS, PinnedTransfer, Transfer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that the CPU is a CUDA device")


# -- the ring of buffers -----------------------------------------------------------------------------------


class LateCopies(PinnedTransfer):
    """Copies happen when somebody waits for the event behind them, in order. log: what was waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.log: list[int] = []
        super().__init__(torch.device("cpu"))

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def _event(self) -> Any:
        return LateEvent(self)

    def _upload(self, buffer: Tensor) -> Tensor:
        sent = torch.zeros_like(buffer)
        self.queue.append(lambda: sent.copy_(buffer))
        return sent


class LateEvent:
    def __init__(self, device: LateCopies):
        self.device, self.place = device, 0

    def record(self) -> None:
        self.place = len(self.device.queue)

    def synchronize(self) -> None:
        self.device.log.append(self.place)
        for i in range(self.place):
            self.device.queue[i]()
            self.device.queue[i] = lambda: None


def random_arrays(rng: np.random.Generator) -> list[np.ndarray]:
    shapes = [(rng.integers(0, 9),), (3, rng.integers(1, 40)), (rng.integers(1, 5), 7)]
    dtypes = [np.int64, np.int64, np.int32]
    return [rng.integers(-9, 9, shape).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def test_arrays_arrive_as_they_were_sent_however_late_the_copy() -> None:
    rng, transfer = np.random.default_rng(0), LateCopies()
    sent = []
    for step in range(40):
        arrays = random_arrays(rng)
        sent.append(([array.copy() for array in arrays], transfer.send(arrays)))
        for array in arrays:
            array[...] = 99  # the caller's arrays may change at once
        if step >= NUM_BUFFERS:
            assert transfer.log[-1] == step - NUM_BUFFERS + 1, "it waits for the buffer's last copy, and no longer"
    for copy in transfer.queue:
        copy()
    for arrays, tensors in sent:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.dtype == torch.from_numpy(array).dtype and tensor.shape == array.shape
            assert tensor.data_ptr() % 8 == 0 and (tensor.numpy() == array).all()


def test_strided_and_transposed_arrays_keep_their_elements() -> None:
    array = np.arange(60, dtype=np.int32).reshape(6, 10)
    transfer = LateCopies()
    tensors = transfer.send([array[::2, 3:], array.T])
    transfer.queue[0]()
    assert tensors[0].tolist() == array[::2, 3:].tolist() and tensors[1].tolist() == array.T.tolist()


class Pair(NamedTuple):
    first: Tensor
    second: Any


@pytest.mark.parametrize("transfer", [Transfer(), LateCopies()])
def test_results_come_in_the_form_that_they_had(transfer: Transfer) -> None:
    seq = object()
    values = Pair(torch.arange(5), [(seq, Pair(torch.rand(2, 3), None))])
    fetched, event = transfer.fetch(values)
    assert (event is None) == (type(transfer) is Transfer)
    if event is not None:
        event.synchronize()
    assert type(fetched) is Pair and torch.equal(fetched.first, values.first)
    assert fetched.second[0][0] is seq and torch.equal(fetched.second[0][1].first, values.second[0][1].first)


# -- the engine on a device in disguise ----------------------------------------------------------------------


class CudaIsCpu(TorchFunctionMode):
    """Whoever asks for CUDA or for pinned memory gets the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        replaced = {key: self._cpu(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*map(self._cpu, args), **replaced)

    def _cpu(self, value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class FakeGraph:
    """torch.cuda.CUDAGraph; inside `fake_capture` it learns what to replay."""

    made: int = 0
    replays: int = 0

    def __init__(self) -> None:
        FakeGraph.made += 1
        self.run: Callable[[], None] = lambda: None

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        FakeGraph.replays += 1
        self.run()


pools: list[Any] = []
current: list[Any] = []


@contextmanager
def current_device(device: Any) -> Iterator[None]:
    current.append(device)
    yield
    current.pop()


def check_current_device() -> None:
    assert current[-1:] == [torch.device("cuda:0")], "another device than the engine's may be current here"


@contextmanager
def fake_capture(graph: FakeGraph, pool: Any) -> Iterator[None]:
    pools.append(pool)
    graph.run = sys._getframe(2).f_locals["run"]
    yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.cuda with one device of 3 GiB, of which others hold 1 GiB."""
    gib = 2**30
    event = SimpleNamespace(record=check_current_device, synchronize=lambda: None)
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": current_device,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: gib // 2,
        "memory_reserved": lambda *_: gib // 4,
        "mem_get_info": lambda *_: (3 * gib - gib - gib // 4, 3 * gib),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=1),
        "Event": lambda: event,
        "CUDAGraph": FakeGraph,
        "graph": lambda graph, pool: fake_capture(graph, pool),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    FakeGraph.made = FakeGraph.replays = 0
    pools.clear()
    with CudaIsCpu():
        yield


def test_measured_memory_is_what_others_hold_and_our_own_peak(cuda: None) -> None:
    ran = []
    use = measure_memory(torch.device("cuda"), lambda: ran.append(1), graphs=5)
    assert ran and use == MemoryUse(total=3 * 2**30, outside=2**30, peak=2**29, graphs=5)


def test_graphs_share_the_pool_of_the_first(cuda: None) -> None:
    backend, calls = CudaBackend(), []
    replays = [backend.capture(lambda i=i: calls.append(i), i == 0) for i in range(3)]  # type: ignore[misc]
    assert pools == [None, "the pool", "the pool"] and calls == [0, 0, 1, 1, 2, 2], "warm up, then capture"
    replays[1]()
    assert calls[-1] == 1


def test_an_engine_on_cuda(cuda: None, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_tiny_model(tmp_path, num_hidden_layers=1)
    options = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 40, "max_num_batched_tokens": 24, "seed": 3}
    prompts = [random_ids(5 + i, i) for i in range(4)]
    params = [greedy(5, logprobs=1), greedy(3), greedy(4, temperature=0.9), greedy(3, prompt_logprobs=0)]
    results = []
    for more in ({}, {"enforce_eager": True, "async_scheduling": False}):
        before = FakeGraph.made
        with LLM(tmp_path, device="cuda", deterministic=True, gpu_memory_utilization=0.7, **options, **more) as llm:
            engine = llm.engine
            assert engine.overlap == (not more) and engine.config.block_size == 16
            assert (engine.runner.graphs is None) == bool(more) == (FakeGraph.made == before)
            size = 2 * 2 * 16 * 16 * 4  # of a block: K and V, KV heads, tokens, head_dim, bytes
            most = (int(0.7 * 3 * 2**30) - 2**30 - 2**29) // size
            num_blocks = len(engine.manager.pool.blocks)
            assert num_blocks == most if more else most / 2 < num_blocks < most, "some is left for graphs"
            results.append([visible(output) for output in llm.generate(prompts, params, use_tqdm=False)])
            assert_idle(llm)
    assert results[0] == results[1] and FakeGraph.replays >= 3 and not current


def test_a_closed_engine_gives_its_memory_back_at_once(cuda: None, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_tiny_model(tmp_path, num_hidden_layers=1)
    gc.collect()
    gc.disable()
    try:
        llm = LLM(tmp_path, device="cuda", max_num_seqs=2, max_model_len=40, num_kv_blocks=8, dtype="float32")
        run = llm.engine.runner
        assert run.graphs is not None
        # What FakeGraph keeps, a captured graph does not: the frame that it was captured in.
        for graph in (graph for graphs in run.graphs.buckets.values() for graph in graphs):
            graph.replay = lambda: None
        llm.generate([5, 6, 7], greedy(1), use_tqdm=False)
        alive = [weakref.ref(thing) for thing in (run, run.model, run.kv_memory)]
        del run, graph
        llm.close()
        assert [ref() is None for ref in alive] == [True] * 3
    finally:
        gc.enable()


def test_a_tiny_model_does_not_get_millions_of_blocks() -> None:
    model = SimpleNamespace(kv_bytes=8)
    use = MemoryUse(total=140 * 2**30, outside=0, peak=0, graphs=0)
    config = EngineConfig.from_arguments("model", max_num_seqs=4)
    assert count_blocks(config, model, 100, lambda: use) == 2**20
    config = EngineConfig.from_arguments("model", max_num_seqs=2**16)
    assert count_blocks(config, model, 1000, lambda: use) == 2**16 * 64, "but all that run must fit"


def test_too_little_memory_is_told_with_all_numbers(cuda: None, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_tiny_model(tmp_path, num_hidden_layers=1)
    options = {"max_num_seqs": 2, "max_model_len": 40, "max_num_batched_tokens": 8, "enforce_eager": True}
    with pytest.raises(ValueError, match="max_model_len=40 needs 3 KV blocks") as error:
        LLM(tmp_path, device="cuda", gpu_memory_utilization=0.5, **options)
    for text in (
        "gpu_memory_utilization=0.5",
        "3072 MiB",
        "1024 MiB of other",
        "512 MiB for weights",
        "0 MiB for graphs",
    ):
        assert text in str(error.value)


def test_the_largest_step_stays_within_the_longest_sequence(
    cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    make_tiny_model(tmp_path, num_hidden_layers=1)
    steps, launch = [], ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "launch", lambda self, batch: steps.append(batch) or launch(self, batch))
    options = {"max_num_seqs": 2, "max_model_len": 40, "max_num_batched_tokens": 200, "enforce_eager": True}
    LLM(tmp_path, device="cuda", dtype="float32", **options).close()
    (batch,) = steps
    assert int(batch.positions.max()) == 39, "the rotary table ends there"
    assert all(seq.sampler_state and seq.params.logprobs and seq.params.top_p < 1 for seq in batch.sequences)
