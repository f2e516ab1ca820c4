"""Memory of this host, and whether the ranks of a plan that run on its CPUs fit into it."""

from __future__ import annotations

from pathlib import Path

import psutil

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.megatron import device

STATE = ("weights", "gradients", "optimizer")
"""Holders of memory that a rank has in any case; activations depend on the kernels."""

CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files below /sys/fs/cgroup with the memory limit of this container: of control groups version 2, and of version 1."""


def host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that the processes of this host or container may use together."""
    limits = [psutil.virtual_memory().total]
    for name in CGROUP_LIMITS:
        text = (cgroup / name).read_text().strip() if (cgroup / name).is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


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
