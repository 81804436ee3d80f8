"""The seam between the model and the device: one set of functions, several implementations.

`reference.py` is the specification in plain PyTorch; `cpu.py` (C++) and the Triton kernels (CUDA) expose the
same functions.
Invariant: every implementation of a function gives the reference's result up to rounding, so nothing above
this package knows which one runs. An engine holds one `Kernels` object and hands it to each module that
needs it; nothing is global.

Shapes: T rows (query tokens of a step), H query heads, Hkv KV heads, D head size, B block size,
NB blocks, L layers, V vocabulary. KV memory is block-major, so that a block is one contiguous extent:

    kv_memory [NB, L, 2, Hkv, B, D]        2: K, V
    kv_cache = kv_memory[:, layer]         what one layer sees (strided): [NB, 2, Hkv, B, D]
    slot = block_id * B + offset           -1: write nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan
    from nanoapc.kernels.attention_work import AttentionWork

PackedLinear = Callable[[Tensor], Tensor]


class Kernels(Protocol):
    """The functions that a device has to offer. All arguments are explicit; tensors live on the device.

    max_tile_rows: how many rows a tile of an AttentionPlan should have at most.
    """

    name: str
    max_tile_rows: int

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedLinear:
        """weight [out, in], bias [out] -> a function from x [T, in] to [T, out] that owns (its form of) the weight.

        gated: the outputs' first half gates the second, the function gives silu(first) * second [T, out / 2].
        """

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual [T, h], weight [h] -> (norm(x + residual), x + residual); without a residual (norm(x), x).

        Normalises in float32, casts to x.dtype, then multiplies by weight.
        """

    def rope_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Per-head q/k norm (if given), rotary embedding, K and V to their slots; returns q [T, H, D].

        qkv [T, (H + 2 * Hkv) * D]; positions, slots [T] int64; cos_sin [max_len, D] float32 (first half
        cos, second half sin); q_norm, k_norm [D] or None; kv_cache [NB, 2, Hkv, B, D] is written.
        """

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q [T, H, D], kv_cache [NB, 2, Hkv, B, D] -> [T, H, D]; K/V are read from the cache alone."""

    def copy_blocks(self, kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        """(source block, destination block, num_tokens): copies the first tokens of a block, all layers, in order."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [n, V] -> the greatest of each row [n] float32 (NaN if there is one), and the first id that has it."""

    def gumbel_argmax(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """logits [n, V] float32, seeds and positions [n] int64 -> ids [n] int64 = argmax(logits + noise).

        The noise is a function of (seed, position, id) alone, see `reference.gumbel_noise`.
        """

    def keep_top(self, x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """x [m, V] float32 -> the same with -inf outside the top_k [m] int64 and top_p [m] float64 sets.

        top_k is at least 1 (V is off). top_p (1 is off) works on the probabilities renormalised over what top_k left:
        an id is kept while those before it have less than this share of the whole. Ties go to the lowest id. Masses are
        the integers of `reference_sampling.fixed_weights`, so every device keeps the same set.
        """

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """x [m, V] float32 -> the k largest of each row and their ids, both [m, k], ties in the order of ids."""

    def logprobs(self, logits: Tensor, ids: Tensor, num_valid_ids: int) -> tuple[Tensor, Tensor]:
        """logits [r, V] float32, ids [r, k] int64 -> their log-probs over all V [r, k], and a rank [r] int64.

        The rank (1 is the best) is that of the first of each row's ids among the ids below num_valid_ids.
        """


@runtime_checkable
class FixedWorkKernels(Protocol):
    """What kernels whose attention can be captured offer besides."""

    def decode_capacities(self, num_rows: int, num_kv_heads: int, max_len: int, shared: bool) -> list[tuple[int, ...]]:
        """Capacities that are worth a graph of their own, the smallest first; shared: for tiles of many rows, too."""

    def prepare(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, capacity: tuple[int, ...]) -> AttentionWork:
        """The work of a plan with this capacity, to be put into the plan; of q and kv_cache only shapes count."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. The host does not wait; PyTorch keeps the pinned copy until it has been read."""
    pinned = values.pin_memory() if device.type == "cuda" and values.numel() else values
    return pinned.to(device, non_blocking=True)


def select_kernels(device: torch.device, deterministic: bool = False) -> Kernels:
    """The implementation for a device, the fastest that works there; `deterministic` matters on CUDA, see there."""
    from nanoapc.kernels.cpu import cpu_kernels
    from nanoapc.kernels.reference import ReferenceKernels

    if device.type == "cpu":
        return cpu_kernels()
    if device.type == "cuda" and find_spec("triton"):
        from nanoapc.kernels.cuda import cuda_kernels

        return cuda_kernels(device, deterministic)
    return ReferenceKernels()
