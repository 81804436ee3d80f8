"""How many KV blocks there are, and the memory that they are.

    num_kv_blocks given           that many
    kv_cache_memory_bytes given   as many as fit
    on the CPU                    CPU_SHARE of the memory that is available once the weights are loaded (what the
                                  system and the control group leave), but never more than max_num_seqs can use
    on CUDA                       what is left of gpu_memory_utilization:

        total * utilization  = | others, driver | weights + the largest step's peak | graphs | KV blocks |
                                  seen outside      measured by running such a step    stated

Invariant: the blocks hold at least one sequence of max_model_len; otherwise nothing is allocated and the ValueError
says both numbers. So a request that passes validation always fits, alone if need be.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from nanoapc.config import EngineConfig
from nanoapc.models.config import ModelConfig

CPU_SHARE = 0.4
"""Share of the available memory that the KV cache takes on the CPU by default. It is taken as blocks are first used, so
LLMs that are made beside each other all find it free: where there are several, give each kv_cache_memory_bytes."""
MOST_BLOCKS = 2**20
"""Of a cache on CUDA, unless more are asked for or the sequences of a step need more: the host keeps an object for
each, and a tiny model on a large card would have tens of millions."""
UNLIMITED = 2**62
CONTROL_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""Of both versions: controllers in /proc/self/cgroup -> where groups lie, limit, use, prefix in memory.stat."""


@dataclass(frozen=True)
class MemoryUse:
    """A CUDA device's bytes before the KV cache is there.

    total: of the device. outside: what others hold, and the driver for us (all that PyTorch's allocator does not).
    peak: the most that this process held while it ran its largest step, weights included. graphs: kept for graphs.
    """

    total: int
    outside: int
    peak: int
    graphs: int

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache; negative if there are too few for the rest."""
        return int(self.total * utilization) - self.outside - self.peak - self.graphs

    def __str__(self) -> str:
        return (
            f"a device of {_mib(self.total)}, less {_mib(self.outside)} of other processes and the driver, "
            f"{_mib(self.peak)} for weights and activations, {_mib(self.graphs)} for graphs"
        )


def measure_memory(device: torch.device, run_largest_step: Callable[[], object], graphs: int) -> MemoryUse:
    """Runs a CUDA engine's largest step and sees what it takes."""
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, total - free - torch.cuda.memory_reserved(device), peak, graphs)


def count_blocks(
    config: EngineConfig, model: ModelConfig, max_model_len: int, measure: Callable[[], MemoryUse] | None
) -> int:
    """Number of KV blocks for an engine whose weights are loaded.

    Args:
        measure: on CUDA, what to call if the config does not say how many.

    Raises:
        ValueError: they could not hold max_model_len tokens, or there is no memory for a single one.
    """
    size = config.block_size * model.kv_bytes
    needed = -(-max_model_len // config.block_size)
    of_running = config.max_num_seqs * (needed + 1)  # what all sequences of a step can hold
    if config.num_kv_blocks is not None:
        count, source = config.num_kv_blocks, f"num_kv_blocks={config.num_kv_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        count = config.kv_cache_memory_bytes // size
        source = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    elif measure is not None:
        use = measure()
        count = min(max(use.left(config.gpu_memory_utilization), 0) // size, max(MOST_BLOCKS, of_running))
        source = f"gpu_memory_utilization={config.gpu_memory_utilization} of {use},"
    else:
        free = int(CPU_SHARE * available_memory())
        count = min(max(free, 0) // size, of_running)
        source = f"{_mib(free)} of free memory"
    if count < needed:
        most = count * config.block_size
        raise ValueError(
            f"max_model_len={max_model_len} needs {needed} KV blocks of {config.block_size} tokens "
            f"({needed * size / 2**20:.1f} MiB), but {source} gives {count} blocks = {most} tokens "
            f"({count * size / 2**20:.1f} MiB); lower max_model_len to at most {most} or give the "
            f"cache more (num_kv_blocks, kv_cache_memory_bytes{'' if measure is None else ', gpu_memory_utilization'})"
        )
    return int(count)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def allocate(num_blocks: int, model: ModelConfig, block_size: int, device: torch.device) -> torch.Tensor:
    """KV memory [num_blocks, L, 2, Hkv, B, D], zero; on the CPU untouched pages cost nothing.

    Raises:
        ValueError: on the CPU, there is no such amount of memory.
    """
    shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    if device.type == "cpu":
        num_bytes = num_blocks * block_size * model.kv_bytes
        try:
            memory = np.zeros(num_bytes, np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than numpy can count
            raise ValueError(
                f"{num_blocks} KV blocks of {block_size} tokens are {_mib(num_bytes)}, which cannot be allocated; "
                "lower num_kv_blocks or kv_cache_memory_bytes"
            ) from None
        return torch.from_numpy(memory).view(model.dtype).view(shape)
    return torch.zeros(shape, dtype=model.dtype, device=device)


def available_memory() -> int:
    """Bytes that this process may still take: the least of what the system and its control groups leave."""
    return min(_system_available(), _control_group_available())


def _system_available() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no Linux


def _control_group_available(root: Path = Path("/")) -> int:
    """The least that the process's control group, and those that it lies in, leave."""
    left = UNLIMITED
    with contextlib.suppress(OSError):  # a system without control groups
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in CONTROL_GROUPS:
                mount, *files = CONTROL_GROUPS[controllers]
                group = PurePosixPath(path)
                left = min(left, *(_left(root / mount / str(g)[1:], *files) for g in (group, *group.parents)))
    return left


def _left(group: Path, limit: str, used: str, prefix: str) -> int:
    """Bytes that a group leaves. Pages of files are left, too: the kernel gives them up on demand, and a model that
    has just been read fills the group with them."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        pages = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        return int((group / limit).read_text()) - int((group / used).read_text()) + pages
    except (OSError, ValueError):  # no such group here, or "max"
        return UNLIMITED
