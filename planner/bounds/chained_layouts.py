"""Bounded layouts with the costs of their chains of segments, on which closer bounds depend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column, Layouts, alike
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS
from megaloom.planner.cost.weight_units import gathered_fields
from megaloom.planner.partition.chain_costs import ChainCosts

from .lower_bounds import BoundedLayouts

CHAIN_FIELDS = (*NODE_COST_FIELDS, "recompute", "recompute_modules", "recompute_layers")


@frozen(eq=False)
class ChainedLayouts:
    """Layouts with their bounds and the costs of their stages.

    Layouts with equally many stages share a chain if all their stages cost the same.
    """

    bounded: BoundedLayouts
    costs: ChainCosts
    chain: Column  # [layouts] number of each one's chain
    of_chains: Layouts  # one layout of each chain

    @classmethod
    def of(cls, bounded: BoundedLayouts, costs_of: Callable[[Layouts], ChainCosts]) -> ChainedLayouts:
        """Return bounded layouts with the costs that `costs_of` gives for one layout of each chain."""
        x = bounded.layouts
        columns = *(getattr(x, name) for name in CHAIN_FIELDS), *gathered_fields(x)
        first, chain = alike(*columns, x.pp * x.vpp)
        return cls(bounded, costs_of(x.take(first)), chain, x.take(first))

    def take(self, which: Column | NDArray[np.bool_]) -> ChainedLayouts:
        """Return those with these numbers, or for which a mask is true."""
        return evolve(self, bounded=self.bounded.take(which), chain=self.chain[which])

    def by_stages(self) -> Iterator[tuple[int, Column, Column]]:
        """Yield each number of stages, the numbers of the layouts that have it, and those of their chains."""
        stages = self.bounded.layouts.pp * self.bounded.layouts.vpp
        for count in np.flatnonzero(np.bincount(stages)).tolist():
            here = np.flatnonzero(stages == count)
            yield count, here, np.flatnonzero(np.bincount(self.chain[here]))
