"""What happens to the scores of attention between the product of queries and keys and their softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaloom.dsl import Attend, RelativeBuckets


def scored(op: Attend, scores: Tensor, *others: Tensor) -> Tensor:
    """The scores [.. heads queries keys] of a core of attention, with all that it does to them, a sink's the last."""
    heads, queries, keys = scores.shape[-3:]
    if op.softcap is not None:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    away = torch.arange(keys, device=scores.device) - torch.arange(queries, device=scores.device)[:, None]
    if op.alibi:
        scores = scores + slopes(heads).to(scores)[:, None, None] * away
    if op.relative is not None:
        scores = scores + others[-1][buckets(away, op.relative)].movedim(-1, 0)
    if op.causal:
        hidden = (away > 0) if op.window is None else (away > 0) | (away <= -op.window)
        scores = scores.masked_fill(hidden, -torch.inf)
    if op.sink:
        scores = torch.cat((scores, others[0][:, None, None].expand(*scores.shape[:-1], 1)), -1)
    return scores


def slopes(heads: int) -> Tensor:
    """How fast each head's scores fall with distance: 2^(-8i/n) for the first n heads, n a power of two, and every
    other one of twice as many for the rest. Source: Press et al., arXiv:2108.12409, and its reference code.
    """
    n = 2 ** (heads.bit_length() - 1)
    exponents = [8 * (i + 1) / n for i in range(n)] + [8 * (2 * i + 1) / (2 * n) for i in range(heads - n)]
    return torch.tensor([2.0**-x for x in exponents])


def buckets(away: Tensor, relative: RelativeBuckets) -> Tensor:
    """The row of the table of biases that each distance (key less query) reads. Source: T5, arXiv:1910.10683."""
    n, first = relative.buckets, torch.zeros_like(away)
    if relative.bidirectional:
        n //= 2
        first, away = (away > 0) * n, away.abs()
    else:
        away = (-away).clamp(min=0)
    exact = n // 2
    far = torch.log(away.clamp(min=1) / exact) / math.log(relative.max_distance / exact) * (n - exact)
    return first + torch.where(away < exact, away, (exact + far.long()).clamp(max=n - 1))
