"""The candidate space of a search, with lower bounds that are computed only as far as the search needs them.

`Candidates` lists all base layouts (device mesh, micro-batch size, sequence parallelism, overlaps within a micro-batch)
in the order of a cheap lower bound. Up to a horizon, a step time, each has the closer bounds of `LowerBounds`;
`variants` are the layouts of some of them.
"""

from __future__ import annotations

from math import inf

import numpy as np
from attrs import define, field

from megaloom.planner.bounds.lower_bounds import (
    BoundedLayouts,
    LowerBounds,
    large_batch_seconds,
    largest_tensor_fits,
)
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.rules.export_rules import exportable

from . import candidate_space
from .candidate_space import FixedAxes
from .pricing import Pricer

HORIZON_GROWTH = 1.2  # least factor by which the horizon moves


@define(eq=False)
class Candidates:
    """The legal layouts of a search."""

    pricer: Pricer
    fixed: FixedAxes
    base_layouts: Layouts = field(init=False)  # all, by ascending `large_batch_seconds`
    horizon: float = 0.0  # seconds; `lower_bounds` has every base layout that may be faster
    bounded: int = 0  # base layouts in `lower_bounds`
    lower_bounds: LowerBounds = field(init=False)  # absent while `bounded` is 0
    numbers: Column = field(factory=lambda: np.zeros(0, dtype=np.int64))  # of these in the order of enumeration
    _order: Column = field(init=False)  # [base layouts] number in the order of enumeration
    _least: Rows = field(init=False)  # [base layouts] seconds
    _considered: int = 0  # base layouts up to the horizon

    def __attrs_post_init__(self) -> None:
        p = self.pricer
        base = candidate_space.base_layouts(p.graph, p.cluster, p.workload, self.fixed, p.inner)
        if not p.own:
            base = base.take(exportable(base, p.graph, p.workload, p.cluster))
        self._least = large_batch_seconds(base, p.cost_cache) if len(base) else np.zeros(0)
        self._order = np.argsort(self._least, kind="stable")
        self.base_layouts, self._least = base.take(self._order), self._least[self._order]

    @property
    def count(self) -> int:
        """Return the number of legal layouts."""
        p = self.pricer
        return candidate_space.count_variants(p.graph, p.workload, self.base_layouts, self.fixed, p.inner)

    def extend(self, seconds: float) -> None:
        """Move the horizon to this step time or further, so that at least one more base layout is considered."""
        first = self._considered
        if first == len(self._least):
            self.horizon = inf
            return
        self.horizon = max(HORIZON_GROWTH * float(self._least[first]), seconds)
        self._considered = int(np.searchsorted(self._least, self.horizon, side="right"))
        more = self.base_layouts.take(slice(first, self._considered))
        fits = largest_tensor_fits(more, self.pricer.cost_cache, self.pricer.capacity)
        self.numbers = np.concatenate([self.numbers, self._order[first : self._considered][fits]])
        self._bound(more.take(fits))

    def bound_all(self) -> LowerBounds:
        """Bound every base layout that may fit the memory; if none may, bound all."""
        while self.horizon < inf:
            self.extend(inf)
        if not self.bounded:
            self._bound(self.base_layouts)
        return self.lower_bounds

    def _bound(self, more: Layouts) -> None:
        if self.bounded:
            self.lower_bounds.extend(more)
        elif len(more):
            self.lower_bounds = LowerBounds(more, self.pricer.cost_cache)
        self.bounded += len(more)

    def variants(self, base: Column) -> BoundedLayouts:
        """Return the layouts of these base layouts, without those whose recompute frees too little."""
        p, lower_bounds = self.pricer, self.lower_bounds
        bases, sets = lower_bounds.base_layouts.take(base), lower_bounds.module_sets(base)
        found, which = candidate_space.variants(p.graph, p.workload, bases, self.fixed, sets, p.inner)
        which = base[which]
        if "recompute" not in self.fixed:
            worth = lower_bounds.worth_recomputing(found, which)
            found, which = found.take(worth), which[worth]
        return lower_bounds.bound(found, which)
