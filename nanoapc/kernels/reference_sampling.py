"""What filters logits and scores tokens, in plain PyTorch: the specification, of which the CPU runs a part.

Invariant: a row's result is a function of that row alone, bit for bit. Sums of probabilities are sums of integers, the
same in every order and on every device; ties go to the lowest id.
"""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    peak, ids = logits.max(dim=-1)
    return peak.float(), ids


def keep_top(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """See `Kernels`."""
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    in_top_k = torch.arange(x.shape[1], device=x.device) < top_k[:, None]
    masses = fixed_weights(values - values[:, :1]) * in_top_k
    total = masses.sum(dim=-1)
    goal = torch.minimum((top_p * total).ceil().to(torch.int64), total)
    mass_before = masses.cumsum(dim=-1) - masses
    keep = in_top_k & ((mass_before < goal[:, None]) | (top_p[:, None] >= 1))
    return torch.full_like(x, -torch.inf).scatter_(1, ids, values.masked_fill(~keep, -torch.inf))


def fixed_weights(x: Tensor) -> Tensor:
    """x <= 0 -> exp(x) in units of 2**-40, int64: sums are exact, the same in every order; a row's stays below 2**63.

    x * log2(e) = n + f, 2**f by a polynomial, 2**n by its bits. Every product and sum is rounded to float32 by itself,
    so every device gets the same integers (an exp of its own would differ in the last bit).
    """
    y = (x * 1.4426950408889634).clamp_(min=-63)
    n = y.floor()
    f = y.sub_(n)
    power = f * 0.0018775767
    for coefficient in (0.0089893397, 0.055826318, 0.24015361, 0.69315308):
        power.add_(coefficient).mul_(f)
    scale = n.to(torch.int32).add_(127 + 40).bitwise_left_shift_(23).view(torch.float32)  # 2**(n + 40)
    return power.add_(0.99999994).mul_(scale).to(torch.int64)


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    V = x.shape[1]
    if 8 * k >= V:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    values, ids = in_order(*x.topk(k + 1, dim=-1))  # of equal values any; the last shows if a tie crosses the edge
    crossing = ((values[:, k - 1] == values[:, k]) & values[:, k].isfinite()).nonzero()[:, 0]
    if k and crossing.numel():
        edge = values[crossing, k : k + 1]
        num_above = (values[crossing] > edge).sum(dim=-1, keepdim=True)
        columns = torch.arange(V, dtype=torch.int32, device=x.device)
        tied = torch.where(x[crossing] == edge, columns, V).topk(k, dim=-1, largest=False).values.to(torch.int64)
        place = columns[:k].to(torch.int64) - num_above  # among the tied, lowest id first
        ids[crossing, :k] = torch.where(place < 0, ids[crossing, :k], tied.gather(1, place.clamp(min=0)))
    return values[:, :k], ids[:, :k]


def in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both [m, k], sorted by value, the largest first, then by id."""
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)


def logprobs(logits: Tensor, ids: Tensor, num_valid_ids: int) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    # Summing bools as int32 takes half the time of int64, torch's default.
    above = (logits[:, :num_valid_ids] > logits.gather(1, ids[:, :1])).sum(dim=-1, dtype=torch.int32)
    return logits.log_softmax(dim=-1).gather(1, ids), above.to(torch.int64) + 1
