"""Which device and backend this process uses, and megatron-core made ready for it.

`prepare()` comes before the first `import megatron.core` anywhere in this package. No other function here needs
megatron-core, and none makes a CUDA context: a parent that only starts ranks holds no GPU memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import warnings
from typing import Any

import torch

from megaloom.dsl.errors import UserError

from . import cpu_shim

CPU_PROCESSES = 4
"""Processes on a machine without GPUs: the fewest that hold two axes of two, with any number of cores."""

PRESETS = {
    "A100-40GB": r"\bA100-SXM4-40GB",
    "A100-PCIe": r"\bA100 80GB PCIe",
    "A100-PCIe-40GB": r"\bA100-PCIE-40GB",
    "V100": r"\bV100-SXM2-32GB",
    **{name: rf"\b{name}\b" for name in ("A100", "A800", "H100", "H800", "H200", "B200", "B300", "GB200", "GB300")},
}
"""The GPUs that the planner knows, by what the driver calls them."""


@functools.cache
def gpus() -> int:
    """Number of CUDA devices that this process may use; counted by NVML, so that CUDA is not started by asking."""
    return int(torch.cuda.device_count())


# Counted when the module is loaded: the shim answers for CUDA later.
gpus()


def available() -> int:
    """Number of devices on this machine: its GPUs, or `CPU_PROCESSES` where there are none."""
    return gpus() or CPU_PROCESSES


def backend() -> str:
    """The collectives' library: "nccl" between GPUs, "gloo" between CPU processes."""
    return "nccl" if gpus() else "gloo"


def current() -> torch.device:
    """The device of this process; on GPUs the one that `torch.cuda.set_device` chose for its rank."""
    return torch.device("cuda", torch.cuda.current_device()) if gpus() else torch.device("cpu")


def cluster_here() -> str:
    """This machine as the planner names it, such as "4xCPU" or "2xH200"; UserError for a GPU without a preset."""
    return f"{available()}x{_preset(gpu_name()) if gpus() else 'CPU'}"


def _preset(name: str) -> str:
    if found := preset(name):
        return found
    raise UserError(
        f"no figures for this machine's GPU, {name!r}\n"
        f"known: {', '.join(PRESETS)}; `megaloom measure -o FILE` takes its own: --gpus {gpus()}xFILE"
    )


def preset(name: str) -> str | None:
    """The planner's name of a GPU that the driver calls so."""
    return next((known for known, pattern in PRESETS.items() if re.search(pattern, name)), None)


def gpu_name() -> str:
    """The first GPU's name, from the driver alone: the runtime would make a context, half a GB on that GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    for call, args in (
        (cuda.cuInit, (0,)),
        (cuda.cuDeviceGet, (ctypes.byref(handle), 0)),
        (cuda.cuDeviceGetName, (name, len(name), handle)),
    ):
        if status := call(*args):
            raise UserError(f"the CUDA driver does not answer: {call.__name__} returns {status}; see nvidia-smi")
    return name.value.decode()


@functools.cache
def prepare() -> None:
    """Import megatron-core so that it runs on this machine's devices, with or without CUDA. Idempotent."""
    assert gpus() or "megatron.core" not in sys.modules, "imported before it was made ready for the CPU"
    _silence()
    if gpus():
        # Before Blackwell, kernels of one connection run in the order of their launch, which overlapping of
        # tensor- and context-parallel collectives counts on. Too late once CUDA has started: launch sets it too.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        _import_megatron()
    else:
        cpu_shim.install()
        # Without a GPU nothing is gained by compiling the fused functions, and it takes seconds and a compiler.
        compile_, torch.compile = torch.compile, _uncompiled
        try:
            _import_megatron()
        finally:
            torch.compile = compile_
        cpu_shim.finish()
    _without_transformer_engine()


def _uncompiled(function: Any = None, **kwargs: Any) -> Any:
    return (lambda f: f) if function is None else function


def _import_megatron() -> None:
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules

    if not gpus():
        megatron.core.jit.disable_jit_fuser()  # for modules of megatron-core that are imported later


def _silence() -> None:
    """Warnings that nobody could act upon; each is met by everyone who trains with megatron-core 0.16.1."""
    for category, message in (
        (UserWarning, "(Transformer Engine and )?Apex (is|are) not installed"),  # both are optional
        (UserWarning, r"barrier\(\): using the device under current context"),  # which is the rank's own: see `rank`
        (UserWarning, "If you are using transformer_engine"),  # of selective recompute; we are not
        (UserWarning, "`sequence_parallel` is set to `True`, but tensor model parallel size is 1"),  # of whole experts
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),  # the distributed optimizer's shards
        (FutureWarning, "`load_state_dict` is deprecated"),  # by torch, in dist_checkpointing
        (DeprecationWarning, "The following imports from `dynamic_context.py`"),  # one of its own imports
        (FutureWarning, r"`torch\.distributed\.\w+` is deprecated\. Please use"),  # it runs on older torch too
    ):
        warnings.filterwarnings("ignore", message, category)


def _without_transformer_engine() -> None:
    """A place of megatron-core 0.16.1 that fails on any device if Transformer Engine is missing."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # moe_utils.py:1192 asks whether it is None, having never set it
