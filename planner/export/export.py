"""A plan in the words of other programs: the same layout, stages and workload, or what of it they cannot do."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model
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
    from megaloom.dsl.graph import graph

    from . import accelerate, bridge, megatron, slurm, torchtitan

    g = graph(model)
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
