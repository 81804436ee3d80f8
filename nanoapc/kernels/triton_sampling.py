"""Sampling in Triton: the sets of top_k and top_p, the draw, log-probs. No sort, and nothing for the host to wait for.

A cut (the k-th best, or the last of a nucleus) is found by narrowing: sums over what lies at or above four pivots say
between which two of them it is, and the row is compacted to what can still count, which is soon a few values:

    pivots           lowest    peak - 16    peak - 4    peak - 1       keys sort like the floats; each round leaves
    count from it    151936    90000      > k = 50 >    2              a quarter of them between `low` and `high`

Invariant: a row's result depends on that row alone; counts and masses are integers, so sums have no order. Ties go to
the lowest id. A draw's noise is that of `reference.gumbel_noise`, a function of (seed, position, id) alone; a program
writes the best of a piece as one integer that sorts like (value, lowest id first), and their maximum is the row's.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoapc.kernels.reference_sampling import in_order

PIECE = 4096
TILE = 2048
"""Values that a program of 16 warps looks at together: 4 a thread, all that its registers can weigh."""


@triton.jit
def _flip(bits):
    """int32: the bits of floats -> integers that sort like the floats, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(value):
    return _flip(tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True))  # -0 is 0


@triton.jit
def _weight(x):
    """`reference_sampling.fixed_weights`, bit for bit: launched with enable_fp_fusion=False."""
    y = tl.maximum(x * 1.4426950408889634, -63.0)
    n = tl.floor(y)
    f = y - n
    power = ((f * 0.0018775767 + 0.0089893397) * f + 0.055826318) * f
    power = ((power + 0.24015361) * f + 0.69315308) * f + 0.99999994
    return (power * ((n.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def _sums(row, n, pivots, low, peak, COMPACT: tl.constexpr, MASS: tl.constexpr, TILE: tl.constexpr):
    """[4, 1] int64: how many of row[:n], or how much mass, has keys from each pivot on; and the new n.

    COMPACT: what is below `low` leaves the row. A tile has been read before anything is written to its places.
    """
    column = tl.arange(0, TILE)[None, :]
    sums = tl.zeros([4, TILE // 4], tl.int64 if MASS else tl.int32)
    kept = 0
    for at in tl.range(0, n, TILE, num_stages=4):
        inside = at + column < n
        value = tl.load(row + at + column, mask=inside, other=float("-inf"))
        key = _key(value)
        counted = _weight(value - peak) if MASS else inside.to(tl.int32)
        counted = tl.where(inside & (key >= pivots.to(tl.int32)), counted, 0)
        sums += tl.sum(tl.reshape(counted, [4, TILE // 4, 4]), 2)  # a thread's four first: fewer registers
        if COMPACT:
            inside &= key >= low.to(tl.int32)
            number = inside.to(tl.int32)
            tl.store(row + kept + tl.cumsum(number, 1) - 1, value, mask=inside)
            kept += tl.sum(number)
    tl.debug_barrier()
    return tl.sum(sums, 1, keep_dims=True).to(tl.int64), kept if COMPACT else n


@triton.jit
def _narrow(pivots, sums, goal, low, high, at_low, above):
    """low: the greatest pivot whose sum reaches the goal, if any does; high: below the smallest whose sum does not."""
    reached = sums >= goal
    low = tl.maximum(low, tl.max(tl.where(reached, pivots, low)))
    at_low = tl.minimum(at_low, tl.min(tl.where(reached, sums, at_low)))
    high = tl.minimum(high, tl.min(tl.where(reached, high, pivots - 1)))
    above = tl.maximum(above, tl.max(tl.where(reached, above, sums)))
    return low, high, at_low, above


@triton.jit
def _find_cut(row, n, low, peak, goal, share, surplus, MASS: tl.constexpr, TILE: tl.constexpr):
    """The greatest key for which what is there and above reaches the goal: (key, that sum, sum above, goal, n).

    The goal is a count, or a share of the mass from `low` on less `surplus` times that of low.
    """
    step = tl.arange(0, 4)[:, None]
    pivots = _key(peak - tl.exp2(6.0 - 2 * step.to(tl.float32))).to(tl.int64)
    pivots = tl.where(step == 0, low, tl.maximum(low, pivots))
    sums, n = _sums(row, n, pivots, low, peak, False, MASS, TILE)
    total = tl.max(sums)
    if MASS:
        total -= surplus * _weight(_flip(low.to(tl.int32)).to(tl.float32, bitcast=True) - peak)
        goal = tl.minimum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), total)
    low, high, at_low, above = _narrow(pivots, sums, goal, low, _key(peak).to(tl.int64), tl.max(sums), total * 0)
    while low < high:
        pivots = low + ((high - low) * (step + 1) + 3) // 4
        sums, n = _sums(row, n, pivots, low, peak, True, MASS, TILE)
        low, high, at_low, above = _narrow(pivots, sums, goal, low, high, at_low, above)
    return low, at_low, above, goal, n


@triton.jit
def _keep_top_kernel(x, top_k, top_p, out, num_ids, TILE: tl.constexpr):
    """One row. Until its last loop `out` holds the values that can still count."""
    row = tl.program_id(0).to(tl.int64)
    x += row * num_ids
    out += row * num_ids
    column = tl.arange(0, TILE)[None, :]
    best = tl.full([1, TILE], float("-inf"), tl.float32)
    for at in tl.range(0, num_ids, TILE, num_stages=4):
        value = tl.load(x + at + column, mask=at + column < num_ids, other=float("-inf"))
        tl.store(out + at + column, value, mask=at + column < num_ids)
        best = tl.maximum(best, value)
    tl.debug_barrier()
    peak = tl.max(best)
    k, share = tl.load(top_k + row), tl.load(top_p + row)
    zero = k * 0
    n = num_ids
    low, tied, kept, surplus = zero - (1 << 31), zero, zero, zero  # the lowest key, how many have it, how many stay
    if k < num_ids:
        low, at_low, above, _, n = _find_cut(out, n, low, peak, k, share, zero, False, TILE)
        tied, kept, surplus = at_low - above, k - above, at_low - k
    if share < 1.0:
        low, at_low, above, goal, n = _find_cut(out, n, low, peak, zero, share, surplus, True, TILE)
        weight = tl.maximum(_weight(_flip(low.to(tl.int32)).to(tl.float32, bitcast=True) - peak), 1)
        tied = (at_low - above) // weight
        kept = tied - (at_low - goal) // weight
    seen = zero
    for at in tl.range(0, num_ids, TILE, num_stages=4):
        inside = at + column < num_ids
        value = tl.load(x + at + column, mask=inside, other=float("-inf"))
        key = _key(value)
        keep = key >= low.to(tl.int32)
        if kept < tied:
            is_tied = (inside & (key == low.to(tl.int32))).to(tl.int64)
            keep &= (key > low.to(tl.int32)) | (seen + tl.cumsum(is_tied, 1) <= kept)
            seen += tl.sum(is_tied)
        tl.store(out + at + column, tl.where(keep, value, float("-inf")), mask=inside)


def keep_top(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """See `Kernels`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if len(x):
        _keep_top_kernel[len(x),](x, top_k, top_p, out, x.shape[1], TILE, num_warps=16, enable_fp_fusion=False)
    return out


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    x = keep_top(x, torch.full(x.shape[:1], k, device=x.device), torch.ones(x.shape[:1], device=x.device).double())
    return in_order(*x.topk(k, dim=-1))


@triton.jit
def _logprob_kernel(logits, ids, id_stride, peaks, sums, ranks, num_ids, num_valid_ids, TILE: tl.constexpr):
    """Of one row: the greatest logit, the sum of exp(logit - that), the rank of its first id."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_ids
    column = tl.arange(0, TILE)
    chosen = tl.load(logits + tl.load(ids + row * id_stride))
    peak = tl.full([TILE], -3.4e38, tl.float32)  # of each column; -inf - -inf would be NaN
    mass = tl.zeros([TILE], tl.float32)
    better = tl.zeros([TILE], tl.int32)
    for at in tl.range(0, num_ids, TILE, num_stages=4):
        value = tl.load(logits + at + column, mask=at + column < num_ids, other=float("-inf"))
        better += ((value > chosen) & (at + column < num_valid_ids)).to(tl.int32)
        top = tl.maximum(peak, value)
        mass = mass * tl.exp(peak - top) + tl.exp(value - top)
        peak = top
    top = tl.max(peak, 0)
    tl.store(peaks + row, top)
    tl.store(sums + row, tl.sum(mass * tl.exp(peak - top), 0))
    tl.store(ranks + row, tl.sum(better, 0) + 1)


def logprobs(logits: Tensor, ids: Tensor, num_valid_ids: int) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    logits, ranks = logits.contiguous(), ids.new_empty(len(ids))
    peaks, sums = logits.new_empty(2, len(logits), 1)
    if len(logits):
        _logprob_kernel[len(logits),](
            *(logits, ids, ids.stride(0), peaks, sums, ranks, logits.shape[1], num_valid_ids), PIECE, num_warps=8
        )
    return logits.gather(1, ids) - peaks - sums.log(), ranks


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
    order = _flip(value.to(tl.int32, bitcast=True))
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)
    key = tl.where(mask, key, -(1 << 63))  # a NaN can be below -inf
    tl.store(keys + row * tl.num_programs(1) + piece, tl.max(key, 0))


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `Kernels`."""
    num_rows, num_ids = logits.shape
    keys = seeds.new_empty(num_rows, triton.cdiv(num_ids, PIECE))
    if num_rows:
        _gumbel_kernel[tuple(keys.shape)](
            logits.contiguous(), seeds.contiguous(), positions.contiguous(), keys, num_ids, PIECE=PIECE, num_warps=8
        )
    return 0x7FFFFFFF - (keys.amax(1) & 0x7FFFFFFF)
