"""Check that the ranks of a plan that run on the CPUs of this host fit into its memory."""

from __future__ import annotations

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import host_memory

STATE = ("weights", "gradients", "optimizer")
"""Holders of memory that a rank has in any case; activations depend on the kernels."""


def check_host_memory(plan: Plan, verb: str = "train") -> None:
    """Raise UserError if the ranks run on CPUs and their weights, gradients and optimizer exceed the host's memory.

    One process that holds the whole model, as `megaloom verify` starts it afterwards, never needs more than all ranks
    together. verb: what the message advises to do elsewhere.
    """
    layout = plan.layout
    held = sum(nbytes.get(name, 0) for nbytes in plan.predicted.nbytes for name in STATE)
    needed, total = held * layout.world // layout.pp, host_memory()
    if not device.gpu_count() and needed > total:
        raise UserError(
            f"{layout.world} ranks need {needed / GiB:,.0f} GiB for weights, gradients and optimizer; this machine has "
            f"no GPUs, and {total / GiB:,.0f} GiB of memory\n"
            f"the plan is for {plan.cluster}: {verb} it there, or a smaller model here"
        )
