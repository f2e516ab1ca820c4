"""Write a plan as a file for another program, with the plan's layout, stages and workload.

`cut_for` balances the stages again in whole layers where the program needs that; `export_plan` returns the file's text.
Both raise UserError for what the program cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megaloom.planner.contract.workload import Runtime

from .target import LAUNCH_FILES, TRAIN_INSTEAD, Target, refuse

if TYPE_CHECKING:
    from megaloom.dsl.graph import Graph, Model
    from megaloom.planner.contract.plans import Plan


def cut_for(target: Target, plan: Plan, model: Model) -> Plan:
    """Return the plan with stages of whole layers, as `target` needs them; the plan itself if it has them.

    A Slurm job that runs `megaloom train` takes any stages. Raises UserError if the model has fewer layers than the
    plan has stages, or if stages of whole layers do not fit the memory.
    """
    if _trains_here(target, plan) or plan.layout.pp == 1:
        return plan
    from megaloom.dsl.graph import graph

    from .decoder import read_decoder
    from .whole_layers import cut_at_layers

    g = graph(model)
    with _runtime_limits_named(plan, g):
        return cut_at_layers(plan, model, read_decoder(g, _options_of(target)))


def export_plan(plan: Plan, model: Model, target: Target, path: str = "plan.json") -> str:
    """Return the text of the file that runs this plan on `target`; `path` is the plan's own file.

    Raises UserError that names what the target cannot express, and what would work.
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.graph import graph
    from megaloom.planner.rules.capabilities import runtime_violations

    g = graph(model)
    if _trains_here(target, plan):
        for limit in runtime_violations(plan.layout, g, plan.workload, plan.cluster):
            raise UserError(f"the {target.program} job would run `megaloom train`, which cannot run this plan: {limit}")
        return _launch_file(target)(plan, g.name, path)
    with _runtime_limits_named(plan, g):
        return _writer(target)(plan, g)


def _trains_here(target: Target, plan: Plan) -> bool:
    """Return whether the export is a job of `megaloom train`."""
    if target in LAUNCH_FILES - {Target.SLURM} and plan.runtime is not Runtime.MEGALOOM:
        refuse(target, f"a plan made with --runtime {plan.runtime}", "plan without --runtime, or use --to slurm")
    return target in LAUNCH_FILES and plan.runtime is Runtime.MEGALOOM


def _options_of(target: Target) -> Target:
    """Return the program whose options the file holds: a Slurm job of a Megatron-core plan runs Megatron-LM."""
    return Target.MEGATRON_LM if target is Target.SLURM else target


@contextmanager
def _runtime_limits_named(plan: Plan, g: Graph) -> Iterator[None]:
    """Replace the advice to use `megaloom train` by the reason why it cannot run the plan either, if it cannot."""
    from megaloom.dsl.errors import UserError
    from megaloom.planner.rules.capabilities import runtime_violations

    try:
        yield
    except UserError as error:
        for limit in runtime_violations(plan.layout, g, plan.workload, plan.cluster):
            instead = f"`megaloom train` cannot run it either: {limit}"
            raise UserError(str(error).replace(TRAIN_INSTEAD, instead)) from None
        raise


def _launch_file(target: Target) -> Callable[[Plan, str, str], str]:
    """Return the function that writes a job of `megaloom train`."""
    from . import cluster_jobs, slurm

    return {
        Target.SLURM: slurm.train_job,
        Target.KUBERNETES: cluster_jobs.pytorch_job,
        Target.SKYPILOT: cluster_jobs.sky_task,
    }[target]


def _writer(target: Target) -> Callable[[Plan, Graph], str]:
    """Return the function that writes a plan for this program."""
    from . import accelerate, megatron_bridge, megatron_lm, torchtitan, torchtitan_python

    return {
        Target.MEGATRON_LM: megatron_lm.script,
        Target.SLURM: megatron_lm.slurm_script,
        Target.MEGATRON_BRIDGE: megatron_bridge.bridge_script,
        Target.ACCELERATE: accelerate.config_yaml,
        Target.TORCHTITAN: torchtitan.config_toml,
        Target.TORCHTITAN_0_3: torchtitan_python.config_python,
    }[target]
