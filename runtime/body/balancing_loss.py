"""The load-balancing loss of a mixture of experts, which is added to the training loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.dsl import MoE


def balancing_loss(op: MoE, chosen: Tensor, scores: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """Return balance · E Σᵢ fᵢ Pᵢ over the E experts (Fedus et al., arXiv:2101.03961, eq. 4).

    fᵢ is the share of the choices that went to expert i, Pᵢ its mean probability, both over the tokens of a micro-batch
    on all ranks of the groups. `chosen` and `scores` are [tokens, experts] of this rank.
    """
    scores = scores.float()
    probabilities = scores.softmax(-1) if op.score == "softmax" else _normalized(scores.sigmoid())
    choices = chosen.sum(0).float()
    tokens = len(scores)
    for group in groups:
        dist.all_reduce(choices, group=group)
        tokens *= group.size()
    return op.balance * op.experts / (op.top_k * tokens) * (choices * probabilities.sum(0)).sum()


def _normalized(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
