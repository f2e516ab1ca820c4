"""The candidate space of a search, with lower bounds that are computed only as far as the search needs them.

`Candidates` lists all base layouts (device mesh, micro-batch size, sequence parallelism, overlaps within a micro-batch)
in the order of a cheap lower bound. Up to a horizon, a step time, each has the closer bounds of `LowerBounds`;
`variants` are the layouts of some of them.
"""

from __future__ import annotations

from math import inf

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from megaloom.planner.bounds.end_of_step import Later, ends_later
from megaloom.planner.bounds.lower_bounds import (
    BoundedLayouts,
    LowerBounds,
    large_batch_seconds,
)
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layouts import Column, Layouts, Rows

from .candidate_space import CandidateSpace
from .pricing import Pricer
from .variant_choices import FixedAxes, implied, shard_choices

HORIZON_GROWTH = 1.1  # least factor by which the horizon moves


@define(eq=False)
class Candidates:
    """The legal layouts of a search."""

    pricer: Pricer
    fixed: FixedAxes
    space: CandidateSpace = field(init=False)
    count: int = field(init=False)  # legal layouts
    base_layouts: Layouts = field(init=False)  # all that have variants, by ascending `large_batch_seconds`
    horizon: float = 0.0  # seconds; `lower_bounds` has every base layout that may be faster
    bounded: int = 0  # base layouts up to the horizon, those in `lower_bounds`
    lower_bounds: LowerBounds = field(init=False)  # absent while `bounded` is 0
    numbers: Column = field(init=False)  # [base layouts] number in the order of enumeration
    _least: Rows = field(init=False)  # [base layouts] seconds
    _later: Later = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        p = self.pricer
        self.space = p.space(self.fixed)
        base = self.space.base_layouts()
        counts = self.space.variant_counts(base)
        base, self.count = base.take(counts > 0), int(counts.sum())
        self._least = large_batch_seconds(base, p.cost_cache) if len(base) else np.zeros(0)
        self.numbers = np.argsort(self._least, kind="stable")
        self.base_layouts, self._least = base.take(self.numbers), self._least[self.numbers]

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
            self.lower_bounds = LowerBounds(more, self.pricer.cost_cache, max(shard_choices(True, self.fixed)))

    def bound_all(self) -> LowerBounds:
        """Return the bounds of every base layout."""
        while self.horizon < inf:
            self.extend(inf)
        return self.lower_bounds

    def variants(self, base: Column, fully: bool = True) -> BoundedLayouts:
        """Return the layouts of these base layouts, without those whose recompute frees too little.

        fully: see `CandidateSpace.variants`.
        """
        lower_bounds = self.lower_bounds
        layouts, rows = self.space.variants(lower_bounds.base_layouts.take(base), lower_bounds.module_sets(base), fully)
        base = base[rows]
        if "recompute" not in implied(self.fixed) and not len(self.space.all_module_sets):
            worth = lower_bounds.worth_recomputing(layouts, base)
            layouts, base = layouts.take(worth), base[worth]
        if len(shard_choices(True, self.fixed)) > 1:
            worth = self._may_pay(layouts, base)
            layouts, base = layouts.take(worth), base[worth]
        return lower_bounds.bound(layouts, base)

    def _may_pay(self, layouts: Layouts, base: Column) -> NDArray[np.bool_]:
        """Return which layouts may be the fastest: without a distributed optimizer only those that it would slow down.

        Elsewhere it saves memory and seconds.
        """
        may_pay: NDArray[np.bool_] = (layouts.shard != Shard.NONE) | (layouts.dp * layouts.cp == 1)
        which, bounds = np.flatnonzero(~may_pay), self.lower_bounds
        plain, elements = layouts.take(which), (bounds.costs.params, bounds.costs.expert_params)
        distributed = self.space.distributed(plain)
        may_pay[which] = ends_later(plain, distributed, base[which], *elements, bounds.cache, self._later)
        return may_pay

    def more_sharded(self, layouts: Layouts, base: Column) -> BoundedLayouts:
        """Return what `CandidateSpace.more_sharded` does, with bounds. base: the number of each one's base layout."""
        layouts, which = self.space.more_sharded(layouts)
        return self.lower_bounds.bound(layouts, base[which])
