"""The load-balancing loss of a mixture of experts, which is added to what training minimizes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.dsl import MoE


def loss(op: MoE, taken: Tensor, scores: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """balance · E Σ f P over the experts, as losses are summed over tokens once for each of them.

    f is the share of the choices that an expert got, P its mean probability, over the tokens of a micro-batch on all
    ranks of the groups (Fedus et al., arXiv:2101.03961, eq. 4). taken, scores: [tokens, experts] of this rank.
    """
    scores = scores.float()
    chances = scores.softmax(-1) if op.score == "softmax" else _shares(scores.sigmoid())
    choices = taken.sum(0).float()
    tokens = len(scores)
    for group in groups:
        dist.all_reduce(choices, group=group)
        tokens *= group.size()
    return op.balance * op.experts / (op.top_k * tokens) * (choices * chances.sum(0)).sum()


def _shares(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
