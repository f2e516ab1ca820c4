"""A plan in the words of other programs: the same layout, stages and workload, or what of it they cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from megaloom.planner.contract.layout import Runtime

if TYPE_CHECKING:
    from megaloom.dsl.graph import Graph, Model
    from megaloom.planner.contract.plans import Plan


class Target(StrEnum):
    """Whom a plan is for."""

    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"
    ACCELERATE = "accelerate"
    TORCHTITAN = "torchtitan"
    SLURM = "slurm"


def whole(plan: Plan, model: Model, target: Target) -> Plan:
    """The plan with stages of whole layers, as `target` cuts a model: itself if it has them, or runs here.

    Raises UserError as `export` does, and where such stages cannot be, or do not fit the memory.
    """
    if target is Target.SLURM and plan.runtime is Runtime.MEGALOOM:
        return plan
    from megaloom.dsl.graph import graph

    from .decoder import gpt
    from .whole_layers import whole as recut

    g = graph(model)
    with _honest(plan, g):
        return recut(plan, model, gpt(g, _program(target)[0]))


def export(plan: Plan, model: Model, target: Target, path: str = "plan.json") -> str:
    """The plan of this model as a file for `target`; `path` is where the plan itself is.

    Raises UserError that names what the target cannot express, and what would work.
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.graph import graph
    from megaloom.planner.rules.capabilities import limits

    g = graph(model)
    if target is Target.SLURM and plan.runtime is Runtime.MEGALOOM:
        from .slurm import job

        for lost in limits(plan.layout, g, plan.workload, plan.cluster):
            raise UserError(f"Slurm's script runs `megaloom train`, and that does not run the plan: {lost}")
        return job(plan, g.name, path)
    with _honest(plan, g):
        return _program(target)[1](plan, g)


@contextmanager
def _honest(plan: Plan, g: Graph) -> Iterator[None]:
    """Where a refusal would send to `megaloom train` what that does not run either, say why it does not."""
    from megaloom.dsl.errors import UserError
    from megaloom.planner.rules.capabilities import limits

    from .decoder import STAYS

    try:
        yield
    except UserError as error:
        for lost in limits(plan.layout, g, plan.workload, plan.cluster):
            raise UserError(str(error).replace(STAYS, f"`megaloom train` does not run it either: {lost}")) from None
        raise


def _program(target: Target) -> tuple[str, Callable[[Plan, Graph], str]]:
    """The name of this program, and what writes for it."""
    from . import (
        accelerate,
        megatron_bridge,
        megatron_lm,
        torchtitan,
    )

    return {
        Target.MEGATRON_LM: (megatron_lm.NAME, megatron_lm.script),
        Target.SLURM: (megatron_lm.NAME, megatron_lm.job),
        Target.MEGATRON_BRIDGE: (megatron_bridge.NAME, megatron_bridge.overrides),
        Target.ACCELERATE: (accelerate.NAME, accelerate.config),
        Target.TORCHTITAN: (torchtitan.NAME, torchtitan.toml),
    }[target]
