"""Stacked experts on devices for which the runtime has none: tests run on CPUs, in fp32."""

from __future__ import annotations

from megaloom.dsl import MoE, Node, Split
from megaloom.planner.contract.capability import Capability
from megaloom.planner.contract.workload import Precision


def stack_experts() -> None:
    """Let this process build mixtures whose experts have one parameter for each product."""

    def groups(self: Capability, node: Node, split: Split, precision: Precision) -> bool:
        return isinstance(node.op, MoE)

    Capability._groups_experts = groups  # type: ignore[method-assign]
