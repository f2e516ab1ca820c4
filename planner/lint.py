"""`plan --lint`: the rules that every legal layout meets, and which of them a layout breaks.

Protocol: `broken` is the text for a terminal; it is empty for a layout that breaks none.
"""

from __future__ import annotations

from megaloom.dsl.graph import Graph

from .cluster import Cluster
from .layout import Layout, Workload
from .rules import RULES, SENSE, violations
from .space import Fixed


def listed() -> str:
    """Every rule: its id and its sentence."""
    rules = (*SENSE, *RULES)
    width = max(len(rule.id) for rule in rules)
    return "\n".join(f"{rule.id:<{width}}  {rule.sentence}" for rule in rules)


def broken(graph: Graph, cluster: Cluster, workload: Workload, fixed: Fixed) -> str:
    """What the layout of these degrees breaks, each rule with what would work. dp, if not given, takes what is left."""
    layout = Layout(**fixed)
    inner = max(1, layout.tp * layout.pp * layout.cp)
    if "dp" not in fixed:
        layout = Layout(**{**fixed, "dp": max(1, cluster.count // inner)})
    wrong = violations(layout, graph, workload, cluster)
    return "\n".join(f"{layout}: {each}" for each in wrong)
