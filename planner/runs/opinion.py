"""A second opinion on a run: rules it breaks, its predicted step, the best layout, and the changes that matter."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Graph, graph
from megaloom.planner.contract.capability import assumed_environment, needs_flex_attention
from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import PLAN_VERSION, Plan
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.cost.measured_memory import required_bytes
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.partition.memory_limit import HEADROOM
from megaloom.planner.partition.whole_blocks import RestrictedGraph, with_cut_points_of
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.rule import Violation
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.branch_and_bound import search
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import TIE_RATIO
from megaloom.planner.search.infeasible import NoLegalLayoutError, gpus_option, nothing_fits, nothing_legal
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.simple_first import NEAR_RATIO, preferred
from megaloom.planner.simulate.price import Priced

from .moves import NO_MOVES, valuable_moves
from .residual import Cause, causes
from .run import TrainingRun


@frozen
class ValuableChange:
    """A change that matters, and the run as a plan with this change alone; None if it is illegal or does not fit."""

    group: str
    alone: Plan | None


@frozen(kw_only=True)
class Opinion:
    """Opinion on a run. Without a legal layout there is neither a prediction nor a best one.

    plan: the run as a plan, with its prediction. fits: whether its memory is predicted to fit. best: the fastest
    layout on the same devices, which the gap is to. advised: the simplest of those that are at most 1 % slower, which
    the changes lead to. changes: those that matter; together: the run with all of them as a plan.
    causes: where the rest of a measured step may be.
    """

    run: TrainingRun
    cluster: Cluster
    broken: tuple[Violation, ...]
    plan: Plan | None = None
    fits: bool = True
    best: Plan | None = None
    advised: Plan | None = None
    changes: tuple[ValuableChange, ...] = ()
    together: Plan | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the step that the fastest layout saves; 0 if the run's is as fast."""
        if self.plan is None or self.best is None:
            return 0.0
        return max(0.0, 1 - self.best.predicted.step_seconds / self.plan.predicted.step_seconds)


def second_opinion(run: TrainingRun, cluster: Cluster, headroom: float = HEADROOM) -> Opinion:
    """Return the opinion on a run on its cluster. Raise UserError if no layout of the model fits the cluster."""
    g = graph(run.model)
    if broken := broken_rules(run, g, cluster):
        return Opinion(run=run, cluster=cluster, broken=broken)
    own, free = (
        Pricer(each, cluster, run.workload, run.profile, headroom)
        for each in (with_stages(g, run), with_cut_points_of(g, run.runtime))
    )
    priced, (best, advised) = own.price(run.layout), best_layouts(run, free)
    moves = NO_MOVES
    if best.seconds < priced.seconds or not priced.partition.fits:
        moves = valuable_moves(run.layout, priced.seconds, advised.layout, own, free)
    plan = plan_of(run, cluster, priced)
    return Opinion(
        run=run,
        cluster=cluster,
        broken=(),
        plan=plan,
        fits=max(map(required_bytes, plan.predicted.nbytes)) <= cluster.device.nbytes,
        best=plan_of(run, cluster, best),
        advised=plan_of(run, cluster, advised),
        changes=tuple(
            ValuableChange(move.group, plan_of(run, cluster, move.alone) if move.alone else None)
            for move in moves.moves
        ),
        together=plan_of(run, cluster, moves.together) if moves.together else None,
        causes=causes(run, cluster, own.graph, plan) if run.measured else (),
    )


def best_layouts(run: TrainingRun, pricer: Pricer) -> tuple[Priced, Priced]:
    """Return the fastest layout that fits, and the simplest of those found that are at most 1 % slower.

    Both have the mathematics of the run. Of layouts within 0.1 % of the fastest, the simplest counts as the fastest.
    The padding of the vocabulary and the format of gradients stay as they are. Raise UserError if none fits.
    """
    fixed: dict[str, Any] = {"vocab_multiple": run.layout.vocab_multiple}
    if run.layout.grad_reduce is not GradReduce.FP32:
        fixed["grad_reduce"] = run.layout.grad_reduce
    candidates = Candidates(pricer, fixed)
    if not candidates.count:
        raise NoLegalLayoutError(nothing_legal(pricer, fixed))
    simulated = search(candidates, meshes=1, count=1)
    if not simulated:
        raise UserError(nothing_fits(pricer, candidates, gpus_option))
    return preferred(simulated, TIE_RATIO), preferred(simulated, NEAR_RATIO)


def broken_rules(run: TrainingRun, g: Graph, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules that a run's layout breaks, those of silently wrong gradients included."""
    case = (run.layout, g, run.workload, cluster)
    if run.runtime is Runtime.MEGALOOM:
        return violations(*case)
    return violations(*case) or export_violations(*case, run.stages)


def with_stages(g: Graph, run: TrainingRun) -> Graph:
    """Return the graph with the starts of the run's stages as its only cut points."""
    if len(run.stages) == 1:
        return with_cut_points_of(g, run.runtime)
    return RestrictedGraph(g.name, g.nodes, g.outputs, frozenset(run.stages[1:]))


def plan_of(run: TrainingRun, cluster: Cluster, priced: Priced) -> Plan:
    """Return a priced layout of a run as a plan."""
    g = graph(run.model)
    experts, flex = model_requirements(g).experts, needs_flex_attention(g.nodes)
    return Plan(
        version=PLAN_VERSION,
        model=run.path if run.own is None else run.own.model,
        fingerprint=fingerprint(run.model),
        cluster=cluster,
        workload=run.workload,
        layout=priced.layout,
        stages=priced.stages,
        predicted=priced.prediction,
        reasons=(),
        runtime=run.runtime,
        environment=assumed_environment(run.runtime, cluster.device.name, experts, flex, run.workload.precision),
        lora=None if run.own is None else run.own.lora,
    )
