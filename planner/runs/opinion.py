"""A second opinion on a run: rules it breaks, its predicted step, the best layout, and the changes that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Graph, Model, graph
from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import PLAN_VERSION, Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.partition.memory_limit import HEADROOM
from megaloom.planner.partition.whole_blocks import RestrictedGraph, with_cut_points_of
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.rule import Violation
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import Found, plan
from megaloom.planner.search.variant_choices import FixedAxes
from megaloom.planner.simulate.price import Priced

from .moves import NO_MOVES, valuable_moves
from .residual import Cause, causes
from .run import TrainingRun

RUNTIME = Runtime.MEGATRON


Search = Callable[[Model, Cluster, Workload, str, FixedAxes, float, Runtime], Found]
"""Function that searches the best plan: of a model, for a cluster and a workload, with its reference, fixed fields, the
share of memory that stays free, and the program."""


@frozen
class ValuableChange:
    """A change that matters, and the run as a plan with this change alone; None if it is illegal or does not fit."""

    group: str
    alone: Plan | None


@frozen(kw_only=True)
class Opinion:
    """Opinion on a run. Without a legal layout there is neither a prediction nor a best one.

    plan: the run as a plan, with its prediction. fits: whether its memory is predicted to fit. found: the search of
    the best layout on the same devices. changes: those that matter; together: the run with all of them as a plan.
    causes: where the rest of a measured step may be.
    """

    run: TrainingRun
    cluster: Cluster
    broken: tuple[Violation, ...]
    plan: Plan | None = None
    fits: bool = True
    found: Found | None = None
    changes: tuple[ValuableChange, ...] = ()
    together: Plan | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the step that the best layout saves; 0 if the run's is as fast."""
        if self.plan is None or self.found is None:
            return 0.0
        return max(0.0, 1 - self.found.best.predicted.step_seconds / self.plan.predicted.step_seconds)


def _plain_search(
    model: Model, cluster: Cluster, workload: Workload, ref: str, fixed: FixedAxes, headroom: float, runtime: Runtime
) -> Found:
    return plan(model, cluster, workload, ref=ref, fixed=fixed, headroom=headroom, runtime=runtime)


def second_opinion(
    run: TrainingRun, cluster: Cluster, headroom: float = HEADROOM, search: Search = _plain_search
) -> Opinion:
    """Return the opinion on a run on its cluster. Raise UserError if no layout of the model fits the cluster."""
    g = graph(run.model)
    broken = broken_rules(run, g, cluster)
    if broken:
        return Opinion(run=run, cluster=cluster, broken=broken)
    profile = PROFILES[RUNTIME]
    own = Pricer(with_stages(g, run.stages), cluster, run.workload, profile, headroom)
    free = Pricer(with_cut_points_of(g, RUNTIME), cluster, run.workload, profile, headroom)
    priced = own.price(run.layout)
    # What the file decides for the mathematics stays: the padding of the vocabulary, the format of gradients.
    fixed: dict[str, Any] = {"vocab_multiple": run.layout.vocab_multiple}
    if run.layout.grad_reduce is not GradReduce.FP32:
        fixed["grad_reduce"] = run.layout.grad_reduce
    found = search(run.model, cluster, run.workload, run.path, fixed, headroom, RUNTIME)
    mine = plan_of(run, cluster, priced, found.best)

    def as_plan(priced: Priced | None) -> Plan | None:
        return None if priced is None else plan_of(run, cluster, priced, found.best)

    moves = NO_MOVES
    if found.best.predicted.step_seconds < priced.seconds or not priced.partition.fits:
        moves = valuable_moves(run.layout, priced.seconds, found.best.layout, own, free)
    return Opinion(
        run=run,
        cluster=cluster,
        broken=(),
        plan=mine,
        fits=priced.partition.fits,
        found=found,
        changes=tuple(ValuableChange(move.group, as_plan(move.alone)) for move in moves.moves),
        together=as_plan(moves.together),
        causes=causes(run, cluster, own.graph, mine) if run.measured else (),
    )


def broken_rules(run: TrainingRun, g: Graph, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules that a run's layout breaks, those of silently wrong gradients included."""
    case = (run.layout, g, run.workload, cluster)
    return violations(*case) or export_violations(*case, run.stages)


def with_stages(g: Graph, stages: tuple[int, ...]) -> Graph:
    """Return the graph with the starts of these stages as its only cut points."""
    if len(stages) == 1:
        return with_cut_points_of(g, RUNTIME)
    return RestrictedGraph(g.name, g.nodes, g.outputs, frozenset(stages[1:]))


def plan_of(run: TrainingRun, cluster: Cluster, priced: Priced, like: Plan) -> Plan:
    """Return a priced layout of a run as a plan. like: a plan for the same cluster and program."""
    return evolve(
        like,
        version=PLAN_VERSION,
        fingerprint=fingerprint(run.model),
        cluster=cluster,
        workload=run.workload,
        layout=priced.layout,
        stages=priced.stages,
        predicted=priced.prediction,
        reasons=(),
    )
