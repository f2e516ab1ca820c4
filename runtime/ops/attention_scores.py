"""Changes of attention scores before the softmax: soft cap, position biases, causal and window masks, sinks."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Attend, RelativeBuckets


@frozen(eq=False)
class HeadScores:
    """The scores of some heads of an attention.

    others: the weights of the op beyond queries, keys and values. slopes: of the ALiBi bias of these heads.
    """

    op: Attend
    others: tuple[Tensor, ...] = ()
    slopes: Tensor | None = None

    def finish(self, scores: Tensor, offset: Tensor, other_document: Tensor | None = None) -> Tensor:
        """Return the scores that the softmax reads, from products of queries and keys [.., heads, queries, keys].

        offset: the position of each key minus that of each query, [queries, keys]. other_document: True where a key is
        not of the query's document. The score of a sink is added as a last key.
        """
        op = self.op
        if op.softcap is not None:
            scores = op.softcap * torch.tanh(scores / op.softcap)
        if self.slopes is not None:
            scores = scores + self.slopes.to(scores)[:, None, None] * offset
        if op.relative is not None:
            scores = scores + self.others[-1][bucket_indices(offset, op.relative)].movedim(-1, 0)
        if op.causal:
            hidden = (offset > 0) if op.window is None else (offset > 0) | (offset <= -op.window)
            scores = scores.masked_fill(hidden, -torch.inf)
        if other_document is not None:
            scores = scores.masked_fill(other_document, -torch.inf)
        if op.sink:
            scores = torch.cat((scores, self.others[0][:, None, None].expand(*scores.shape[:-1], 1)), -1)
        return scores


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head's ALiBi bias, [heads].

    Let n be the largest power of two ≤ heads. The first n slopes are 2^(-8i/n), i = 1 .. n. The others are every second
    slope of 2n heads: 2^(-8(2i-1)/(2n)). Source: Press et al., arXiv:2108.12409, and its reference code.
    """
    n = 2 ** (heads.bit_length() - 1)
    exponents = [8 * (i + 1) / n for i in range(n)] + [8 * (2 * i + 1) / (2 * n) for i in range(heads - n)]
    return torch.tensor([2.0**-x for x in exponents])


def bucket_indices(offset: Tensor, relative: RelativeBuckets) -> Tensor:
    """Return the row of the bias table for each offset, key position minus query position. T5, arXiv:1910.10683."""
    n, first = relative.buckets, torch.zeros_like(offset)
    if relative.bidirectional:
        n //= 2
        first, distance = (offset > 0) * n, offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = n // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(relative.max_distance / exact) * (n - exact)
    return first + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=n - 1))
