"""A plan in the words of other programs: the same layout, stages and workload, or what of it they cannot do."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaloom.dsl.graph import Graph, Model
    from megaloom.planner.plan import Plan


class Target(StrEnum):
    """Whom a plan is for."""

    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"
    ACCELERATE = "accelerate"
    TORCHTITAN = "torchtitan"
    SLURM = "slurm"


def export(plan: Plan, model: Model, target: Target, path: str = "plan.json") -> str:
    """The plan of this model as a file for `target`; `path` is where the plan itself is.

    Raises UserError that names what the target cannot express, and what would work.
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.graph import graph
    from megaloom.planner.legal.limits import limits

    from .gpt import STAYS

    g = graph(model)
    lost = limits(plan.layout, g, plan.workload, plan.cluster)
    if lost and target is Target.SLURM:
        raise UserError(f"Slurm's script runs `megaloom train`, and that does not run the plan: {lost[0]}")
    try:
        return _written(plan, g, target, path)
    except UserError as error:
        if not lost:
            raise
        raise UserError(str(error).replace(STAYS, f"`megaloom train` does not run it either: {lost[0]}")) from None


def _written(plan: Plan, g: Graph, target: Target, path: str) -> str:
    from . import accelerate, bridge, megatron, slurm, torchtitan

    match target:
        case Target.MEGATRON_LM:
            return megatron.script(plan, g)
        case Target.MEGATRON_BRIDGE:
            return bridge.overrides(plan, g)
        case Target.ACCELERATE:
            return accelerate.config(plan, g)
        case Target.TORCHTITAN:
            return torchtitan.toml(plan, g)
        case Target.SLURM:
            return slurm.job(plan, g.name, path)
