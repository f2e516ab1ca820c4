"""The load-balancing loss of experts in training: its gradient, and the sums that give its value.

Each micro-batch has a `Balancing`. A mixture adds the gradient of its loss to that of its gate by `attach`, and records
sums, which are added over micro-batches and ranks. So the loss is that of `ops.balancing` under every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megaloom.dsl import MoE
from megaloom.dsl.facts.placement import PlacedOp
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.ops.balancing import balance_of, counted_choices, router_probabilities
from megaloom.runtime.ops.tensors import broadcast, names


@frozen(eq=False)
class Balancing:
    """Balancing losses of one micro-batch.

    weight: of a sequence, such that the sums of the loss divided by those of its weights have the mean over sequences.
    frequencies: of each expert over the global batch, by node, for losses over the batch; empty in a pass without
    gradients. records: the sums of this rank by node, of size `record_size`; recompute writes equal ones again.
    """

    weight: float = 0.0
    frequencies: Mapping[str, Tensor] = field(factory=dict)
    records: dict[str, Tensor] = field(factory=dict)
    node: str = ""

    def of(self, node: str) -> Balancing:
        """Return the balancing losses for the mixture of a node."""
        return evolve(self, node=node)

    def attach_to_gate(self, op: MoE, p: PlacedOp, groups: ProcessGroups, scores: Tensor, gate: Tensor) -> Tensor:
        """Return the gate of a body, with the gradient of the loss added to its own."""
        v, layout = p.step.value, groups.layout
        token_groups = [groups.of_axis(name) for name in sorted(p.sharded_axes)]
        replicas = layout.tp * layout.cp // prod(group.size() for group in token_groups)
        order = ["batch", *names(v.shape.without("batch", "experts")), "experts"]
        chosen, token_scores = (
            broadcast(x, a.shape, order).flatten(1, -2) for x, a in ((gate.detach() != 0, v), (scores, v.args[0]))
        )
        return self.attach(op, gate, token_scores, chosen, token_groups, replicas)

    def attach(
        self,
        op: MoE,
        gate: Tensor,
        scores: Tensor,
        chosen: Tensor,
        groups: Sequence[dist.ProcessGroup],
        replicas: int = 1,
    ) -> Tensor:
        """Return the gate unchanged, with the gradient of the loss added to its own; record the sums of the loss.

        scores, chosen: router logits and choices, [batch, tokens, experts] of this rank. groups: over which the tokens
        of a sequence lie. replicas: ranks that have the same tokens.
        """
        probabilities = router_probabilities(op, scores).sum(1)
        choices = counted_choices(op, scores, chosen).sum(1).to(probabilities)
        if op.balance_over == "batch":
            self.records[self.node] = torch.cat([choices.sum(0), probabilities.detach().sum(0)]) / replicas
            if self.node not in self.frequencies:
                return gate
            loss = self._share_of_batch(op, probabilities, scores.shape[1], groups)
        else:
            tokens = scores.shape[1]
            for group in groups:
                dist.all_reduce(choices, group=group)
                tokens *= group.size()
            loss = balance_of(op, choices, probabilities, tokens).sum()
            self.records[self.node] = loss.detach()[None] / replicas
        if not torch.is_grad_enabled():
            return gate
        return MoEAuxLossAutoScaler.apply(gate, op.balance * self.weight * loss)  # type: ignore[no-any-return]

    def _share_of_batch(
        self, op: MoE, probabilities: Tensor, tokens: int, groups: Sequence[dist.ProcessGroup]
    ) -> Tensor:
        """Return this rank's share of the loss over the batch, times the number of sequences."""
        for group in groups:
            tokens *= group.size()
        return op.experts * (self.frequencies[self.node] * probabilities).sum() / tokens


def record_size(op: MoE) -> int:
    """Return the numbers that a mixture records: its loss, or choices and probabilities of each expert."""
    return 2 * op.experts if op.balance_over == "batch" else 1


def recorded_balance(op: MoE, sums: Tensor, sequences: float) -> float:
    """Return the balancing loss from the sums of its records over all ranks and sequences."""
    if op.balance_over == "sequence":
        return float(sums[0] / sequences)
    choices, probabilities = sums.chunk(2)
    return float(balance_of(op, choices, probabilities, choices.sum() / op.top_k))


def recorded_frequencies(op: MoE, sums: Tensor) -> Tensor:
    """Return the share of the choices of each expert, float32 [experts], from the sums of records over the batch."""
    choices, _ = sums.chunk(2)
    return (choices / choices.sum()).float()
