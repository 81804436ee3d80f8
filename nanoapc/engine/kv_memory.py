"""How many KV blocks there are, and the memory that they are.

    num_kv_blocks given     that many
    kv_cache_memory given   as many as fit
    on the CPU              CPU_SHARE of the memory that is available once the weights are loaded (what the
                            system and the control group leave), but never more than max_num_seqs can use
    on CUDA                 gpu_memory_utilization of the card, less everything that is in use

Invariant: the blocks hold at least one sequence of max_model_len; otherwise nothing is allocated and the ValueError
says both numbers. So a request that passes validation always fits, alone if need be.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from nanoapc.config import EngineConfig
from nanoapc.models.config import ModelConfig

CPU_SHARE = 0.4
"""Share of the available memory that the KV cache takes on the CPU by default."""


def block_bytes(model: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block: K and V of block_size tokens in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * block_size * dtype.itemsize


def count_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> int:
    """Number of KV blocks for an engine whose weights are loaded.

    Raises:
        ValueError: they could not hold max_model_len tokens, or there is no memory for a single one.
    """
    size = block_bytes(model, dtype, config.block_size)
    needed = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        count, source = config.num_kv_blocks, f"num_kv_blocks={config.num_kv_blocks}"
    elif config.kv_cache_memory is not None:
        count, source = config.kv_cache_memory // size, f"kv_cache_memory={config.kv_cache_memory} bytes"
    else:
        free = _free_bytes(device, config.gpu_memory_utilization)
        useful = config.max_num_seqs * (needed + 1) if device.type == "cpu" else 2**62
        count, source = min(max(free, 0) // size, useful), f"{free / 2**20:.0f} MiB of free memory"
    if count < needed:
        most = count * config.block_size
        raise ValueError(
            f"max_model_len={max_model_len} needs {needed} KV blocks of {config.block_size} tokens "
            f"({needed * size / 2**20:.1f} MiB), but {source} gives {count} blocks = {most} tokens "
            f"({count * size / 2**20:.1f} MiB); lower max_model_len to at most {most} or give the "
            "cache more (num_kv_blocks, kv_cache_memory"
            + (", gpu_memory_utilization)" if device.type == "cuda" else ")")
        )
    return int(count)


def allocate(
    num_blocks: int, model: ModelConfig, dtype: torch.dtype, block_size: int, device: torch.device
) -> torch.Tensor:
    """KV memory [num_blocks, L, 2, Hkv, B, D], zero; on the CPU untouched pages cost nothing."""
    shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    if device.type == "cpu":
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _free_bytes(device: torch.device, utilization: float) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * utilization) - (total - free)
    return int(CPU_SHARE * available_memory())


def available_memory() -> int:
    """Bytes that this process may still take: the least of what the system and its control groups leave."""
    return min(_system_available(), _control_group_available())


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30  # an unknown system: a size that any machine for this job has


def _control_group_available() -> int:
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit, used in pairs:
        try:
            return int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return 2**62
