"""Results of steps and evaluations: the loss, and each of its terms by itself. Free of torch.

The balancing loss of experts is a term too: the mean over the mixtures of experts, without its coefficient, so that 1
is a balanced load. The loss does not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

BALANCING = "balancing"  # the term of the balancing loss


@frozen
class StepResult:
    """Result of one optimizer step, equal on all ranks."""

    loss: float  # sum of weighted losses / sum of weights over the global batch, without the balancing loss
    grad_norm: float  # before clipping
    lr: float
    skipped: bool = False  # loss or gradients were not finite, so no weight has changed
    loss_scale: float | None = None  # of fp16, after the step
    terms: Mapping[str, float] = field(factory=dict)  # means of several losses by node, and `balancing`
    report: Mapping[str, float] = field(factory=dict)  # sum / weight of each name that a step of the user's own reports


@frozen
class Scores:
    """Scores of predicted classes, the ones with the largest logits."""

    accuracy: float  # share of the right ones
    macro_f1: float  # mean of the F1 scores of the classes that are given or predicted

    @classmethod
    def of(cls, right: Sequence[float], predicted: Sequence[float], given: Sequence[float]) -> Scores:
        """Return the scores of counts by class, as scikit-learn's accuracy_score and f1_score(average="macro").

        The F1 score of a class is 2 right / (predicted + given).
        """
        counts = zip(right, predicted, given, strict=True)
        each = [2 * r / (p + g) for r, p, g in counts if p + g]
        return cls(sum(right) / sum(given), sum(each) / len(each))


@frozen
class EvaluationResult:
    """Mean loss of an evaluation, equal on all ranks."""

    loss: float
    tokens: int  # predicted; sequences or images of a classification
    terms: Mapping[str, float] = field(factory=dict)  # as in `StepResult`
    cross_entropy: float | None = None  # nats per token, if a term predicts tokens
    scores: Scores | None = None  # of a classification
    report: Mapping[str, float] = field(factory=dict)  # as in `StepResult`

    @property
    def perplexity(self) -> float | None:
        """Return e to the power of the cross-entropy, infinity if too large; None if no tokens are predicted."""
        if self.cross_entropy is None:
            return None
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf
