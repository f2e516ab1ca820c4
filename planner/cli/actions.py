"""The actions of the command `plan`: search with a progress line, print the report, a scaling table, or the rules."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from megaloom.planner.contract.workload import Runtime, Workload

if TYPE_CHECKING:
    from megaloom.dsl.graph import Graph, Model
    from megaloom.planner.contract.devices import Cluster
    from megaloom.planner.contract.plans import Plan
    from megaloom.planner.report.token_budget import TokenBudget
    from megaloom.planner.search.search import Found
    from megaloom.planner.search.variant_choices import FixedAxes

    from .plan_options import JobOptions


def print_scaling(
    model: Model, job: JobOptions, fixed: FixedAxes, budget: TokenBudget | None, *, pareto: bool, as_json: bool
) -> None:
    """Search each cluster of a range, or each memory limit, and print the best layouts as a table or as JSON."""
    from rich.console import Console

    from megaloom.dsl.facts.parameters import params
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.search.infeasible import checked_fixed
    from megaloom.planner.search.scaling import (
        Goal,
        clusters_in_range,
        scaling_points,
    )
    from megaloom.planner.search.search import plan as search

    console = Console(stderr=True)
    progress = console.status("", spinner="line")
    headroom, runtime = job.memory_headroom, job.runtime
    goal = Goal.PARETO if pareto else Goal.FASTEST if job.fastest else Goal.SIMPLEST

    def workload(machine: Cluster) -> Workload:
        return job.workload(model, machine)

    def clusters() -> Iterator[Cluster]:
        for machine in clusters_in_range(job.cluster_name):
            progress.update(f"searching the layouts of {model.name} on {machine} ...")
            yield machine

    with progress if console.is_terminal else nullcontext():
        found = list(scaling_points(graph(model), clusters(), workload, checked_fixed(fixed), headroom, runtime, goal))
    if not any(point.best for point in found):  # then the search on the last cluster raises the reason
        search(
            model,
            found[-1].cluster,
            workload(found[-1].cluster),
            ref="",
            fixed=fixed,
            headroom=headroom,
            runtime=runtime,
        )
    if as_json:
        from megaloom.planner.report.to_json import scaling_json

        print(json.dumps(scaling_json(found, params(model), budget), indent=1))
    else:
        from megaloom.planner.report.scaling_table import scaling_report

        show(scaling_report(found, model, budget), sys.stdout)


def print_rules(as_json: bool) -> int:
    """Print all rules of legal layouts; return exit code 0."""
    from megaloom.planner.report.lint import rules_json, rules_text

    print(json.dumps({"rules": rules_json()}, indent=1) if as_json else rules_text())
    return 0


def print_lint(g: Graph, machine: Cluster, workload: Workload, fixed: FixedAxes, as_json: bool) -> int:
    """Print the rules that a layout breaks, or all rules without a layout; return exit code 1 if it breaks one."""
    from megaloom.planner.report.lint import caveats_text, lint_json, violations_text
    from megaloom.planner.search.infeasible import check_ranges, checked_fixed

    fixed = checked_fixed(fixed)
    check_ranges(fixed, g, workload, machine)
    if not fixed:
        return print_rules(as_json)
    if as_json:
        result = lint_json(g, machine, workload, fixed)
        print(json.dumps(result, indent=1))
        return 1 if result["violations"] else 0
    violations = violations_text(g, machine, workload, fixed)
    print(violations or "the layout breaks no rule")
    if warning := caveats_text(g, machine, workload, fixed):
        print(warning)
    return 1 if violations else 0


def run_search(
    declared: Model, machine: Cluster, workload: Workload, ref: str, fixed: FixedAxes, job: JobOptions
) -> Found:
    """Search with a progress line on a terminal. If interrupted, return the best plan so far."""
    from rich.console import Console

    from megaloom.planner.search.search import Progress
    from megaloom.planner.search.search import plan as search

    console = Console(stderr=True)
    message = f"searching the layouts of {declared.name} on {machine} ..."
    progress = console.status(message, spinner="line") if console.is_terminal else None

    def tell(so_far: Progress) -> None:
        best = f"{so_far.layout}: {so_far.seconds:.3g} s a step, {_gain_text(so_far.gap)}"
        if progress:
            progress.update(f"{message} best so far {best} (Ctrl-C stops here)")

    with progress or nullcontext(), garbage_kept():
        return search(
            declared,
            machine,
            workload,
            ref=ref,
            fixed=fixed,
            headroom=job.memory_headroom,
            runtime=job.runtime,
            fastest=job.fastest,
            on_progress=tell if progress else None,
            keep_incumbent=True,
        )


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Switch garbage collection off meanwhile: of a search it takes 3 % of the time, and frees less than 10 MB."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _gain_text(gain: float) -> str:
    """Return how much faster another layout may be than the best so far, as a share of the step time."""
    return (
        f"another layout may be at most {gain:.1%} faster"
        if gain < 1
        else "not yet known how much faster another layout may be"
    )


def default_seq(g: Graph) -> int:
    """Return 4096, or the number of learned positions if that is less; 1 for a model without sequences."""
    from megaloom.planner.model.requirements import model_requirements

    return min((4096, *model_requirements(g).learned_positions)) if any("seq" in node.shape for node in g.nodes) else 1


def default_batch(machine: Cluster) -> int:
    """Return 8 sequences per device, but at most 1024 in all and at least one per device."""
    return machine.count * max(1, min(8, 1024 // machine.count))


def print_report(
    found: Found, declared: Model, top: int, assumed: Sequence[str], path: str, budget: TokenBudget | None
) -> None:
    """Print the report of a search. `assumed` are the options that were not given; the plan was written to `path`."""
    from rich.console import Group
    from rich.text import Text

    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.report.text import search_report

    best, g = found.best, graph(declared)
    foot = f"\n{_long_run(best, declared, budget)}{_next_step(best, declared, g, path)}"
    show(Group(Text(_head(found, declared, assumed)), search_report(found, g, top), Text(foot)), sys.stdout)


def _long_run(best: Plan, declared: Model, budget: TokenBudget | None) -> str:
    """Return the paragraph on goodput and on what the tokens of a budget take; empty if neither is wanted."""
    from megaloom.dsl.facts.parameters import params
    from megaloom.planner.report.goodput import MANY_DEVICES, goodput, goodput_text
    from megaloom.planner.report.run_cost import assumed_text, cost_text, training_cost

    lines = []
    if budget:
        lines = [cost_text(training_cost(best, declared, budget), budget), assumed_text(best.cluster)]
    if budget or best.cluster.count >= MANY_DEVICES:
        lasting = goodput(params(declared), best.workload.precision, best.cluster, best.predicted.step_seconds)
        lines += [f"In a long run {goodput_text(lasting)}"] if lasting else []
    return "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")


def _head(found: Found, declared: Model, assumed: Sequence[str]) -> str:
    from megaloom.dsl.facts.parameters import parameters_text
    from megaloom.planner.cost.profiles.frameworks import PROFILES

    best = found.best
    cluster, work = best.cluster, best.workload
    nodes = f"{cluster.nodes} nodes of {cluster.per_node}" if cluster.nodes > 1 else "one node"
    defaults = f" (default {' and '.join(assumed)})" if assumed else ""
    tokens = f", {work.tokens:,} tokens in all" if work.seq > 1 else ""
    ended = "" if found.gap is None else f", interrupted: {_gain_text(found.gap)}"
    runner = "" if best.runtime is Runtime.MEGALOOM else f", run by {PROFILES[best.runtime].name}"
    return (
        f"{declared.name}: {parameters_text(declared)} on {cluster} ({nodes}){runner}; "
        f"searched for {found.seconds:.1f} s{ended}\n"
        f"One step: {work}{tokens}{defaults}\n"
    )


def _next_step(plan: Plan, declared: Model, g: Graph, path: str) -> str:
    """Return the line that names the written file and the command to go on with."""
    from megaloom.dsl.errors import UserError
    from megaloom.planner.export.export import cut_for, export_plan
    from megaloom.planner.export.target import Target
    from megaloom.planner.rules.capabilities import runtime_violations

    wrote, reason = f"wrote {path}. ", ""
    if plan.runtime is Runtime.MEGALOOM:
        lacking = runtime_violations(plan.layout, g, plan.workload, plan.cluster)
        if not lacking:
            return f"{wrote}Next: megaloom train {path}"
        reason = f" (our own runtime cannot run it: {lacking[0].message})"
    try:
        export_plan(cut_for(Target.MEGATRON_LM, plan, declared), declared, Target.MEGATRON_LM, path)
    except UserError as error:
        refused = str(error).partition("\n")[0]
        own = f". Our own runtime cannot run it either: {lacking[0].message}" if reason else ""
        return f"{wrote}{refused}{own}"
    return f"{wrote}Next: megaloom export {path} --to megatron-lm{reason}"
