"""ReferenceKernels: every kernel in plain PyTorch. The specification, and the fallback for any device.

Invariant: products accumulate and normalisations run in float32, results have the dtype of the input; a slot
of the KV memory that no row may see has no influence, not even when it holds NaN.

Attention works on a row's running state, so that its KV range may come in any number of pieces:

    m    [T, H]     the largest score so far           new m = max(m, scores)
    l    [T, H]     sum of exp(score - m)              l and acc are rescaled by exp(m - new m)
    acc  [T, H, D]  sum of exp(score - m) * V          result = acc / l
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.engine.attention_plan import KV_END, KV_START, NUM_ROWS, ROW_START, TABLE
from nanoapc.kernels.reference_sampling import argmax, keep_top, largest, logprobs

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan

CHUNK_TOKENS = 2048
"""KV positions of a tile that are looked at together: bounds the temporaries."""

BATCH_TOKENS = 1 << 14
"""KV positions that a batch of tiles gathers at most (tiles x positions)."""

MASK32 = 0xFFFFFFFF


class ReferenceKernels:
    """Plain PyTorch on any device; see the protocol `Kernels` for shapes and dtypes."""

    name = "reference"
    max_tile_rows = 128
    argmax = staticmethod(argmax)
    keep_top = staticmethod(keep_top)
    largest = staticmethod(largest)
    logprobs = staticmethod(logprobs)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Callable[[Tensor], Tensor]:
        """weight [out, in], bias [out] -> a function from x [T, in] to [T, out]."""
        return lambda x: F.linear(x, weight, bias)

    def pack_gated_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """weight [2 * I, in], gate's rows before up's -> a function from x [T, in] to silu(gate) * up [T, I]."""

        def gated(x: Tensor) -> Tensor:
            gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
            return F.silu(gate) * up

        return gated

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dimension, in float32; cast to x.dtype; times weight."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), the sum in x.dtype."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

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
        """Splits qkv into heads, normalises and rotates q and k, stores K and V; returns q [T, H, D]."""
        num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        q = self.rms_norm(q, q_norm, eps) if q_norm is not None else q
        k = self.rms_norm(k, k_norm, eps) if k_norm is not None else k
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] float32
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kept = slots >= 0
        blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
        kv_cache[blocks, 0, :, offsets] = k[kept].to(kv_cache.dtype)
        kv_cache[blocks, 1, :, offsets] = v[kept].to(kv_cache.dtype)
        return q

    def attention(self, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Softmax attention of each row over the KV positions that its tiles and its own position allow."""
        num_rows, num_heads, head_dim = q.shape
        m = torch.full((num_rows, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
        state = (m, torch.zeros_like(m), m.new_zeros(num_rows, num_heads, head_dim))
        for first, end in zip(plan.level_starts[:-1], plan.level_starts[1:], strict=True):
            for tiles in _batches(plan.host_tiles[first:end]):
                for kv_start in range(0, int((tiles[:, KV_END] - tiles[:, KV_START]).max()), CHUNK_TOKENS):
                    _attend(q, kv_cache, plan, tiles, kv_start, scale, state)
        return (state[2] / state[1].unsqueeze(-1)).to(q.dtype)

    def copy_blocks(self, kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        """(source, destination, num_tokens): the first tokens of a block, all layers, in order."""
        for source, destination, num_tokens in copies:
            kv_memory[destination, ..., :num_tokens, :] = kv_memory[source, ..., :num_tokens, :]

    def gumbel_argmax(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax(logits + gumbel_noise) per row; ties go to the lowest id."""
        return torch.argmax(logits + gumbel_noise(seeds, positions, logits.shape[-1]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, 1, D / 2]: rotates the pairs (x[i], x[i + D / 2]), in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def gumbel_noise(seeds: Tensor, positions: Tensor, num_ids: int) -> Tensor:
    """[n, num_ids] float32 Gumbel(0, 1) noise; an entry is a function of (seed, position, id) alone.

    mix is a bijection of 32-bit integers; all sums and products are modulo 2**32:

        k0 = mix(mix(position) ^ low half of seed)
        k1 = mix(k0 ^ high half of seed ^ 0x9e3779b9)
        u = ((mix(mix(id + k0) ^ k1) >> 8) + 0.5) / 2**24      noise = -log(-log(u))

    u and its logarithms are taken in float64: in float32 u would round to 1 and the noise to infinity.
    """
    low, high = seeds & MASK32, (seeds >> 32) & MASK32
    k0 = _mix(_mix(positions & MASK32) ^ low)
    k1 = _mix(k0 ^ high ^ 0x9E3779B9)
    ids = torch.arange(num_ids, device=seeds.device)
    h = _mix(_mix((ids + k0.unsqueeze(-1)) & MASK32) ^ k1.unsqueeze(-1))
    u = ((h >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(u)).float()


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser 'lowbias32', on int64 tensors that hold values in [0, 2**32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def _batches(tiles: np.ndarray) -> Iterator[np.ndarray]:
    """The non-empty tiles of a level in groups of like size that are worth padding to one shape."""
    lengths = tiles[:, KV_END] - tiles[:, KV_START]
    order = np.lexsort((lengths, tiles[:, NUM_ROWS]))
    order = order[lengths[order] > 0]
    first = 0
    for i in range(1, len(order) + 1):
        if i < len(order):
            rows, rows_limit = tiles[order[i], NUM_ROWS], 2 * tiles[order[first], NUM_ROWS]
            length, length_limit = lengths[order[i]], 2 * lengths[order[first]] + 64
            padded = (i + 1 - first) * min(int(lengths[order[first : i + 1]].max()), CHUNK_TOKENS)
            fits = padded <= BATCH_TOKENS and padded * int(rows) <= 16 * BATCH_TOKENS
            if fits and rows <= rows_limit and length <= length_limit:
                continue
        yield tiles[order[first:i]]
        first = i


def _attend(
    q: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    tiles: np.ndarray,
    kv_start: int,
    scale: float,
    state: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Folds positions [kv_start, kv_start + CHUNK_TOKENS) of each tile's own range into its rows' state.

    n tiles, padded to R rows (the last one repeated) and C positions; G = H / Hkv query heads a KV head.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    tile = torch.from_numpy(tiles.astype(np.int64)).to(q.device)
    n, num_rows = len(tiles), int(tiles[:, NUM_ROWS].max())
    length = min(int((tiles[:, KV_END] - tiles[:, KV_START]).max()) - kv_start, CHUNK_TOKENS)

    row = torch.arange(num_rows, device=q.device)
    is_row = row < tile[:, NUM_ROWS, None]  # [n, R]
    rows = tile[:, ROW_START, None] + torch.minimum(row, tile[:, NUM_ROWS, None] - 1)  # [n, R]
    position = tile[:, KV_START, None] + kv_start + torch.arange(length, device=q.device)  # [n, C]
    row_position = plan.positions[rows]  # [n, R]
    last = torch.minimum(tile[:, KV_END] - 1, row_position.amax(1))  # [n]
    seen = (position.unsqueeze(1) <= row_position.unsqueeze(2)) & (position <= last[:, None]).unsqueeze(1)

    readable = torch.minimum(position, last[:, None])  # [n, C]; positions past the end repeat the last one
    blocks = plan.block_tables.long()[tile[:, TABLE, None], readable // block_size]
    k = kv_cache[:, 0][blocks, :, readable % block_size].float()  # [n, C, Hkv, D]
    v = kv_cache[:, 1][blocks, :, readable % block_size].float()

    queries = q[rows].float().view(n, num_rows, num_kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(n, num_kv_heads, num_rows * group, head_dim)
    scores = (queries @ k.permute(0, 2, 3, 1)) * scale  # [n, Hkv, R * G, C]
    scores = scores.view(n, num_kv_heads, num_rows, group, length)
    scores.masked_fill_(~seen[:, None, :, None], -torch.inf)

    m, sums, acc = (part[rows].view(n, num_rows, num_kv_heads, group, -1).transpose(1, 2) for part in state)
    new_m = torch.maximum(m, scores.amax(-1, keepdim=True))  # [n, Hkv, R, G, 1]
    reference = new_m.masked_fill(new_m == -torch.inf, 0)  # a row that has seen nothing yet stays at l = 0
    weights = torch.exp(scores - reference)
    rescale = torch.exp(m - reference)
    summed = weights.view(n, num_kv_heads, num_rows * group, length) @ v.transpose(1, 2)
    new_acc = acc * rescale + summed.view(acc.shape)
    new_sums = sums * rescale + weights.sum(-1, keepdim=True)
    for part, new in zip(state, (new_m, new_sums, new_acc), strict=True):
        part[rows[is_row]] = new.transpose(1, 2)[is_row].reshape(-1, *part.shape[1:])
