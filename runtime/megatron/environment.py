"""Environment of this process, as plans record it: device, torch version, optional kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from attrs import evolve
from torch.torch_version import TorchVersion

from megaloom.planner.contract.capability import (
    ADDED_GRADIENTS,
    FLEX_ATTENTION,
    GROUPED_GEMM,
    TRANSFORMER_ENGINE,
    Environment,
)

from . import device

FLEX_ATTENTION_DEVICE = 8  # least major compute capability that Triton compiles FlexAttention for
FLEX_ATTENTION_TORCH = TorchVersion("2.6")  # the first that has gradients of biases
ENGINE_DEVICE = 8  # least major compute capability of Transformer Engine's fused attention
FP8_DEVICE = 8, 9  # least compute capability with products in fp8
ENGINE_MODULES = ("transformer_engine", "transformer_engine_torch")  # the second is its compiled half
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
    if device.gpu_count() and "dtype_out" in torch.ops.aten.addmm.overloads():
        backends.append(ADDED_GRADIENTS)
    if major >= ENGINE_DEVICE and engine_is_installed():
        backends.append(TRANSFORMER_ENGINE)
    return Environment(device=device.preset_of(name) or name, torch=torch.__version__, backends=tuple(backends))


def engine_is_installed() -> bool:
    """Return whether Transformer Engine for torch is installed, without importing it."""
    return all(find_spec(name) for name in ENGINE_MODULES)


def multiplies_fp8() -> bool:
    """Return whether the devices of this process have matrix products in fp8."""
    return device.gpu_count() > 0 and torch.cuda.get_device_capability() >= FP8_DEVICE


def building_environment(assumed: Environment | None = None) -> Environment:
    """Return the environment by which modules are built: Transformer Engine is in it only where a plan assumes it.

    assumed: the environment of the plan; None for no plan.
    """
    here = current_environment()
    if assumed is not None and TRANSFORMER_ENGINE in assumed.backends:
        return here
    return evolve(here, backends=tuple(name for name in here.backends if name != TRANSFORMER_ENGINE))
