"""Which layouts are legal: small rules, each with an id, a sentence, whose it is, and what would work instead.

Protocol: `violations` is empty exactly when megatron-core 0.16.1 takes this layout of this graph, but for what the
rules of the planner and of the runtime refuse beside (`By`). What the rules ask of the model they read off the dims of
its weights. megatron-core checks few of them in one place: others end in its asserts, in dropped layers, or in wrong
numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.planner.cluster import Cluster
from megaloom.planner.columns import Layouts
from megaloom.planner.layout import Layout, Workload

from . import grid as grid_rules
from . import overlaps as overlap_rules
from . import sizes as size_rules
from . import steps as step_rules
from .rule import By, Case, Rule, Truth, Violation, Words, broken, every

MOST = 2**20  # sequences a step: more than any model was trained with, and few enough to replay them


def _amounts(case: Case) -> dict[str, Any]:
    return {**case.layout.degrees, "seq": case.workload.seq, "batch": case.workload.batch}


def _positive(case: Case) -> Truth:
    return every(amount >= 1 for amount in _amounts(case).values())


def _positive_told(case: Case) -> Words:
    name, amount = next((name, amount) for name, amount in _amounts(case).items() if amount < 1)
    return f"{name} is {amount}: that is none at all", f"{name} is at least 1"


def _plausible(case: Case) -> Truth:
    return case.workload.batch <= MOST


def _plausible_told(case: Case) -> Words:
    return f"a batch of {case.workload.batch} is not plausible", f"{MOST:,} sequences or less"


SENSE = (
    Rule(
        "positive",
        "Every degree, the micro-batch, the sequence and the batch are at least 1.",
        "1 or more",
        By.CORE,
        "it divides by them",
        _positive,
        _positive_told,
    ),
    Rule(
        "plausible",
        "The batch is no larger than any that was ever trained on.",
        f"{MOST:,} sequences or less",
        By.PLANNER,
        "it could not be replayed",
        _plausible,
        _plausible_told,
    ),
)
RULES = (*grid_rules.RULES, *size_rules.RULES, *step_rules.RULES, *overlap_rules.RULES)


def legal(layouts: Layouts, graph: Graph, workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Which of these layouts break no rule."""
    case = Case(layouts, graph, workload, cluster)
    out = np.ones(len(layouts), dtype=bool)
    for rule in (*SENSE, *RULES):
        out &= rule.holds(case)
    return out


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Every rule that this layout breaks. When a degree is no degree at all, only those are looked at."""
    case = Case(layout, graph, workload, cluster)
    return broken(SENSE, case) or broken(RULES, case)


def senseless(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """The rules without which no other can be asked: every degree and amount is at least 1, and plausible."""
    return broken(SENSE, Case(layout, graph, workload, cluster))
