"""Engine: the parts of one LLM put together, and the loop's one step.

    Scheduler.schedule() -> StepBatch -> ModelRunner.launch() -> Scheduler.advance()       host: N    N+1    N+2
    InFlight.wait() -> tokens -> Scheduler.settle() -> finished requests                   device: N    N+1    N+2

With `overlap`, a call of `step` launches the next step before it waits for the one in flight, so the device always has
work; without, it waits for what it has launched. Results are the same (see scheduler.py).

Invariant: if anything in a step fails, what it and the step behind it would have cached is withdrawn, all requests are
aborted and their blocks free, and the engine can go on with new ones. (An interruption on the host's side - Ctrl-C,
mostly - leaves nothing there that could be trusted: the whole cache is forgotten.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoapc.config import EngineConfig
from nanoapc.engine.attention_plan import AttentionPlanner
from nanoapc.engine.block_hash import BlockHasher
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.cuda_graphs import CudaBackend, graph_bytes
from nanoapc.engine.events import Events, configure_logging
from nanoapc.engine.kv_memory import MemoryUse, allocate, count_blocks, measure_memory
from nanoapc.engine.metrics import Metrics, MetricsFile, PhaseStats, collect
from nanoapc.engine.model_runner import InFlight, ModelRunner
from nanoapc.engine.prefix_order import prefix_order
from nanoapc.engine.prefix_store import PrefixStore, kv_origin
from nanoapc.engine.request import Request, make_sequences
from nanoapc.engine.scheduler import Scheduler
from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.engine.step_batch import StepBatch, largest_batch
from nanoapc.engine.transfer import PinnedTransfer, Transfer
from nanoapc.inputs import InputProcessor
from nanoapc.kernels import FixedWorkKernels, select_kernels
from nanoapc.layers.sampler import Sampler, SamplerState, make_state, request_seed
from nanoapc.models.checkpoint import TOKENIZER_PATTERNS, load_tokenizer, resolve_model, why_unreadable
from nanoapc.models.config import ModelConfig
from nanoapc.models.decoder import CausalLM
from nanoapc.models.weights import WeightsDigest, check_weights, load_model, replace_weights
from nanoapc.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


class Engine:
    """Everything that one LLM owns, except the caller's side.

    Attributes:
        eos_token_ids: what ends a text: the model's and the tokenizer's.
        inputs: makes prompts for this model; has the tokenizer.
        phases: the steps so far, by phase ("prefill", "decode", "mixed").
        overlap: whether steps are launched ahead.
        dead: None, or why the engine cannot run any more.
        unusable: None, or why it cannot run until `load_weights` has succeeded.
    """

    unusable: str | None = None
    _in_step = False  # while `step` runs
    _at_device = False  # while a step is launched or waited for: what fails then leaves scheduler and pool whole

    def __init__(self, config: EngineConfig):
        self.config = config
        log_events = configure_logging()
        self.metrics_file = MetricsFile(config.metrics_file) if config.metrics_file else None
        directory = resolve_model(config.model, TOKENIZER_PATTERNS)
        if config.load_format != "dummy":
            # What cannot run is refused before its weights are fetched.
            ModelConfig.from_directory(directory, "float32")
            directory = resolve_model(config.model)
        self.model_config = ModelConfig.from_directory(directory, config.dtype)
        self.device = _device(config.device)
        self.inputs = make_inputs(config, directory, self.model_config)
        # Chat models that were tuned from a base model often name the end of a turn only in their tokenizer.
        own = self._main_eos_id = getattr(self.inputs.tokenizer, "eos_token_id", None)
        self.eos_token_ids = tuple({*self.model_config.eos_token_ids, *([] if own is None else [own])})
        self.dead: str | None = None
        self._num_requests = 0
        self._num_sequences = 0
        self._settled_at = 0.0
        self.phases = {phase: PhaseStats() for phase in ("prefill", "decode", "mixed")}
        with self._own_context():
            self._build(str(directory), log_events)

    # Tensors that are made in the caller's inference mode could not be written outside it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _build(self, directory: str, log_events: bool) -> None:
        config, model_config, max_model_len = self.config, self.model_config, self.inputs.max_model_len
        # What cannot fit is refused before weights are read.
        if self.device.type == "cpu":
            count_blocks(config, model_config, max_model_len, None)
        table = SequenceTable(config.max_num_seqs, max_model_len, config.block_size)
        kernels = select_kernels(self.device, config.deterministic)
        self._digest = WeightsDigest() if config.prefix_cache_file else None
        model = load_model(
            directory,
            model_config,
            device=self.device,
            kernels=kernels,
            max_len=max_model_len,
            load_format=config.load_format,
            digest=self._digest,
        )
        budget = config.max_num_batched_tokens or MAX_BATCHED_TOKENS[self.device.type]
        on_cuda = self.device.type == "cuda"
        measure = partial(self._measure_memory, model, budget) if on_cuda else None
        num_blocks = count_blocks(config, model_config, max_model_len, measure)
        size = num_blocks * config.block_size * model_config.kv_bytes
        logger.info("KV cache: %d blocks of %d tokens, %.0f MiB", num_blocks, config.block_size, size / 2**20)
        self.runner = self._make_runner(model, num_blocks)  # before the blocks: it fails at once if there is no memory
        hasher = BlockHasher(config.prefix_caching_hash_algo)
        self.events = self._make_events(directory, num_blocks) if config.trace or log_events else None
        self.manager = BlockManager(num_blocks, config.block_size, hasher, config.enable_prefix_caching, self.events)
        self.scheduler = Scheduler(self.manager, table, budget, self.eos_token_ids, self._main_eos_id)
        self.store = self._open_store(config.prefix_cache_file) if config.prefix_cache_file else None
        if on_cuda and not config.enforce_eager and isinstance(kernels, FixedWorkKernels):
            self.runner.capture_graphs(CudaBackend(), table.block_table.shape[1])
        # A line of a trace is a step: its events must not mix with those of the next.
        wanted = on_cuda if config.async_scheduling is None else config.async_scheduling
        self.overlap = wanted and self.events is None
        self._in_flight: tuple[InFlight, float] | None = None  # and when the host began with it

    @contextmanager
    def _own_context(self) -> Iterator[None]:
        """Inside it streams, events and kernels are those of this engine's device, whichever thread runs, and the
        caller's autocast is off."""
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with device, torch.autocast(self.device.type, enabled=False):
            yield

    def _make_runner(self, model: CausalLM, num_blocks: int) -> ModelRunner:
        config, kernels = self.config, model.kernels
        return ModelRunner(
            model,
            Sampler(kernels, self.inputs.num_valid_ids),
            AttentionPlanner(config.block_size, kernels.max_tile_rows, share=config.enable_forest_attention),
            allocate(num_blocks, self.model_config, config.block_size, self.device),
            PinnedTransfer(self.device) if self.device.type == "cuda" else Transfer(),
            config.max_num_seqs,
        )

    def _open_store(self, path: str) -> PrefixStore:
        """The file of cached prefixes, already read."""
        kv_memory = self.runner.kv_memory
        origin = kv_origin(self.model_config, str(self._digest), self.runner.kernels, kv_memory)
        store = PrefixStore(path, self.manager, kv_memory, origin)
        store.load()
        if self.events is not None:
            self.events.flush()
        return store

    def _measure_memory(self, model: CausalLM, budget: int) -> MemoryUse:
        """What is there for the KV cache on CUDA: runs the largest step, with a cache of one block."""
        config, kernels, graphs = self.config, model.kernels, 0
        if not config.enforce_eager and isinstance(kernels, FixedWorkKernels):
            graphs = graph_bytes(kernels, self.model_config, config.max_num_seqs, self.inputs.max_model_len)
        # All that takes memory of the size of the logits.
        params = SamplingParams(temperature=1.0, min_p=0.1, top_p=0.9, repetition_penalty=1.1, logprobs=1)
        most = min(budget, config.max_num_seqs * self.inputs.max_model_len)
        batch = largest_batch(most, config.max_num_seqs, config.block_size, params)
        for seq in batch.sequences:
            seq.sampler_state = make_state(params)
        runner = self._make_runner(model, num_blocks=1)
        return measure_memory(self.device, lambda: runner.launch(batch), graphs)

    def _make_events(self, directory: str, num_blocks: int) -> Events:
        header = {
            "model": directory,
            "tokenizer": None if self.inputs.tokenizer is None else self.config.tokenizer or directory,
            "block_size": self.config.block_size,
            "num_blocks": num_blocks,
        }
        return Events(self.config.trace, header)

    # -- requests ----------------------------------------------------------------------------------------

    def prepare(self, requests: Iterable[Request]) -> list[Sequence]:
        """Gives new requests their ids and sequences, in the order in which they are best run; nothing runs yet."""
        sequences: list[Sequence] = []
        tokenizer = self.inputs.tokenizer
        states: dict[int, SamplerState | None] = {}  # one for each SamplingParams, which many requests share
        for request in requests:
            number, first_seq_id = self._num_requests, self._num_sequences  # a signal's handler gets others
            self._num_requests, self._num_sequences = number + 1, first_seq_id + request.params.n
            request.request_id = str(number)
            request.arrival_time = time.perf_counter()
            seed = request.params.seed
            if seed is None:
                seed = request_seed(self.config.seed, number)
            if (key := id(request.params)) not in states:
                bad_words = request.params.bad_words_ids(tokenizer) if request.params.bad_words else ()
                states[key] = make_state(request.params, self.eos_token_ids, bad_words)
            request.sequences = make_sequences(
                request, first_seq_id, self.inputs.max_model_len, seed, states[key], tokenizer
            )
            sequences += request.sequences
        return prefix_order(sequences) if self.config.schedule_policy == "prefix" else sequences

    def abort(self, requests: Iterable[Request]) -> None:
        """Drops what is unfinished of the requests."""
        self.scheduler.abort([seq for request in requests for seq in request.sequences])

    def abort_all(self) -> None:
        """Drops everything that waits or runs."""
        self.scheduler.abort([*self.scheduler.running, *self.scheduler.waiting])

    def check_usable(self) -> None:
        """RuntimeError if no step can run, now or at all."""
        if (reason := self.dead or self.unusable) is not None:
            raise RuntimeError(reason)

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that it has finished. Nothing waits or runs: an empty list."""
        self.check_usable()
        self._in_step = True
        try:
            with self._own_context():
                step = self._in_flight or self._launch()
                if step is None:
                    return []
                self._in_flight = self._launch() if self.overlap else None
                ended = self._settle(*step)
                if not self.scheduler.has_unfinished:
                    self._drain()
        except BaseException:
            self._in_flight = None
            self.scheduler.step_failed(host_is_whole=self._at_device)
            self._at_device = False
            raise
        finally:
            self._in_step = False
        # A request appears once, with its last sequence.
        return list({id(seq.request): seq.request for seq in ended if seq.request.finished}.values())

    def _launch(self) -> tuple[InFlight, float] | None:
        """Starts the next step, if there is one that can be started now; when that began."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self._at_device = True
        in_flight = self.runner.launch(batch)
        self._at_device = False
        self.scheduler.advance(batch)
        return in_flight, start

    def _settle(self, in_flight: InFlight, start: float) -> list[Sequence]:
        """Waits for a step's result and enters it; returns the sequences that have ended."""
        self._at_device = True
        token_ids, batch = in_flight.wait(), in_flight.batch
        self._at_device = False
        before = self.scheduler.stats.computed_tokens
        ended = self.scheduler.settle(batch, token_ids)
        now = time.perf_counter()
        seconds, self._settled_at = now - max(start, self._settled_at), now
        self._step_done(batch, in_flight.tiles, self.scheduler.stats.computed_tokens - before, seconds)
        return ended

    def _drain(self) -> None:
        """Settles the step in flight; only surplus rows are left in it when nothing is unfinished."""
        if self._in_flight is not None:
            step, self._in_flight = self._in_flight, None
            self._settle(*step)

    # -- what is told about it ---------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """This moment's numbers."""
        return collect(self.scheduler, self.phases, self.model_config)

    def _step_done(self, batch: StepBatch, tiles: np.ndarray, num_tokens: int, seconds: float) -> None:
        """num_tokens: rows that were of use."""
        phase = self.phases[batch.phase]
        phase.steps += num_tokens > 0
        phase.tokens += num_tokens
        phase.seconds += seconds
        if batch.phase != "decode":
            for seq in batch.sampled:
                seq.request.first_token_time = seq.request.first_token_time or time.perf_counter()
        idle = not self.scheduler.has_unfinished
        if self.events is not None:
            self.events.end_step(batch, tiles, seconds)
            if idle:
                self.events.flush()
        if self.metrics_file is not None and (idle or self.metrics_file.is_due):
            self.metrics_file.write(self.metrics())

    # -- the cache ---------------------------------------------------------------------------------------

    def save_prefix_cache(self) -> int:
        """Writes the cached prefixes to prefix_cache_file; returns the number of blocks."""
        if self.store is None:
            raise ValueError("there is no file to save the prefix cache to; name it: LLM(..., prefix_cache_file=...)")
        # What a step fills is there once it has been settled. (A signal's handler may come in the middle of one.)
        num_unsettled = (self._in_flight is not None) + self._in_step
        return self.store.save(self.manager.step + 1 - num_unsettled)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """New weights under the checkpoint's names; cached K/V of the old ones is forgotten.

        Raises:
            ValueError: see `check_weights`; nothing has changed.
            Any other error: if weights have changed, `unusable` is set.
        """
        if self.scheduler.has_unfinished:
            raise RuntimeError("weights cannot change while requests are unfinished; wait for them or abort them")
        self._drain()
        weights = check_weights(self.runner.model, tensors)
        self.unusable = "the weights were replaced only in part, because load_weights failed; call load_weights again"
        self.manager.start_over()
        replace_weights(self.runner.model, weights, self._digest)
        if self.store is not None:
            self.store.origin["weights"] = str(self._digest)
        if self.runner.graphs is not None:
            with self._own_context():
                self.runner.graphs.capture()  # they hold the addresses of the old ones
        self.unusable = None

    def close(self) -> None:
        """Drops model and KV memory; afterwards nothing can run (a RuntimeError)."""
        if self.dead is None:
            self.abort_all()
            self._in_flight = None
            if self.store is not None:
                try:
                    self.save_prefix_cache()
                except OSError as error:
                    what = f"prefix_cache_file {self.store.path} could not be written, it stays as it was"
                    logger.warning("%s: %s", what, error)
            self.dead = "this LLM is closed; make a new one"
            if self.events is not None:
                self.events.close()
            if self.metrics_file is not None:
                self.metrics_file.write(self.metrics())
            self.runner.graphs = None  # which refer to the runner: a circle, which is freed late
            del self.runner, self.store
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # for other processes


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in MAX_BATCHED_TOKENS:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but this PyTorch sees no CUDA device; use device='cpu'")
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def make_inputs(config: EngineConfig, directory: Path, model: ModelConfig) -> InputProcessor:
    """What makes prompts for a model directory, with its tokenizer; needs no weights."""
    limit = model.max_len
    wanted = limit if config.max_model_len is None else config.max_model_len
    if wanted > limit:
        raise ValueError(f"max_model_len={wanted} is more than the model's own limit of {limit} positions; lower it")
    if wanted < 2:
        raise ValueError(f"max_model_len={wanted} leaves no room for a prompt and one output token; use at least 2")
    return InputProcessor(_load_tokenizer(config, str(directory)), model.vocab_size, wanted)


def _load_tokenizer(config: EngineConfig, directory: str) -> Any:
    """The transformers tokenizer of a model directory (or of config.tokenizer); None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    source = directory if config.tokenizer is None else str(resolve_model(config.tokenizer, TOKENIZER_PATTERNS))
    try:
        tokenizer = load_tokenizer(source, config.trust_remote_code)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one without any files
            raise ValueError("it has no tokens but special ones; are its files there?")
        return tokenizer
    except Exception as error:  # transformers raises many kinds
        raise ValueError(
            f"no tokenizer could be loaded from {source!r} ({why_unreadable(Path(source) / 'tokenizer.json', error)}); "
            "give tokenizer=... or, for prompts of token ids, skip_tokenizer_init=True"
        ) from error
