"""The legal layouts of a search, and what each takes at the least.

Protocol: a `Field` has the places, each a way to lay a micro-batch over the axes, with bounds of `ideal` layouts there;
`variants` are the layouts at some of them, with their own bounds.
"""

from __future__ import annotations

from math import inf

import numpy as np
from attrs import define, field

from megaloom.planner.bounds.layouts import (
    BoundedLayouts,
    LowerBounds,
    large_batch_seconds,
    largest_tensor_fits,
)
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.rules.capabilities import right

from . import candidate_space
from .candidate_space import FixedAxes
from .pricing import Pricer

HORIZON_GROWTH = 1.2  # the horizon moves by this factor at least


@define(eq=False)
class Candidates:
    """The legal layouts of a search, of which those are looked at that may be among the best."""

    pricer: Pricer
    fixed: FixedAxes
    base_layouts: Layouts = field(init=False)  # all, by ascending lower bound
    horizon: float = 0.0  # seconds; every base layout with a smaller bound is in `lower_bounds`
    lower_bounds: LowerBounds = field(init=False)  # of the base layouts up to the horizon that may fit the memory
    _order: Column = field(init=False)  # number of each of the base layouts in the order of enumeration
    _least: Rows = field(init=False)  # lower bound of each of the base layouts
    numbers: Column = field(factory=lambda: np.zeros(0, dtype=np.int64))  # of these in the order of enumeration
    bounded: int = 0  # base layouts in `lower_bounds`
    _considered: int = 0  # base layouts up to the horizon

    def __attrs_post_init__(self) -> None:
        p = self.pricer
        base = candidate_space.base_layouts(p.graph, p.cluster, p.workload, self.fixed, p.inner)
        if not p.own:
            base = base.take(np.broadcast_to(right(base, p.graph, p.workload, p.cluster), len(base)))
        self._least = large_batch_seconds(base, p.cost_cache) if len(base) else np.zeros(0)
        self._order = np.argsort(self._least, kind="stable")
        self.base_layouts, self._least = base.take(self._order), self._least[self._order]

    @property
    def count(self) -> int:
        """Return the number of legal layouts."""
        p = self.pricer
        return candidate_space.count_variants(p.graph, p.workload, self.base_layouts, self.fixed, p.inner)

    def extend(self, seconds: float) -> None:
        """Move the horizon to this time at least, and on until it includes another base layout."""
        first = self._considered
        if first == len(self._least):
            self.horizon = inf
            return
        self.horizon = max(HORIZON_GROWTH * float(self._least[first]), seconds)
        self._considered = int(np.searchsorted(self._least, self.horizon, side="right"))
        more = self.base_layouts.take(slice(first, self._considered))
        fits = largest_tensor_fits(more, self.pricer.cost_cache, self.pricer.capacity)
        more = more.take(fits)
        self.numbers = np.concatenate([self.numbers, self._order[first : self._considered][fits]])
        if self.bounded:
            self.lower_bounds.extend(more)
        elif len(more):
            self.lower_bounds = LowerBounds(more, self.pricer.cost_cache)
        self.bounded += len(more)

    def bound_all(self) -> LowerBounds:
        """Bound every base layout that may fit the memory; if none may, all of them."""
        while self.horizon < inf:
            self.extend(inf)
        if not self.bounded:
            self.lower_bounds, self.bounded = (
                LowerBounds(self.base_layouts, self.pricer.cost_cache),
                len(self.base_layouts),
            )
        return self.lower_bounds

    def variants(self, which: Column) -> BoundedLayouts:
        """The layouts at these places, those left out that recompute what is not worth the trouble."""
        p, lower_bounds = self.pricer, self.lower_bounds
        base, family = lower_bounds.at.take(which), lower_bounds.family(which)
        found, place = candidate_space.variants(p.graph, p.workload, base, self.fixed, family, p.inner)
        place = which[place]
        if "recompute" not in self.fixed:
            keep = self.lower_bounds.worthwhile(found, place)
            found, place = found.take(keep), place[keep]
        return self.lower_bounds.bound(found, place)
