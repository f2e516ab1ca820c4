"""`plan --lint`: the rules of legal layouts, and which of them a layout breaks.

`rules_text`, `violations_text` and `caveats_text` return text for a terminal.
"""

from __future__ import annotations

from textwrap import fill
from typing import Any

from attrs import asdict, evolve

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.rules.capabilities import RUNTIME_RULES, caveats, runtime_violations
from megaloom.planner.rules.export_rules import EXPORT_RULES, export_violations
from megaloom.planner.rules.rule import Owner, Rule
from megaloom.planner.rules.rules import RANGE_RULES, RULES, violations
from megaloom.planner.search.candidate_space import CandidateSpace
from megaloom.planner.search.suggestions import changes_text, legal_changes
from megaloom.planner.search.variant_choices import FixedAxes, implied

HEADINGS = {
    Owner.CORE: "refused by megatron-core 0.16.1",
    Owner.CALLERS: "refused by the callers of megatron-core, which does not check it",
    Owner.PLANNER: "refused by the planner, though megatron-core accepts it",
    Owner.EXPORTS: "refused by `megaloom export`: megatron-core computes wrong gradients, which our runtime corrects",
    Owner.RUNTIME: "refused by `megaloom train`; plans for other programs may have it",
}
LEGEND = "Conditions of every legal layout. In brackets: the source line that checks it, or the reason."
WIDTH = 116
# Fields of a layout that have their default where the user gives none.
FREE_FIELDS = ("tp", "pp", "cp", "vpp", "ep", "etp", "micro_batch", "microbatch_group")
ALL_RULES = (*RANGE_RULES, *RULES, *EXPORT_RULES, *RUNTIME_RULES)


def rules_text() -> str:
    """Return every rule by owner: its id, its sentence, its fix, and the source."""
    margin = 2 + max(len(rule.id) for rule in ALL_RULES) + 2
    sections = ([head, *(_rule_text(r, margin) for r in ALL_RULES if r.owner is by)] for by, head in HEADINGS.items())
    return "\n\n".join((LEGEND, *("\n".join(section) for section in sections)))


def _rule_text(rule: Rule, margin: int) -> str:
    lines = (f"{rule.id:<{margin - 2}}{rule.sentence}", f"{'':<{margin - 2}}fix: {rule.fix} [{rule.source}]")
    return "\n".join(fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * margin) for line in lines)


def violations_text(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> str:
    """Return the rules that this layout breaks, and changes that are legal; empty if it breaks none."""
    layout = _layout(graph, cluster, workload, fixed)
    wrong = violations(layout, graph, workload, cluster)
    lines = [f"{layout}: {v.message} [{v.rule}]" for v in wrong]
    changes = _changes(CandidateSpace(graph, cluster, workload, fixed), layout) if wrong else []
    return "\n".join([*lines, *(changes or [f"{v.rule}: {v.fix}" for v in wrong])])


def _changes(space: CandidateSpace, layout: Layout) -> list[str]:
    """Return the smallest changes of what the user fixed, or of another field, that make the layout legal.

    A field that the user left free is as in the layout unless a change says otherwise; dp takes what is left.
    """
    fixed = {**space.fixed, **{name: getattr(layout, name) for name in FREE_FIELDS if name not in space.fixed}}
    return changes_text(legal_changes(evolve(space, fixed=fixed)), fixed)


def caveats_text(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> str:
    """Return why the runtime does not train this layout; empty if it does."""
    return "\n".join(caveats(_layout(graph, cluster, workload, fixed), graph, workload, cluster))


def lint_json(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> dict[str, Any]:
    """Return as JSON the rules that a layout breaks, its limits at runtime, and all rules."""
    case = (_layout(graph, cluster, workload, fixed), graph, workload, cluster)
    lists = {"violations": violations, "limits": runtime_violations, "wrong": export_violations}
    return {**{name: [asdict(each) for each in check(*case)] for name, check in lists.items()}, "rules": rules_json()}


def rules_json() -> list[dict[str, str]]:
    """Return every rule as JSON."""
    fields = ("id", "sentence", "fix", "owner", "source")
    return [{name: getattr(rule, name) for name in fields} for rule in ALL_RULES]


def _layout(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> Layout:
    """Return the layout with these fields. If free, dp takes the rest of the devices, and sp is on if that is legal."""
    fixed = implied(fixed)
    layout = Layout(**fixed)
    if "dp" not in fixed:
        layout = Layout(**{**fixed, "dp": max(1, cluster.count // max(1, layout.tp * layout.pp * layout.cp))})
    if "sequence_parallel" in fixed:
        return layout
    choices = (layout, evolve(layout, sequence_parallel=True))
    return min(choices, key=lambda x: len(violations(x, graph, workload, cluster)))
