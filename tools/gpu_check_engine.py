"""The engine on a CUDA device: the same ids whatever runs them, and how fast.

    python tools/gpu_check_engine.py --part right                          on a GPU, about a minute
    python tools/gpu_check_engine.py --json benchmarks/gpu_engine.json     with the figures, about four minutes more
    python tools/gpu_check_engine.py --dry-run                             anywhere: tries this script out, tiny

Right: tiny models of each architecture against transformers; cache on and off, graphs and eager, overlap and plain, to
the bit with deterministic=True. Fast, with random weights at real sizes: a decode step over the time that its bytes
(weights and K/V) take at the card's copy rate, nano-vLLM's benchmark, a shared prefix, the host's share, start-up, and
transformers' own `generate` and continuous batching on the same work.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from gpu_check_report import Report  # noqa: E402
from tiny_models import FAMILIES, make_tiny_model, random_ids  # noqa: E402

import bench  # noqa: E402
from nanoapc import LLM, SamplingParams  # noqa: E402

bench.SHAPES["tiny"] = ("Qwen3ForCausalLM", 512, 64, 96, 2, 4, 2, 16, True)


class Check(Report):
    """One run; its models are made in `folder`."""

    def __init__(self, dry: bool, folder: Path, path: Path | None = None):
        super().__init__(dry, path)
        self.folder = folder

    def llm(self, model: str | Path, **options: Any) -> LLM:
        """An LLM; a preset's name gives a real shape (tiny in a dry run) with random weights."""
        if str(model) in bench.SHAPES:
            folder = self.folder / str(model)
            folder.mkdir(exist_ok=True)
            model = bench.preset_directory("tiny" if self.dry else str(model), str(folder))
            options = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "max_model_len": 4096 // self.tiny,
                **options,
            }
            if self.dry:
                options.setdefault("num_kv_blocks", 512)
        elif "num_kv_blocks" not in options:
            options["num_kv_blocks"] = 512 if self.dry else 4096
        return LLM(model, device=self.device, **options)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options)


def ids_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


# ---- right ----


def check_parity(check: Check) -> None:
    """float32, each architecture: the ids of transformers' greedy generate."""
    prompts = [random_ids(length, length) for length in ((5, 17) if check.dry else (5, 17, 64, 300))]
    for family in FAMILIES:
        directory = check.folder / family
        model = make_tiny_model(directory, family).to(check.device)
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=check.device)
            options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            expected.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
        with check.llm(directory, dtype="float32", max_num_seqs=8) as llm:
            cold, warm = (ids_of(llm, prompts, greedy(16)) for _ in range(2))
        check.expect(f"{family}: transformers' ids, cold and warm", cold == warm == expected)


def check_same_bits(check: Check) -> None:
    """A tiny model, deterministic: ids and log-probs do not depend on how they are computed."""
    directory = make_tiny_directory(check)
    shared = random_ids(20 if check.dry else 600, 1)
    prompts = [shared[: len(shared) - 7 * i] + random_ids(5 + i, i) for i in range(4 if check.dry else 24)]
    params = [greedy(12, logprobs=1) if i % 2 else SamplingParams(max_tokens=20, logprobs=1, seed=i) for i in range(24)]
    params = params[: len(prompts)]
    variants: dict[str, dict[str, Any]] = {
        "plain": {"enforce_eager": True, "async_scheduling": False, "enable_prefix_caching": False},
        "graphs": {"async_scheduling": False, "enable_prefix_caching": False},
        "overlap": {"enforce_eager": True, "async_scheduling": True, "enable_prefix_caching": False},
        "cache": {"enforce_eager": True, "async_scheduling": False},
        "all": {"async_scheduling": True},
        "all, no forest": {"async_scheduling": True, "enable_forest_attention": False},
        "all, chunks": {"async_scheduling": True, "max_num_batched_tokens": 64},
        "all, tight": {"async_scheduling": True, "num_kv_blocks": 96 // (4 if check.dry else 1)},
        "all, to a file": {"async_scheduling": True, "prefix_cache_file": check.folder / "prefixes"},
        "all, from a file": {"async_scheduling": True, "prefix_cache_file": check.folder / "prefixes"},
    }
    results = {}
    for name, options in variants.items():
        limits = {"max_num_seqs": 13, "max_model_len": 64 if check.dry else 700, "dtype": "bfloat16", **options}
        with check.llm(directory, deterministic=True, **limits) as llm:
            for run in ("", ", warm"):
                outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
                results[name + run] = [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs]
            if check.device == "cuda":
                graphs = llm.engine.runner.graphs is not None
                check.expect(f"{name}: graphs are {'on' if graphs else 'off'}", graphs != ("enforce_eager" in options))
    for name, result in results.items():
        check.expect(f"the same bits: {name}", result == results["plain"])


def make_tiny_directory(check: Check) -> Path:
    directory = check.folder / "same_bits"
    make_tiny_model(directory, "qwen3", dtype=torch.bfloat16, max_position_embeddings=1024)
    return directory


# ---- fast ----


def measure_copy_rate(check: Check) -> None:
    a = torch.empty((1 << 31) // check.tiny**3, dtype=torch.uint8, device=check.device)
    b = torch.empty_like(a)
    b.copy_(a)
    check.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        b.copy_(a)
    check.synchronize()
    check.copy_rate = 10 * 2 * a.nbytes / (time.perf_counter() - start)
    check.note("card", copy_TB_s=check.copy_rate / 1e12)


def decode_seconds(llm: LLM, work: Callable[[], object]) -> tuple[float, int, int]:
    """Seconds, steps and tokens of the decode steps of some work."""
    before = llm.metrics().steps["decode"]
    work()
    after = llm.metrics().steps["decode"]
    return after.seconds - before.seconds, after.steps - before.steps, after.tokens - before.tokens


def weight_bytes(llm: LLM) -> int:
    """Bytes of the weights that a decode step reads (one row of the embedding is next to nothing)."""
    config = llm.engine.model_config
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return (config.num_layers * layer + config.vocab_size * config.hidden_size) * config.dtype.itemsize


def measure_decode(check: Check, llm: LLM, name: str) -> None:
    """A decode step over its byte floor. The prompts are cached from the first run on."""
    context, runner = 1024 // check.tiny, llm.engine.runner
    kv_bytes = llm.engine.runner.kv_memory[0].nbytes // llm.engine.config.block_size  # of a token
    prompts = [random_ids(context, i, llm.engine.model_config.vocab_size) for i in range(max(2, 256 // check.tiny))]
    ids_of(llm, prompts, greedy(1))
    graphs = runner.graphs
    for batch in (1, 16, 64, 256):
        batch = max(1, batch // check.tiny)
        floor = (weight_bytes(llm) + batch * (context + 16) * kv_bytes) / check.copy_rate
        values = {"floor_us": floor * 1e6}
        for way in ("graph", "eager"):
            runner.graphs = graphs if way == "graph" else None
            ids_of(llm, prompts[:batch], greedy(4))
            seconds, steps, _ = decode_seconds(llm, lambda b=batch: ids_of(llm, prompts[:b], greedy(32)))
            values |= {f"{way}_us": seconds / max(steps, 1) * 1e6, f"{way}_over_floor": seconds / max(steps, 1) / floor}
        runner.graphs = graphs
        check.note(f"decode, {name}, {batch} x {context}", **values)


def measure_host(check: Check, llm: LLM, name: str) -> None:
    """Host time of a decode step (all but the waiting), and how long the device waits for the host between steps."""
    engine, runner = llm.engine, llm.engine.runner
    batch, context = max(2, 256 // check.tiny), 1024 // check.tiny
    prompts = [random_ids(context, i, engine.model_config.vocab_size) for i in range(batch)]
    ids_of(llm, prompts, greedy(2))
    launch, send, events, waits = runner.launch, runner.transfer.send, [], []

    def timed(step: Any) -> Any:
        if check.device == "cuda":
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        in_flight = launch(step)
        if check.device == "cuda":
            events[-1][1].record()
        wait = in_flight.wait

        def timed_wait() -> Any:
            start = time.perf_counter()
            if in_flight.arrived is not None:
                in_flight.arrived.synchronize()
            waits.append(time.perf_counter() - start)
            return wait()

        object.__setattr__(in_flight, "wait", timed_wait)
        return in_flight

    def timed_send(arrays: Any) -> Any:
        if check.device == "cuda":
            events[-1][0].record()  # the first that the device has to do; planning comes before it
        return send(arrays)

    runner.launch, runner.transfer.send = timed, timed_send
    for overlap in (True, False):
        engine.overlap = overlap
        events.clear()
        waits.clear()
        seconds, steps, _ = decode_seconds(llm, lambda: ids_of(llm, prompts, greedy(64)))
        check.synchronize()
        idle = [before[1].elapsed_time(after[0]) for before, after in itertools.pairwise(events[1:])]
        total = sum(event[0].elapsed_time(event[1]) for event in events[1:]) + sum(idle)
        check.note(
            f"host, {name}, {batch} x {context}, {'overlap' if overlap else 'plain'}",
            host_us=(seconds - sum(waits[1:])) / max(steps, 1) * 1e6,
            step_us=seconds / max(steps, 1) * 1e6,
            device_idle=sum(idle) / total if events else float("nan"),
        )
    del runner.launch, runner.transfer.send
    engine.overlap = True


def measure_nano_vllm(check: Check, llm: LLM) -> None:
    """nano-vLLM's benchmark: 256 prompts of 100-1024 tokens, 100-1024 tokens out."""
    args = bench.parse(["random", "--num-requests", str(max(2, 256 // check.tiny))])
    args.input_len, args.output_len = [(lo // check.tiny + 1, hi // check.tiny) for lo, hi in ((100, 1024),) * 2]
    workload = bench.WorkloadMaker(args, llm.engine.model_config.vocab_size).random()
    result = bench.play(workload, generate_with(llm))
    check.note(
        "nano-vLLM's benchmark, qwen3-0.6b",
        output_tok_s=result["output_tokens"] / result["seconds"],
        total_tok_s=(result["output_tokens"] + result["prompt_tokens"]) / result["seconds"],
    )


def generate_with(llm: LLM) -> Callable[[list[bench.Request]], list[list[int]]]:
    return lambda requests: ids_of(llm, [prompt for prompt, _ in requests], [greedy(n) for _, n in requests])


def measure_shared_prefix(check: Check) -> None:
    """256 x (2048 shared + 128 own), 128 out: without a cache, with one, with one and forest attention."""
    vocab, batch = 512 if check.dry else 100_000, max(2, 256 // check.tiny)
    shared = random_ids(2048 // check.tiny, 1, vocab)
    prompts = [shared + random_ids(128 // check.tiny, 2 + i, vocab) for i in range(batch)]
    rates = {}
    for name, options in {
        "no cache": {"enable_prefix_caching": False},
        "cache": {"enable_forest_attention": False},
        "cache and forest": {},
    }.items():
        with check.llm("qwen3-0.6b", **options) as llm:
            ids_of(llm, [random_ids(40 // check.tiny + 1, 9, vocab)] * 2, greedy(4))
            start = time.perf_counter()
            seconds, _, tokens = decode_seconds(llm, lambda llm=llm: ids_of(llm, prompts, greedy(128 // check.tiny)))
            rates[name] = tokens / max(seconds, 1e-9)
            total = batch * (128 // check.tiny) / (time.perf_counter() - start)
        check.note(f"shared prefix, {name}", output_tok_s=total, decode_tok_s=rates[name])
    check.note("shared prefix, decode", times_no_forest=rates["cache and forest"] / rates["cache"])


def measure_start(check: Check) -> None:
    """From process start to the first token, graphs captured."""
    folder = check.folder / "qwen3-0.6b"
    program = f"""
from nanoapc import LLM, SamplingParams
llm = LLM({str(folder)!r}, device={check.device!r}, load_format="dummy", skip_tokenizer_init=True, max_model_len=128,
          num_kv_blocks={512 if check.dry else None})
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
"""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    check.note("start to first token, qwen3-0.6b", seconds=time.perf_counter() - start)


def measure_peers(check: Check) -> None:
    with check.llm("qwen3-0.6b", gpu_memory_utilization=0.4) as llm:  # the peer needs room
        compare_with_transformers(check, llm)


def compare_with_transformers(check: Check, llm: LLM) -> None:
    """transformers on 256 prompts of 100-1024 tokens, 128 tokens out, and ourselves on the same work."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    args = bench.parse(["random", "--num-requests", str(max(2, 256 // check.tiny))])
    num_output = max(2, 128 // check.tiny)
    args.input_len, args.output_len = (100 // check.tiny + 1, 1024 // check.tiny), (num_output, num_output)
    workload = bench.WorkloadMaker(args, llm.engine.model_config.vocab_size).random()
    with torch.device(check.device):
        config = AutoConfig.from_pretrained(check.folder / "qwen3-0.6b")
        peer = bench.Transformers.__new__(bench.Transformers)
        peer.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        peer.device = check.device

    def continuous(requests: list[bench.Request]) -> list[list[int]]:
        options = GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = peer.model.generate_batch([prompt for prompt, _ in requests], generation_config=options)
        if len(results) < len(requests):  # it logs what goes wrong, and returns what it has
            raise RuntimeError(f"only {len(results)} of {len(requests)} requests came back")
        return [result.generated_tokens for result in results.values()]

    runs = {"nanoapc": generate_with(llm), "generate": peer.generate, "continuous batching": continuous}
    for name, generate in runs.items():
        if name == "continuous batching" and check.device == "cpu":
            continue
        llm.reset_prefix_cache()
        try:
            result = bench.play(workload, generate)
        except Exception as error:  # a peer's own limits are no failure of ours
            print(f"     {name} cannot run this work: {error}")
            continue
        check.note(f"same work, {name}", output_tok_s=result["output_tokens"] / result["seconds"])


def measure_small_model(check: Check) -> None:
    with check.llm("qwen3-0.6b", async_scheduling=True) as llm:
        check.attempt(measure_decode, llm, "qwen3-0.6b")
        check.attempt(measure_host, llm, "qwen3-0.6b")
        llm.reset_prefix_cache()
        check.attempt(measure_nano_vllm, llm)


def measure_large_model(check: Check) -> None:
    with check.llm("qwen3-8b", async_scheduling=True) as llm:
        measure_decode(check, llm, "qwen3-8b")


PARTS: dict[str, tuple[Callable[[Check], None], ...]] = {
    "right": (check_parity, check_same_bits),
    "fast": (
        measure_copy_rate,
        measure_small_model,
        measure_large_model,
        measure_shared_prefix,
        measure_start,
    ),
    "peers": (measure_peers,),  # by itself: a peer may hang, or keep memory
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.dry_run, Path(folder), options.json)
        for name in PARTS if options.part is None else [options.part]:
            for part in PARTS[name]:
                check.attempt(part)
    return check.finish()


if __name__ == "__main__":
    sys.exit(main())
