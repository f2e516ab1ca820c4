"""Environment of this process, as plans record it: device, torch version, optional kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion

from megaloom.planner.contract.capability import FLEX_ATTENTION, GROUPED_GEMM, Capability, Environment, capability
from megaloom.planner.contract.workload import Runtime

from . import device

FLEX_ATTENTION_DEVICE = 8  # least major compute capability that Triton compiles FlexAttention for
FLEX_ATTENTION_TORCH = TorchVersion("2.6")  # the first that has gradients of biases
GROUPED_GEMM_DEVICES = (9, 10)  # major compute capabilities for which torch has one kernel, and not a loop of them


@cache
def current_environment() -> Environment:
    """Return the device, torch version and backends of this process."""
    name = device.gpu_name() if device.gpu_count() else "CPU"
    major = torch.cuda.get_device_capability()[0] if device.gpu_count() else 0
    backends = []
    if hasattr(torch, "_grouped_mm") and major in GROUPED_GEMM_DEVICES:
        backends.append(GROUPED_GEMM)
    if major >= FLEX_ATTENTION_DEVICE and find_spec("triton") and torch.__version__ >= FLEX_ATTENTION_TORCH:
        backends.append(FLEX_ATTENTION)
    return Environment(device=device.preset_of(name) or name, torch=torch.__version__, backends=tuple(backends))


def current_capability() -> Capability:
    """Return what Megaloom's own runtime can do in this process."""
    return capability(Runtime.MEGALOOM, current_environment())
