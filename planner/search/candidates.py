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
)
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.rules.export_rules import exportable

from . import candidate_space
from .candidate_space import FixedAxes
from .pricing import Pricer

HORIZON_GROWTH = 1.1  # least factor by which the horizon moves


@define(eq=False)
class Candidates:
    """The legal layouts of a search."""

    pricer: Pricer
    fixed: FixedAxes
    base_layouts: Layouts = field(init=False)  # all, by ascending `large_batch_seconds`
    horizon: float = 0.0  # seconds; `lower_bounds` has every base layout that may be faster
    bounded: int = 0  # base layouts up to the horizon, those in `lower_bounds`
    lower_bounds: LowerBounds = field(init=False)  # absent while `bounded` is 0
    numbers: Column = field(init=False)  # [base layouts] number in the order of enumeration
    _least: Rows = field(init=False)  # [base layouts] seconds

    def __attrs_post_init__(self) -> None:
        p = self.pricer
        base = candidate_space.base_layouts(p.graph, p.cluster, p.workload, self.fixed, p.inner)
        if not p.own:
            base = base.take(exportable(base, p.graph, p.workload, p.cluster))
        self._least = large_batch_seconds(base, p.cost_cache) if len(base) else np.zeros(0)
        self.numbers = np.argsort(self._least, kind="stable")
        self.base_layouts, self._least = base.take(self.numbers), self._least[self.numbers]

    @property
    def count(self) -> int:
        """Return the number of legal layouts."""
        p = self.pricer
        return candidate_space.count_variants(p.graph, p.workload, self.base_layouts, self.fixed, p.inner)

    def extend(self, seconds: float) -> None:
        """Move the horizon to this step time or further, so that at least one more base layout is bounded."""
        first = self.bounded
        if first == len(self._least):
            self.horizon = inf
            return
        self.horizon = max(HORIZON_GROWTH * float(self._least[first]), seconds)
        self.bounded = int(np.searchsorted(self._least, self.horizon, side="right"))
        more = self.base_layouts.take(slice(first, self.bounded))
        if first:
            self.lower_bounds.extend(more)
        else:
            self.lower_bounds = LowerBounds(more, self.pricer.cost_cache)

    def bound_all(self) -> LowerBounds:
        """Return the bounds of every base layout."""
        while self.horizon < inf:
            self.extend(inf)
        return self.lower_bounds

    def variants(self, base: Column) -> BoundedLayouts:
        """Return the layouts of these base layouts, without those whose recompute frees too little."""
        p, lower_bounds = self.pricer, self.lower_bounds
        bases, sets = lower_bounds.base_layouts.take(base), lower_bounds.module_sets(base)
        layouts, rows = candidate_space.variants(p.graph, p.workload, bases, self.fixed, sets, p.inner)
        base = base[rows]
        if "recompute" not in self.fixed:
            worth = lower_bounds.worth_recomputing(layouts, base)
            layouts, base = layouts.take(worth), base[worth]
        return lower_bounds.bound(layouts, base)
