"""Best-first branch and bound over the layouts of a candidate space.

docs/concepts/search.md explains the algorithm. Read `BranchAndBound.search`, then `_examine`; the frontier is in
best_first.py and the lower bounds are in planner/bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter

from attrs import define, field

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.simulate.price import Priced

from .best_first import BalancedLayout, Entry, Frontier
from .candidates import Candidates
from .device_meshes import device_mesh
from .found import Progress
from .pricing import PartitionedLayout, Pricer
from .simple_first import NEAR_RATIO, SimplestLayouts

SIMULATED = 100  # layouts that a search simulates in full, the best among them
PROVEN_MESHES = 5  # device meshes whose best layout is proven, as many as a report shows
ROUNDING = 1 - 1e-10  # bounds and simulations add the same seconds in different orders
INCUMBENT_TRIES = 512  # layouts that are tried for a first plan that fits
PROGRESS_SECONDS = 0.1  # between two reports of progress


def search(candidates: Candidates, meshes: int = PROVEN_MESHES, count: int = PROVEN_MESHES) -> list[Priced]:
    """Return the fastest of these layouts that fit the memory, fastest first: see `BranchAndBound.search`."""
    return BranchAndBound().search(candidates, meshes, count)


@define(eq=False)
class BranchAndBound:
    """A search in progress: the layouts simulated so far, and a lower bound of the rest."""

    on_progress: Callable[[Progress], None] | None = None
    incumbent: Priced | None = None
    lower_bound: float = 0.0  # seconds, of every layout that is still of interest
    examined: float = 0.0  # seconds up to which the best layout of each device mesh is known
    _simulated: dict[Layout, Priced] = field(factory=dict)
    _reported: float = 0.0  # time of the last report of progress

    @property
    def progress(self) -> Progress | None:
        """Return the state of the search, None before a layout is found that fits."""
        best = self.incumbent
        return Progress(best.layout, best.seconds, self.lower_bound) if best else None

    def find_incumbent(self, candidates: Candidates) -> None:
        """Simulate the most promising layout whose balanced partition fits, before all candidates are known."""
        if not len(candidates.base_layouts):
            return
        frontier = Frontier(candidates)
        for _ in range(INCUMBENT_TRIES):
            if (top := frontier.pop()) is None:
                return
            entry = top[1]
            if not isinstance(entry, BalancedLayout) or not entry.may_fit:
                continue
            if entry.even.fits:
                self._simulate(candidates.pricer, candidates.pricer.refine(entry.even))
                return

    def search(self, candidates: Candidates, meshes: int, count: int) -> list[Priced]:
        """Return layouts that fit the memory, fastest first: the best of `meshes` device meshes, and `count` in all.

        The first is proven: no layout is faster, and every layout that ties with it is in the result. The best layout
        of the other meshes is proven under one assumption: repartitioning interleaved chunks does not gain more than
        `balanced_partition.EXPECTED_SHARE` allows. The rest are the most promising layouts that fit.
        """
        frontier = Frontier(candidates, meshes)
        while self._examine(frontier, meshes):
            pass
        self.examined = max(frontier.closed.values()) if frontier.closed else inf
        proven = {
            layout
            for layout, priced in self._simulated.items()
            if priced.seconds <= frontier.closed.get(device_mesh(layout), 0.0)
        }
        frontier.reopen()
        proven |= self._find_simpler(frontier, meshes)
        feasible = frontier.feasible()
        while len(self._simulated) < count and (partition := next(feasible, None)):
            self._simulate(candidates.pricer, partition)
        while len(self._simulated) < count and self._examine(frontier):
            pass
        every = self.fastest(len(self._simulated))
        rest = [priced for priced in every if priced.layout not in proven]
        chosen = proven | {priced.layout for priced in rest[: max(0, count - len(proven))]}
        return [priced for priced in every if priced.layout in chosen]

    def _examine(self, frontier: Frontier, meshes: int = 0) -> bool:
        """Look more closely at the entry with the least bound; return False when the search has ended.

        A balanced layout gets its partition; a partition is simulated; a simulated layout whose time is the least bound
        of all is the best of its mesh. With `meshes`, the search ends once so many meshes are closed and nothing left
        can tie with them.
        """
        if (top := frontier.pop()) is None:
            return False
        seconds, entry = top
        if meshes and len(frontier.closed) >= meshes and seconds > max(frontier.closed.values()):
            frontier.push(seconds, entry)
            return False
        self.lower_bound = min(seconds, self.incumbent.seconds) if self.incumbent else seconds
        self._report(PROGRESS_SECONDS)
        if meshes and isinstance(entry, Priced):
            frontier.close(entry)
        self._refine(frontier, seconds, entry)
        return True

    def _find_simpler(self, frontier: Frontier, meshes: int) -> set[Layout]:
        """Simulate layouts that may be recommended in place of the fastest, and return all of these.

        A step of theirs is at most NEAR_RATIO times as long, and each is simpler than all that were simulated before of
        its device mesh, if that is among the `meshes` with the simplest layouts.
        """
        if self.incumbent is None:
            return set()
        limit = NEAR_RATIO * self.incumbent.seconds
        near = {layout for layout, priced in self._simulated.items() if priced.seconds <= limit}
        simplest = SimplestLayouts(frontier.candidates.pricer.cluster, meshes)
        simplest.add(near)
        left = []
        while top := frontier.pop():
            if top[0] > limit:
                left.append(top)
                break
            layout = top[1].partition.layout if isinstance(top[1], PartitionedLayout) else top[1].layout
            if isinstance(top[1], Priced):
                near.add(layout)
                simplest.add([layout])
            elif simplest.improved_by(layout):
                self._refine(frontier, *top)
            else:
                left.append(top)
        for seconds, entry in left:
            frontier.push(seconds, entry)
        return near

    def _refine(self, frontier: Frontier, seconds: float, entry: Entry) -> None:
        """Replace an entry by the next step of its examination."""
        if isinstance(entry, Priced):
            return
        if isinstance(entry, PartitionedLayout):
            priced = self._simulate(frontier.candidates.pricer, entry.partition)
            frontier.push(priced.seconds, priced)
        elif isinstance(step := next(entry.steps, None), Layout):  # one with less overlap, which needs less memory
            frontier.push(seconds, entry)
            if "overlaps" not in frontier.candidates.fixed:
                frontier.push(seconds, BalancedLayout(entry.pricer, Layouts.of([step]), 0, may_fit=True))
        else:
            frontier.shard_more(entry)
            if step is not None:
                frontier.push(max(seconds, ROUNDING * step.seconds), step)

    def fastest(self, count: int) -> list[Priced]:
        """Return the fastest layouts simulated so far."""
        return sorted(self._simulated.values(), key=lambda priced: priced.seconds)[:count]

    def _simulate(self, pricer: Pricer, partition: Partition) -> Priced:
        if partition.layout in self._simulated:
            return self._simulated[partition.layout]
        priced = self._simulated[partition.layout] = pricer.simulate(partition)
        if self.incumbent is None or priced.seconds < self.incumbent.seconds:
            self.incumbent = priced
            self._report(0.0)
        return priced

    def _report(self, after: float) -> None:
        """Report progress if the last report is so many seconds ago."""
        progress = self.progress
        if self.on_progress and progress and (now := perf_counter()) - self._reported >= after:
            self._reported = now
            self.on_progress(progress)
