"""Drawing a token in Triton: argmax(logits + Gumbel noise), in one pass over the logits.

Invariant: the noise of `reference.gumbel_noise`, a function of (seed, position, id) alone; ties go to the lowest id.
Each program finds the best of a piece of a row and writes it as one integer that sorts like (value, lowest id
first), so the best of a row is a maximum of integers: the same in any order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel_kernel(logits, seeds, positions, keys, num_ids, PIECE: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed = tl.load(seeds + row)
    k0 = _mix(_mix(tl.load(positions + row).to(tl.uint32)) ^ seed.to(tl.uint32))
    k1 = _mix(k0 ^ (seed >> 32).to(tl.uint32) ^ 0x9E3779B9)
    token_id = piece * PIECE + tl.arange(0, PIECE)
    bits = (_mix(_mix(token_id.to(tl.uint32) + k0) ^ k1) >> 8).to(tl.int32)
    # u = (bits + 0.5) / 2**24 needs 25 bits near 1, where float32 has 24; 1 - u fits there: log(u) = log1p(-(1 - u)).
    low = bits < (1 << 23)
    part = (tl.where(low, bits, (1 << 24) - 1 - bits).to(tl.float32) + 0.5) * 2.0**-24  # u, or 1 - u
    rounded = tl.where(low, part, 1.0 - part)
    exponential = -tl.log(rounded)
    # What rounding 1 - part has lost is put back: log1p(x) = log(1 + x) * x / ((1 + x) - 1).
    exponential = tl.where(low, exponential, exponential * (part / tl.where(low, 1.0, 1.0 - rounded)))
    exponential = tl.where(rounded == 1.0, part, exponential)
    mask = token_id < num_ids
    value = tl.load(logits + row * num_ids + token_id, mask=mask, other=float("-inf")) - tl.log(exponential)
    order = value.to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)  # integers that sort like the floats
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)
    tl.store(keys + row * tl.num_programs(1) + piece, tl.max(key, 0))


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits [n, V] float32, seeds and positions [n] int64 -> ids [n] int64."""
    num_rows, num_ids = logits.shape
    keys = seeds.new_empty(num_rows, triton.cdiv(num_ids, PIECE))
    if num_rows:
        _gumbel_kernel[tuple(keys.shape)](
            logits.contiguous(), seeds.contiguous(), positions.contiguous(), keys, num_ids, PIECE=PIECE, num_warps=8
        )
    return 0x7FFFFFFF - (keys.amax(1) & 0x7FFFFFFF)
