"""Prices of many layouts of one job: what layouts share is computed once.

`Pricer` wraps the pure functions of `planner/simulate/price.py` with caches; its results are equal. `refined` gives
a layout with its partition within the memory limit.
"""

from __future__ import annotations

from operator import attrgetter

import numpy as np
from attrs import define, evolve, field, frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.bounds.chained_layouts import ChainedLayouts
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.bounds.simulated_step import step_lower_bound
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, alike
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS, CostCache, node_cost_key
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
from megaloom.planner.partition.chain_costs import ChainCosts
from megaloom.planner.partition.dynamic_program import Indices, balance_all
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
# The balanced partition into a number of stages depends on these fields.
BALANCE_FIELDS = (*NODE_COST_FIELDS, "recompute", "recompute_modules", "recompute_layers")
BALANCE_OF = attrgetter(*BALANCE_FIELDS)


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
    _balanced: dict[tuple[object, ...], Indices] = field(factory=dict, init=False)  # cut points
    _examples: dict[int, Indices] = field(factory=dict, init=False)  # by number of stages

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
        return self.refine(self.even(layout))

    def even(self, layout: Layout) -> Partition:
        """Return the balanced partition of a legal layout, whatever memory it takes."""
        problem = PartitionProblem(layout, self.cost_table(layout), self.capacity)
        return Partition(problem, self._balance(problem))

    def refine(self, even: Partition) -> Partition:
        """Return the planner's partition of a layout, given the balanced one."""
        return partition(even.problem, self._balance, even)

    def refined(self, even: Partition, *, full: bool = False) -> PartitionedLayout | None:
        """Return a legal layout with its partition and a lower bound of its step; None if none fits the memory limit.

        even: its balanced partition. full: that hardly fits, so it is cheaper to ask first whether any partition may.
        Where nodes share weights, the planner's partition may fit though none seems to.
        """
        known = self.structure.shared_weights or (not full and even.fits)
        if not known and not even.problem.feasible(even.bounds):
            return None
        found = self.refine(even)
        return PartitionedLayout(found, step_lower_bound(found)) if found.fits else None

    def fewer_overlaps(self, even: Partition) -> list[Layout]:
        """Return the legal layouts with one overlap less, or with none, if the balanced partition may fit only then.

        Where it fits, an overlap costs memory but no time.
        """
        layout = even.layout
        inner = [o for o in layout.overlaps if o in self.inner]
        if not inner or even.fits:
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

    def _balance(self, problem: PartitionProblem) -> StageBounds:
        """Return the balanced partition, which layouts with one cost table share."""
        x, cuts = problem.layout, problem.cut_points
        key = (*BALANCE_OF(x), x.pp * x.vpp, problem.whole_blocks)
        if key not in self._balanced:
            self._balanced[key] = cuts.searchsorted(problem.balanced)
        return tuple(cuts[self._balanced[key]].tolist())

    def chain_costs(self, x: Layouts) -> ChainCosts:
        """Return the costs of the stages of these layouts."""
        columns = (getattr(x, name) for name in (*NODE_COST_FIELDS, "recompute", "recompute_modules"))
        first, which = alike(*columns, x.recompute_layers > 0, *gathered_fields(x))
        tables = [self.cost_table(layout) for layout in x.each(first)]
        return ChainCosts(tables, which, x.recompute_layers * x.full_recompute)

    def balance_all(self, chained: ChainedLayouts, which: Column) -> list[Indices]:
        """Return the balanced partitions of these chains, as cut points; new ones are solved together."""
        x, costs = chained.of_chains.take(which), chained.costs
        stages = x.pp * x.vpp
        columns = *(getattr(x, name) for name in BALANCE_FIELDS), stages, 0 * stages
        keys = [*zip(*(column.tolist() for column in columns), strict=True)]
        new, partly = np.array([key not in self._balanced for key in keys]), costs.blocks[which] > 0
        for count in np.flatnonzero(np.bincount(stages[new])).tolist():
            for some in (new & (stages == count) & partly, new & (stages == count) & ~partly):
                if some.any():
                    partitions = balance_all(costs.seconds(which[some]), count)
                    chosen = zip(np.flatnonzero(some).tolist(), partitions, strict=True)
                    self._balanced |= {keys[i]: bounds for i, bounds in chosen}
        return [self._balanced[key] for key in keys]

    def balanced_example(self, chained: ChainedLayouts, chain: int, count: int) -> Indices:
        """Return the balanced partition into so many stages of the first chain for which it was asked for."""
        if count not in self._examples:
            self._examples[count] = self.balance_all(chained, np.array([chain]))[0]
        return self._examples[count]

    def bound(self, layout: Layout) -> tuple[float, float]:
        """Return lower bounds of the step seconds and of the peak bytes of a layout, for every partition."""
        one = Layouts.of([layout])
        bounded = LowerBounds(one, self.cost_cache).bound(one, np.zeros(1, dtype=np.int64))
        return float(bounded.seconds[0]), float(bounded.nbytes[0])
