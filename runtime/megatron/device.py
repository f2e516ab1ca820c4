"""Device and collective backend of this process, and the import of megatron-core for them.

Call `prepare()` before the first `import megatron.core`. No other function here needs megatron-core. None creates a
CUDA context, so a process that only starts ranks holds no GPU memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import re
import resource
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megaloom.dsl.errors import UserError

from . import cpu_shim
from .host import usable_cores

PRESETS = {
    "A100-40GB": r"\bA100-SXM4-40GB",
    "A100-PCIe": r"\bA100 80GB PCIe",
    "A100-PCIe-40GB": r"\bA100-PCIE-40GB",
    "V100": r"\bV100-SXM2-32GB",
    **{name: rf"\b{name}\b" for name in ("A100", "A800", "H100", "H800", "H200", "B200", "B300", "GB200", "GB300")},
}
"""Presets of the planner, and patterns of the names that the driver reports for these GPUs."""


@functools.cache
def gpu_count() -> int:
    """Return the number of CUDA devices that this process may use. NVML counts them, without starting CUDA."""
    return int(torch.cuda.device_count())


gpu_count()  # count now: the CPU shim later replaces `torch.cuda.device_count`


def device_count() -> int:
    """Return the number of devices on this machine: its GPUs or, if it has none, a process for each usable core."""
    return gpu_count() or usable_cores()


def backend() -> str:
    """Return the backend of collectives: "nccl" between GPUs, "gloo" between CPU processes."""
    return "nccl" if gpu_count() else "gloo"


def current() -> torch.device:
    """Return the device of this process; on GPUs, the one that `torch.cuda.set_device` has selected."""
    return torch.device("cuda", torch.cuda.current_device()) if gpu_count() else torch.device("cpu")


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory. A copy from a GPU is in pinned memory; `torch.cuda.synchronize` completes it."""
    if not x.is_cuda:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: on a GPU what torch allocated, on CPU all of it."""
    if gpu_count():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def local_cluster() -> str:
    """Return this machine as a cluster name, such as "4xCPU" or "2xH200". Raise UserError for an unknown GPU."""
    return f"{device_count()}x{_known_preset(gpu_name()) if gpu_count() else 'CPU'}"


def _known_preset(name: str) -> str:
    if preset := preset_of(name):
        return preset
    raise UserError(
        f"no preset for this machine's GPU {name!r}; presets: {', '.join(PRESETS)}\n"
        f"run `megaloom measure -o FILE`, then plan with --gpus {gpu_count()}xFILE"
    )


def preset_of(name: str) -> str | None:
    """Return the preset of a GPU by the name that the driver reports, or None."""
    return next((known for known, pattern in PRESETS.items() if re.search(pattern, name)), None)


def gpu_name() -> str:
    """Return the first GPU's name from the driver API; the runtime API would create a context of half a GB."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    for call, args in (
        (cuda.cuInit, (0,)),
        (cuda.cuDeviceGet, (ctypes.byref(handle), 0)),
        (cuda.cuDeviceGetName, (name, len(name), handle)),
    ):
        if status := call(*args):
            raise UserError(f"the CUDA driver fails: {call.__name__} returned {status}; check nvidia-smi")
    return name.value.decode()


def use_deterministic_kernels() -> None:
    """Let torch, cuBLAS and NCCL compute bitwise equal results in every run on these devices, or raise RuntimeError.

    Call it before the process groups of a layout are created, and before the first matrix product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLink SHARP and trees may add in another order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it finds errors, and takes time


@functools.cache
def prepare() -> None:
    """Import megatron-core so that it runs on this machine's devices, with or without CUDA. Idempotent."""
    assert gpu_count() or "megatron.core" not in sys.modules, "megatron-core was imported before device.prepare()"
    _silence_warnings()
    os.environ.setdefault("NO_VCS_VERSION", "1")  # or importing megatron-core 0.18 and later calls git
    if gpu_count():
        # Overlap of tensor- and context-parallel collectives needs kernels to run in launch order: before Blackwell,
        # one connection. It has no effect once CUDA has started, so `launcher` sets it too.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        _import_megatron()
    else:
        cpu_shim.install()
        # On CPU compiling the fused functions gains nothing, takes seconds, and needs a compiler.
        compile_, torch.compile = torch.compile, _uncompiled
        try:
            _import_megatron()
        finally:
            torch.compile = compile_
        cpu_shim.finish()
        importlib.import_module("torch._dynamo")  # torch's optimizers import it: once, for all ranks that are forked
    from . import releases  # which needs megatron-core

    releases.define_missing_names()
    releases.avoid_compiler()


def _uncompiled(function: Any = None, **kwargs: Any) -> Any:
    return (lambda f: f) if function is None else function


def _import_megatron() -> None:
    with _hidden("wandb"), _hidden("tensorboard"):  # it logs to them; importing both takes most of a second
        import megatron.core.dist_checkpointing
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules

    if not gpu_count():
        megatron.core.jit.disable_jit_fuser()  # for modules of megatron-core that are imported later


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let imports of an optional package fail inside the context, as if it were not installed."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _silence_warnings() -> None:
    """Silence warnings of torch and megatron-core that no user can act on."""
    for category, message in (
        (SyntaxWarning, "invalid escape sequence"),  # as Python compiles megatron-core 0.19 for the first time
        (UserWarning, "(Transformer Engine and )?Apex (is|are) not installed"),  # optional
        (UserWarning, r"barrier\(\): using the device under current context"),  # `rank` has set it
        (UserWarning, "If you are using transformer_engine"),  # about selective recompute; not used here
        (
            UserWarning,
            "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
        ),  # for experts
        (UserWarning, r"FSDP2-wrapped module .* returned a view tensor"),  # nothing overwrites outputs of units
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),  # the distributed optimizer's shards
        (FutureWarning, "`load_state_dict` is deprecated"),  # by torch, in dist_checkpointing
        (DeprecationWarning, "The following imports from `dynamic_context.py`"),  # one of its own imports
        (UserWarning, "MimoModelConfig is experimental"),  # its optimizers import it; not used here
        (UserWarning, "The argument order of load has been changed"),  # megatron-core calls torch's load
        (UserWarning, "torch.distributed is disabled, unavailable or uninitialized"),  # one process reads a checkpoint
        (FutureWarning, r"`torch\.distributed\.\w+` is deprecated\. Please use"),  # it runs on older torch too
    ):
        warnings.filterwarnings("ignore", message, category)
    for logger, message in (
        ("torch.utils.cpp_extension", "No CUDA runtime is found"),  # torch for CUDA on a machine without
        ("megatron.core.dist_checkpointing.strategies.common", "load_common is deprecated"),  # by megatron-core 0.19
        ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),  # computed, then
    ):
        logging.getLogger(logger).addFilter(partial(_is_other_message, message))


def _is_other_message(message: str, record: logging.LogRecord) -> bool:
    """Return whether a log record does not contain a message."""
    return message not in record.getMessage()
