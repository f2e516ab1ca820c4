"""The fields of a plan that a target's file does not say, each with the reason: one table.

An export that is read again gives the same plan but for these fields; a test holds every target to it. Fields are those
of a layout and a workload, and `model`, `stages` and `devices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve

from megaloom.planner.contract.choices import Reshard, Shard
from megaloom.planner.contract.plans import Plan

from .target import TORCHTITANS, Target

_LAUNCHED = "options of torchrun say it"
_LAUNCHED_SCRIPT = "the launched script says it"
_BY_SCRIPT = "a comment says what the launched script passes"
_ITSELF = "the job names the plan's file"
_OF_OWN_JOBS = dict.fromkeys(("model", "stages"), _ITSELF)
_OF_TORCHTITAN = {
    "devices": _LAUNCHED,
    "model": "torchtitan's own model of the same sizes, with its positions, eps and balancing of experts",
    "vocab_multiple": "it never pads the vocabulary; a plan is exported if nothing is padded",
}
NOT_EXPRESSED: Mapping[Target, Mapping[str, str]] = MappingProxyType(
    {
        Target.MEGATRON_LM: {},
        Target.SLURM: {},
        Target.MEGATRON_BRIDGE: {"devices": _LAUNCHED},
        Target.TORCHTITAN: _OF_TORCHTITAN,
        Target.TORCHTITAN_0_3: _OF_TORCHTITAN,
        Target.ACCELERATE: {
            "model": _LAUNCHED_SCRIPT,
            "seq": _LAUNCHED_SCRIPT,
            "micro_batch": _LAUNCHED_SCRIPT,
            "batch": _LAUNCHED_SCRIPT,
            "overlaps": _BY_SCRIPT,
            "vocab_multiple": _BY_SCRIPT,
            "grad_reduce": _BY_SCRIPT,
        },
        Target.KUBERNETES: _OF_OWN_JOBS,
        Target.SKYPILOT: _OF_OWN_JOBS,
    }
)


def as_told(target: Target, plan: Plan) -> Plan:
    """Return the plan that a target's file tells of several plans which the target runs alike.

    torchtitan keeps gathered weights and gradients for a step in a pipeline, which is a distributed optimizer too, and
    without a pipeline a distributed optimizer of one micro-batch is `gradients`.
    """
    x = plan.layout
    if target not in TORCHTITANS:
        return plan
    in_pipeline = x.pp > 1 and x.shard is Shard.WEIGHTS and x.reshard is Reshard.STEP and x.replicas == 1
    if in_pipeline:
        x = evolve(x, shard=Shard.OPTIMIZER, reshard=Reshard.MICRO_BATCH)
    elif x.pp == 1 and x.shard is Shard.OPTIMIZER and x.dp * x.cp > 1:
        x = evolve(x, shard=Shard.GRADIENTS)
    return evolve(plan, layout=x)
