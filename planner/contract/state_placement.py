"""Placements of weights, gradients and optimizer state over the devices that have copies of a weight.

These devices are those of dp x cp, of edp for the weights of experts. A placement here is that of the elements between
micro-batches. In the passes of a micro-batch every weight is Replicate and every gradient Partial, so a weight that is
sharded between them is gathered for each pass, and its gradient reduced after the backward pass. Weights of experts may
have another value of `shard` than all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from attrs import frozen

from megaloom.dsl.facts import placement
from megaloom.dsl.facts.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Transition

from .choices import N, Reshard, Shard
from .layout import Layout, LayoutFields


@frozen
class StatePlacement:
    """The placements of a weight, its gradient and its optimizer state between the micro-batches of a step."""

    weights: Placement
    gradients: Placement
    optimizer: Placement

    @property
    def reduction(self) -> Transition:
        """Return the transition of the gradients before the optimizer."""
        return Transition("dp", self.gradients, self.optimizer)

    @property
    def pass_gather(self) -> Transition:
        """Return the transition of the weights before each pass of a micro-batch."""
        return Transition("dp", self.weights, REPLICATE)

    @property
    def pass_reduction(self) -> Transition:
        """Return the transition of the gradients after each backward pass."""
        return Transition("dp", PARTIAL, self.gradients)

    @property
    def gather(self) -> Transition:
        """Return the transition of the weights after the optimizer."""
        return Transition("dp", self.optimizer, self.weights)


SHARDED = placement.Shard("elements")
STATE_PLACEMENTS: Mapping[tuple[Shard, Reshard], StatePlacement] = {
    (Shard.NONE, Reshard.MICRO_BATCH): StatePlacement(REPLICATE, PARTIAL, INVARIANT),
    (Shard.OPTIMIZER, Reshard.MICRO_BATCH): StatePlacement(REPLICATE, PARTIAL, SHARDED),
    (Shard.GRADIENTS, Reshard.MICRO_BATCH): StatePlacement(REPLICATE, SHARDED, SHARDED),
    (Shard.WEIGHTS, Reshard.MICRO_BATCH): StatePlacement(SHARDED, SHARDED, SHARDED),
    (Shard.WEIGHTS, Reshard.STEP): StatePlacement(REPLICATE, PARTIAL, SHARDED),
}
"""The placements of state by `shard` and `reshard`. Only sharded weights have a choice of `reshard`."""


@lru_cache
def _sharded(holder: str) -> dict[tuple[Shard, Reshard], bool]:
    """Return whether the weights, the gradients or the optimizer state are sharded between micro-batches."""
    whole = {
        (s, r): STATE_PLACEMENTS.get((s, r), STATE_PLACEMENTS[s, Reshard.MICRO_BATCH]) for s in Shard for r in Reshard
    }
    return {key: getattr(placed, holder) == SHARDED for key, placed in whole.items()}


def is_sharded(
    layout: LayoutFields[N], holder: Literal["weights", "gradients", "optimizer"], *, experts: bool = False
) -> N:
    """True where this state is sharded between micro-batches: of one layout, or of columns of layouts.

    experts: of the weights of experts, not of all others.
    """
    table: Any = _sharded(holder)
    shard = layout.shard_of_experts if experts else layout.shard
    if isinstance(shard, Shard):
        one: N = table[shard, layout.reshard]
        return one
    import numpy as np  # only a search has columns

    columns: N = np.array([*table.values()])[shard * len(Reshard) + layout.reshard]
    return columns


def state_placement(layout: Layout, *, experts: bool = False) -> StatePlacement:
    """Return the placements of the state of a layout. experts: of the weights of experts, not of all others."""
    return STATE_PLACEMENTS[layout.shard_of_experts if experts else layout.shard, layout.reshard]


def state_placements(layout: Layout) -> tuple[StatePlacement, StatePlacement]:
    """Return the placements of the state of dense weights, and of that of experts."""
    return state_placement(layout), state_placement(layout, experts=True)
