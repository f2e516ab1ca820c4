"""Legality of layouts: small rules, each with an id, a sentence, an owner, a source and a fix.

`violations` is empty exactly when megatron-core 0.16.1 accepts a layout of a graph, except for the rules that the
planner adds (`Owner`). megatron-core checks few of the conditions in one place: others end in asserts, dropped
layers or wrong numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import MOST, Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Workload

from .mesh import MESH_RULES
from .overlaps import OVERLAP_RULES
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
from .sizes import SIZE_RULES
from .steps import STEP_RULES

LONGEST = 2**27  # tokens a sequence: more than the 100 million of magic.dev/blog/100m-token-context-windows
ZERO = ("recompute_layers", "microbatch_group")  # may be 0, for as many as there are


def _amounts(case: Case) -> dict[str, Any]:
    x, w = case.layout, case.workload
    return {**x.degrees, "seq": w.seq, "batch": w.batch, **{name: getattr(x, name) for name in ZERO}}


def _positive(case: Case) -> Truth:
    return all_of(amount >= (name not in ZERO) for name, amount in _amounts(case).items())


def _positive_text(case: Case) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount < (name not in ZERO))
    return (
        f"{name} must be at least {int(name not in ZERO)}, got {_amounts(case)[name]}",
        f"{name} is at least {int(name not in ZERO)}",
    )


def _most(name: str) -> int:
    return LONGEST if name == "seq" else MOST


def _plausible(case: Case) -> Truth:
    return all_of(amount <= _most(name) for name, amount in _amounts(case).items())


def _plausible_text(case: Case) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount > _most(name))
    return f"{name} must be at most {_most(name):,}, got {_amounts(case)[name]}", f"{name} is {_most(name):,} or less"


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
        "Batch, sequence and degrees are at most of plausible size.",
        f"{MOST:,} or less, and {LONGEST:,} tokens or less",
        Owner.PLANNER,
        "it could not be simulated",
        _plausible,
        _plausible_text,
    ),
)
RULES = (*MESH_RULES, *SIZE_RULES, *STEP_RULES, *OVERLAP_RULES)


def legal(layouts: Layouts, graph: Graph, workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Return a mask of the layouts that break no rule."""
    case = Case(layouts, graph, workload, cluster)
    out = np.ones(len(layouts), dtype=bool)
    for rule in (*RANGE_RULES, *RULES):
        out &= rule.holds(case)
    return out


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules that a layout breaks; if a value is out of range, only those about ranges."""
    case = Case(layout, graph, workload, cluster)
    return violated(RANGE_RULES, case) or violated(RULES, case)


def range_violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules about ranges that a layout breaks: every degree and amount is at least 1, and plausible."""
    return violated(RANGE_RULES, Case(layout, graph, workload, cluster))
