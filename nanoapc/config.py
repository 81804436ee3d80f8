"""EngineConfig: every knob of the engine, its default and its check.

Invariant: an EngineConfig that exists is valid in itself; what depends on the model (lengths, memory) is settled by
`LLM` when the model is known. Unknown names are an error that suggests the nearest known one. An argument of vLLM that
changes nothing here passes; for another the error says what to do instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

HASH_ALGORITHMS = ("xxhash", "xxhash_cbor", "sha256", "sha256_cbor")
SCHEDULE_POLICIES = ("prefix", "fcfs")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "dummy")
FILES = ("prefix_cache_file", "metrics_file", "trace")

NO_EFFECT = {
    *("disable_custom_all_reduce", "disable_log_stats", "enable_chunked_prefill", "max_logprobs", "max_lora_rank"),
    *("max_seq_len_to_capture", "swap_space"),
}
"""Arguments of vLLM that change no result here."""
ONE_DEVICE = "an LLM runs on one device; docs/batch_files.md says how to use several"
SNAPSHOT = "pass the directory that huggingface_hub.snapshot_download(name, revision=...) returns"
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, ONE_DEVICE),
    "pipeline_parallel_size": (1, ONE_DEVICE),
    "data_parallel_size": (1, ONE_DEVICE),
    "distributed_executor_backend": (None, ONE_DEVICE),
    "quantization": (None, "pass an unquantised checkpoint"),
    "kv_cache_dtype": ("auto", "the KV cache has the dtype of the weights"),
    "cpu_offload_gb": (0, "the weights must fit the device"),
    "enable_lora": (False, "merge the adapter into the weights"),
    "enable_sleep_mode": (False, "close() gives the memory back, load_weights() replaces the weights"),
    "speculative_config": (None, "leave it out, the outputs are the same"),
    "revision": (None, SNAPSHOT),
    "tokenizer_revision": (None, SNAPSHOT),
    "tokenizer_mode": ("auto", "the tokenizer is the one that transformers loads"),
    "hf_overrides": (None, "change config.json in a copy of the model's directory"),
    "generation_config": ("auto", "SamplingParams() has the neutral values"),
    "logprobs_mode": ("raw_logprobs", "log-probs are those of the raw logits"),
    "model_impl": ("auto", "each architecture has one implementation"),
    "task": ("generate", "a model generates text and does nothing else"),
}
"""Arguments of vLLM that are not supported: the value with which they change nothing (None, too), and what to do."""


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `LLM`, as vLLM names them.

    model: a directory, or a name on the Hugging Face hub.
    tokenizer: the same for the tokenizer; None takes the model's.
    dtype: of weights and KV cache; "auto" keeps the checkpoint's.
    device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1".
    seed: the root of all random draws of requests that bring no seed of their own.
    max_model_len: tokens a sequence may hold, prompt and output; None takes the model's limit.
    max_num_seqs: sequences that run at once, at most.
    max_num_batched_tokens: the token budget of a step; None: 2048 on the CPU, 8192 on CUDA.
    block_size: tokens a KV block.
    num_kv_blocks: size of the KV cache in blocks; None: from kv_cache_memory.
    kv_cache_memory: size of the KV cache in bytes; None: a share of what is free (see `engine/kv_memory.py`).
    gpu_memory_utilization: share of a GPU's memory that this process may use.
    enable_prefix_caching: reuse the KV of equal prefixes, within a call and between calls.
    prefix_caching_hash_algo: how a block's key is made (see `engine/block_hash.py`).
    prefix_cache_file: where cached prefixes outlive the process: read at the start if it exists, written by `close`,
        which also runs when the program ends (see `engine/prefix_store.py`). It holds prompts as they are.
    schedule_policy: "prefix" runs a batch in the order of its prefix tree, "fcfs" in the order given.
    enable_forest_attention: read a shared prefix once for all rows that share it.
    deterministic: the same bits whatever the batch, on CUDA, too; costs time there (see `kernels/cuda.py`). On the CPU
        it is so in any case.
    enforce_eager: no CUDA graphs: every step is launched kernel by kernel (see `engine/cuda_graphs.py`).
    async_scheduling: start a step before the results of the one before are known, so that the device never waits for
        the host; None: on CUDA. Results are the same. Off while a trace or the debug log is written.
    metrics_file: keep the metrics in this file, in Prometheus' text format (see `engine/metrics.py`).
    trace: write what happens to every block to this file, one JSON line a step (see `engine/events.py`).
    load_format: "auto" reads the weights, "dummy" makes random ones (only config.json is needed).
    trust_remote_code: let the tokenizer run code from its directory.
    skip_tokenizer_init: no tokenizer at all: prompts and outputs are token ids.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "xxhash"
    prefix_cache_file: str | None = None
    schedule_policy: str = "prefix"
    enable_forest_attention: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    metrics_file: str | None = None
    trace: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False

    @classmethod
    def from_arguments(cls, model: str | os.PathLike[str], **arguments: Any) -> EngineConfig:
        """Checks the names and the values; ValueError names the argument, the value and what is allowed.

        None stands for an argument's default.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in arguments.items():
            if name in UNSUPPORTED:
                neutral, remedy = UNSUPPORTED[name]
                if value is not None and value != neutral:
                    raise ValueError(f"{name}={value!r} is not supported (only {neutral!r} is); {remedy}")
            elif name not in known | NO_EFFECT:
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known arguments: {', '.join(sorted(known))}"
                raise ValueError(f"LLM got an unknown argument {name!r}; {hint}")
        arguments = {name: value for name, value in arguments.items() if name in known and value is not None}
        if "dtype" in arguments:
            dtype = str(arguments["dtype"]).removeprefix("torch.")
            arguments["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
        for name in FILES:
            if isinstance(arguments.get(name), os.PathLike):
                arguments[name] = os.fspath(arguments[name])
        return cls(model=os.fspath(model), **arguments)

    def __post_init__(self) -> None:
        self._check_choice("dtype", DTYPES)
        self._check_choice("prefix_caching_hash_algo", HASH_ALGORITHMS)
        self._check_choice("schedule_policy", SCHEDULE_POLICIES)
        self._check_choice("load_format", LOAD_FORMATS)
        for name in ("max_num_seqs", "block_size"):
            self._check_int(name, optional=False)
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_memory"):
            self._check_int(name, optional=True)
        self._check_int("seed", optional=False, least=-(2**63), most=2**64 - 1)
        for field in dataclasses.fields(self):
            value, optional = getattr(self, field.name), field.type == "bool | None"
            if (field.type == "bool" or optional) and not (isinstance(value, bool) or (optional and value is None)):
                raise ValueError(f"{field.name} must be True or False{' or None' * optional}, not {value!r}")
        for name in FILES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be the name of a file or None, not {value!r}")
        if self.prefix_cache_file is not None and not self.enable_prefix_caching:
            raise ValueError(
                f"prefix_cache_file={self.prefix_cache_file!r} needs the cache; leave out enable_prefix_caching=False"
            )
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], not {utilization!r}")
        if not self.model:
            raise ValueError("model is empty; give a model directory or a hub name such as 'Qwen/Qwen3-0.6B'")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")

    def _check_int(self, name: str, optional: bool, least: int = 1, most: int = 2**62) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = "a positive whole number" if least == 1 else "a whole number of at most 64 bits"
            raise ValueError(f"{name} must be {kind}{' or None' if optional else ''}, not {value!r}")
