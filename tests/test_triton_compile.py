"""Every kernel in every shape of the table compiles for sm_80 and sm_90, within the device's limits, on any machine.

See compile_triton.py for how. What a compiler cannot show - speed, and that the binaries compute the right thing - is
for `tools/gpu_check.sh`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
# Not imported here: the first import in a process decides whether Triton interprets, see test_triton_kernels.py.

HERE = Path(__file__).parent
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program can have."""

Binary = dict[str, Any]


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[int, subprocess.Popen[str]]]:
    """One process for each target, side by side. Apart from this one, because it may run Triton's interpreter."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "TRITON_INTERPRET": "0"}
    running = {
        capability: subprocess.Popen(
            [sys.executable, HERE / "compile_triton.py", str(capability)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for capability in SHARED_MEMORY
    }
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_within_shared_memory_and_registers(
    compilers: dict[int, subprocess.Popen[str]], capability: int
) -> None:
    out, errors = compilers[capability].communicate()
    assert compilers[capability].returncode == 0, errors
    binaries: list[Binary] = [json.loads(line) for line in out.splitlines()]
    for binary in binaries:
        assert binary["shared"] <= SHARED_MEMORY[capability], binary
        assert binary["STACK"] == binary["LOCAL"] == 0, f"registers were spilled: {binary}"
    attention = [binary for binary in binaries if binary["kernel"] == "attend_kernel"]
    assert len({binary["case"] for binary in attention}) == 8
    assert len(attention) == 16  # narrow and wide
    for binary in attention:
        assert binary["async_copy"], f"K and V are not loaded ahead: {binary}"
        assert binary["matrix_unit"] == ("float32" not in binary["case"]), binary
    names = {binary["kernel"] for binary in binaries}
    assert names == {
        "attend_kernel",
        "merge_kernel",
        "_norm_kernel",
        "_silu_and_mul_kernel",
        "_rope_and_store_kernel",
        "_copy_kernel",
        "_linear_kernel",
        "_gumbel_kernel",
        "_keep_top_kernel",
        "_logprob_kernel",
    }
