"""Cost of a scan with a triangular system for each chunk of positions, by the kernels of our runtime.

Measured on an H100 with torch 2.11 (2026-11-25), forward, and forward and backward: 14.1 and 41.4 ms for 4 x 4,096
positions of 32 heads with 128 states and channels, 3.9 and 11.3 for 4 x 1,024; a profile of 1 x 4,096 has 5.1 ms of
products and 6.0 of other kernels. Transient bytes: 8,156, 2,033 and, with 16 heads of 64, 1,017 MiB.
"""

from __future__ import annotations

from math import ceil

from megaloom.dsl.dims import NBYTES, DType
from megaloom.dsl.facts.work import Work
from megaloom.planner.contract.capability import TRIANGULAR_CHUNK
from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

from .kernels import KernelSeconds

NUMBER_NBYTES = NBYTES[DType.FLOAT32]
PRODUCTS = 0.32  # share of the fp32 peak that its batched products reach
OTHER_PASSES = (16.4, 31.0)  # of the other kernels over the numbers of a position and head, forward and backward
ALIVE = 7.4  # numbers held at once in the backward pass, per number of a position and head
# Kernels of all chunks together, and of each chunk, of the forward pass and of a backward pass with recompute.
FIXED_KERNELS, CHUNK_KERNELS = (60, 170), (1, 6)


def triangular_seconds(work: Work, device: Device, cp: int, copies: int) -> KernelSeconds:
    """Return the seconds of one forward and one backward pass, which recomputes the forward pass.

    copies: each context-parallel rank runs along the whole sequence of all its channels, else 1.
    """
    size, numbers = _chunk(work, cp), _numbers(work, cp, copies)
    positions, n, c = work.count * work.m * copies, work.n, work.k
    # Products of keys with keys and queries, of the inverse with values and keys, of what a chunk passes on, of the
    # state with keys and queries, and of queries' reads of corrections.
    pairs = 2 * n + (c + n) + c
    flops = 2 * positions * (size * pairs + n * n + n * c + n * n * c / size + 2 * n * c)
    product = flops / (device.flops.get(Precision.FP32, device.flops[Precision.BF16.wide]) * PRODUCTS)
    moved = [passes * NUMBER_NBYTES * numbers / device.moves for passes in OTHER_PASSES]
    forward, chunks = product + moved[0], ceil(work.m * cp / size)
    kernels = [fixed + each * chunks for fixed, each in zip(FIXED_KERNELS, CHUNK_KERNELS, strict=True)]
    return KernelSeconds(forward, forward + 2 * product + moved[1], *kernels)


def triangular_bytes(work: Work, cp: int, copies: int) -> int:
    """Return the bytes that it holds at once in its backward pass, and frees."""
    return int(NUMBER_NBYTES * ALIVE * _numbers(work, cp, copies))


def _chunk(work: Work, cp: int) -> int:
    return min(TRIANGULAR_CHUNK, work.m * cp)


def _numbers(work: Work, cp: int, copies: int) -> float:
    """Return the numbers of all positions and heads: pairs within a chunk, channels, states, and states of a chunk."""
    size = _chunk(work, cp)
    return work.count * work.m * copies * (size + work.k + work.n + work.n * work.k / size)
