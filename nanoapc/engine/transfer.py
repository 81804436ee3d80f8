"""Transfer: a step's arrays to the device, and its results back, without the host waiting for either.

    host arrays --> pinned buffer 0 -- one copy, in the background --> device memory, cut into the arrays again
                    pinned buffer 1 ...                                 (a ring of buffers: 0, 1, 2, 0, 1, ...)

Invariant: a pinned buffer is not written again before the event behind its copy has passed, however far the host runs
ahead of the device. What `fetch` returns may be read once its event has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_BUFFERS = 3
"""One that the device reads, one that waits behind it, one that the host fills."""
ALIGNMENT = 64
"""Of each array in a buffer, in bytes: kernels are compiled for aligned pointers."""


class Transfer:
    """On the CPU there is nothing to move."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays as tensors on the device."""
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, values: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Tensors on the device, in (named) tuples and lists, to the host; the event says when they are there."""
        return values, None


class PinnedTransfer(Transfer):
    """To and from a CUDA device, in the order of its current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self._ring = [(self._pinned(0), self._event()) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def _upload(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.device, non_blocking=True)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays as tensors on the device, all with one copy."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        buffer, event = self._ring[self._turn]
        event.synchronize()  # at once, if it was never recorded
        if buffer.numel() < ends[-1]:
            buffer = self._pinned(2 * ends[-1])
            self._ring[self._turn] = buffer, event
        self._turn = (self._turn + 1) % NUM_BUFFERS
        pieces = [slice(start, start + array.nbytes) for start, array in zip([0, *ends], arrays)]
        host = buffer.numpy()
        for piece, array in zip(pieces, arrays, strict=True):
            host[piece] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = self._upload(buffer[: ends[-1]])
        event.record()
        dtypes = [torch.from_numpy(array[:0]).dtype for array in arrays]
        return [
            sent[piece].view(dtype).view(array.shape)
            for piece, dtype, array in zip(pieces, dtypes, arrays, strict=True)
        ]

    def fetch(self, values: Any) -> tuple[Any, torch.cuda.Event | None]:
        """See Transfer. PyTorch gives pinned memory to others only when the copy into it has happened."""
        fetched, event = self._to_host(values), self._event()
        event.record()
        return fetched, event

    def _to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            host = self._pinned(value.nbytes).view(value.dtype).view(value.shape)
            return host.copy_(value, non_blocking=True)
        if isinstance(value, list):
            return [self._to_host(item) for item in value]
        if isinstance(value, tuple):
            items = [self._to_host(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value
