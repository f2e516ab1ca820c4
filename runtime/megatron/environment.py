"""Environment of this process, as plans record it: device, torch version, optional kernels."""

from __future__ import annotations

from functools import cache

import torch

from megaloom.planner.contract.capability import GROUPED_GEMM, Capability, Environment, capability
from megaloom.planner.contract.workload import Runtime

from . import device

GROUPED_GEMM_DEVICES = (9, 10)  # major compute capabilities for which torch has one kernel, and not a loop of them


@cache
def current_environment() -> Environment:
    """Return the device, torch version and backends of this process."""
    name = device.gpu_name() if device.gpu_count() else "CPU"
    grouped = (
        device.gpu_count() > 0
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability()[0] in GROUPED_GEMM_DEVICES
    )
    return Environment(
        device=device.preset_of(name) or name, torch=torch.__version__, backends=(GROUPED_GEMM,) if grouped else ()
    )


def current_capability() -> Capability:
    """Return what Megaloom's own runtime can do in this process."""
    return capability(Runtime.MEGALOOM, current_environment())
