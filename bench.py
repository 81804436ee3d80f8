"""Throughput of nanoapc, and of other engines on the same work.

    python bench.py                                         the workloads on the embedded model, about a minute
    python bench.py shared forest --model qwen3-0.6b        a preset: the real shape, random weights
    python bench.py --model DIR --compare transformers      the same work there, in turn
    python bench.py --model DIR --compare vllm --vllm-python ENV/bin/python
    python bench.py shared --set enable_prefix_caching=False     any engine argument
    python bench.py --sweep --plot sweep.png                shared length x group size, with and without the forest
    python bench.py --profile                               where a run's time goes
    python bench.py --host                                  scheduler, planner and inputs alone, no model

Requests are seeded random token ids, greedy, end of text ignored, output lengths fixed, so that all engines do
identical work. Every run starts with an empty prefix cache. Prints a table and, last, one JSON line.
Times on a shared machine drift: compare ratios of alternating runs (--repeat), never single figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]
"""Prompt token ids, and how many tokens to generate."""

SHAPES = {  # vocab, hidden, intermediate, layers, heads, kv heads, head_dim, tied
    "qwen3-0.6b": ("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-8b": ("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "smollm2-135m": ("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, True),
    "llama-3.1-8b": ("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, False),
}
"""Presets: real shapes for --load-format dummy."""


# -- work ------------------------------------------------------------------------------------------------


@dataclass
class Workload:
    """Rounds of requests; with `conversation`, a round's prompts continue the prompts and outputs of the one before."""

    name: str
    rounds: list[list[Request]]
    conversation: bool = False


class WorkloadMaker:
    """Seeded workloads from the command line's sizes."""

    def __init__(self, args: argparse.Namespace, vocab_size: int):
        self.args = args
        self.rng = random.Random(args.seed)
        self.high = min(vocab_size, 49000)

    def ids(self, count: int) -> list[int]:
        """Random token ids, clear of the first hundred, which are special in many vocabularies."""
        return [self.rng.randrange(min(100, self.high // 2), self.high) for _ in range(count)]

    def make(self, name: str) -> Workload:
        """The workload of this name."""
        return getattr(self, name)()

    def random(self) -> Workload:
        """Nothing shared: lengths uniform in the given ranges (the shape of nano-vLLM's benchmark)."""
        a = self.args
        requests = [
            (self.ids(self.rng.randint(*a.input_len)), self.rng.randint(*a.output_len)) for _ in range(a.num_requests)
        ]
        return Workload("random", [requests])

    def shared(self) -> Workload:
        """One common prefix, unique tails."""
        a = self.args
        prefix = self.ids(a.shared_len)
        return Workload(
            "shared", [[(prefix + self.ids(a.own_len), a.shared_output_len) for _ in range(a.num_requests)]]
        )

    def forest(self) -> Workload:
        """A prefix shared by all, documents shared by four each, unique tails; given in an unsorted order."""
        a = self.args
        root, documents = self.ids(a.shared_len // 2), max(a.num_requests // 4, 1)
        texts = [self.ids(a.shared_len // 2) for _ in range(documents)]
        requests = [
            (root + texts[i % documents] + self.ids(a.own_len), a.shared_output_len) for i in range(a.num_requests)
        ]
        return Workload("forest", [requests])

    def chat(self) -> Workload:
        """Conversations of several turns: each resends its history."""
        a = self.args
        conversations = max(a.num_requests // 4, 1)
        rounds = [[(self.ids(a.turn_len), a.shared_output_len) for _ in range(conversations)] for _ in range(a.turns)]
        return Workload("chat", rounds, conversation=True)

    def single(self) -> Workload:
        """One request, mostly decoding."""
        return Workload("single", [[(self.ids(self.args.single_len), self.args.single_output_len)]])


WORKLOADS = ("random", "shared", "forest", "chat", "single")


def play(workload: Workload, generate: Any) -> dict[str, float]:
    """Runs a workload; returns seconds, prompt and output tokens. generate: list of requests -> list of output ids."""
    history: list[list[int]] = [[] for _ in workload.rounds[0]]
    num_prompt = num_output = 0
    start = time.perf_counter()
    for round_ in workload.rounds:
        requests = [(h + prompt, out) for h, (prompt, out) in zip(history, round_, strict=True)]
        outputs = generate(requests)
        if workload.conversation:
            history = [prompt + out for (prompt, _), out in zip(requests, outputs, strict=True)]
        num_prompt += sum(len(prompt) for prompt, _ in requests)
        num_output += sum(len(out) for out in outputs)
    return {"seconds": time.perf_counter() - start, "prompt_tokens": num_prompt, "output_tokens": num_output}


# -- engines ---------------------------------------------------------------------------------------------


class NanoApc:
    """This package, in this process."""

    def __init__(self, args: argparse.Namespace, **overrides: Any):
        from nanoapc import LLM, SamplingParams

        self.params = SamplingParams
        options = {"dtype": args.dtype, "load_format": args.load_format, "seed": args.seed, **args.options, **overrides}
        self.llm = LLM(args.model, skip_tokenizer_init=True, **options)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Greedy completions."""
        params = [self.params(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        outputs = self.llm.generate([p for p, _ in requests], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def run(self, workload: Workload) -> dict[str, float]:
        """One run from an empty cache."""
        self.llm.reset_prefix_cache()
        before = self.llm.metrics()
        result = play(workload, self.generate)
        after = self.llm.metrics()
        result["cached_tokens"] = after.hit_tokens - before.hit_tokens
        return result


class Transformers:
    """transformers' own generate, left-padded batch."""

    def __init__(self, args: argparse.Namespace):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
        if args.load_format == "dummy":
            config = AutoConfig.from_pretrained(args.model)
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype or "auto").eval()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.to(self.device)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Greedy completions, all as long as the longest; the surplus is cut off."""
        import torch
        from transformers import GenerationConfig

        width, longest = max(len(p) for p, _ in requests), max(n for _, n in requests)
        ids = torch.zeros((len(requests), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), generation_config=config
            )
        return [out[row, width : width + n].tolist() for row, (_, n) in enumerate(requests)]

    def run(self, workload: Workload) -> dict[str, float]:
        """One run."""
        return play(workload, self.generate)


class Vllm:
    """vLLM in another environment: this file serves there, requests and answers go through pipes."""

    def __init__(self, args: argparse.Namespace):
        if not args.vllm_python:
            raise SystemExit("--compare vllm needs --vllm-python, the Python of an environment with vllm")
        env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "HF_HUB_OFFLINE": "1"}
        env = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **env}
        env.pop("GOMP_SPINCOUNT", None)  # nanoapc's choice, not vLLM's
        command = [args.vllm_python, __file__, "--serve-vllm", "--model", args.model, "--dtype", args.dtype]
        command += ["--load-format", args.load_format, "--max-model-len", str(args.max_model_len)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("vLLM has ended; its output is above")

    def _ask(self, message: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, workload: Workload) -> dict[str, float]:
        """One run from an empty cache."""
        self._ask(None)
        return play(workload, self._ask)


def serve_vllm(args: argparse.Namespace) -> None:
    """Answers requests from standard input with vLLM (runs in its environment)."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        **({"gpu_memory_utilization": 0.5} if torch.cuda.is_available() else {}),  # the other half is nanoapc's
    )
    print("@0", flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        if requests is None:
            llm.reset_prefix_cache()
            print("@0", flush=True)
            continue
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in requests], params, use_tqdm=False)
        print("@" + json.dumps([list(o.outputs[0].token_ids) for o in outputs]), flush=True)


# -- what to measure -------------------------------------------------------------------------------------


@dataclass
class Report:
    """Rows of a table, and the same as JSON."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Prints a row and keeps it."""
        if not self.rows:
            print(
                f"{'workload':10} {'engine':14} {'seconds':>9} {'output tok/s':>13} {'total tok/s':>12} {'cached':>7}"
            )
        total = (row["prompt_tokens"] + row["output_tokens"]) / row["seconds"]
        row["output_tok_s"] = round(row["output_tokens"] / row["seconds"], 1)
        cached = f"{row['cached_tokens'] / row['prompt_tokens']:.0%}" if "cached_tokens" in row else "-"
        print(
            f"{row['workload']:10} {row['engine']:14} {row['seconds']:9.2f} {row['output_tok_s']:13.1f} "
            f"{total:12.1f} {cached:>7}",
            flush=True,
        )
        self.rows.append(row)


def alternate(engines: dict[str, Any], workload: Workload, repeat: int) -> dict[str, dict[str, float]]:
    """Runs a workload `repeat` times through each engine, in turn; the median run of each."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(repeat):
        for name, engine in engines.items():
            runs[name].append(engine.run(workload))
    return {name: sorted(of, key=lambda run: run["seconds"])[len(of) // 2] for name, of in runs.items()}


def compare(args: argparse.Namespace, workloads: list[Workload]) -> Report:
    """Runs the workloads through nanoapc and the engine to compare with, alternating; the median run of each."""
    engines: dict[str, Any] = {"nanoapc": NanoApc(args)}
    if args.compare:
        engines[args.compare] = {"transformers": Transformers, "vllm": Vllm}[args.compare](args)
    report = Report()
    for workload in workloads:
        runs = alternate(engines, workload, args.repeat)
        for name, middle in runs.items():
            report.add(workload=workload.name, engine=name, **middle)
        if len(engines) > 1:
            mine, other = (middle["seconds"] for middle in runs.values())
            print(f"{'':10} nanoapc takes {mine / other:.2f}x the time of {args.compare}")
    return report


def sweep(args: argparse.Namespace, vocab_size: int) -> Report:
    """Shared length x group size: forest attention against each sequence reading for itself, alternating."""
    engines = {"forest": NanoApc(args), "plain": NanoApc(args, enable_forest_attention=False)}
    report = Report()
    for group in (4, 16, 32):
        for shared_len in (0, 256, 1024, 1792):
            args.num_requests, args.shared_len = group, shared_len
            workload = WorkloadMaker(args, vocab_size).make("shared")
            for name, middle in alternate(engines, workload, args.repeat).items():
                report.add(workload=f"{group}x{shared_len}", engine=name, group=group, shared_len=shared_len, **middle)
    return report


def profile(args: argparse.Namespace, workloads: list[Workload]) -> Report:
    """One run of each workload under torch's profiler: the stages of its steps, and the operators that take the time.

    On CUDA a stage's time is the host's: what it queues runs later.
    """
    from torch.profiler import profile as torch_profile
    from torch.profiler import record_function

    engine, report = NanoApc(args), Report()
    core = engine.llm.engine
    stages = {
        "schedule": (core.scheduler, "schedule"),
        "plan attention": (core.runner.planner, "tiles"),
        "forward": (core.runner.model, "forward"),
        "logits": (core.runner.model, "compute_logits"),
        "sample": (core.runner.sampler, "forward"),
        "settle": (core.scheduler, "settle"),
    }
    for stage, (owner, name) in stages.items():
        setattr(owner, name, record_function(stage)(getattr(owner, name)))
    for workload in workloads:
        engine.run(workload)
        with torch_profile() as profiler:
            result = engine.run(workload)
        report.add(workload=workload.name, engine="nanoapc", **result)
        operators = profiler.key_averages()
        times = {item.key: item.cpu_time_total / 1e6 for item in operators if item.key in stages}
        for stage in stages:
            seconds = times.get(stage, 0.0)  # a graph's replay is no call of ours
            print(f"  {stage:15} {seconds:9.3f} s {seconds / result['seconds']:6.1%}")
        print(operators.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))
    return report


def host(num_seqs: int = 256, prompt_len: int = 2048, shared_len: int = 1024, num_steps: int = 64) -> Report:
    """Schedule, plan, prepare and settle with a null model, plain and overlapped; microseconds a prompt and a step."""
    report = Report()
    print(f"{num_seqs} sequences, prompts of {prompt_len} ({shared_len} shared), block size 16")
    for overlap in (False, True):
        admission, steps = host_loop(num_seqs, prompt_len, shared_len, num_steps, overlap)
        name = "overlapped" if overlap else "plain"
        admit, step, mean, most = (
            seconds * 1e6
            for seconds in (admission / num_seqs, statistics.median(steps), statistics.mean(steps), max(steps))
        )
        if not overlap:
            print(f"admit a prompt (hash, match, allocate)        {admit:8.1f} us")
        print(f"decode step, {name:10} (all but the model)   {step:8.1f} us median, {mean:.1f} mean, {most:.1f} most")
        row = {"us_admit_per_prompt": admit, "us_decode_step": step, "us_decode_step_mean": mean}
        report.rows.append({"loop": name, **row, "us_decode_step_most": most})
    return report


def host_loop(
    num_seqs: int, prompt_len: int, shared_len: int, num_steps: int, overlap: bool
) -> tuple[float, list[float]]:
    """Seconds to admit all prompts, and of each decode step, as the engine's loop takes them."""
    import numpy as np

    from nanoapc.engine.attention_plan import AttentionPlanner
    from nanoapc.engine.block_hash import BlockHasher
    from nanoapc.engine.block_manager import BlockManager
    from nanoapc.engine.prefix_order import prefix_order
    from nanoapc.engine.scheduler import Scheduler
    from nanoapc.engine.sequence import Sequence, SequenceTable
    from nanoapc.engine.step_batch import StepBatch
    from nanoapc.sampling_params import SamplingParams

    rng = np.random.default_rng(0)
    manager = BlockManager(200_000, 16, BlockHasher("xxhash", seed="0"))
    scheduler = Scheduler(manager, SequenceTable(num_seqs, 8192, manager.block_size), 1 << 20)
    planner = AttentionPlanner(16)
    shared = rng.integers(0, 30000, shared_len)
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    sequences = []
    for i in range(num_seqs):
        prompt = np.concatenate([shared, rng.integers(0, 30000, prompt_len - shared_len)]).astype(np.int32)
        sequences.append(Sequence(i, prompt, params, num_steps))

    def launch() -> StepBatch | None:
        batch = scheduler.schedule()
        if batch is not None:
            planner.tiles(batch.block_tables, batch.starts, batch.counts, batch.key)
            scheduler.advance(batch)
        return batch

    start = time.perf_counter()
    scheduler.add(prefix_order(sequences))
    batch = launch()
    admission = time.perf_counter() - start
    steps, tokens = [], np.full(num_seqs, 7)
    while batch is not None:
        start = time.perf_counter()
        following = launch() if overlap else None
        scheduler.settle(batch, tokens[: len(batch.samples)])
        batch = following if overlap else launch()
        steps.append(time.perf_counter() - start)
    return admission, steps[1:-1]


def plot(report: Report, file: str) -> None:
    """Output tokens/s of every row as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row['workload']}\n{row['engine']}" for row in report.rows]
    figure, axes = pyplot.subplots(figsize=(max(6, len(labels) * 0.7), 4), layout="constrained")
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["engine"] for row in report.rows))}
    bars = [row["output_tok_s"] for row in report.rows]
    axes.bar(range(len(bars)), bars, color=[colors[row["engine"]] for row in report.rows])
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=60)
    axes.set_ylabel("output tokens / s")
    figure.savefig(file, dpi=150)


def preset_directory(name: str, folder: str) -> str:
    """A directory with the config.json of a preset."""
    architecture, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = SHAPES[name]
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def positive(text: str, least: int = 1) -> int:
    """A whole number from 1 on, from the command line."""
    if (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0 on, from the command line."""
    return positive(text, 0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default all")
    parser.add_argument("--model", default="embedded", help=f"a directory, a hub name or a preset: {', '.join(SHAPES)}")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=positive, default=2048)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine argument")
    parser.add_argument("--num-requests", type=positive, default=32)
    parser.add_argument("--input-len", type=positive, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=positive, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--shared-len", type=not_negative, default=1024)
    parser.add_argument("--own-len", type=positive, default=32)
    parser.add_argument("--shared-output-len", type=positive, default=32, help="outputs of shared, forest and chat")
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--turn-len", type=positive, default=64)
    parser.add_argument("--single-len", type=positive, default=128)
    parser.add_argument("--single-output-len", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=positive, default=1, help="runs of each; the median counts")
    parser.add_argument("--threads", type=positive, help="torch.set_num_threads")
    parser.add_argument("--compare", choices=("transformers", "vllm"))
    parser.add_argument("--vllm-python")
    parser.add_argument("--serve-vllm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args(argv)
    for name in args.workloads:
        if name not in WORKLOADS:
            parser.error(f"unknown workload {name!r}; choose from {', '.join(WORKLOADS)}")
    for name, (least, most) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if least > most:
            parser.error(f"{name} {least} {most}: MIN must be at most MAX")
    if args.host and args.plot:
        parser.error("--plot shows output tokens a second, which --host does not measure; leave one of them out")
    args.options = {"max_model_len": args.max_model_len}
    for item in args.set:
        name, _, value = item.partition("=")
        try:
            args.options[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            args.options[name] = value
    return args


def main(argv: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    args = parse(argv)
    if args.serve_vllm:
        serve_vllm(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = measure(args, folder)
    print(json.dumps({"model": args.model, "options": args.options, "rows": report.rows}))
    if args.plot:
        plot(report, args.plot)


def measure(args: argparse.Namespace, folder: str) -> Report:
    """Settles the model and runs the asked-for measurement."""
    if args.host:
        return host()
    import nanoapc  # before torch, as its users do
    from nanoapc.models.checkpoint import resolve_model

    import torch  # isort: skip

    if args.threads:
        torch.set_num_threads(args.threads)
    if (args.compare or args.sweep) and torch.cuda.is_available():
        args.options.setdefault("kv_cache_memory_bytes", 16 << 30)  # two engines share the card
    if args.model == "embedded":
        args.model = str(Path(nanoapc.__file__).parent / "embedded")
    elif args.model in SHAPES and not Path(args.model).is_dir():
        args.model, args.load_format = preset_directory(args.model, folder), "dummy"
    config = json.loads((resolve_model(args.model) / "config.json").read_text())
    if args.sweep:
        return sweep(args, config["vocab_size"])
    maker = WorkloadMaker(args, config["vocab_size"])
    workloads = [maker.make(name) for name in args.workloads or WORKLOADS]
    return profile(args, workloads) if args.profile else compare(args, workloads)


if __name__ == "__main__":
    main()
