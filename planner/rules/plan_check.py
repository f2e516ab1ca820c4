"""Comparison of a plan with its model and with the runtime that is to train it."""

from __future__ import annotations

from megaloom.dsl.files.json_form import fingerprint, is_current
from megaloom.dsl.graph import Graph, Model, graph
from megaloom.planner.contract.plans import Plan, PlanError, plan_command
from megaloom.planner.model.structure import model_structure

from .capabilities import runtime_violations
from .rules import violations


def check_plan(plan: Plan, model: Model) -> None:
    """Raise PlanError unless the plan was made for this model and is legal for it."""
    current = fingerprint(model)
    if not is_current(plan.fingerprint):
        raise PlanError(
            "the plan was made by another version of megaloom, which identified models differently "
            f"(fingerprint {plan.fingerprint}, now {current})\nplan again: {plan_command(plan)}"
        )
    if current != plan.fingerprint:
        raise PlanError(
            f"the plan is for another model: {plan.model} had fingerprint {plan.fingerprint}, "
            f"{model.name!r} has {current}\nthe model changed since; plan again: {plan_command(plan)}"
        )
    g = graph(model)
    for violation in violations(plan.layout, g, plan.workload, plan.cluster):
        raise PlanError(f"the plan is not legal: {violation}\ncorrect that, or plan again: {plan_command(plan)}")
    if wrong := _wrong_field(plan, g):
        raise PlanError(f"the plan does not fit {plan.model}: {wrong}\nplan again: {plan_command(plan)}")


def check_trainable(plan: Plan, model: Model) -> None:
    """Raise PlanError unless Megaloom's own runtime can train this plan."""
    for violation in runtime_violations(plan.layout, graph(model), plan.workload, plan.cluster):
        raise PlanError(f"{violation.message} [{violation.rule}]\n{violation.fix}")


def _wrong_field(plan: Plan, g: Graph) -> str:
    """Return what is wrong with a field of the plan for this graph; empty if nothing is."""
    structure, layers = model_structure(g), plan.layout.recompute_layers
    if layers > structure.recomputable_blocks:
        return f"layout.recompute_layers is {layers}, and the model has {structure.recomputable_blocks} blocks"
    if plan.stages[-1].stop != len(g.nodes):
        return f"stages[{len(plan.stages) - 1}].stop is {plan.stages[-1].stop}, and the graph has {len(g.nodes)} nodes"
    for i, stage in enumerate(plan.stages[:-1]):
        if stage.stop not in g.cut_points:
            return f"stages[{i}].stop is {stage.stop}, which is not a cut point of the graph"
    return ""
