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
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Workload

from . import mesh as grid_rules
from . import overlaps as overlap_rules
from . import sizes as size_rules
from . import steps as step_rules
from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Violation,
    Words,
    all_of,
    violated,
)

MOST = 2**20  # of any amount: more sequences than any model was trained with a step, and few enough to replay them
LONGEST = 2**27  # tokens a sequence: more than the 100 million of magic.dev/blog/100m-token-context-windows
ZERO = ("recompute_layers", "microbatch_group")  # may be 0, for as many as there are


def _amounts(case: Case) -> dict[str, Any]:
    x, w = case.layout, case.workload
    return {**x.degrees, "seq": w.seq, "batch": w.batch, **{name: getattr(x, name) for name in ZERO}}


def _positive(case: Case) -> Truth:
    return all_of(amount >= (name not in ZERO) for name, amount in _amounts(case).items())


def _positive_text(case: Case) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount < (name not in ZERO))
    return f"{name} is {_amounts(case)[name]}: that is none at all", f"{name} is at least {int(name not in ZERO)}"


def _most(name: str) -> int:
    return LONGEST if name == "seq" else MOST


def _plausible(case: Case) -> Truth:
    return all_of(amount <= _most(name) for name, amount in _amounts(case).items())


def _plausible_text(case: Case) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount > _most(name))
    return f"{name} is {_amounts(case)[name]}: that is not plausible", f"{name} is {_most(name):,} or less"


RANGE_RULES = (
    Rule(
        "positive",
        "Every degree, the micro-batch, the sequence and the batch are at least 1, and no count is below 0.",
        "1 or more",
        Owner.CORE,
        "it divides by them",
        _positive,
        _positive_text,
    ),
    Rule(
        "plausible",
        "Nothing is larger than it ever was: the batch, the sequence, a degree.",
        f"{MOST:,} or less, and {LONGEST:,} tokens or less",
        Owner.PLANNER,
        "it could not be replayed",
        _plausible,
        _plausible_text,
    ),
)
RULES = (*grid_rules.RULES, *size_rules.RULES, *step_rules.RULES, *overlap_rules.RULES)


def legal(layouts: Layouts, graph: Graph, workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Which of these layouts break no rule."""
    case = Case(layouts, graph, workload, cluster)
    out = np.ones(len(layouts), dtype=bool)
    for rule in (*RANGE_RULES, *RULES):
        out &= rule.holds(case)
    return out


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Every rule that this layout breaks. When a degree is no degree at all, only those are looked at."""
    case = Case(layout, graph, workload, cluster)
    return violated(RANGE_RULES, case) or violated(RULES, case)


def range_violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """The rules without which no other can be asked: every degree and amount is at least 1, and plausible."""
    return violated(RANGE_RULES, Case(layout, graph, workload, cluster))
