"""ReferenceKernels: every kernel in plain PyTorch. The specification, and the fallback for any device.

Invariant: products accumulate and normalisations run in float32, results have the dtype of the input; a slot
of the KV memory that no row may see has no influence, not even when it holds NaN.

Attention works on a row's running state, so that its KV range may come in any number of pieces:

    m    [T, H]     the largest score so far           new m = max(m, scores)
    l    [T, H]     sum of exp(score - m)              l and acc are rescaled by exp(m - new m)
    acc  [T, H, D]  sum of exp(score - m) * V          result = acc / l
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoapc.kernels import PackedLinear
from nanoapc.kernels.reference_sampling import argmax, keep_top, largest, logprobs

if TYPE_CHECKING:
    from nanoapc.engine.attention_plan import AttentionPlan

CHUNK_TOKENS = 2048
"""KV positions of a tile that are looked at together: bounds the temporaries."""

MASK32 = 0xFFFFFFFF


class ReferenceKernels:
    """Plain PyTorch on any device; see the protocol `Kernels` for shapes and dtypes."""

    name = "reference"
    max_tile_rows = 128
    argmax = staticmethod(argmax)
    keep_top = staticmethod(keep_top)
    largest = staticmethod(largest)
    logprobs = staticmethod(logprobs)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedLinear:
        def linear(x: Tensor) -> Tensor:
            out = F.linear(x, weight, bias)
            if not gated:
                return out
            gate, up = out.chunk(2, dim=-1)
            return F.silu(gate) * up

        return linear

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x / rms(x) over the last dimension, in float32; cast to x.dtype; times weight. The sum is in x.dtype, too."""
        total = x if residual is None else x + residual
        wide = total.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype), total

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
        q = self.rms_norm(q, None, q_norm, eps)[0] if q_norm is not None else q
        k = self.rms_norm(k, None, k_norm, eps)[0] if k_norm is not None else k
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
        for row, count, table, kv_start, kv_end, _ in plan.host_tiles.tolist():
            rows = slice(row, row + count)
            end = min(kv_end, int(plan.positions[rows].max()) + 1)
            for start in range(kv_start, end, CHUNK_TOKENS):
                position = torch.arange(start, min(end, start + CHUNK_TOKENS), device=q.device)
                _attend(q, kv_cache, plan, rows, table, position, scale, state)
        return (state[2] / state[1].unsqueeze(-1)).to(q.dtype)

    def copy_blocks(self, kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
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


def _attend(
    q: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    rows: slice,
    table: int,
    position: Tensor,
    scale: float,
    state: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Folds KV positions [C] of one table into the state of R rows; G = H / Hkv query heads a KV head."""
    num_kv_heads, block_size, _ = kv_cache.shape[2:]
    block = plan.block_tables[table].long()[position // block_size]
    k, v = kv_cache[block, :, :, position % block_size].float().permute(1, 2, 0, 3)  # each [Hkv, C, D]
    queries = q[rows].float().unflatten(1, (num_kv_heads, -1))  # [R, Hkv, G, D]
    scores = torch.einsum("rhgd,hcd->rhgc", queries, k).flatten(1, 2) * scale  # [R, H, C]
    unseen = position > plan.positions[rows, None]  # [R, C]
    scores.masked_fill_(unseen[:, None], -torch.inf)

    m, sums, acc = (part[rows] for part in state)
    new_m = torch.maximum(m, scores.amax(-1))  # [R, H]
    reference = new_m.masked_fill(new_m == -torch.inf, 0)  # a row that has seen nothing yet stays at l = 0
    weights = torch.exp(scores - reference[..., None])
    rescale = torch.exp(m - reference)
    summed = torch.einsum("rhgc,hcd->rhgd", weights.unflatten(1, (num_kv_heads, -1)), v).flatten(1, 2)
    state[0][rows] = new_m
    state[1][rows] = sums * rescale + weights.sum(-1)
    state[2][rows] = acc * rescale[..., None] + summed
