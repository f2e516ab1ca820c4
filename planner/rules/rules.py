"""Legality of layouts: small rules, each with an id, a sentence, an owner, a source and a fix.

`violations` is empty exactly when megatron-core 0.16.1 accepts a layout of a graph, except for the rules that the
planner adds (`Owner`). megatron-core checks few of the conditions in one place: others end in asserts, dropped
layers or wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import MOST, Layout
from megaloom.planner.contract.layouts import Column
from megaloom.planner.contract.workload import Workload

from .expert_shard import EXPERT_SHARD_RULES
from .fsdp import FSDP_RULES
from .mesh import MESH_RULES
from .overlaps import OVERLAP_RULES
from .rule import (
    Case,
    L,
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

LONGEST = 2**27  # tokens of a sequence: more than the 100 million of magic.dev/blog/100m-token-context-windows
MAY_BE_ZERO = ("recompute_layers", "microbatch_group")  # 0 stands for the default


def _amounts(case: Case[L]) -> Mapping[str, int | Column]:
    """Return the numbers of a case that must be in range, by name."""
    x, w = case.layout, case.workload
    counts = {name: getattr(x, name) for name in ("vocab_multiple", "replicas", *MAY_BE_ZERO)}
    return {**x.degrees, "seq": w.seq, "batch": w.batch, **counts}


def _positive(case: Case[L]) -> Truth:
    return all_of(amount >= (name not in MAY_BE_ZERO) for name, amount in _amounts(case).items())


def _positive_text(case: Case[Layout]) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount < (name not in MAY_BE_ZERO))
    return (
        f"{_word(name)} must be at least {int(name not in MAY_BE_ZERO)}, got {_amounts(case)[name]}",
        f"use {int(name not in MAY_BE_ZERO)} or more",
    )


def _word(name: str) -> str:
    """Return the name of an amount as the command line writes it."""
    return name.replace("_", "-")


def _maximum(name: str) -> int:
    return LONGEST if name == "seq" else MOST


def _plausible(case: Case[L]) -> Truth:
    return all_of(amount <= _maximum(name) for name, amount in _amounts(case).items())


def _plausible_text(case: Case[Layout]) -> Words:
    name = next(name for name, amount in _amounts(case).items() if amount > _maximum(name))
    return (
        f"{_word(name)} must be at most {_maximum(name):,}, got {_amounts(case)[name]}",
        f"use {_maximum(name):,} or less",
    )


RANGE_RULES = (
    Rule(
        id="positive",
        sentence="Every degree, the micro-batch, the sequence, the batch and the multiple of the vocabulary are at "
        "least 1, and no count is below 0.",
        fix="use 1 or more",
        owner=Owner.CORE,
        source="megatron-core divides by them",
        holds=_positive,
        explain=_positive_text,
    ),
    Rule(
        id="plausible",
        sentence=f"Degrees, counts and the batch are at most {MOST:,}, and the sequence at most {LONGEST:,} tokens.",
        fix=f"use {MOST:,} or less, and {LONGEST:,} tokens or less",
        owner=Owner.PLANNER,
        source="larger steps cannot be simulated",
        holds=_plausible,
        explain=_plausible_text,
    ),
)
RULES = (*MESH_RULES, *SIZE_RULES, *STEP_RULES, *OVERLAP_RULES, *FSDP_RULES, *EXPERT_SHARD_RULES)


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules that a layout breaks; if a value is out of range, only those about ranges."""
    case = Case(layout, graph, workload, cluster)
    return violated(RANGE_RULES, case) or violated(RULES, case)


def range_violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules about ranges that a layout breaks: every degree and amount is at least 1, and plausible."""
    return violated(RANGE_RULES, Case(layout, graph, workload, cluster))
