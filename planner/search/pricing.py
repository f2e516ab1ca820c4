"""The price of one layout: where its stages are cut, and what is predicted of it then.

Protocol: `price` is all of it. A `Pricer` keeps what layouts share; its `bound` is the cheap lower bound by which a
search leaves layouts out, `refined` what it takes to a layout's cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.planner.bounds import interleaved_memory
from megaloom.planner.bounds.layouts import LowerBounds, where
from megaloom.planner.contract.choices import Overlap, OverlapSet, Shard
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.cost.cost_table import (
    STEP_COLUMNS,
    BareTable,
    CostTable,
    bare_to_table,
)
from megaloom.planner.cost.memory import ALLOCATED
from megaloom.planner.cost.profiles.frameworks import OWN, PROFILES
from megaloom.planner.cost.profiles.groups import FrameworkProfile
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.model.structure import ModelStructure, model_structure
from megaloom.planner.partition.dynamic_program import evens
from megaloom.planner.partition.partitioner import (
    HEADROOM,
    Partition,
    PartitionProblem,
    StageBounds,
    capacity,
)
from megaloom.planner.partition.segments import ChainBatch, SegmentSums
from megaloom.planner.rules.capabilities import wrong
from megaloom.planner.rules.rule import Violation
from megaloom.planner.rules.rules import violations
from megaloom.planner.simulate.prediction import (
    Counted,
    Priced,
    simulate,
    step_lower_bound,
)

from .candidate_space import microbatch_groups

ALIKE = 1.001  # times as long as the slowest stage may take, if that makes stages of whole blocks


@frozen(eq=False)
class Cut:
    """A layout with its cut, and what its step takes at the least."""

    partition: Partition
    seconds: float


def price(
    graph: Graph, layout: Layout, cluster: Cluster, workload: Workload, runtime: Runtime = Runtime.MEGALOOM
) -> Priced:
    """What this legal layout takes, whether or not it fits the memory."""
    return Pricer(graph, cluster, workload, PROFILES[runtime]).price(layout)


@define(eq=False, slots=False)
class Pricer:
    """Prices layouts of one graph on one cluster; what they share is computed once."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    profile: FrameworkProfile = OWN
    headroom: float = HEADROOM
    structure: ModelStructure = field(init=False)
    cost_cache: CostCache = field(init=False)
    counted: Counted = field(init=False)
    _bases: dict[tuple[object, ...], BareTable] = field(factory=dict, init=False)
    _sheets: dict[tuple[object, ...], CostTable] = field(factory=dict, init=False)
    _cuts: dict[tuple[object, ...], StageBounds] = field(factory=dict, init=False)
    _levels: dict[tuple[object, ...], StageBounds] = field(factory=dict, init=False)  # of interleaved chunks
    _fits: dict[Layout, bool] = field(factory=dict, init=False)
    _layers: dict[Layout, int] = field(factory=dict, init=False)  # of each, blocks a stage that are too few

    def __attrs_post_init__(self) -> None:
        self.structure = model_structure(self.graph)
        self.cost_cache = CostCache(self.structure, self.workload, self.cluster, self.profile)
        self.counted = Counted.of(self.graph, self.cluster, self.workload)

    @property
    def own(self) -> bool:
        """Whether plans are for megaloom's own runtime, which mends what megatron-core computes wrongly."""
        return self.profile is OWN

    @property
    def inner(self) -> tuple[Overlap, ...]:
        """The overlaps within a micro-batch that a search looks at."""
        return self.profile.overlap.supported

    def broken(self, layout: Layout) -> tuple[Violation, ...]:
        """The rules that a layout breaks; of other runtimes those too that megatron-core computes wrongly."""
        found = violations(layout, self.graph, self.workload, self.cluster)
        return found if self.own else found + wrong(layout, self.graph, self.workload, self.cluster)

    def cost_table(self, layout: Layout) -> CostTable:
        """The costs of every node under a layout."""
        place = where(layout)
        key = (*place, layout.recompute_text)
        if key not in self._sheets:
            if place not in self._bases:
                self._bases[place] = self.cost_cache.base(layout)
            self._sheets[key] = bare_to_table(self._bases[place], self.structure, layout, self.workload)
        return self._sheets[key]

    def price(self, layout: Layout) -> Priced:
        """The stages, the step time and the memory of a legal layout: cut to fit the memory if that can be."""
        return self.simulate(self.partition(layout))

    def partition(self, layout: Layout) -> Partition:
        """The stages of a legal layout: the most even of those that fit the memory, or of all when none do."""
        return self._best(self._even(layout))

    def even_if_it_fits(self, layout: Layout) -> Partition | None:
        """The stages of a legal layout, if its most even cut fits the memory."""
        even = self._even(layout)
        return self._best(even) if even.fits else None

    def refined(self, layout: Layout) -> Iterator[float | Cut]:
        """Lower bounds of the seconds of a step of a legal layout, each dearer than the one before, then its cut.

        Ends without one if no cut fits the memory.
        """
        if not self.hopeful(layout):
            return
        even = self._even(layout)
        if not even.fits:
            if not self.structure.shared_weights and not self._may_fit(layout, even):
                return
            yield even.problem.microbatches * max(even.seconds)  # no cut has a quicker slowest stage
        placed = self._best(even)
        if not placed.fits:
            return
        yield Cut(placed, step_lower_bound(placed))

    def fewer(self, layout: Layout) -> list[Layout]:
        """The same layout with fewer overlaps, if its most even cut has no room and would have then; the most of them.

        Where it has room, overlap wins: it takes memory alone, no time.
        """
        inner = [o for o in layout.overlaps if o in self.inner]
        if not inner or (even := self._even(layout)).fits:
            return []
        found = [x for out in inner if (x := self._without([out], layout, even.deficit))]
        none = self._without(inner, layout, even.deficit) if len(inner) > 1 and not found else None
        return [none] if none else found

    def _without(self, overlaps: list[Overlap], layout: Layout, lacking: int) -> Layout | None:
        """The layout without these overlaps, if that frees what it lacks."""
        other = evolve(layout, overlaps=OverlapSet(o for o in layout.overlaps if o not in overlaps))
        before, after = (s.library + s.workspace for s in (self.cost_table(layout), self.cost_table(other)))
        return other if lacking <= ALLOCATED * (before - after) else None

    @cached_property
    def many(self) -> NDArray[np.bool_]:
        """For each number of stages, whether there are more ways to cut than may all be looked at."""
        return interleaved_memory.many(len(self.structure.cut_points) - 1)

    def hopeful(self, layout: Layout) -> bool:
        """Whether this layout may fit the memory: whether the leanest that differs little from it does.

        That has the optimizer's state divided and the smallest group; of more blocks computed again nothing is more.
        """
        x, m = layout, layout.microbatches(self.workload.batch)
        group = x.microbatch_group and microbatch_groups(x.pp, m)[0]
        lean = evolve(x, shard=Shard(x.dp * x.cp > 1), microbatch_group=group)
        if not lean.recompute_layers:
            return self._may_fit(lean)
        key = evolve(lean, recompute_layers=0)
        if key not in self._layers:
            most = -(-model_requirements(self.graph).blocks // (x.pp * x.vpp))
            self._layers[key] = bisect_left(
                range(1, most), True, key=lambda n: self._may_fit(evolve(lean, recompute_layers=n))
            )
        return lean.recompute_layers > self._layers[key]

    def _may_fit(self, layout: Layout, even: Partition | None = None) -> bool:
        if layout not in self._fits:
            even = even or self._even(layout)
            self._fits[layout] = even.problem.hopeful(even.bounds) or (
                bool(self.structure.shared_weights) and self._best(even).fits
            )
        return self._fits[layout]

    @property
    def capacity(self) -> int:
        """Bytes of a device that a plan may fill."""
        return capacity(self.cluster, self.headroom)

    def _even(self, layout: Layout) -> Partition:
        return self._cut(self._fit(layout))

    def _fit(self, layout: Layout) -> PartitionProblem:
        return PartitionProblem(
            layout, self.cost_table(layout), self.workload, self.cluster, self.profile, self.headroom
        )

    def _cut(self, fit: PartitionProblem) -> Partition:
        """The most even cut, which layouts of the same sheet share."""
        x = fit.layout
        key = _cut_key(x, fit.whole)
        if key not in self._cuts:
            self._cuts[key] = fit.even()
        return Partition(fit, self._cuts[key])

    def balance_all(self, layouts: Sequence[Layout]) -> list[StageBounds]:
        """The most even cuts of these layouts: those that are new made together."""
        places, new = self.structure.cut_points, dict[tuple[int, bool], dict[tuple[object, ...], SegmentSums]]()
        for x in layouts:
            if (key := _cut_key(x)) not in self._cuts:
                runs = self.cost_table(x).runs(places, STEP_COLUMNS)
                new.setdefault((x.pp * x.vpp, runs.more is None), {})[key] = runs
        for (count, _), alike in new.items():
            for key, cut in zip(alike, evens(ChainBatch.of(tuple(alike.values())), count), strict=True):
                self._cuts[key] = tuple(places[cut].tolist())
        return [self._cuts[_cut_key(x)] for x in layouts]

    def _best(self, even: Partition) -> Partition:
        """The cut that is priced: of whole blocks, if one that fits is hardly slower than the most even one of all."""
        whole, slowest = evolve(even.problem, whole=True), ALIKE * max(even.seconds)
        if len(even.bounds) <= len(whole.places) and whole.reaches(slowest):
            blocks = self._cut(whole)
            if max(blocks.seconds) <= slowest and blocks.fits:
                return self._roomy(blocks)
        return self._roomy(even)

    def _roomy(self, even: Partition) -> Partition:
        """The same layout cut to fit the memory if that can be, and to be quick; `even` is its most even cut.

        What layouts of the same sheet share is tried first.
        """
        x = even.layout
        if x.vpp == 1:
            return even.roomy()
        key = (*_cut_key(x, even.problem.whole), x.pp)
        if key not in self._levels:
            self._levels[key] = even.problem.level(even.bounds)
        if (level := Partition(even.problem, self._levels[key])).fits:
            return level
        return even.roomy()

    def simulate(self, placed: Partition) -> Priced:
        """The step time of a layout whose stages have a place."""
        return simulate(placed, self.counted)

    def bound(self, layout: Layout) -> tuple[float, float]:
        """(seconds of a step, bytes of the fullest rank): no way to cut the graph into these stages takes less."""
        one = Layouts.of([layout])
        found = LowerBounds(one, self.cost_cache).bound(one, np.zeros(1, dtype=np.int64))
        return float(found.seconds[0]), float(found.nbytes[0])


def _cut_key(x: Layout, whole: bool = False) -> tuple[object, ...]:
    """What the most even cut depends on."""
    return (*where(x), x.recompute_text, x.pp * x.vpp, whole)
