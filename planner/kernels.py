"""Seconds of one piece of work on one device: a roofline, with an efficiency that depends on the shape.

Protocol: `seconds` prices one forward and one backward pass of a `Work` of the model's facts on a device. A kernel
takes the longest of three: its arithmetic, its memory traffic, its launch.
"""

from __future__ import annotations

from math import ceil

from attrs import frozen

from megaloom.dsl.facts import Work

from .cluster import Device
from .layout import Precision

NBYTES = {Precision.FP32: 4, Precision.BF16: 2}  # of a COMPUTE element

# The output tile of cuBLAS's large products on Hopper and Ampere; a smaller product fills its last tile in vain.
TILE_M, TILE_N = 128, 128
# Of the last round of tiles that the multiprocessors take, half is idle on average.
LAST_ROUND = 0.5
# Filling the pipeline of a tile costs about as much as this much depth of the product.
DEPTH = 128

# Attention over s keys reaches s / (s + HALF) of its speed on long sequences, with heads of c channels
# c / (c + HEAD) of its limit: cuDNN on an H100, causal, 315, 410, 484, 518, 529, 539 TFLOP/s at 0.5k to 16k with
# heads of 128, and 412 with heads of 64 (Shah et al., arXiv:2407.08608, figure 5).
HALF, HEAD = 330, 45
# Its backward computes the scores again: five products for the forward's two (Dao, arXiv:2307.08691, section 3.1).
ATTEND_BACKWARD = 2.5

# Backward of what memory limits reads a gradient and what was saved, and writes a gradient; forward reads and writes.
BACKWARD_TRAFFIC = 1.5
# The facts count a chain of pointwise work as one kernel; torch passes memory more often, and copies and casts around
# it. Measured on an H200 (Llama 3.2 1B, sequences of 4096: 0.685 s for 8 of them one at a time, 1.183 s for 16 four at
# a time): norms pass memory twice, rotary positions six times (a row of uncompiled kernels), other chains, which are
# compiled there, three times.
PASSES = {"normalize": 2, "pointwise": 3, "rope": 6, "drop": 3}
# Bytes moved for each logit by the loss and its gradient, half of them in each: 2 % of such a step.
LOSS_TRAFFIC = 34


@frozen
class Seconds:
    """A forward and a backward pass."""

    forward: float
    backward: float


def seconds(work: Work, device: Device, precision: Precision) -> Seconds:
    """Seconds of one forward and one backward pass of this work."""
    traffic = work.elements * NBYTES[precision] / (device.bandwidth * device.bandwidth_efficiency)
    peak = device.flops[precision] * device.sustained
    if work.kind == "dot":
        fast = peak * device.flops_efficiency
        m, n, k = work.m, work.n, work.k
        products = [  # y = x w, dx = dy w^T, dw = x^T dy
            (work.flops, fill(m, n, k, work.count, device)),
            (work.dgrad, fill(m, k, n, work.count, device)),
            (work.wgrad, fill(k, n, m, work.count, device)),
        ]
        took = [kernel(max(flops / (fast * share), traffic), device) if flops else 0.0 for flops, share in products]
        return Seconds(took[0], took[1] + took[2])
    if work.kind == "attend":
        fast = peak * device.attend_efficiency * reach(work.n, work.k)
        back = max(ATTEND_BACKWARD * work.flops / fast, BACKWARD_TRAFFIC * traffic)
        return Seconds(kernel(max(work.flops / fast, traffic), device), kernel(back, device))
    passes = PASSES.get(work.kind, 1)
    return Seconds(passes * kernel(traffic, device), passes * kernel(BACKWARD_TRAFFIC * traffic, device))


def kernel(busy: float, device: Device) -> float:
    """Seconds of a kernel that is busy so long. Its launch is hidden, unless the device is the host itself."""
    return busy + device.launch_seconds if device.units == 1 else max(busy, device.launch_seconds)


def fill(m: int, n: int, k: int, count: int, device: Device) -> float:
    """The share of a large product's speed that `count` products [m k] x [k n] reach.

    Each tile is computed whole, the multiprocessors take them in rounds of which the last is not full, and every tile
    has to be started. A device of one unit (a CPU process) has no tiles.
    """
    if device.units == 1:
        return 1.0
    tiles = ceil(m / TILE_M) * ceil(n / TILE_N)
    whole = m * n / (tiles * TILE_M * TILE_N)
    rounds = tiles * count / device.units
    return whole * min(1.0, rounds / (rounds + LAST_ROUND)) * k / (k + DEPTH)


def reach(keys: int, channels: int) -> float:
    """The share of its best speed that attention reaches over so many keys, with heads of so many channels."""
    return keys / (keys + HALF) * min(1.0, channels / (channels + HEAD) / (128 / (128 + HEAD)))
