"""A shim that runs megatron-core without CUDA: "the current CUDA device" becomes the CPU.

`install()` runs before the first import of megatron-core and replaces, in torch, only what would raise there.
`finish()` runs after the import and replaces names inside megatron-core. Nothing on disk changes,
`torch.cuda.is_available()` stays False, and neither function is called on a machine with CUDA.

| group | used by, in megatron-core 0.16.1 |
|---|---|
| device | everything (`torch.cuda.current_device()` as a device), p2p and checkpoints (`synchronize`) |
| streams | the all-to-all dispatcher of MoE |
| factories | optimizer, gradient clipping, schedules, rotary positions with context parallelism (`pin_memory`) |
| tensors | rotary positions with context parallelism, tied embeddings, parallel checkpoint loads (`.cuda()`) |
| types | every optimizer: it sorts parameters by the name "torch.cuda.FloatTensor" |
| random | the tracker of random states |
| uneven | expert tensor parallelism: gloo gathers and scatters only equal parts |
| gloo | all process groups: with one gloo device for all, steps of four processes take up to a third less time |
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

CPU = torch.device("cpu")


def install() -> None:
    """Replace the functions of torch that need CUDA by ones for the CPU."""
    for group in (_device, _streams, _factories, _tensors, _types, _random, _uneven, _gloo):
        group()


def finish() -> None:
    """Replace the functions of megatron-core that need CUDA, once it is imported."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # The tracker warns if the CPU generator moves inside its fork(); on CPU it must.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    # It converts only CUDA tensors to numpy (moe_utils.py:1093), and its callers need numpy.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _device() -> None:
    torch.cuda.current_device = _returns(CPU)
    torch.cuda.device_count = _returns(1)
    for silent in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, silent, _returns(None))
    for nothing in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, nothing, _returns(0))


class _ProgramOrder:
    """A stream or event on the CPU, where operations run in program order and waiting does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, event: _ProgramOrder | None = None) -> _ProgramOrder:
        return event or _ProgramOrder()


def _streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _ProgramOrder
    torch.cuda.current_stream = torch.cuda.default_stream = _returns(_ProgramOrder())
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _returns(None)


def _here(device: Any) -> Any:
    return CPU if device is not None and str(device).startswith("cuda") else device


def _factories() -> None:
    # `with torch.device(…)` records the functions that it must wrap when it is first entered: enter it before.
    with torch.device("cpu"):
        torch.empty(0)
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return factory


def _tensors() -> None:
    to = Tensor.to

    @functools.wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], str | torch.device):
            args = (_here(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        return to(self, *args, **kwargs)

    def itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    Tensor.to = moved
    Tensor.cuda = Tensor.pin_memory = torch.nn.Module.cuda = itself
    Tensor.record_stream = _returns(None)


def _types() -> None:
    named = Tensor.type

    @functools.wraps(named)
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        asks_for_name = not args and not kwargs
        name = named(self, *args, **kwargs)
        if asks_for_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    Tensor.type = type_


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _random() -> None:
    for where in (torch.cuda, torch.cuda.random):
        where.get_rng_state, where.set_rng_state = _get_rng_state, _set_rng_state
        where.manual_seed = where.manual_seed_all = _seed


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven() -> None:
    """Make gloo gather and scatter parts of unequal length, by padding to the longest. Equal parts are unchanged."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        longest = _longest(parts)
        if longest is None:
            return gather(parts, tensor, group=group, async_op=async_op)
        padded = [part.new_empty(longest, *part.shape[1:]) for part in parts]
        gather(padded, _pad(tensor, longest), group=group)
        for part, full in zip(parts, padded, strict=True):
            part.copy_(full[: len(part)])

    def reduce_scatter(
        out: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        longest = _longest(parts)
        if longest is None:
            return scatter(out, parts, op=op, group=group, async_op=async_op)
        full = out.new_empty(longest, *out.shape[1:])
        scatter(full, [_pad(part, longest) for part in parts], op=op, group=group)
        out.copy_(full[: len(out)])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _longest(parts: list[Tensor]) -> int | None:
    """Return the greatest length of the parts, or None if all have one length."""
    lengths = {len(part) for part in parts if part.dim()}
    return max(lengths) if len(lengths) > 1 else None


def _pad(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def _gloo() -> None:
    """Let the process groups of a process share its gloo devices, each of which has a thread that wakes every 10 ms."""
    create = ProcessGroupGloo.__init__

    def on_shared_devices(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = _gloo_devices(os.getpid()), timeout
        create(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = on_shared_devices  # type: ignore[method-assign, assignment]


@functools.cache
def _gloo_devices(process: int) -> list[ProcessGroupGloo.Device]:
    """Return one device for each network interface in GLOO_SOCKET_IFNAME, or torch's choice, as torch does itself.

    process: the id of this process, because forked ranks have no threads of their parent.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
