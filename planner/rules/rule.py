"""Rules as values: `Rule`, the `Case` that a rule looks at, and the `Violation` of a rule by a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import NAMES, Layouts
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import ModelRequirements, model_requirements

L = TypeVar("L", Layout, Layouts)
"""One layout, or columns of layouts."""
Truth = bool | NDArray[np.bool_]  # for one layout, or for each of the layouts in columns
Words = tuple[str, str]  # the message, and the fix


class Owner(StrEnum):
    """Program that refuses a layout which breaks a rule."""

    CORE = "megatron-core"
    CALLERS = "callers of megatron-core"  # without their check, training is wrong or fails much later
    PLANNER = "the planner"  # megatron-core accepts the layout
    EXPORTS = "exports to megatron-core"  # megatron-core computes wrong gradients; our runtime corrects them
    RUNTIME = "the runtime"  # plans may break the rule, for other programs


@frozen
class Violation:
    """A rule that a layout breaks, with the message and the nearest value that works."""

    rule: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} [{self.rule}]\n{self.fix}"


@frozen(eq=False)
class Case(Generic[L]):
    """Input of a rule: one layout or columns of layouts, with model, workload and cluster."""

    layout: L
    graph: Graph
    workload: Workload
    cluster: Cluster
    starts: tuple[int, ...] = ()  # first node of each stage of a plan; empty without stages

    @property
    def requirements(self) -> ModelRequirements:
        """The sizes that axes must divide, and what else the model requires of a layout."""
        return model_requirements(self.graph)


class Condition(Protocol):
    """Function that tells for one layout, or for each of many, if it keeps a rule."""

    def __call__(self, case: Case[L], /) -> Truth: ...


@frozen(kw_only=True)
class Rule:
    """Condition of every legal layout.

    `holds` takes a case with one layout or with columns of layouts; `explain` one layout for which it does not hold.
    """

    id: str
    sentence: str
    fix: str  # in general; `explain` gives it with numbers
    owner: Owner
    source: str  # a line of megatron-core 0.16.1 or its callers; if they accept the layout, why we refuse it
    holds: Condition
    explain: Callable[[Case[Layout]], Words]


def all_of(truths: Iterable[Truth]) -> Truth:
    """Return the conjunction of conditions, element by element for arrays."""
    out: Truth = True
    for truth in truths:
        out = out & truth
    return out


def legal(rules: Iterable[Rule], case: Case[Layouts]) -> NDArray[np.bool_]:
    """Return a mask of the layouts that break none of these rules."""
    out = np.ones(len(case.layout), dtype=bool)
    for rule in rules:
        out &= rule.holds(case)
    return out


def fields_read(rule: Rule, case: Case[Layouts]) -> frozenset[str]:
    """Return the fields of layouts that a rule reads for this model, workload and cluster."""
    read = set[str]()

    class Recorder(Layouts):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    columns = {name: getattr(case.layout, name) for name in NAMES}
    rule.holds(evolve(case, layout=Recorder(**columns)))
    return frozenset(read.intersection(NAMES))


def violated(rules: Iterable[Rule], case: Case[Layout]) -> tuple[Violation, ...]:
    """Return a violation for each rule that the layout of a case breaks."""
    return tuple(Violation(rule.id, *rule.explain(case)) for rule in rules if not rule.holds(case))
