"""The load-balancing loss of a mixture of experts: E Σᵢ fᵢ Pᵢ over its E experts, 1 if the load is balanced.

fᵢ is the share of the choices that went to expert i, Pᵢ its mean probability: over the tokens of one sequence, then the
mean over the sequences; or both over all tokens of the batch. Source: Fedus et al., arXiv:2101.03961, equation 4;
DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaloom.dsl import MoE


def router_probabilities(op: MoE, scores: Tensor) -> Tensor:
    """Return the probability of each expert, float32 or more, from router logits [.., experts]."""
    scores = scores if scores.dtype is torch.float64 else scores.float()
    if op.score == "softmax":
        return scores.softmax(-1)
    x = scores.sigmoid()
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def counted_choices(op: MoE, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return which experts count as chosen, [.., experts]: those of the gate, or of the scores without a correction."""
    if not op.corrected:
        return chosen
    return torch.zeros_like(chosen).scatter(-1, scores.topk(op.top_k, -1).indices, True)


def balance_of(op: MoE, choices: Tensor, probabilities: Tensor, tokens: int | Tensor) -> Tensor:
    """Return E Σᵢ fᵢ Pᵢ [..] from the number of choices and the sum of probabilities of each expert, [.., experts].

    tokens: over which both are sums.
    """
    return op.experts / (op.top_k * tokens**2) * (choices * probabilities).sum(-1)


def mean_balance(op: MoE, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the balancing loss of a whole batch, without its coefficient. scores, chosen: [batch, tokens, experts]."""
    choices, probabilities = counted_choices(op, scores, chosen), router_probabilities(op, scores)
    choices = choices.to(probabilities)
    if op.balance_over == "batch":
        choices, probabilities = choices.flatten(0, 1), probabilities.flatten(0, 1)
    return balance_of(op, choices.sum(-2), probabilities.sum(-2), choices.shape[-2]).mean()
