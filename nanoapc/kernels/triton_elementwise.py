"""Norms, gated activation, rotary embedding with K/V store, block copies: bound by memory. And the fixed product.

Invariant: every element is read and written once, sums and functions are taken in float32, and each step of the
reference that rounds to the dtype (the norm before its weight, silu before the product) rounds here too.
A program owns whole rows, so no result depends on the other rows of the step.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoapc.kernels import upload


@triton.jit
def _norm_kernel(x, residual, weight, out, total, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    mask = column < size
    value = tl.load(x + row + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        value = (value.to(tl.float32) + tl.load(residual + row + column, mask=mask, other=0.0)).to(value.dtype)
        tl.store(total + row + column, value, mask=mask)
    wide = value.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)).to(value.dtype).to(tl.float32)
    tl.store(out + row + column, normed * tl.load(weight + column, mask=mask, other=0.0), mask=mask)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    num_rows, size = x.shape
    x = x.contiguous()
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(size)
        _norm_kernel[num_rows,](
            *(x, x if residual is None else residual.contiguous(), weight, out, total, size, eps),
            *(residual is not None, block),
            num_warps=min(max(block // 512, 1), 16),  # 16 elements a thread: two 16-byte loads in flight
        )
    return out, total


@triton.jit
def _silu_and_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + 2 * row * size + column, mask=mask, other=0.0)
    up = tl.load(gate_up + (2 * row + 1) * size + column, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, silu * up, mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up [T, I]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, 1024))
        _silu_and_mul_kernel[grid](gate_up.contiguous(), out, size, 1024, num_warps=4)
    return out


@triton.jit
def _rope_and_store_kernel(
    qkv, positions, cos_sin,  # [T, H + 2 * Hkv, D]; [T] int64; [max_len, D] float32
    q_norm, k_norm, eps,  # [D]; [D]
    kv, slots, out,  # [NB, 2, Hkv, B, D], strided; [T] int64; [T, H, D]
    block_stride, value_stride, head_stride,  # of kv
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS heads (axis 1: query heads, then key heads, then value heads) of one row (axis 0), as two halves."""
    row = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions + row), tl.load(slots + row)  # here, so that all loads but of angles are at once
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_q, is_v = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_pair = pair < HEAD_DIM // 2
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_pair[None, :]
    here = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * HEAD_DIM + pair[None, :]
    x = tl.load(here, mask=mask, other=0.0)
    y = tl.load(here + HEAD_DIM // 2, mask=mask, other=0.0)
    angle = cos_sin + position * HEAD_DIM + pair
    cos = tl.load(angle, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(angle + HEAD_DIM // 2, mask=is_pair, other=0.0)[None, :]
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    raw_x, raw_y = x, y
    if NORM_Q or NORM_K:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
        for is_key in tl.static_range(2):
            if NORM_K if is_key else NORM_Q:
                weight = (k_norm if is_key else q_norm) + pair
                first = tl.load(weight, mask=is_pair, other=0.0).to(tl.float32)[None, :]
                second = tl.load(weight + HEAD_DIM // 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
                mine = (is_q != is_key)[:, None]
                x = tl.where(mine, ((raw_x * scale).to(dtype).to(tl.float32) * first).to(dtype).to(tl.float32), x)
                y = tl.where(mine, ((raw_y * scale).to(dtype).to(tl.float32) * second).to(dtype).to(tl.float32), y)
    rotated_x = tl.where(is_v[:, None], raw_x, x * cos - y * sin)
    rotated_y = tl.where(is_v[:, None], raw_y, y * cos + x * sin)

    to = out + (row * NUM_HEADS + head[:, None]) * HEAD_DIM + pair[None, :]
    tl.store(to, rotated_x, mask=mask & is_q[:, None])
    tl.store(to + HEAD_DIM // 2, rotated_y, mask=mask & is_q[:, None])
    if slot >= 0:
        kv_head = head - NUM_HEADS - tl.where(is_v, NUM_KV_HEADS, 0)
        to = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM
        to += (kv_head * head_stride + tl.where(is_v, value_stride, 0))[:, None] + pair[None, :]
        mask &= (head >= NUM_HEADS)[:, None]
        tl.store(to, rotated_x, mask=mask)
        tl.store(to + HEAD_DIM // 2, rotated_y, mask=mask)


def rope_and_store(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    kv_cache: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Norms and rotates q and k, writes K and V to their slots, returns q [T, H, D]; see `Kernels`."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    num_rows, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = qkv.new_empty(num_rows, num_heads, head_dim)
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(1, 1024 // half)  # 2048 elements a program: 16 a thread
    if num_rows:
        _rope_and_store_kernel[num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads)](
            *(qkv.contiguous(), positions, cos_sin),
            *(qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm),
            *(eps, kv_cache, slots, out, *kv_cache.stride()[:3]),
            *(num_heads, num_kv_heads, head_dim, block_size, q_norm is not None, k_norm is not None, heads, half),
            num_warps=4,
        )
    return out


@triton.jit
def _copy_kernel(memory, copies, block_numel, EXTENT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Axis 0: pieces of a block [.., EXTENT = B * D]; axis 1: (source, destination, num_tokens) int64."""
    copy = copies + 3 * tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < block_numel) & (at % EXTENT < tl.load(copy + 2) * HEAD_DIM)
    value = tl.load(memory + tl.load(copy) * block_numel + at, mask=mask)
    tl.store(memory + tl.load(copy + 1) * block_numel + at, value, mask=mask)


def copy_blocks(kv_memory: Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
    """kv_memory [NB, L, 2, Hkv, B, D] contiguous; (source, destination, num_tokens), as if one after the other."""
    block_numel, (block_size, head_dim) = kv_memory[0].numel(), kv_memory.shape[-2:]
    for group in _independent(copies):
        numbers = upload(torch.tensor(group, device="cpu"), kv_memory.device)
        _copy_kernel[triton.cdiv(block_numel, 2048), len(group)](
            kv_memory, numbers, block_numel, block_size * head_dim, head_dim, 2048, num_warps=4
        )


def _independent(copies: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The list cut where a copy touches what an earlier one of its group has written, or writes what it has read."""
    groups: list[list[tuple[int, int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if not groups or copy[0] in written or copy[1] in written | read:
            groups.append([])
            read, written = set(), set()
        groups[-1].append(copy)
        read.add(copy[0])
        written.add(copy[1])
    return groups


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    x += row[:, None].to(tl.int64) * num_inputs + column[None, :]
    weight += output[:, None].to(tl.int64) * num_inputs + column[None, :]
    is_row, is_output = (row < num_rows)[:, None], (output < num_outputs)[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in tl.range(0, num_inputs, INPUTS):
        is_column = (at + column < num_inputs)[None, :]
        a = tl.load(x + at, mask=is_row & is_column, other=0.0)
        b = tl.load(weight + at, mask=is_output & is_column, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * num_outputs + output[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row & (output < num_outputs)[None, :])


def fixed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight [out, in], bias [out] -> a function from x [T, in] to [T, out] whose rows' bits do not depend on T.

    The tile depends on the weight alone and nothing is split along `in`, which costs time: few rows leave most of the
    card idle (narrow tiles for small weights soften that), many would take larger tiles.
    """
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    is_float32 = weight.dtype is torch.float32
    outputs = 32 if num_outputs <= 4096 or is_float32 else 64 if num_outputs <= 16384 else 128

    def linear(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], num_outputs)
        if len(x):
            _linear_kernel[triton.cdiv(len(x), 64), triton.cdiv(num_outputs, outputs)](
                *(x.contiguous(), weight, weight if bias is None else bias, out, len(x), num_outputs, num_inputs),
                *(bias is not None, 64, outputs, 32 if is_float32 else 64, "ieee" if is_float32 else None),
                num_warps=8 if outputs == 128 else 4,
                num_stages=4,
            )
        return out

    return linear
