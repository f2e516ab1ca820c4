"""Time matrix products, attention, copies, kernel launches and collectives on the devices of this machine.

`measure_devices` starts a rank on each device, or joins the ranks that torchrun started. All ranks run each operation
at once; its time is that of the slowest rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from megaloom.planner.hardware.calibration import COLLECTIVE_KINDS, SMALL_MESSAGE, Sample
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import join, started_by_launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.fused_attention import fused_attention
from megaloom.runtime.megatron.host import host_memory

SERIES_SECONDS, BRIEF_SERIES_SECONDS = 0.1, 0.04
"""Duration of a series of one operation: longer than the scheduler makes processes wait that share a core. The brief
one is for processes that have a core each."""
SERIES = 3  # per operation; the fastest counts
BURST_SECONDS, PAUSE_SECONDS = 0.03, 0.1
"""Duration of a series of products or attention on a GPU, and the pause before it. Without pauses the GPU reaches its
power limit and lowers its clock: on an H200, products of 8,192 tokens run at 670 to 690 TFLOP/s, and at 790 to 820
after pauses. The cost model counts the lower clock of a training step apart (`sustained`)."""
SMALL_OPS, KERNELS_PER_OP = 40, 8
"""Small operations in a sequence, and the kernels of each with its backward pass."""
ATTENTION_ON_CPU, ATTENTION_ON_GPU = ((4, 256, 64), (4, 512, 64)), ((32, 4096, 128), (32, 8192, 128))
"""Sizes of attention: heads, tokens, channels."""
EMBED = 4096  # hidden size of the layers whose matrix products are timed on GPUs


@frozen
class Measurements:
    """The devices of this machine, and the times measured on them."""

    count: int  # devices
    per_node: int
    nbytes: int  # memory of one device
    units: int  # multiprocessors of one device
    samples: tuple[Sample, ...]
    seconds: float  # for the whole measurement


@frozen
class Scope:
    """Extent of a measurement: everything, or in a few seconds what a plan for CPU processes of this machine needs."""

    seconds: float = SERIES_SECONDS  # of a series
    products: tuple[tuple[torch.dtype, int, int, int], ...] | None = None  # None: those of this device
    attention: int | None = None  # number of sizes; None for all
    all_groups: bool = True  # of collectives; else only that of all devices


def brief(precision: str, *, shared: bool) -> Scope:
    """Return what to measure in a few seconds for CPU processes that compute in fp32 and in this precision.

    shared: processes share a core, so that a short series may fall between two turns.
    """
    dtypes = {torch.float32, next(dtype for dtype, name in NAMES.items() if name == precision)}
    products = [(dtype, *shape) for dtype in sorted(dtypes, key=str) for shape in BRIEF_PRODUCTS]
    return Scope(SERIES_SECONDS if shared else BRIEF_SERIES_SECONDS, tuple(products), 1, all_groups=False)


def measure_devices(count: int, scope: Scope = Scope()) -> Measurements:
    """Measure `count` devices of this machine; as a rank of a job, all devices of the job."""
    if started_by_launcher():
        join()
        return _measure_on_rank(scope)
    results: list[Measurements] = launcher.run(_measure_on_rank, (scope,), count)
    return results[0]


def _measure_on_rank(scope: Scope) -> Measurements:
    """Measure on this rank, at once with all others."""
    start, world, node = time.perf_counter(), dist.get_world_size(), _ranks_per_node()
    groups = [group for group in _groups(world, node) if scope.all_groups or group[0] in (node, world // node)]
    collectives = (s for n, stride in groups for s in _collectives(n, stride, scope.seconds))
    samples = (*_kernels(scope), *collectives)
    nbytes, units = host_memory() // node, 1
    if device.gpu_count():
        properties = torch.cuda.get_device_properties(device.current())
        nbytes, units = properties.total_memory, properties.multi_processor_count
    return Measurements(world, node, nbytes, units, samples, time.perf_counter() - start)


def _ranks_per_node() -> int:
    """Return the number of ranks on this machine."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names.count(socket.gethostname())


def _groups(world: int, node: int) -> Iterator[tuple[int, int]]:
    """Yield (devices, stride) of the groups to measure: 2, 4, ..., a whole node, and one device of each node."""
    size = 2
    while size < node:
        if node % size == 0:
            yield size, 1
        size *= 2
    if node > 1:
        yield node, 1
    if world > node:
        yield world // node, node


def _kernels(scope: Scope) -> Iterator[Sample]:
    series, burst = scope.seconds, partial(_timed, series=scope.seconds)
    if device.gpu_count():
        burst = partial(_timed, series=BURST_SECONDS, pause=PAUSE_SECONDS)
    free = torch.cuda.mem_get_info()[0] if device.gpu_count() else 2**28
    dtype_16 = _fast_16_bit_dtype() if device.gpu_count() else torch.float32
    for dtype, m, n, k in scope.products or _products():
        if 4 * dtype.itemsize * max(m * n, m * k, n * k) <= free and (run := _product(dtype, m, n, k)):
            yield Sample(kind="product", precision=NAMES[dtype], shape=(m, n, k), seconds=burst(run))
    sizes = ATTENTION_ON_GPU if device.gpu_count() else ATTENTION_ON_CPU
    for heads, tokens, channels in sizes[: scope.attention]:
        run, shape = _attention(dtype_16, heads, tokens, channels), (heads, tokens, channels)
        yield Sample(kind="attention", precision=NAMES[dtype_16], shape=shape, seconds=burst(run))
    nbytes = min(2**30, free // 8) // 2**20 * 2**20
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device.current()) for _ in range(2))
    yield Sample(kind="copy", nbytes=2 * nbytes, seconds=_timed(lambda: target.copy_(source), series))
    yield Sample(kind="launch", seconds=_timed(_small_ops, series) / (SMALL_OPS * KERNELS_PER_OP))


BRIEF_PRODUCTS = ((256, 256, 256), (512, 512, 512), (1024, 512, 128))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


def _fast_16_bit_dtype() -> torch.dtype:
    """Return bf16; before Ampere, whose tensor cores were the first with bf16, fp16."""
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def _products() -> Iterator[tuple[torch.dtype, int, int, int]]:
    """Yield dtype and sizes (m, n, k): square products, and those of transformer layers."""
    if not device.gpu_count():
        for dtype in (torch.float32, torch.bfloat16):
            for size in (128, 256, 512, 1024):
                yield dtype, size, size, size
            yield dtype, 1024, 512, 128
        return
    for size in (8192, 1024, 2048, 4096, 16384):
        yield _fast_16_bit_dtype(), size, size, size
    for n, k in (
        (EMBED, EMBED),
        (6144, EMBED),
        (14336, EMBED),
        (EMBED, 14336),
        (128256, EMBED),
    ):
        yield _fast_16_bit_dtype(), 8192, n, k
    yield torch.float8_e4m3fn, 8192, 8192, 8192
    yield torch.float8_e4m3fn, 8192, 14336, EMBED
    yield torch.float32, 4096, 4096, 4096


def _product(dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], Any] | None:
    """Return a function that computes a product as a linear layer does; None if the device does not support it."""
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
        out = fused_attention(q, k, v, causal=True, scale=None)
        torch.autograd.grad(out, (q, k, v), gradient)

    return run


def _small_ops() -> None:
    x = first = torch.ones(8, 64, device=device.current(), requires_grad=True)
    for _ in range(SMALL_OPS):
        x = F.gelu(F.layer_norm(x, (64,))) * 0.5 + x
    torch.autograd.grad(x.sum(), first)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device.current(), dtype=dtype)


def _collectives(size: int, stride: int, series: float) -> Iterator[Sample]:
    """Yield the times of all collectives, with small and large messages, in all groups of this size at once."""
    group, members = _group(size, stride)
    large = 2**28 if device.gpu_count() else 2**23
    for kind in ("send", *COLLECTIVE_KINDS):
        for nbytes in (SMALL_MESSAGE // 16, large):
            run = _exchange(kind, nbytes, group, members)
            yield Sample(kind=kind, nbytes=nbytes, devices=size, stride=stride, seconds=_timed(run, series))
    dist.destroy_process_group(group)


def _group(size: int, stride: int) -> tuple[Any, list[int]]:
    """Return this rank's group and its members. Every rank creates all groups, as torch.distributed requires."""
    own: tuple[Any, list[int]] | None = None
    for block in range(0, dist.get_world_size(), size * stride):
        for first in range(block, block + stride):
            members = list(range(first, first + size * stride, stride))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                own = group, members
    assert own is not None, "the groups cover all ranks"
    return own


def _exchange(kind: str, nbytes: int, group: Any, members: list[int]) -> Callable[[], Any]:
    """Return a function that runs a collective on a tensor of `nbytes`."""
    target, n = device.current(), len(members)
    count = nbytes // 4 // n * n
    whole, other = (torch.zeros(count, device=target) for _ in range(2))
    part = torch.zeros(count // n, device=target)
    index = members.index(dist.get_rank())
    following, previous = members[(index + 1) % n], members[index - 1]

    def send() -> None:
        transfers = [dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, other, previous, group)]
        for request in dist.batch_isend_irecv(transfers):
            request.wait()

    return {
        "send": send,
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[kind]


def _timed(run: Callable[[], Any], series: float, pause: float = 0.0) -> float:
    """Return the seconds of one call on the slowest rank: the mean of the fastest of a few series of that duration.

    pause: seconds before each series.
    """
    _series(run, 1)
    count = max(1, min(10_000, round(series / _series(run, 2))))
    return min(_series(run, count, pause) for _ in range(SERIES))


def _series(run: Callable[[], Any], count: int, pause: float = 0.0) -> float:
    """Return the mean seconds of `count` calls on the slowest rank, after a pause."""
    time.sleep(pause)
    _slowest(0.0)  # a barrier
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize()
    return _slowest((time.perf_counter() - start) / count)


def _slowest(seconds: float) -> float:
    largest = torch.tensor(seconds, dtype=torch.float64, device=device.current())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    _synchronize()
    return float(largest)


def _synchronize() -> None:
    if device.gpu_count():
        torch.cuda.synchronize()
