"""CpuKernels: the kernels in C++ (cpu.cpp), compiled on first use for the machine that runs them.

Invariant: a row's bits depend on that row alone - not on the other rows of the step, on how attention was cut
into tiles, or on the number of threads (cpu_matrix.h and cpu_attention.h say why).

The shared library lands in a cache under a name that holds a hash of all that it depends on (sources, flags,
compiler, PyTorch, processor), so nothing stale is ever loaded. It is built in a folder of its own and renamed
into place: processes that build at the same time disturb nobody, and one that dies leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.kernels import PackedLinear
from nanoapc.kernels.reference import ReferenceKernels
from nanoapc.kernels.reference_sampling import largest, logprobs

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan

HEADERS = ("cpu_vector.h", "cpu_matrix.h", "cpu_weight.h", "cpu_linear.h", "cpu_attention.h", "cpu_sampling.h")
SOURCES = [Path(__file__).parent / name for name in ("cpu.cpp", *HEADERS)]

COMPILE_SECONDS = 600
"""A compiler that takes longer is taken for a broken one."""

LOADING = threading.Lock()
"""The library is loaded once a process, so threads that need it at once compile it once."""

DIGEST_BYTES = 32
"""A library in the cache ends with the SHA-256 of what comes before."""

logger = logging.getLogger(__name__)


class CpuKernels:
    """The C++ kernels; see the protocol `Kernels` for shapes and dtypes (float32, bfloat16 or float16).

    Args:
        matrix_unit: use the processor's bfloat16 matrix unit (AMX) if it has one.

    Raises:
        RuntimeError: the library cannot be built here; the text holds the compiler's answer.
    """

    max_tile_rows = 128
    largest = staticmethod(largest)
    logprobs = staticmethod(logprobs)

    def __init__(self, matrix_unit: bool = True):
        with LOADING:
            load_library()
        self._ops = torch.ops.nanoapc_cpu
        self.matrix_unit = matrix_unit and bool(self._ops.has_amx())
        self.name = "cpu with matrix unit" if self.matrix_unit else "cpu"
        self._attention = self._ops.attention.default
        self.rms_norm = self._ops.rms_norm.default
        self.argmax = self._ops.argmax.default
        self.rope_and_store = self._ops.rope_and_store.default

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedLinear:
        """For the matrix unit a weight is packed (cpu_weight.h); otherwise it is used where it lies.

        Sizes that are no multiple of 32 make a padded copy.
        """
        num_outputs, num_inputs = weight.shape[0] // (1 + gated), weight.shape[1]
        if gated and (rows := -num_outputs % 16):  # so that gate and up begin with a group of 16 rows
            weight = F.pad(weight.view(2, num_outputs, num_inputs), (0, 0, 0, rows)).flatten(0, 1)
            bias = None if bias is None else F.pad(bias.view(2, num_outputs), (0, rows)).flatten()
            linear = self.pack_linear(weight, bias, gated)
            return lambda x: linear(x)[:, :num_outputs]
        amx = self.matrix_unit and weight.dtype is torch.bfloat16
        columns, rows = -num_inputs % 32 if amx else 0, -weight.shape[0] % 32
        weight = F.pad(weight, (0, columns, 0, rows)) if columns or rows else weight.contiguous()
        if not amx:
            linear_op = self._ops.linear.default
            return lambda x: linear_op(x, weight, bias, num_outputs, gated)
        packed, packed_op = self._ops.pack_linear_weight(weight, gated), self._ops.packed_linear.default
        if columns:
            return lambda x: packed_op(F.pad(x, (0, columns)), *packed, bias, num_outputs, gated)
        return lambda x: packed_op(x, *packed, bias, num_outputs, gated)

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        step = (plan.tiles, plan.positions, plan.block_tables, plan.level_starts)
        return self._attention(q, kv_cache, *step, scale, self.matrix_unit)

    def copy_blocks(self, kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        self._ops.copy_blocks(kv_memory, [number for copy in copies for number in copy])

    def gumbel_argmax(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self._ops.gumbel_argmax(logits.contiguous(), seeds, positions)

    def keep_top(self, x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return self._ops.keep_top(x.contiguous(), top_k, top_p)


def cpu_kernels() -> CpuKernels | ReferenceKernels:
    """CpuKernels, or after a warning the reference kernels where they cannot be built."""
    try:
        return CpuKernels()
    except (RuntimeError, OSError) as error:
        logger.warning("C++ kernels are not available, running the slower PyTorch ones: %s", error)
        return ReferenceKernels()


# ---- building ----


def load_library() -> None:
    """Registers torch.ops.nanoapc_cpu, once a process; compiles it if the cache has no copy that loads.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    if hasattr(torch.ops.nanoapc_cpu, "has_amx"):
        return
    command = compile_command()
    name = f"cpu-{build_key(command)}.so"
    for folder in cache_folders():
        library = folder / name
        if library.is_file() and _loads(library):
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            build(command, library)
        except OSError as error:
            logger.info("cannot write to %s (%s), trying the next folder", folder, error)
            continue
        torch.ops.load_library(str(library))
        return
    with tempfile.TemporaryDirectory(prefix="nanoapc-") as temporary:  # a loaded library may be deleted
        logger.warning("no cache folder can be written, C++ kernels are compiled anew: set NANOAPC_CACHE")
        build(command, Path(temporary) / name)
        torch.ops.load_library(str(Path(temporary) / name))


def _loads(library: Path) -> bool:
    content = library.read_bytes()
    whole = hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
    if whole:  # a file cut short, by a full disk for example, would crash the process
        torch.ops.load_library(str(library))
    else:
        logger.warning("%s is damaged, compiling it again", library)
    return whole


def cache_folders() -> list[Path]:
    """Where the library is looked for and written, best first."""
    chosen = [os.environ.get("NANOAPC_CACHE"), os.environ.get("TORCH_EXTENSIONS_DIR")]
    home = os.path.expanduser("~")  # stays so where a container's user has none
    default = [] if home == "~" else [Path(home, ".cache", "nanoapc")]
    return [Path(folder) for folder in chosen if folder] or default


def compile_command() -> list[str]:
    """The compiler and its flags, without the files."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, filter(None, candidates))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++ or clang++, or set CXX")
    home = Path(torch.__file__).parent
    return [
        compiler,
        *("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]


def build_key(command: list[str]) -> str:
    """A hash of everything that the library depends on."""
    version = subprocess.run([command[0], "--version"], capture_output=True, timeout=COMPILE_SECONDS).stdout
    parts = [torch.__version__.encode(), " ".join(command).encode(), version, _processor().encode()]
    parts += [source.read_bytes() for source in SOURCES]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the processor's name and abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model", "cpu family", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(kept)}))


def build(command: list[str], library: Path) -> None:
    """Compiles SOURCES[0] to `library`, which appears whole. OSError: its folder cannot be written."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
        output = Path(folder) / library.name
        started = time.monotonic()
        logger.info("compiling the C++ kernels, once for this machine: %s", library)
        try:
            result = subprocess.run(
                [*command[:1], str(SOURCES[0]), *command[1:], "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[0]} took more than {COMPILE_SECONDS} s") from None
        if result.returncode != 0 or not output.is_file():
            raise RuntimeError(f"{command[0]} failed ({result.returncode}): {result.stderr[:2000]}")
        with output.open("ab") as file:
            file.write(hashlib.sha256(output.read_bytes()).digest())
        os.replace(output, library)
        logger.info("compiled in %.0f s", time.monotonic() - started)
