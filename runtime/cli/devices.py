"""Devices that `megaloom train` plans for, where no plan is given: how many, and how to say that others would do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import prod

from megaloom.planner.cli.arguments import FixedLayout, fixed_fields
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.infeasible import NoLegalLayoutError
from megaloom.planner.search.search import Found
from megaloom.runtime.launch.launcher import most_ranks
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import host_memory, usable_cores

from .machine import given_machine, this_machine

MAX_TRIED = 16  # numbers of processes for which a legal layout is looked for
AXES = ("dp", "tp", "pp", "cp")
"""Axes whose degrees multiply to the number of devices."""


def make_plan(
    make: Callable[[Cluster], Found],
    count: int | None,
    fixed: FixedLayout,
    machine: Cluster | None,
    precision: Precision,
) -> Plan:
    """Return the fastest plan for `count` devices of this machine, by default all.

    make: searches the plan for a cluster. machine: that of the job, if this process is a rank of one.
    On CPU the default is the largest number of processes, up to the cores, with which a layout is legal.
    """
    if machine or count is not None or device.gpu_count() or given_machine():
        return make(machine or this_machine(count, precision)).best
    unit = max(1, prod(value for name, value in fixed_fields(fixed).items() if name in AXES))
    counts = [unit * times for times in range(max(1, usable_cores() // unit), 0, -1)]
    try:
        return make(this_machine(counts[0], precision)).best
    except NoLegalLayoutError:
        fewer = next((n for n in islice(counts, 1, MAX_TRIED) if _legal(make, n)), None)
        if fewer is None:
            raise
    return make(this_machine(fewer, precision)).best


def _legal(make: Callable[[Cluster], Found], count: int) -> bool:
    """Return whether a layout is legal on so many CPU processes, measured or not."""
    try:
        make(cluster(f"{count}xCPU"))
    except NoLegalLayoutError:
        return False
    return True


def devices_option(other: Cluster) -> str | None:
    """Return the option of `megaloom train` that gives another cluster. None if this machine is not that."""
    if device.gpu_count():
        here = other.kind == device.local_cluster().partition("x")[2] and other.count <= device.gpu_count()
    else:
        here = other.device.name == "CPU" and other.count <= most_ranks()
        here = here and other.count * other.device.nbytes <= host_memory()
    return f"--devices {other.count}" if here else None
