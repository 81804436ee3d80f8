"""CpuKernels: the kernels in C++ (cpu.cpp), compiled on first use for the machine that runs them.

Invariant: a row's bits depend on that row alone - not on the other rows of the step, on how attention was cut into
tiles, or on the number of threads (cpu_matrix.h and cpu_attention.h say why).

The shared library lands in a cache under a name that holds a hash of everything it depends on (sources, flags,
compiler, PyTorch, processor), so nothing stale is ever loaded. It is built in a folder of its own and renamed into
place: processes that build at the same time disturb nobody, and one that dies leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan

SOURCES = [Path(__file__).parent / name for name in ("cpu.cpp", "cpu_attention.h", "cpu_matrix.h")]

COMPILE_SECONDS = 600
"""A compiler that takes longer is taken for a broken one."""

logger = logging.getLogger(__name__)


class CpuKernels:
    """The C++ kernels; see the protocol `Kernels` for shapes and dtypes (float32, bfloat16 or float16).

    Args:
        matrix_unit: use the processor's bfloat16 matrix unit (AMX) if it has one.

    Raises:
        RuntimeError: the library cannot be built here; the text holds the compiler's answer.
    """

    name = "cpu"

    def __init__(self, matrix_unit: bool = True):
        load_library()
        self._ops = torch.ops.nanoapc_cpu
        self.matrix_unit = matrix_unit and bool(self._ops.has_amx())
        self._linear = self._ops.linear.default
        self._attention = self._ops.attention.default
        self._rope_and_store = self._ops.rope_and_store.default
        self.rms_norm: Callable[[Tensor, Tensor, float], Tensor] = self._ops.rms_norm.default
        self.add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = (
            self._ops.add_rms_norm.default
        )
        self.silu_and_mul: Callable[[Tensor], Tensor] = self._ops.silu_and_mul.default
        self.rope_and_store: Callable[..., Tensor] = self._ops.rope_and_store.default

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """weight [out, in], bias [out] -> a function from x [T, in] to [T, out].

        The weight is used where it lies; only sizes that are no multiple of 32 make a padded copy.
        """
        num_outputs, num_inputs = weight.shape
        amx = self.matrix_unit and weight.dtype is torch.bfloat16
        padding = (0, -num_inputs % 32 if amx else 0, 0, -num_outputs % 32)
        packed = F.pad(weight, padding) if any(padding) else weight.contiguous()
        linear = self._linear
        return lambda x: linear(x, packed, bias, num_outputs, amx)

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q [T, H, D], kv_cache [NB, 2, Hkv, B, D] -> [T, H, D]."""
        return self._attention(
            q, kv_cache, plan.tiles, plan.positions, plan.block_tables, plan.level_starts, scale, self.matrix_unit
        )

    def copy_blocks(self, kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        """(source, destination, num_tokens): the first tokens of a block, all layers, in list order."""
        self._ops.copy_blocks(kv_memory, [number for copy in copies for number in copy])

    def gumbel_argmax(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax(logits + noise) per row [n] int64, see `reference.gumbel_noise`."""
        return self._ops.gumbel_argmax(logits.contiguous(), seeds, positions)


def cpu_kernels() -> CpuKernels | ReferenceKernels:
    """CpuKernels, or after a warning the reference kernels where they cannot be built."""
    try:
        return CpuKernels()
    except (RuntimeError, OSError) as error:
        logger.warning("C++ kernels are not available, running the slower PyTorch ones: %s", error)
        return ReferenceKernels()


# ---- building ----


def load_library() -> None:
    """Registers torch.ops.nanoapc_cpu, once a process; builds the library if the cache has none that loads."""
    if hasattr(torch.ops.nanoapc_cpu, "has_amx"):
        return
    compiler = find_compiler()
    flags = compiler_flags()
    name = f"cpu_{build_key([compiler, *flags])}.so"
    for folder in cache_folders():
        try:
            library = folder / name
            if library.exists():
                try:
                    torch.ops.load_library(str(library))
                    return
                except OSError:  # damaged, by a full disk for example: built again below
                    logger.warning("%s does not load, building it again", library)
            build(compiler, flags, library)
            torch.ops.load_library(str(library))
            return
        except PermissionError:
            continue
    raise RuntimeError("no folder to build in: set NANOAPC_CACHE to a folder that can be written")
