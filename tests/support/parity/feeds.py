"""Feeds of drawn runs: the form of their samples, and steps of their own."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Feed(Enum):
    """The form in which a run gets its samples, and the step that computes its loss."""

    SAMPLES = "by number"
    BATCHES = "batches on every rank"
    FIRST_RANK = "batches on the first rank of each data-parallel rank"
    OWN_STEP = "an own step"


class LargeLogits:
    """A step with a loss on large logits."""

    def __init__(self, logits: str) -> None:
        self.logits = logits

    def training_step(self, forward: Any, batch: Any) -> Any:
        """Return the sums of a micro-batch."""
        outputs = forward(batch)
        if outputs is None:
            return None
        large = outputs.gathered(self.logits).float().square().sum()
        return outputs.loss_sum + 1e-3 * large, outputs.weight_sum
