"""Prices of many layouts of one job: what layouts share is computed once.

`Pricer` wraps the pure functions of `planner/simulate/price.py` with caches; its results are equal. `refined` gives
a layout with its partition within the memory limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from attrs import define, evolve, field, frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.bounds.simulated_step import step_lower_bound
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.cost_cache import CostCache, node_cost_key
from megaloom.planner.cost.cost_table import (
    BareTable,
    CostTable,
    cost_table,
)
from megaloom.planner.cost.memory import rank_memory
from megaloom.planner.cost.profiles.frameworks import OWN, PROFILES
from megaloom.planner.cost.profiles.groups import FrameworkProfile
from megaloom.planner.cost.weight_units import gathered_fields
from megaloom.planner.model.structure import ModelStructure, model_structure
from megaloom.planner.partition.dynamic_program import (
    ChainBatch,
    SegmentSums,
    balance_all,
)
from megaloom.planner.partition.memory_limit import HEADROOM, capacity
from megaloom.planner.partition.partitioner import (
    Partition,
    PartitionProblem,
    StageBounds,
    partition,
)
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.fsdp import OWN_GRADIENTS
from megaloom.planner.rules.rule import Case, Violation, violated
from megaloom.planner.rules.rules import violations
from megaloom.planner.simulate.price import Priced, simulate

from .candidate_space import CandidateSpace
from .variant_choices import FixedAxes

RECOMPUTE_OF = attrgetter("recompute", "recompute_modules", "recompute_layers")


@frozen(eq=False)
class PartitionedLayout:
    """A layout with its stages, and a lower bound of its step time."""

    partition: Partition
    seconds: float


def price(
    graph: Graph, layout: Layout, cluster: Cluster, workload: Workload, runtime: Runtime = Runtime.MEGALOOM
) -> Priced:
    """Return the prediction of a legal layout, whether or not it fits the memory limit."""
    return Pricer(graph, cluster, workload, PROFILES[runtime]).price(layout)


@define(eq=False, slots=False)
class Pricer:
    """Prices layouts of one graph on one cluster, and remembers what they share."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    profile: FrameworkProfile = OWN
    headroom: float = HEADROOM
    structure: ModelStructure = field(init=False)
    cost_cache: CostCache = field(init=False)
    _bare: dict[tuple[object, ...], BareTable] = field(factory=dict, init=False)
    _tables: dict[tuple[object, ...], CostTable] = field(factory=dict, init=False)
    _balanced: dict[tuple[object, ...], StageBounds] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.structure = model_structure(self.graph)
        self.cost_cache = CostCache(self.structure, self.workload, self.cluster, self.profile)

    @property
    def own(self) -> bool:
        """Return True if plans are for megaloom's own runtime, which corrects errors of megatron-core."""
        return self.profile is OWN

    @property
    def inner(self) -> tuple[Overlap, ...]:
        """Return the overlaps within a micro-batch that the framework supports."""
        return self.profile.overlap.supported

    def space(self, fixed: FixedAxes) -> CandidateSpace:
        """Return the space of layouts with these fields that the framework of this pricer may run."""
        return CandidateSpace(self.graph, self.cluster, self.workload, fixed, self.inner, exported=not self.own)

    def broken(self, layout: Layout) -> tuple[Violation, ...]:
        """Return the rules that a layout breaks, for other runtimes with those that megatron-core computes wrongly."""
        case = layout, self.graph, self.workload, self.cluster
        return violations(*case) + (violated((OWN_GRADIENTS,), Case(*case)) if self.own else export_violations(*case))

    def cost_table(self, layout: Layout) -> CostTable:
        """Return the costs of all graph nodes under a layout."""
        axes = node_cost_key(layout)
        key = (*axes, *RECOMPUTE_OF(layout), *gathered_fields(layout))
        if key not in self._tables:
            if axes not in self._bare:
                self._bare[axes] = self.cost_cache.bare_table(layout)
            self._tables[key] = cost_table(self.cost_cache.job, layout, self._bare[axes])
        return self._tables[key]

    def price(self, layout: Layout) -> Priced:
        """Return the prediction of a legal layout."""
        return simulate(self.partition(layout))

    def simulate(self, partition: Partition) -> Priced:
        """Return the prediction of a layout with its stages."""
        return simulate(partition)

    def partition(self, layout: Layout) -> Partition:
        """Return the stages of a legal layout, within the memory limit if a partition fits."""
        return self._refine(self._even(layout))

    def even_if_it_fits(self, layout: Layout) -> Partition | None:
        """Return the stages of a legal layout if its balanced partition fits the memory limit."""
        even = self._even(layout)
        return self._refine(even) if even.fits else None

    def balanced_fits(self, layout: Layout) -> bool:
        """Return whether the balanced partition of a legal layout fits the memory limit."""
        return self._even(layout).fits

    def refined(self, layout: Layout, *, full: bool = False) -> PartitionedLayout | None:
        """Return a legal layout with its partition and a lower bound of its step; None if none fits the memory limit.

        full: the balanced partition hardly fits, so it is cheaper to ask first whether any partition may. Where nodes
        share weights, the planner's partition may fit though none seems to.
        """
        even = self._even(layout)
        known = self.structure.shared_weights or (not full and even.fits)
        if not known and not even.problem.feasible(even.bounds):
            return None
        partition = self._refine(even)
        return PartitionedLayout(partition, step_lower_bound(partition)) if partition.fits else None

    def fewer_overlaps(self, layout: Layout) -> list[Layout]:
        """Return the legal layouts with one overlap less, or with none, if the balanced partition may fit only then.

        Where it fits, an overlap costs memory but no time.
        """
        inner = [o for o in layout.overlaps if o in self.inner]
        if not inner or (even := self._even(layout)).fits:
            return []
        leaner = [x for overlap in inner if (x := self._without([overlap], layout, even.deficit))]
        without_any = self._without(inner, layout, even.deficit) if len(inner) > 1 and not leaner else None
        return [without_any] if without_any else leaner

    def _without(self, overlaps: list[Overlap], layout: Layout, deficit: int) -> Layout | None:
        """Return the layout without these overlaps, if it is legal and frees the deficit."""
        other = evolve(layout, overlaps=OverlapSet(o for o in layout.overlaps if o not in overlaps))
        before, after = (table.library + table.workspace for table in map(self.cost_table, (layout, other)))
        enough = deficit <= rank_memory(0, 0, 0, before - after)
        return other if enough and not self.broken(other) else None

    @property
    def capacity(self) -> int:
        """Return the memory limit: the bytes of a device that a plan may use."""
        return capacity(self.cluster, self.headroom)

    def _even(self, layout: Layout) -> Partition:
        problem = PartitionProblem(layout, self.cost_table(layout), self.capacity)
        return Partition(problem, self._balance(problem))

    def _refine(self, even: Partition) -> Partition:
        return partition(even.problem, self._balance, even)

    def _balance(self, problem: PartitionProblem) -> StageBounds:
        """Return the balanced partition, which layouts with one cost table share."""
        key = _balance_key(problem.layout, problem.whole_blocks)
        if key not in self._balanced:
            self._balanced[key] = problem.balanced
        return self._balanced[key]

    def balance_all(self, layouts: Sequence[Layout]) -> list[tuple[CostTable, StageBounds]]:
        """Return the cost tables and balanced partitions of these layouts; new partitions are solved together."""
        cuts, new = self.structure.cut_points, dict[tuple[int, bool], dict[tuple[object, ...], SegmentSums]]()
        each = [(x, _balance_key(x), self.cost_table(x)) for x in layouts]
        for x, key, table in each:
            if key not in self._balanced:
                sums = PartitionProblem(x, table, self.capacity).seconds
                new.setdefault((x.pp * x.vpp, sums.extra is None), {})[key] = sums
        for (count, _), chains in new.items():
            partitions = balance_all(ChainBatch.of(tuple(chains.values())), count)
            for key, stages in zip(chains, partitions, strict=True):
                self._balanced[key] = tuple(cuts[stages].tolist())
        return [(table, self._balanced[key]) for _, key, table in each]

    def bound(self, layout: Layout) -> tuple[float, float]:
        """Return lower bounds of the step seconds and of the peak bytes of a layout, for every partition."""
        one = Layouts.of([layout])
        bounded = LowerBounds(one, self.cost_cache).bound(one, np.zeros(1, dtype=np.int64))
        return float(bounded.seconds[0]), float(bounded.nbytes[0])


def _balance_key(x: Layout, whole_blocks: bool = False) -> tuple[object, ...]:
    """Return everything that the balanced partition of a layout depends on."""
    return (*node_cost_key(x), *RECOMPUTE_OF(x), x.pp * x.vpp, whole_blocks)
