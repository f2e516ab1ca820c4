"""How long matrix products, attention, copies, small kernels and collectives take on the devices at hand.

Protocol: `measured` starts a rank on each device (or joins those that torchrun started), all of which do the same at
the same time; what it returns is of the slowest.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from megaloom.planner.hardware.calibration import COLLECTIVE_KINDS, SMALL_MESSAGE, Sample
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import inside, join
from megaloom.runtime.megatron import device

WINDOW = 0.1
"""Seconds that one thing is done over and over; longer than a scheduler lets processes that share a core wait."""
REPEATS = 3
CHAIN, KERNELS = 40, 8
"""A row of small operations, and the kernels of each of them and of its backward pass."""
HEADS, HEADS_ON_GPU = ((4, 256, 64), (4, 512, 64)), ((32, 4096, 128), (32, 8192, 128))
"""Of attention: heads, tokens, channels."""
COLUMNS = 4096  # of the layers that products are taken from, on GPUs


@frozen
class Machine:
    """What is at hand, and how long what took there."""

    count: int  # of devices
    per_node: int
    nbytes: int  # memory of one
    units: int  # multiprocessors of one
    samples: tuple[Sample, ...]
    seconds: float


def measured(count: int) -> Machine:
    """What `count` devices of this machine take. Within a job of many ranks, what all of them take."""
    if inside():
        join()
        return _measure()
    found: list[Machine] = launcher.run(_measure, (), count)
    return found[0]


def _measure() -> Machine:
    """On every rank at once."""
    start, world, node = time.perf_counter(), dist.get_world_size(), _node()
    samples = (*_kernels(), *(s for n, stride in _groups(world, node) for s in _collectives(n, stride)))
    nbytes, units = psutil.virtual_memory().total // node, 1
    if device.gpus():
        here = torch.cuda.get_device_properties(device.current())
        nbytes, units = here.total_memory, here.multi_processor_count
    return Machine(world, node, nbytes, units, samples, time.perf_counter() - start)


def _node() -> int:
    """How many ranks share this machine."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names.count(socket.gethostname())


def _groups(world: int, node: int) -> Iterator[tuple[int, int]]:
    """(devices, stride) of the groups: 2, 4, ... and all of a node, then one of each node."""
    size = 2
    while size < node:
        if node % size == 0:
            yield size, 1
        size *= 2
    if node > 1:
        yield node, 1
    if world > node:
        yield world // node, node


def _kernels() -> Iterator[Sample]:
    room = torch.cuda.mem_get_info()[0] if device.gpus() else 2**28
    wide = _wide() if device.gpus() else torch.float32
    for dtype, m, n, k in _products():
        if 4 * dtype.itemsize * max(m * n, m * k, n * k) <= room and (run := _product(dtype, m, n, k)):
            yield Sample(kind="product", precision=NAMES[dtype], shape=(m, n, k), seconds=_timed(run))
    for heads, tokens, channels in HEADS_ON_GPU if device.gpus() else HEADS:
        run = _attention(wide, heads, tokens, channels)
        yield Sample(kind="attention", precision=NAMES[wide], shape=(heads, tokens, channels), seconds=_timed(run))
    nbytes = min(2**30, room // 8) // 2**20 * 2**20
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device.current()) for _ in range(2))
    yield Sample(kind="copy", nbytes=2 * nbytes, seconds=_timed(lambda: target.copy_(source)))
    yield Sample(kind="launch", seconds=_timed(_small) / (CHAIN * KERNELS))


NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


def _wide() -> torch.dtype:
    """The 16 bits that a GPU has fast products of: before Ampere fp16 alone."""
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def _products() -> Iterator[tuple[torch.dtype, int, int, int]]:
    """Squares, and products of the layers of a transformer."""
    if not device.gpus():
        for dtype in (torch.float32, torch.bfloat16):
            for size in (128, 256, 512, 1024):
                yield dtype, size, size, size
            yield dtype, 1024, 512, 128
        return
    for size in (8192, 1024, 2048, 4096, 16384):
        yield _wide(), size, size, size
    for n, k in ((COLUMNS, COLUMNS), (6144, COLUMNS), (14336, COLUMNS), (COLUMNS, 14336), (128256, COLUMNS)):
        yield _wide(), 8192, n, k
    yield torch.float8_e4m3fn, 8192, 8192, 8192
    yield torch.float8_e4m3fn, 8192, 14336, COLUMNS
    yield torch.float32, 4096, 4096, 4096


def _product(dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], Any] | None:
    """What computes it, as a linear layer would; None if this device has no such products."""
    x, w = (_random(rows, k, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype).to(dtype) for rows in (m, n))
    if dtype.itemsize > 1:
        out = x.new_empty(m, n)
        return lambda: torch.mm(x, w.T, out=out)
    one = torch.ones((), device=x.device)

    def run() -> Tensor:
        return torch._scaled_mm(x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        run()
    except (RuntimeError, ValueError, NotImplementedError):  # before Hopper and Ada
        return None
    return run


def _attention(dtype: torch.dtype, heads: int, tokens: int, channels: int) -> Callable[[], Any]:
    q, k, v = (_random(1, heads, tokens, channels, dtype=dtype).requires_grad_() for _ in range(3))
    gradient = _random(1, heads, tokens, channels, dtype=dtype)

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return run


def _small() -> None:
    x = first = torch.ones(8, 64, device=device.current(), requires_grad=True)
    for _ in range(CHAIN):
        x = F.gelu(F.layer_norm(x, (64,))) * 0.5 + x
    torch.autograd.grad(x.sum(), first)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device.current(), dtype=dtype)


def _collectives(size: int, stride: int) -> Iterator[Sample]:
    """Those of groups of this kind, small and large, all groups at once."""
    group, members = _group(size, stride)
    large = 2**28 if device.gpus() else 2**23
    for kind in ("send", *COLLECTIVE_KINDS):
        for nbytes in (SMALL_MESSAGE // 16, large):
            run = _exchange(kind, nbytes, group, members)
            yield Sample(kind=kind, nbytes=nbytes, devices=size, stride=stride, seconds=_timed(run))
    dist.destroy_process_group(group)


def _group(size: int, stride: int) -> tuple[Any, list[int]]:
    """This rank's group, and who is in it; every rank makes all groups, as torch.distributed asks."""
    mine: tuple[Any, list[int]] | None = None
    for block in range(0, dist.get_world_size(), size * stride):
        for first in range(block, block + stride):
            members = list(range(first, first + size * stride, stride))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group, members
    assert mine is not None, "the groups cover all ranks"
    return mine


def _exchange(kind: str, nbytes: int, group: Any, members: list[int]) -> Callable[[], Any]:
    """What does it, over a tensor of so many bytes."""
    here, n = device.current(), len(members)
    count = nbytes // 4 // n * n
    whole, other = (torch.zeros(count, device=here) for _ in range(2))
    part = torch.zeros(count // n, device=here)
    place = members.index(dist.get_rank())
    after, before = members[(place + 1) % n], members[place - 1]

    def send() -> None:
        both = [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for request in dist.batch_isend_irecv(both):
            request.wait()

    return {
        "send": send,
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[kind]


def _timed(run: Callable[[], Any]) -> float:
    """Seconds of one of many in a row, on the slowest rank: the best row of a few."""
    _row(run, 1)
    count = max(1, min(10_000, round(WINDOW / _row(run, 2))))
    return min(_row(run, count) for _ in range(REPEATS))


def _row(run: Callable[[], Any], count: int) -> float:
    _slowest(0.0)  # all begin together
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize()
    return _slowest((time.perf_counter() - start) / count)


def _slowest(seconds: float) -> float:
    most = torch.tensor(seconds, dtype=torch.float64, device=device.current())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    _synchronize()
    return float(most)


def _synchronize() -> None:
    if device.gpus():
        torch.cuda.synchronize()
