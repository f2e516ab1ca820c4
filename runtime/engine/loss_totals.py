"""Sums of micro-batches over all ranks, and the means that they give: the loss, and each of its terms by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import (
    Graph,
    MaskedToken,
    MoE,
    NextToken,
    SequenceToSequence,
    StackLosses,
)
from megaloom.runtime.body.balancing_loss import record_size, recorded_balance, recorded_frequencies
from megaloom.runtime.samples.objectives import is_over_positions

from .results import BALANCING, EvaluationResult, Scores
from .scores import ROWS, Classifier


@frozen
class Losses:
    """The losses of a model: the node at its end, and the name and coefficient of each loss."""

    end: str
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    copies: tuple[int, ...]  # context-parallel ranks that each compute the same sums, such as of one class per image

    @classmethod
    def of(cls, graph: Graph, cp: int) -> Losses:
        """Return the losses of a graph that ends in one. cp: context-parallel ranks."""
        node = graph.nodes[graph.index[graph.outputs[0]]]
        op = node.value.source.op
        names = node.inputs if isinstance(op, StackLosses) else (node.name,)
        copies = tuple(1 if is_over_positions(graph.nodes[graph.index[name]]) else cp for name in names)
        return cls(node.name, names, op.coefficients if isinstance(op, StackLosses) else (1.0,), copies)

    def factors(self, weights: Tensor) -> Tensor:
        """Return for each loss its coefficient, times the weights of the first loss over its own: float64 [losses].

        weights: of each loss in the global batch, [losses], where the factors are computed. With them, the quotient of
        the sums of a batch is the sum of coefficient * mean.
        """
        return torch.tensor(self.coefficients, dtype=torch.float64).to(weights.device) * (weights[0] / weights)

    def sums(self, end: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss_sum, weight_sum, and a report [losses + 1, 2]: the total, then each loss.

        end: of the node at the end, [2] or [losses, 2]. factors: of `factors`, on the device of `end`, since a copy
        from the host would wait for the whole forward pass.
        """
        each = self.counted_once(self.end, end.reshape(-1, 2))
        total, weight = (each[:, 0] * factors.to(each.dtype)).sum(), each[0, 1].detach()
        return total, weight, each.detach()

    def counted_once(self, name: str, each: Tensor) -> Tensor:
        """Return sums [losses, 2] of a node that add up over the context-parallel ranks, with the gradients they have.

        The gradient of a value that these ranks replicate is whole on each of them, so it is not divided.
        """
        copies = self.copies if name == self.end else (self.copies[self.names.index(name)],)
        if max(copies) == 1:
            return each
        divisors = torch.tensor(copies, dtype=each.dtype, device=each.device)[:, None]
        return each.detach() / divisors + (each - each.detach())


@frozen
class LossTerms:
    """The terms of the training loss of a model."""

    losses: Losses
    balanced: tuple[tuple[str, MoE], ...]  # mixtures with a balancing loss, by node
    predicts_tokens: str | None  # the loss that is the cross-entropy of the tokens
    classifier: Classifier | None = None

    @classmethod
    def of(cls, graph: Graph, cp: int) -> LossTerms:
        """Return the terms of the loss in which a graph ends. cp: the number of context-parallel ranks."""
        losses = Losses.of(graph, cp)
        balanced = tuple((n.name, n.op) for n in graph.nodes if isinstance(n.op, MoE) and n.op.balance)
        ops = {name: graph.nodes[graph.index[name]].op for name in losses.names}
        classifier = Classifier.of(graph)
        tokens = None if classifier else next((name for name, op in ops.items() if _predicts_tokens(op)), None)
        return cls(losses, balanced, tokens, classifier)

    @property
    def over_batch(self) -> bool:
        """Return whether a load is balanced over the global batch."""
        return any(op.balance_over == "batch" for _, op in self.balanced)

    @property
    def size(self) -> int:
        """Return the length of `LossTotals.sums` without a report."""
        records = sum(record_size(op) for _, op in self.balanced)
        return 2 * (1 + len(self.losses.names)) + 1 + records + self.scored

    @property
    def scored(self) -> int:
        """Return the number of counts by class in `LossTotals.sums`."""
        return ROWS * self.classifier.classes if self.classifier else 0

    def zero(self, device: torch.device | int | None = None, names: tuple[str, ...] = ()) -> LossTotals:
        """Return the totals of no micro-batch. names: of the report of a step of the user's own."""
        return LossTotals(self, torch.zeros(self.size + 2 * len(names), dtype=torch.float64, device=device), names)


@frozen(eq=False)
class LossTotals:
    """Sums over micro-batches: loss and weights of all losses together, of each, sequences, records of each mixture,
    counts of predicted classes, and the report of a step of the user's own."""

    terms: LossTerms
    sums: Tensor  # float64 [terms.size + 2 names]
    names: tuple[str, ...] = ()  # of the report

    def __add__(self, other: LossTotals) -> LossTotals:
        """Return the totals of both. Those of no micro-batch, on the left, need not know the names of a report."""
        sums = other.sums.clone()
        sums[: len(self.sums)] += self.sums
        return LossTotals(self.terms, sums, other.names)

    def add_losses(self, report: Tensor) -> None:
        """Add the sums of a micro-batch, [1 + losses, 2], in place."""
        self.sums[: report.numel()] += report.flatten()

    def add_sequences(self, count: int) -> None:
        """Count sequences, in place."""
        self.sums[self._pairs] += count

    def add_counts(self, counts: Tensor) -> None:
        """Add counts by class, [3, classes], in place."""
        self._counts.add_(counts.flatten())

    def add_report(self, report: Tensor) -> None:
        """Add the report of a micro-batch, sum and weight of each name [names, 2], in place."""
        self.sums[self.terms.size :] += report.flatten()

    def add_records(self, records: Mapping[str, Tensor]) -> None:
        """Add what mixtures have recorded for a micro-batch, in place."""
        for name, _, own in self._records():
            if name in records:
                own += records[name]

    def on_host(self) -> LossTotals:
        """Return these totals in host memory, so that reading each of them does not wait for the device."""
        return LossTotals(self.terms, self.sums.cpu(), self.names)

    @property
    def loss(self) -> float:
        """Return the mean of the losses together."""
        return float(self.sums[0] / self.sums[1])

    @property
    def means(self) -> dict[str, float]:
        """Return the mean of each loss, if there are several, and that of the balancing losses, if there are any."""
        names = self.terms.losses.names
        out = {name: self._mean(i) for i, name in enumerate(names)} if len(names) > 1 else {}
        sequences = float(self.sums[self._pairs])
        if balances := [recorded_balance(op, own, sequences) for _, op, own in self._records()]:
            out[BALANCING] = sum(balances) / len(balances)
        return out

    @property
    def report(self) -> dict[str, float]:
        """Return sum / weight of each name of the report of the user's step; NaN if the weight is 0."""
        pairs = self.sums[self.terms.size :].view(-1, 2)
        return {name: float(x / weight) for name, (x, weight) in zip(self.names, pairs, strict=True)}

    @property
    def frequencies(self) -> dict[str, Tensor]:
        """Return the share of the choices of each expert, for the mixtures that are balanced over the batch."""
        over_batch = ((name, op, own) for name, op, own in self._records() if op.balance_over == "batch")
        return {name: recorded_frequencies(op, own) for name, op, own in over_batch}

    @property
    def evaluation(self) -> EvaluationResult:
        """Return the result of an evaluation with these totals."""
        name, names = self.terms.predicts_tokens, self.terms.losses.names
        entropy = None if name is None else self._mean(names.index(name))
        tokens = round(float(self.sums[3]))  # of the declared loss, since a step may return other weights
        return EvaluationResult(self.loss, tokens, self.means, entropy, self._scores, self.report)

    @property
    def _scores(self) -> Scores | None:
        """Return the scores of a classification; None if nothing was counted, as in training."""
        counts = self._counts
        return Scores.of(*counts.view(ROWS, -1).tolist()) if float(counts.sum()) else None

    @property
    def _counts(self) -> Tensor:
        """Return a view of the counts by class."""
        return self.sums[self.terms.size - self.terms.scored : self.terms.size]

    def _mean(self, i: int) -> float:
        """Return the mean of loss i."""
        return float(self.sums[2 + 2 * i] / self.sums[3 + 2 * i])

    @property
    def _pairs(self) -> int:
        """Return the index after the sums of losses and weights."""
        return 2 * (1 + len(self.terms.losses.names))

    def _records(self) -> list[tuple[str, MoE, Tensor]]:
        """Return the mixtures and views of their sums."""
        sizes = [record_size(op) for _, op in self.terms.balanced]
        parts = self.sums[self._pairs + 1 :][: sum(sizes)].split(sizes) if sizes else ()
        return [(name, op, own) for (name, op), own in zip(self.terms.balanced, parts, strict=True)]


def _predicts_tokens(op: Any) -> bool:
    """Return whether a loss is the cross-entropy of the next token, of masked tokens, or of a target."""
    return isinstance(op, MaskedToken | SequenceToSequence) or (isinstance(op, NextToken) and not op.offset)
