"""The load-balancing loss of a mixture of experts whose body runs, added to what training minimizes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megaloom.dsl import MoE, Value

from .tensors import broadcast, names


def balanced(op: MoE, v: Value, gate: Tensor, scores: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """The gate as it is; its gradient brings that of the loss along.

    The loss is balance · E Σ f P over the experts: f the share of the choices that an expert got, P its mean
    probability, over the tokens of a micro-batch on all ranks of the groups (Fedus et al., arXiv:2101.03961, eq. 4).
    As losses are summed over tokens, it counts once for each of them.
    """
    order = [*names(v.shape.without("experts")), "experts"]
    rows = broadcast(scores, v.args[0].shape, order).flatten(0, -2).float()
    chances = rows.softmax(-1) if op.score == "softmax" else _shares(rows.sigmoid())
    choices = (broadcast(gate.detach(), v.shape, order).flatten(0, -2) != 0).sum(0).float()
    tokens = len(rows)
    for group in groups:
        dist.all_reduce(choices, group=group)
        tokens *= group.size()
    loss = op.balance * op.experts / (op.top_k * tokens) * (choices * chances.sum(0)).sum()
    return MoEAuxLossAutoScaler.apply(gate, loss)  # type: ignore[no-any-return]


def _shares(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
