"""The best layout of a model over a cluster: the legal ones, their lower bounds, the price of those that can win.

Protocol: `plan` is the whole of it, `price` the price of one layout. Layouts are priced from the least lower bound on,
until no other can be quicker: the best is exact, as far as the price is.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from attrs import define, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.json_form import fingerprint
from megaloom.planner.contract.capability import assumed_environment
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.plans import PLAN_VERSION, Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.partition.partitioner import HEADROOM, Partition
from megaloom.planner.partition.whole_blocks import blocks
from megaloom.planner.rules.capabilities import caveats
from megaloom.planner.rules.rules import senseless
from megaloom.planner.simulate.price import Priced

from .best_first import BalancedLayout, Frontier
from .candidate_space import FixedAxes
from .candidates import Candidates
from .device_meshes import best_of_each_mesh, device_mesh
from .infeasible import (
    PLAIN_AXES,
    checked_fixed,
    nothing_fits,
    nothing_legal,
)
from .neighbours import priced_neighbours
from .pricing import PartitionedLayout, Pricer, price
from .reasons import (
    Rejected,
    best_reasons,
    other_reasons,
    slower_neighbours,
)

__all__ = ["Found", "Progress", "Rejected", "plan", "price", "search"]

SIMULATED = 100  # plans of a search: layouts that are replayed, the best of all
PROVEN_MESHES = 5  # ways to deal the devices of which the best is sought: as many as are shown
ROUNDING = 1 - 1e-10  # bounds and prices add up the same seconds in different orders
TRIES = 512  # layouts, the most promising first, of which the first one that fits is sought as a first plan
OFTEN = 0.1  # seconds between two signs of progress


@frozen
class Found:
    """What a search found: the best plan, the next best, its neighbours that lose, and how long it took.

    Each of the next best deals the devices to the axes in another way, of which it is the best; or if there is one way
    alone, it is another layout of that.
    """

    best: Plan
    others: tuple[Plan, ...]
    variants: tuple[Plan, ...]  # more layouts of these ways, quickest first: time against memory
    rejected: tuple[Rejected, ...]
    slower: tuple[Rejected, ...]  # neighbours that can be had, and by what they lose; the quickest first
    seconds: float
    unproven: float | None = None  # of an interrupted search: the share of its step that the best may be slower by

    def next(self, count: int) -> tuple[Plan, ...]:
        """So many behind the best, quickest first: other ways, and variants of them where these are too few."""
        chosen = (*self.others, *self.variants)[:count]
        return tuple(sorted(chosen, key=lambda plan: plan.predicted.step_seconds))


@frozen
class Progress:
    """How far a search is: the best layout so far, its seconds a step, and those that no layout takes less than."""

    layout: Layout
    seconds: float
    least: float

    @property
    def unproven(self) -> float:
        """The share of its step that the best may be slower by than what is not yet looked at."""
        return max(0.0, 1 - self.least / self.seconds)


Tell = Callable[[Progress], None]


def plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    ref: str,
    fixed: FixedAxes | None = None,
    headroom: float = HEADROOM,
    runtime: Runtime = Runtime.MEGALOOM,
    tell: Tell | None = None,
    settle: bool = False,
) -> Found:
    """The quickest layout that is legal and fits the memory; `ref` says where the model is found again.

    headroom: the share of each device's memory that is left free. runtime: what runs the plan. tell: is given the
    progress, first when a first layout is found that fits. settle: when interrupted, take the best so far, if there is
    one.
    Raises UserError if what is fixed breaks a rule, or if nothing fits: then with the nearest miss.
    """
    began = perf_counter()
    chosen = checked_fixed(fixed or {})
    for wrong in senseless(Layout(**chosen), graph(model), workload, cluster):
        raise UserError(str(wrong))
    pricer = Pricer(blocks(graph(model), runtime), cluster, workload, PROFILES[runtime], headroom)
    solver, candidates, unproven = BranchAndBound(tell), None, None
    try:
        solver.dive(Candidates(pricer, {**PLAIN_AXES, **chosen}))
        candidates = Candidates(pricer, chosen)
        if not candidates.count:
            raise UserError(nothing_legal(pricer, chosen))
        found = solver.search(candidates, PROVEN_MESHES, SIMULATED)
    except KeyboardInterrupt:
        if not settle or solver.progress is None:
            raise
        candidates, found, unproven = (
            candidates or Candidates(pricer, chosen),
            solver.sorted(SIMULATED),
            solver.progress.unproven,
        )
    if not found:
        raise UserError(nothing_fits(pricer, candidates))
    best, *others = best_of_each_mesh(found)
    shown = {priced.layout for priced in (best, *others)}
    rivals, rejected = priced_neighbours(best.layout, pricer, chosen)
    identity = fingerprint(model)
    experts = model_requirements(graph(model)).experts
    environment = assumed_environment(runtime, cluster.device.name, experts)

    def said(layout: Layout) -> tuple[str, ...]:
        return tuple(caveats(layout, graph(model), workload, cluster)) if runtime is Runtime.MEGALOOM else ()

    def made(priced: Priced, reasons: tuple[str, ...]) -> Plan:
        return Plan(
            version=PLAN_VERSION,
            environment=environment,
            model=ref,
            fingerprint=identity,
            cluster=cluster,
            workload=workload,
            layout=priced.layout,
            stages=priced.stages,
            predicted=priced.prediction,
            reasons=(*reasons, *said(priced.layout)),
            runtime=runtime,
        )

    return Found(
        best=made(best, best_reasons(best, found[0], others, rivals, candidates.count, cluster)),
        others=tuple(made(other, other_reasons(other, best)) for other in others),
        variants=tuple(made(other, other_reasons(other, best)) for other in found if other.layout not in shown),
        rejected=rejected,
        slower=slower_neighbours(best, rivals),
        seconds=perf_counter() - began,
        unproven=unproven,
    )


def search(candidates: Candidates, sure: int = PROVEN_MESHES, keep: int = PROVEN_MESHES) -> list[Priced]:
    """The quickest of these layouts that fit the memory, quickest first: see `Hunt.search`."""
    return BranchAndBound().search(candidates, sure, keep)


@define(eq=False)
class BranchAndBound:
    """A search under way: what it has priced so far, and what it can say of the rest."""

    tell: Tell | None = None
    best: Priced | None = None
    least: float = 0.0  # seconds that nothing takes less than, of what is still looked for
    _priced: dict[Layout, Priced] = field(factory=dict)
    _told: float = 0.0  # when

    @property
    def progress(self) -> Progress | None:
        """How far it is, once something is found."""
        return Progress(self.best.layout, self.best.seconds, self.least) if self.best else None

    def dive(self, candidates: Candidates) -> None:
        """Price a first layout that fits as it is evenly cut, sooner than it takes to know all that there is."""
        if not len(candidates.base_layouts):
            return
        frontier = Frontier(candidates)
        for _ in range(TRIES):
            if (top := frontier.pop()) is None:
                return
            near = top[1]
            if (
                isinstance(near, BalancedLayout)
                and near.roomy
                and (placed := candidates.pricer.even_if_it_fits(near.layout))
            ):
                self._price(candidates.pricer, placed)
                return

    def search(self, candidates: Candidates, sure: int, keep: int) -> list[Priced]:
        """Layouts that fit the memory, quickest first: those of the `sure` quickest ways, of all `keep` or more.

        No layout is quicker than the first, and none that is as quick is left out. Of the other ways no layout is
        quicker, as far as interleaved chunks that are cut anew gain no more than is likely (`evens.GAIN`). Best first:
        of all layouts the one whose bound is the least is looked at more closely, so that what is dear to know (cuts,
        replays) is asked only of those that nothing cheaper rules out. The others are the most promising of those that
        were looked at closely meanwhile and have room as they are cut then.
        """
        frontier = Frontier(candidates)
        while self._advance(frontier, sure):
            pass
        proven = {
            x for x, priced in self._priced.items() if priced.seconds <= frontier.settled.get(device_mesh(x), 0.0)
        }
        frontier.recall()
        roomy = frontier.roomy()
        while len(self._priced) < keep and (placed := next(roomy, None)):
            self._price(candidates.pricer, placed)
        while len(self._priced) < keep and self._advance(frontier):
            pass
        every = self.sorted(len(self._priced))
        rest = [priced for priced in every if priced.layout not in proven]
        chosen = proven | {priced.layout for priced in rest[: max(0, keep - len(proven))]}
        return [priced for priced in every if priced.layout in chosen]

    def _advance(self, frontier: Frontier, sure: int = 0) -> bool:
        """Look at what takes the least more closely, or at last find it; not when there is nothing left.

        sure: ways that are looked for, rather than all layouts: not once they are found, and all that is as quick.
        """
        if (top := frontier.pop()) is None:
            return False
        seconds, what = top
        if sure and len(frontier.settled) >= sure and seconds > max(frontier.settled.values()):
            frontier.push(seconds, what)
            return False
        self.least = min(seconds, self.best.seconds) if self.best else seconds
        self._say(OFTEN)
        if isinstance(what, Priced):
            if sure:
                frontier.settle(what)
        elif isinstance(what, PartitionedLayout):
            priced = self._price(frontier.candidates.pricer, what.partition)
            frontier.push(priced.seconds, priced)
        elif isinstance(step := next(what.steps, None), Layout):
            frontier.push(seconds, what)
            if "overlaps" not in frontier.candidates.fixed:
                frontier.push(seconds, BalancedLayout(what.pricer, Layouts.of([step]), 0, roomy=True))
        elif step is not None:
            least = step.seconds if isinstance(step, PartitionedLayout) else step
            frontier.push(max(seconds, ROUNDING * least), step if isinstance(step, PartitionedLayout) else what)
        return True

    def sorted(self, keep: int) -> list[Priced]:
        """The quickest of what was priced."""
        return sorted(self._priced.values(), key=lambda priced: priced.seconds)[:keep]

    def _price(self, pricer: Pricer, placed: Partition) -> Priced:
        if placed.layout in self._priced:
            return self._priced[placed.layout]
        priced = self._priced[placed.layout] = pricer.simulate(placed)
        if self.best is None or priced.seconds < self.best.seconds:
            self.best = priced
            self._say(0.0)
        return priced

    def _say(self, after: float) -> None:
        """Tell of the progress, if the last time is so many seconds ago."""
        if self.tell and self.progress and (now := perf_counter()) - self._told >= after:
            self._told = now
            self.tell(self.progress)
