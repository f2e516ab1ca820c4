"""The legal layouts of a search, and what each takes at the least.

Protocol: a `Field` has the places, each a way to lay a micro-batch over the axes, with bounds of `ideal` layouts there;
`variants` are the layouts at some of them, with their own bounds.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from megaloom.planner.bounds.layouts import BoundedLayouts, LowerBounds, largest_tensor_fits
from megaloom.planner.contract.layouts import Column, Layouts
from megaloom.planner.rules.capabilities import right

from . import candidate_space
from .candidate_space import FixedAxes
from .pricing import Pricer


@define(eq=False)
class Candidates:
    """The legal layouts of a search, of which those are looked at that may be among the best."""

    pricer: Pricer
    fixed: FixedAxes
    at: Layouts = field(init=False)
    lower_bounds: LowerBounds = field(init=False)

    def __attrs_post_init__(self) -> None:
        p = self.pricer
        self.at = candidate_space.base_layouts(p.graph, p.cluster, p.workload, self.fixed, p.inner)
        if not p.own:
            self.at = self.at.take(np.broadcast_to(right(self.at, p.graph, p.workload, p.cluster), len(self.at)))
        if len(self.at):
            fits = largest_tensor_fits(self.at, p.cost_cache, p.capacity)
            self.lower_bounds = LowerBounds(self.at.take(fits) if fits.any() else self.at, p.cost_cache)

    @property
    def count(self) -> int:
        """How many legal layouts there are."""
        p = self.pricer
        return candidate_space.count_variants(p.graph, p.workload, self.at, self.fixed, p.inner)

    def variants(self, which: Column) -> BoundedLayouts:
        """The layouts at these places, those left out that recompute what is not worth the trouble."""
        at, family = self.lower_bounds.at.take(which), self.lower_bounds.family(which)
        p = self.pricer
        found, place = candidate_space.variants(p.graph, p.workload, at, self.fixed, family, p.inner)
        place = which[place]
        if "recompute" not in self.fixed:
            keep = self.lower_bounds.worthwhile(found, place)
            found, place = found.take(keep), place[keep]
        return self.lower_bounds.bound(found, place)
