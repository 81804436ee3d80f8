"""Compiles the Triton kernels for a GPU that is not here and reports what they use: python compile_triton.py 90.

Launches go through TritonKernels as in an engine, on CPU tensors; Triton's driver is a stand-in that names the target,
and a launch ends after compiling. So what is compiled is what a device of that capability would run, with the same
specialisation on strides and alignment. One JSON line for each binary.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from test_kernels import make_plan
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nanoapc.kernels.cuda import TritonKernels
from nanoapc.kernels.triton_elementwise import fixed_linear, silu_and_mul

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

ATTENTION = [  # dtype, head_dim, query heads for one KV head, block_size
    (torch.bfloat16, 64, 3, 16),
    (torch.bfloat16, 80, 4, 8),
    (torch.bfloat16, 128, 2, 16),
    (torch.bfloat16, 128, 7, 48),
    (torch.float16, 256, 8, 256),
    (torch.float32, 64, 1, 16),
    (torch.float32, 96, 5, 48),
    (torch.float32, 256, 2, 32),
]
"""Every row of the table of shapes, all sorts of groups and block sizes."""


class StandIn:
    """Triton's driver for a device that is not there."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread, bytes of its stack (what has no register: spills) and of other local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.findall(rf"{name}:(\d+)", report)[0]) for name in ("REG", "STACK", "LOCAL")}


def compile_attention(capability: int, dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    """Narrow items, wide items, and a row in parts."""
    width = -(-1024 // block_size)
    plan = make_plan([list(range(width))] * 2, [1000, 0], [1, 200], block_size, share=False)
    q = torch.zeros(201, 2 * group, head_dim, dtype=dtype)
    kv_cache = torch.zeros(width, 2, 2, 2, block_size, head_dim, dtype=dtype)[:, 1]
    TritonKernels(capability, num_sms=1000).attention(q, kv_cache, plan, 0.1)


def compile_others(capability: int, dtype: torch.dtype) -> None:
    kernels = TritonKernels(capability)
    x, weight = torch.zeros(8, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    kernels.rms_norm(x, None, weight, 1e-6)
    kernels.rms_norm(x, x, weight, 1e-6)
    silu_and_mul(x)
    for num_outputs in (4096, 8192, 32768):
        fixed_linear(torch.zeros(num_outputs, 64, dtype=dtype), None)(x[:, :64].contiguous())
    for head_dim, norm in ((64, None), (80, None), (128, weight[:128]), (256, weight[:256])):
        memory = torch.zeros(4, 2, 2, 2, 16, head_dim, dtype=dtype)
        index = torch.zeros(8, dtype=torch.int64)
        qkv = torch.zeros(8, 8 * head_dim, dtype=dtype)
        kernels.rope_and_store(qkv, index, torch.zeros(9, head_dim), norm, norm, 1e-6, memory[:, 1], index)
        kernels.copy_blocks(memory, [(0, 1, 3)])
    logits = torch.zeros(8, 151_936)
    kernels.gumbel_argmax(logits, index, index)
    kernels.keep_top(logits, index, index.double())
    kernels.logprobs(logits, index[:, None], 151_000)


def main(capability: int) -> None:
    driver.set_active(StandIn(capability))
    run = JITFunction.run
    reported = set()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in reported:
            reported.add(kernel.hash)
            facts = {"kernel": self.fn.__name__, "case": case, "shared": kernel.metadata.shared}
            facts["matrix_unit"] = bool(re.search(r"wgmma|mma\.sync", kernel.asm["ptx"]))
            facts["async_copy"] = "cp.async" in kernel.asm["ptx"]
            print(json.dumps({**facts, **usage(kernel.asm["cubin"])}), flush=True)
        return kernel

    JITFunction.run = compile_only
    for arguments in ATTENTION:
        case = str(arguments)
        compile_attention(capability, *arguments)
    for dtype in (torch.bfloat16, torch.float32):
        case = str(dtype)
        compile_others(capability, dtype)


if __name__ == "__main__":
    main(int(sys.argv[1]))
