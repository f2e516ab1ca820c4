"""What `plan` does once it knows what is asked: a search with a sign of life, its report, tables, the rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from megaloom.planner.contract.workload import Runtime, Workload

if TYPE_CHECKING:
    from megaloom.dsl.graph import Graph, Model
    from megaloom.planner.contract.devices import Cluster
    from megaloom.planner.search.candidate_space import FixedAxes
    from megaloom.planner.search.search import Found


def scale(
    m: Model,
    gpus: str,
    work: Callable[[Cluster], Workload],
    fixed: FixedAxes,
    free: float,
    runtime: Runtime,
    pareto: bool,
    as_json: bool,
) -> None:
    """A table of the best layouts on more and more devices, or in less and less memory. No plan is written."""
    from rich.console import Console

    from megaloom.dsl.facts.parameters import params
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.search.infeasible import checked_fixed
    from megaloom.planner.search.scaling import (
        clusters_in_range,
        scaling_points,
        scaling_table,
    )
    from megaloom.planner.search.search import plan as search

    console = Console(stderr=True)
    watched = console.status("", spinner="line")

    def row() -> Iterator[Cluster]:
        for machine in clusters_in_range(gpus):
            watched.update(f"searching the layouts of {m.name} on {machine} ...")
            yield machine

    with watched if console.is_terminal else nullcontext():
        found = list(scaling_points(graph(m), row(), work, checked_fixed(fixed), free, runtime, pareto=pareto))
    if not any(point.best for point in found):  # then the search on the last one says why
        search(m, found[-1].cluster, work(found[-1].cluster), ref="", fixed=fixed, headroom=free, runtime=runtime)
    if as_json:
        from megaloom.planner.report.to_json import scaling_json

        print(json.dumps(scaling_json(found, params(m)), indent=1))
    else:
        show(scaling_table(found, params(m)), sys.stdout)


def ruled(as_json: bool) -> int:
    """The rules that there are."""
    from megaloom.planner.search.lint import rules_json, rules_text

    print(json.dumps({"rules": rules_json()}, indent=1) if as_json else rules_text())
    return 0


def told(g: Graph, machine: Cluster, workload: Workload, fixed: FixedAxes, as_json: bool) -> int:
    """2 if the layout breaks a rule. Without a layout the rules are shown."""
    from megaloom.planner.search.infeasible import checked_fixed
    from megaloom.planner.search.lint import caveats_text, lint_json, violations_text

    if not (fixed := checked_fixed(fixed)):
        return ruled(as_json)
    if as_json:
        found = lint_json(g, machine, workload, fixed)
        print(json.dumps(found, indent=1))
        return 2 if found["violations"] else 0
    wrong = violations_text(g, machine, workload, fixed)
    print(wrong or "no rule is broken")
    if warning := caveats_text(g, machine, workload, fixed):
        print(warning)
    return 2 if wrong else 0


def searched(
    declared: Model, machine: Cluster, workload: Workload, ref: str, fixed: FixedAxes, free: float, runtime: Runtime
) -> Found:
    """The search, with signs of life where somebody watches. Interrupted, it takes the best so far."""
    from rich.console import Console

    from megaloom.planner.search.search import Progress
    from megaloom.planner.search.search import plan as search

    console = Console(stderr=True)
    doing = f"searching the layouts of {declared.name} on {machine} ..."
    watched = console.status(doing, spinner="line") if console.is_terminal else None

    def tell(so_far: Progress) -> None:
        best = f"{so_far.layout}: {so_far.seconds:.3g} s a step, {nearly(so_far.gap)}"
        if watched:
            watched.update(f"{doing} so far {best} (Ctrl-C takes it)")

    with watched or nullcontext():
        return search(
            declared,
            machine,
            workload,
            ref=ref,
            fixed=fixed,
            headroom=free,
            runtime=runtime,
            on_progress=tell if watched else None,
            keep_incumbent=True,
        )


def nearly(unproven: float) -> str:
    """What is known of how good the best so far is."""
    return f"at most {unproven:.1%} can be gained yet" if unproven < 1 else "nothing is known of the others yet"


def default_seq(g: Graph) -> int:
    """4096, or as many tokens as the model has learned positions for; 1 of a model that reads no sequence."""
    from megaloom.planner.model.requirements import model_requirements

    return min((4096, *model_requirements(g).learned_positions)) if any("seq" in node.shape for node in g.nodes) else 1


def default_batch(machine: Cluster) -> int:
    """8 sequences a device, at most 1024 in all, at least one a device."""
    return machine.count * max(1, min(8, 1024 // machine.count))


def tell(found: Found, declared: Model, top: int, assumed: Sequence[str], target: str) -> None:
    """What was found, for people."""
    from rich.console import Group
    from rich.text import Text

    from megaloom.dsl.facts.parameters import params
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.cost.profiles.frameworks import PROFILES
    from megaloom.planner.report.text import search_report
    from megaloom.planner.rules.capabilities import limits
    from megaloom.planner.search.goodput import (
        MANY_DEVICES,
        goodput,
        goodput_text,
    )

    best = found.best
    machine, w, seconds = best.cluster, best.workload, best.predicted.step_seconds
    nodes = f"{machine.nodes} nodes of {machine.per_node}" if machine.nodes > 1 else "one node"
    said = f" ({' and '.join(assumed)} not given)" if assumed else ""
    whole = f", {w.tokens:,} in all" if w.seq > 1 else ""
    ended = "" if found.gap is None else f", then interrupted: {nearly(found.gap)}"
    own = best.runtime is Runtime.MEGALOOM
    runner = "" if own else f", as {PROFILES[best.runtime].name} runs it"
    head = (
        f"{declared.name}: {params(declared):,} parameters, on {machine} ({nodes}); "
        f"searched in {found.seconds:.1f} s{ended}{runner}\n"
        f"a step: {w}{whole}{said}\n"
    )
    runs = own and not limits(best.layout, graph(declared), w, machine)
    foot = f"\nwrote {target}" + (f"; `megaloom train {target}` trains by it" if runs else ", to be exported")
    if machine.count >= MANY_DEVICES and (lasting := goodput(params(declared), w.precision, machine, seconds)):
        foot = f"\nOver weeks: {goodput_text(lasting)}\n{foot}"
    show(Group(Text(head), search_report(found, graph(declared), top), Text(foot)), sys.stdout)
