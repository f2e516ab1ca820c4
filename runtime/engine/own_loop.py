"""The engine for a training loop of the user's own, inside ranks that torchrun, srun or our launcher has started.

    engine = shard(model, plan, recipe)
    result = engine.step(batch)

Importing this module prepares megatron-core for the devices of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_plan
from megaloom.runtime.launch.rendezvous import join
from megaloom.runtime.megatron import device
from megaloom.runtime.modules.initial_weights import GivenValues
from megaloom.runtime.optimizer.recipe import Recipe

device.prepare()

from megaloom.runtime.optimizer.parameter_groups import ParameterGroup as ParameterGroup  # noqa: E402

from .engine import Engine as Engine  # noqa: E402 (it imports megatron-core)
from .frozen_model import FrozenModel as FrozenModel  # noqa: E402
from .outputs import token_log_probs as token_log_probs  # noqa: E402
from .sharded_loader import ShardedLoader as ShardedLoader  # noqa: E402
from .sharded_loader import shard_loader as shard_loader  # noqa: E402


def shard(
    model: Model,
    plan: Plan,
    recipe: Recipe | None = None,
    *,
    steps: object = None,
    parameter_groups: Sequence[ParameterGroup] = (),
    average: float | None = None,
    weights: GivenValues | None = None,
) -> Engine:
    """Return this rank's part of a model under a plan, ready to train. Every rank of the plan calls it.

    steps: an object with any of the methods of `Steps`. parameter_groups: settings for parameters by their names.
    average: decay of a moving average of the weights, which `Engine.averaged_weights` gives the model for evaluation.
    weights: initial values of all weights by the names of `graph(model).weights`, whole and equal on all ranks, as
    tensors or as views of files, of which each rank reads its shards; without them, random ones.

    It initializes torch.distributed from the environment, unless that is done already. Raise UserError if the plan is
    for another model or another number of ranks, or if the runtime does not run it.
    """
    check_plan(plan, model)
    if average is not None and not 0 <= average < 1:
        raise UserError(f"average must be a decay from 0 to below 1, such as 0.999; got {average:g}")
    if not dist.is_initialized():
        join(plan.layout)
    return Engine.build(
        plan,
        model,
        Recipe() if recipe is None else recipe,
        steps,
        parameter_groups=parameter_groups,
        average=average,
        weights=weights,
    )


def shard_frozen(model: Model, plan: Plan, weights: GivenValues) -> FrozenModel:
    """Return this rank's part of a model that is not trained, to run beside the engine of another or the same model.

    It holds the weights in the precision of the plan: no gradients and no optimizer state. weights: as for `shard`.
    Every rank of the plan calls it. Raise UserError as `shard` does, and unless all plans of this process have one
    device mesh: equal tp, pp, cp, ep, etp and vpp.
    """
    check_plan(plan, model)
    if not dist.is_initialized():
        join(plan.layout)
    return FrozenModel.build(plan, model, weights)
