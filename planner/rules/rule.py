"""Rules as values: `Rule`, the `Case` that a rule looks at, and the `Violation` of a rule by a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from attrs import field, frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import ModelRequirements, model_requirements


class Owner(StrEnum):
    """Program that refuses a layout which breaks a rule."""

    CORE = "megatron-core"
    CALLERS = "callers of megatron-core"  # it is left to them, and wrong or fails much later if they do not look
    PLANNER = "the planner"  # megatron-core would take it
    EXPORTS = "exports to megatron-core"  # it would take it and compute wrong gradients; the runtime mends that
    RUNTIME = "the runtime"  # plans are made of it, for other programs


@frozen
class Violation:
    """A rule that a layout breaks, with the message and the nearest value that works."""

    rule: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} [{self.rule}]\n{self.fix}"


@frozen(eq=False)
class Case:
    """Everything that a rule may look at: one layout or columns of them, with model, workload and cluster."""

    layout: Any  # Layout | Layouts, of which a rule asks the same
    graph: Graph
    workload: Workload
    cluster: Cluster
    starts: tuple[int, ...] = ()  # of a plan, the node that each stage begins with
    requirements: ModelRequirements = field(init=False)

    @requirements.default
    def _requirements(self) -> ModelRequirements:
        return model_requirements(self.graph)


Truth = Any  # a bool, or of layouts in columns an array of them
Words = tuple[str, str]  # the message, and the fix


@frozen
class Rule:
    """Condition of every legal layout.

    `holds` takes a case with one layout or with columns of layouts; `explain` one layout for which it does not hold.
    """

    id: str
    sentence: str
    fix: str  # in general; `explain` says it in numbers
    owner: Owner
    source: str  # where in megatron-core 0.16.1 or its callers; of what they take, why it is refused here
    holds: Callable[[Case], Truth]
    explain: Callable[[Case], Words]


def all_of(truths: Iterable[Truth]) -> Truth:
    """Return the conjunction of conditions, element by element for arrays."""
    out = True
    for truth in truths:
        out = out & truth
    return out


def violated(rules: Iterable[Rule], case: Case) -> tuple[Violation, ...]:
    """Return a violation for each rule that the layout of a case breaks."""
    return tuple(Violation(rule.id, *rule.explain(case)) for rule in rules if not rule.holds(case))
