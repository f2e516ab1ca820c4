"""Placements of weights, gradients and optimizer state over the devices that have copies of a weight.

These devices are those of dp x cp, of edp for the weights of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from megaloom.dsl.facts import placement
from megaloom.dsl.facts.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Transition

from .choices import Shard


@frozen
class StatePlacement:
    """The placements of a weight in the passes, of its gradient until the last of them, and of its optimizer state."""

    weights: Placement
    gradients: Placement
    optimizer: Placement

    @property
    def reduction(self) -> Transition:
        """Return the transition of the gradients before the optimizer."""
        return Transition("dp", self.gradients, self.optimizer)

    @property
    def gather(self) -> Transition:
        """Return the transition of the weights after the optimizer."""
        return Transition("dp", self.optimizer, self.weights)


STATE_PLACEMENTS: Mapping[Shard, StatePlacement] = {
    Shard.NONE: StatePlacement(REPLICATE, PARTIAL, INVARIANT),
    Shard.OPTIMIZER: StatePlacement(REPLICATE, PARTIAL, placement.Shard("elements")),
}
