"""The CUDA kernels at real sizes: right (against the reference, in bfloat16), repeatable to the bit, and how fast.

    python tools/gpu_check_kernels.py --json benchmarks/gpu_kernels.json     on a GPU, about two minutes
    python tools/gpu_check_kernels.py --small                                on a GPU, no figures: for compute-sanitizer
    TRITON_INTERPRET=1 python tools/gpu_check_kernels.py --dry-run           anywhere: only tries this script out

Figures are shares of what this card reaches: bytes that have to be moved against a large copy (read + written), and
operations against a large matrix product on random data. Caches are flushed between runs; a figure is a median.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from gpu_check_report import Report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoapc.engine.attention_plan import AttentionPlan, AttentionPlanner
from nanoapc.kernels import Kernels
from nanoapc.kernels.cuda import TritonKernels, cuda_kernels
from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.kernels.triton_elementwise import silu_and_mul
from nanoapc.layers.sampler import Sampler, SamplingRows, make_state
from nanoapc.sampling_params import SamplingParams

REFERENCE = ReferenceKernels()
BLOCK_SIZE = 16
LLAMA_8B = (32, 8, 128)  # query heads, KV heads, head_dim
QWEN3_06B = (16, 8, 128)
LLAMA_1B = (32, 8, 64)


class Check(Report):
    """One run, with the kernels that it checks."""

    def __init__(self, dry: bool, path: Path | None = None):
        super().__init__(dry, path)
        self.about["triton"] = triton.__version__
        self.dtype = torch.float16 if dry else torch.bfloat16  # the interpreter's bfloat16 is wrong
        self.kernels, self.deterministic = (
            TritonKernels(deterministic=fixed) if dry else cuda_kernels(torch.device("cuda"), fixed)
            for fixed in (False, True)
        )
        self.matrix_rate = float("nan")

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def seconds(self, run: Callable[[], Any]) -> float:
        if self.device == "cpu":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median") / 1e3

    def close(self, name: str, out: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
        error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
        self.expect(name, error < limit, f"relative error {error:.1e}")  # NaN fails


class Step:
    """Rows of attention over a paged cache in random order: what a step of an engine would run."""

    def __init__(
        self,
        check: Check,
        geometry: tuple[int, int, int],
        lengths: list[tuple[int, int]],
        shared: int = 0,
        filled: bool = True,
    ):
        """lengths: (first position, rows) of each sequence; the first `shared` positions are common to all."""
        self.check, self.geometry = check, geometry
        num_heads, num_kv_heads, head_dim = geometry
        common = shared // BLOCK_SIZE
        blocks = [-(-(start + count) // BLOCK_SIZE) for start, count in lengths]
        num_blocks = common + sum(max(n - common, 0) for n in blocks) + 1
        free = iter(np.random.permutation(num_blocks - 1) + 1)
        prefix = [next(free) for _ in range(common)]
        self.tables = np.zeros((len(lengths), max(blocks)), np.int32)
        for table, n in zip(self.tables, blocks, strict=True):
            table[:n] = [*prefix[:n], *(next(free) for _ in range(n - common))]
        shape = (num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim)
        memory = torch.full(shape, torch.nan, dtype=check.dtype, device=check.device)
        self.kv_cache = memory[:, 1]
        for block in range(1, num_blocks, 4096):  # piece by piece: random numbers are made in float32
            self.kv_cache[block : block + 4096] = check.randn(*self.kv_cache[block : block + 4096].shape)
        if not filled:  # what no row may see is NaN
            for table, n, (start, count) in zip(self.tables, blocks, lengths, strict=True):
                if n > common:
                    self.kv_cache[int(table[n - 1]), :, :, (start + count - 1) % BLOCK_SIZE + 1 :] = torch.nan
        self.starts = np.array([start for start, _ in lengths])
        self.counts = np.array([count for _, count in lengths])
        self.q = check.randn(int(self.counts.sum()), num_heads, head_dim)
        self.kv_bytes = 2 * num_kv_heads * head_dim * self.q.element_size()  # of a position

    def plan(self, share: bool = True, only: int | None = None) -> AttentionPlan:
        """The plan of the step, or of one of its sequences alone."""
        chosen = slice(None) if only is None else slice(only, only + 1)
        tables, starts, counts = self.tables[chosen], self.starts[chosen], self.counts[chosen]
        tiles, levels = AttentionPlanner(BLOCK_SIZE, 1 << 20, share=share).tiles(tables, starts, counts)
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        host = (tiles.copy(), positions, np.full_like(positions, -1), tables.copy())
        arrays = (torch.from_numpy(array).to(self.check.device) for array in host)
        return AttentionPlan(*arrays, tiles, levels)

    def run(self, kernels: Kernels, plan: AttentionPlan, rows: slice = slice(None)) -> Tensor:
        return kernels.attention(self.q[rows], self.kv_cache, plan, self.geometry[2] ** -0.5)

    def seconds(self, plan: AttentionPlan) -> float:
        """Of the kernels alone: on the GPU they are replayed, so that no time of the host's is in it."""
        run = lambda: self.run(self.check.kernels, plan)  # noqa: E731
        if self.check.device == "cpu":
            return self.check.seconds(run)
        run()  # compiles, and prepares the plan's work
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self.check.seconds(graph.replay)


# ---- right ----


def check_attention(check: Check, small: bool) -> None:
    k = 64 if check.tiny > 1 else 16 if small else 1
    steps = {
        "decode": (LLAMA_8B, [(p // k, 1) for p in (8191, 4000, 1023, 255, 17) * 4], 0),
        "decode, head 64": (LLAMA_1B, [(p // k, 1) for p in (3000, 1023, 255, 17) * 4], 0),
        "prefill": (LLAMA_8B, [(0, 2048 // k), (0, 100)], 0),
        "shared": (QWEN3_06B, [(2048 // min(k, 4) + i, 1) for i in range(6 if k > 16 else 70)], 2048 // min(k, 4)),
        "mixed": (QWEN3_06B, [(2100 // min(k, 4), 1), (600, 300 // k), (600, 1), (0, 700 // k), (549, 33)], 512),
    }
    for name, (geometry, lengths, shared) in steps.items():
        if small and name not in ("decode", "mixed"):
            continue
        if check.tiny > 1:
            geometry = (4, 2, 64)
        step = Step(check, geometry, lengths, shared, filled=False)
        expected = step.run(REFERENCE, step.plan())
        check.close(f"attention, {name}", step.run(check.kernels, step.plan()), expected)
        whole = step.run(check.deterministic, step.plan())
        check.close(f"attention, {name}, deterministic", whole, expected)
        alike = torch.equal(whole, step.run(check.deterministic, step.plan(share=False)))
        ends = np.cumsum(step.counts)
        for i in range(0, len(lengths), max(1, len(lengths) // 5)):
            rows = slice(int(ends[i] - step.counts[i]), int(ends[i]))
            alike &= torch.equal(whole[rows], step.run(check.deterministic, step.plan(only=i), rows))
        check.expect(f"attention, {name}: the same bits alone, in company, with a shared prefix", alike)


def check_elementwise(check: Check) -> None:
    rows, size, kernels = 2048 // check.tiny, 4096 // check.tiny, check.kernels
    x, residual, weight = check.randn(rows, size), check.randn(rows, size), check.randn(size)
    for out, expected in zip(
        kernels.rms_norm(x, residual, weight, 1e-6), REFERENCE.rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        check.close("rms_norm", out, expected)
    check.close("silu_and_mul", silu_and_mul(x), torch_silu_and_mul(x))
    results = []
    arguments = rope_arguments(check, rows)
    for implementation in (kernels, REFERENCE):
        cache = torch.zeros_like(arguments[-2])
        q = implementation.rope_and_store(*arguments[:-2], cache, arguments[-1])
        results.append((q, cache))
    for out, expected, name in zip(*results, ("q", "K and V"), strict=True):
        check.close(f"rope_and_store, {name}", out, expected)
    memory = check.randn(64, 2, 2, 8, 16, 64)
    copies = [(i, 32 + i, i % 17) for i in range(30)] + [(33, 63, 16), (1, 33, 4)]
    copied, expected = memory.clone(), memory.clone()
    kernels.copy_blocks(copied, copies)
    REFERENCE.copy_blocks(expected, copies)
    check.expect("copy_blocks", torch.equal(copied, expected))
    linear_weight = check.randn(4096 // check.tiny, size)
    linear = check.deterministic.pack_linear(linear_weight, None)
    check.close("fixed product", linear(x), F.linear(x, linear_weight))
    check.expect("fixed product: the same bits for 1, 77, all rows", all(
        torch.equal(linear(x[:n]), linear(x)[:n]) for n in (1, 77 // min(check.tiny, 11), rows)
    ))  # fmt: skip


def check_sampling(check: Check) -> None:
    kernels, (logits, seeds, positions) = check.kernels, sampling_arguments(check, 64 // check.tiny)
    ids = kernels.gumbel_argmax(logits, seeds, positions)
    check.expect("gumbel_argmax", torch.equal(ids, REFERENCE.gumbel_argmax(logits, seeds, positions)))
    V = logits.shape[1]
    logits[1::2] = logits[1::2].bfloat16().float()  # ties
    for k, p in ((50, 1.0), (V, 0.95), (V // 3, 0.99), (V, 1e-9), (1, 0.5)):
        top_k, top_p = (torch.full(seeds.shape, value, device=check.device) for value in (k, p))
        kept, expected = (one.keep_top(logits, top_k, top_p.double()) for one in (kernels, REFERENCE))
        check.expect(f"keep_top, k {k}, p {p}", torch.equal(kept, expected), f"{(kept > -1e9).sum()} kept")
    best, expected = (one.largest(logits, 20) for one in (kernels, REFERENCE))
    check.expect("largest", all(torch.equal(a, b) for a, b in zip(best, expected, strict=True)))
    (found, rank), (expected, true_rank) = (one.logprobs(logits, ids[:, None], V - 9) for one in (kernels, REFERENCE))
    check.close("logprobs", found, expected, 1e-5)
    check.expect("logprobs, rank", torch.equal(rank, true_rank))
    ranked, greedy = SamplingParams(top_k=20, top_p=0.9, min_p=1e-4, logprobs=3), SamplingParams(temperature=0)
    penalised = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5)
    sample = sampler_run(check, logits, positions, [ranked, greedy, SamplingParams(logit_bias={3: 1.0}), penalised])
    sample()
    if check.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")  # what waits raises (`attempt` sets it back)
        sample()


def sampler_run(check: Check, logits: Tensor, positions: Tensor, params: list[SamplingParams]) -> Callable[[], Any]:
    """Samples a row of logits for each of params, which are repeated."""
    some = [params[i % len(params)] for i in range(len(logits))]
    rows = SamplingRows([(p, make_state(p), i) for i, p in enumerate(some)], logits.shape[1], check.device)
    rows.positions = positions
    return lambda: Sampler(check.kernels, logits.shape[1]).forward(logits, rows)


def torch_silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_arguments(check: Check, rows: int) -> tuple[Any, ...]:
    num_heads, num_kv_heads, head_dim = LLAMA_8B
    memory = torch.zeros(rows // 16 + 1, 2, 2, num_kv_heads, 16, head_dim, dtype=check.dtype, device=check.device)
    slots = torch.randperm(rows, device=check.device)
    slots[::9] = -1
    positions = torch.randint(0, 4096, (rows,), device=check.device)
    qkv = check.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = torch.rand(4096, head_dim // 2, device=check.device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    return qkv, positions, cos_sin, check.randn(head_dim), check.randn(head_dim), 1e-6, memory[:, 1], slots


def sampling_arguments(check: Check, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(rows, 151_936 // check.tiny, device=check.device) * 3
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=check.device)
    return logits, seeds, torch.randint(0, 100_000, (rows,), device=check.device)


# ---- fast ----


def measure_card(check: Check) -> None:
    a = torch.empty((1 << 30) // check.tiny**3, dtype=torch.bfloat16, device=check.device)
    b = a.clone()
    check.copy_rate = 2 * a.nbytes / check.seconds(lambda: b.copy_(a))
    n = 8192 // check.tiny
    x, y = check.randn(n, n), check.randn(n, n)
    check.matrix_rate = 2 * n**3 / check.seconds(lambda: x @ y)
    check.note("card", copy_TB_s=check.copy_rate / 1e12, matrix_TFLOP_s=check.matrix_rate / 1e12)


def measure_decode(check: Check) -> None:
    for geometry in (LLAMA_1B, LLAMA_8B):
        for context in (1024, 8192):
            for batch in (1, 16, 64, 256):
                batch, length = max(1, batch // check.tiny), context // check.tiny
                step = Step(check, geometry, [(length - 1, 1)] * batch)
                seconds = step.seconds(step.plan())
                share = batch * length * step.kv_bytes / seconds / check.copy_rate
                check.note(f"decode, head {geometry[2]}, {batch} x {length}", us=seconds * 1e6, of_copy_rate=share)


def measure_prefill(check: Check) -> None:
    num_heads, num_kv_heads, head_dim = LLAMA_8B
    for length in (2048, 8192, 32768):
        length //= 8 * check.tiny if check.tiny > 1 else 1
        step = Step(check, LLAMA_8B, [(0, length)])
        operations = 2 * num_heads * head_dim * length * (length + 1)
        q = check.randn(1, num_heads, length, head_dim)
        k, v = check.randn(2, 1, num_kv_heads, length, head_dim)
        seconds = step.seconds(step.plan())
        sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        chosen = check.seconds(sdpa)  # on sm_90 that is cuDNN's, which is no flash attention of version 2
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            flash = check.seconds(sdpa)
        check.note(
            f"prefill, head {head_dim}, {length}",
            ms=seconds * 1e3,
            of_matrix_rate=operations / seconds / check.matrix_rate,
            times_sdpa=chosen / seconds,
            times_flash=flash / seconds,
        )
    context = 32_768 // (8 * check.tiny if check.tiny > 1 else 1)
    seconds = (step := Step(check, LLAMA_8B, [(context - 64, 64)])).seconds(step.plan())
    operations = 4 * num_heads * head_dim * 64 * context
    check.note(f"chunk of 64 to {context}", us=seconds * 1e6, of_matrix_rate=operations / seconds / check.matrix_rate)


def measure_shared_prefix(check: Check) -> None:
    batch = 256 // check.tiny
    for shared in (512, 2048, 8192):
        shared //= 4 if check.tiny > 1 else 1
        step = Step(check, QWEN3_06B, [(shared + 127, 1)] * batch, shared)
        forest, plain = (step.seconds(step.plan(share=share)) for share in (True, False))
        check.note(
            f"shared prefix, {batch} x ({shared} + 128)",
            us=forest * 1e6,
            plain_us=plain * 1e6,
            times_plain=plain / forest,
        )


def measure_elementwise(check: Check) -> None:
    rows, size = 8192 // check.tiny, 4096 // check.tiny
    x, residual, weight = check.randn(rows, size), check.randn(rows, size), check.randn(size)
    gate_up = check.randn(rows, 3 * size)
    rope = rope_arguments(check, rows)
    written = rope[0].nbytes * 8 // 9
    for name, num_bytes, arguments in (
        ("rms_norm", 4 * x.nbytes, (x, residual, weight, 1e-6)),
        ("silu_and_mul", gate_up.nbytes * 3 // 2, (gate_up,)),
        ("rope_and_store", rope[0].nbytes + written, rope),
    ):
        own, plain = getattr(check.kernels, name, silu_and_mul), getattr(REFERENCE, name, torch_silu_and_mul)
        seconds = check.seconds(lambda own=own, a=arguments: own(*a))
        eager = check.seconds(lambda plain=plain, a=arguments: plain(*a))
        values = {
            "us": seconds * 1e6,
            "of_copy_rate": num_bytes / seconds / check.copy_rate,
            "times_eager": eager / seconds,
        }
        if check.device == "cuda" and name != "rope_and_store":  # that one writes to a boolean selection
            compiled = torch.compile(plain)
            values["times_compiled"] = check.seconds(lambda c=compiled, a=arguments: c(*a)) / seconds
        check.note(name, **values)
    memory = check.randn(513, 4 if check.tiny > 1 else 28, 2, 8, 16, 128 // check.tiny)
    copies = [(i, 256 + i, 16) for i in range(256)]
    seconds = check.seconds(lambda: check.kernels.copy_blocks(memory, copies))
    check.note("copy_blocks, 256", us=seconds * 1e6, of_copy_rate=2 * memory[:256].nbytes / seconds / check.copy_rate)


def measure_sampling(check: Check) -> None:
    """The draw alone, then the whole sampler beside PyTorch, which races exponentials or sorts the vocabulary."""
    logits, seeds, positions = sampling_arguments(check, 256 // check.tiny)
    size, num_ids = f"{logits.shape[0]} x {logits.shape[1]}", logits.shape[1]
    seconds = check.seconds(lambda: check.kernels.gumbel_argmax(logits, seeds, positions))
    check.note(f"gumbel_argmax, {size}", us=seconds * 1e6, of_copy_rate=logits.nbytes / seconds / check.copy_rate)

    def plain(k: int, p: float) -> Tensor:
        if k == num_ids and p == 1:
            return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)
        values, ids = logits.sort(dim=-1, descending=True)
        values[:, k:] = -torch.inf
        probabilities = values.softmax(-1)
        probabilities.masked_fill_(probabilities.cumsum(-1) - probabilities >= p, 0)
        return ids.gather(1, torch.multinomial(probabilities, 1))

    filters = ({}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.99, "temperature": 5.0})
    for options in (*filters, {"logprobs": 5}):
        params = SamplingParams(**options)
        one, all_rows = (
            check.seconds(sampler_run(check, logits[:n], positions[:n], [params])) for n in (1, len(logits))
        )
        torch_seconds = check.seconds(lambda k=params.top_k or num_ids, p=params.top_p: plain(k, p))
        values = {"us": all_rows * 1e6, "times_torch": torch_seconds / all_rows, "us_1_row": one * 1e6}
        check.note(f"sampler {options}, {size}", **values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--small", action="store_true", help="attention at a small size, no figures")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in Triton's interpreter, tiny")
    parser.add_argument("--seed", type=int, help="of the data; without one they are fresh: right on any")
    options = parser.parse_args()
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    print(f"seed {seed}")
    torch.manual_seed(seed)
    np.random.seed(seed)
    check = Check(options.dry_run, options.json)
    check.attempt(check_attention, options.small)
    if not options.small:
        for part in (
            check_elementwise,
            check_sampling,
            measure_card,
            measure_decode,
            measure_prefill,
            measure_shared_prefix,
            measure_elementwise,
            measure_sampling,
        ):
            check.attempt(part)
    return check.finish()


if __name__ == "__main__":
    sys.exit(main())
