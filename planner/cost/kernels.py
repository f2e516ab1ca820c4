"""Seconds of one piece of work on one device: a roofline, with an efficiency that depends on the shape.

`kernel_seconds` prices one forward and one backward pass of a `Work` of the model's facts. A kernel takes the longer of
two times: its arithmetic and its memory traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from attrs import frozen

from megaloom.dsl.facts.work import Work
from megaloom.dsl.value import Fusion
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.capability import Execution
from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

from .profiles.frameworks import OWN
from .profiles.groups import ONE_PASS, ContextCommunication, FrameworkProfile

# Output tiles that cuBLAS chooses from (rows, columns, share of its best speed). Smaller tiles read their operands more
# often (NVIDIA, Deep Learning Performance, Matrix Multiplication Background, 4.1). Multiprocessors take tiles in
# rounds, of which the last is not full (4.2).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8))
# Rows that are no multiple of 16 bytes (8 elements of 16 bits) keep a product from the tensor cores' best kernels
# (NVIDIA, Deep Learning Performance, Matrix Multiplication Background, section 2.2). MISALIGNED is the share of the
# speed that remains: 118 TFLOP/s on an H200, measured in all three products of a vocabulary of 50,257.
ALIGNED, MISALIGNED = 8, 0.17
# The share that remains in the products of unfused attention, head by head: fitted to BLOOM's benchmarks with heads of
# 150 and 450 channels.
MISALIGNED_HEADS = 0.028
# Filling the pipeline of a tile and writing its output costs about as much as this much depth of a 16-bit product. With
# fewer bits the same time is more depth.
DEPTH = 128

# Attention over s keys reaches s / (s + HALF) of its speed on long sequences, with heads of c channels c / (c + HEAD)
# of its limit: cuDNN on an H100, causal, 315, 410, 484, 518, 529, 539 TFLOP/s at 0.5k to 16k with heads of 128, and 412
# with heads of 64 (Shah et al., arXiv:2407.08608, figure 5).
HALF, HEAD = 330, 45
# Attention's backward pass computes the scores again: five products for the forward's two (Dao, arXiv:2307.08691,
# section 3.1).
ATTEND_BACKWARD = 2.5

# Memory-bound work reads a gradient and a saved tensor, and writes a gradient, backward; it reads and writes forward.
BACKWARD_TRAFFIC = 1.5
# Attention without a fused kernel moves the scores, 2 bytes each: written by the product, read, masked and written by
# the softmax, read, dropped and written (and a mask of 1 byte), read by the second product; backward twice as much.
SCORE_TRAFFIC = 13
# Selective scans, counted as Megatron-LM counts them, reach this share of the fp32 peak outside of the tensor cores:
# fitted to steps of Nemotron-H 56B on H100; of Nemotron 3 Nano on Blackwell they take as much. Backward takes twice.
SCAN, SCAN_BACKWARD = 0.5, 2
# Backward, 8-bit products add up in fp32 (Transformer Engine: use_split_accumulator of dgrad and wgrad), for which
# Hopper leaves its fast accumulation: 0.85 to 1.01 of its speed on an H200, in the mean of 16 products this.
SPLIT = 0.94


# A cross-entropy on a CPU runs op by op, and its exponentials take longer than its traffic. Small kernels of a forward
# and a backward pass, and bytes per logit that a copy would move in the same time, by whether logits have 16 bits or
# are overwritten in fp32: measured with torch 2.13, one thread of an AMD EPYC, 8 x 64 to 2048 x 256 and 1024 x 2048
# logits (2026-11-23: 3.4 and 0.4 ns a logit in fp32, 3.4 and 6.4 in bf16, where a copy moves 14.5 GB/s). In 16 bits
# tensors of more than 32 MiB, for which the allocator maps new pages each time, take up to four times as long.
CPU_LOSS_KERNELS = (25, 10)
CPU_LOSS_NBYTES: Mapping[bool, tuple[float, float]] = {True: (50, 95), False: (50, 5)}


# Name among a profile's memory passes of the kernel of a fusion group, outside of experts (False) and inside (True).
# Other memory-bound work has the name of its kind.
MEMORY_KERNELS: Mapping[tuple[Fusion | None, bool], str] = {
    ("gate", False): "gate",
    ("gate", True): "expert gate",
    ("bias", True): "expert bias",
}


@frozen
class KernelSeconds:
    """Device seconds of a forward and a backward pass, and the number of kernels that the host launches for them.

    fused_gradients: elements of the weight gradient that a product adds to the main gradient as it writes it
    (transformer_engine, fuse_wgrad_accumulation; megatron-core 0.16.1, gradient_accumulation_fusion).
    """

    forward: float
    backward: float
    forward_kernels: float
    backward_kernels: float
    fused_gradients: int = 0

    def plus(self, other: KernelSeconds) -> KernelSeconds:
        """Return the seconds of these kernels and of others, which fuse no gradients."""
        return KernelSeconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
            self.fused_gradients,
        )


def kernel_seconds(
    work: Work,
    device: Device,
    precision: Precision,
    profile: FrameworkProfile = OWN,
    *,
    inside: bool = True,
    stored_scores: bool = False,
    priced: KernelSeconds | None = None,
    adds: bool = False,
) -> KernelSeconds:
    """Return the seconds of one forward and one backward pass of this work, by one kernel for each product or chain.

    inside: the work is in a block, where products may have fewer than 16 bits. stored_scores: attention is not one
    fused kernel, but products and a softmax over all scores, which are saved. priced: its seconds without launches,
    if known. adds: products add the gradients of weights to main gradients. A CPU process launches its own kernels,
    and a blocking framework waits for each, so that launches add. The elements of a loss of logits, which is no work of
    a node, are its logits.
    """
    took = priced or _kernel(work, device, precision, profile, inside, stored_scores, adds)
    if device.units > 1 and not profile.host.blocking_launches:
        return took
    one = device.launch_seconds
    forward, backward = took.forward + took.forward_kernels * one, took.backward + took.backward_kernels * one
    return KernelSeconds(forward, backward, 0, 0, took.fused_gradients)


def _kernel(
    work: Work,
    device: Device,
    precision: Precision,
    profile: FrameworkProfile,
    inside: bool,
    stored_scores: bool,
    adds: bool,
) -> KernelSeconds:
    """Return the seconds of the kernel of this kind of work, without launches."""
    traffic = work.elements * precision.nbytes / device.moves
    match work.kind:
        case WorkKind.PRODUCT:
            return _product(work, device, precision if inside else precision.wide, profile, traffic, adds)
        case WorkKind.ATTENTION if stored_scores:
            return _unfused_attention(work, device, precision, traffic)
        case WorkKind.ATTENTION:
            return _attention(work, device, precision, profile, traffic)
        case WorkKind.SCAN | WorkKind.TRIANGULAR_SCAN if Precision.FP32 in device.flops:
            busy = max(work.flops / (device.flops[Precision.FP32] * SCAN), traffic)
            return KernelSeconds(busy, SCAN_BACKWARD * busy, 1, 1)
        case WorkKind.LOGITS_LOSS if device.units > 1:
            half = profile.kernels.loss_moved_nbytes * work.elements / 2 / device.moves
            return KernelSeconds(half, half, 0, 0)
        case WorkKind.LOGITS_LOSS:
            forward, backward = CPU_LOSS_NBYTES[precision.nbytes < Precision.FP32.nbytes]
            each = work.elements / device.moves
            return KernelSeconds(forward * each, backward * each, *CPU_LOSS_KERNELS)
        case (
            WorkKind.SCAN
            | WorkKind.TRIANGULAR_SCAN
            | WorkKind.CONVOLUTION
            | WorkKind.POINTWISE
            | WorkKind.DROPOUT
            | WorkKind.NORM
            | WorkKind.ROTARY
            | WorkKind.CROSS_ENTROPY
            | WorkKind.GATE
            | WorkKind.DISPATCH
            | WorkKind.COMBINE
            | WorkKind.MEMORY
        ):
            name = MEMORY_KERNELS.get((work.fusion, work.experts), work.kind)
            forward, backward = profile.kernels.memory_passes.get(name, ONE_PASS)
            return KernelSeconds(forward * traffic, backward * BACKWARD_TRAFFIC * traffic, forward, backward)
        case WorkKind.NONE:
            return KernelSeconds(0.0, 0.0, 0, 0)
    assert_never(work.kind)


def _attention(
    work: Work, device: Device, precision: Precision, profile: FrameworkProfile, traffic: float
) -> KernelSeconds:
    """Return the seconds of fused attention."""
    keys = min(work.m, work.n) if profile.attention.context_communication is ContextCommunication.P2P else work.n
    channels = min(1.0, work.k / (work.k + HEAD) / (128 / (128 + HEAD)))
    peak = device.flops[precision.wide] * device.sustained
    reached = peak * device.attend_efficiency * (keys / (keys / profile.attention.speed + HALF) * channels)
    backward = max(ATTEND_BACKWARD * work.flops / reached, BACKWARD_TRAFFIC * traffic)
    return KernelSeconds(max(work.flops / reached, traffic), backward, 1, 1)


def _product(
    work: Work,
    device: Device,
    precision: Precision,
    profile: FrameworkProfile,
    traffic: float,
    adds: bool,
) -> KernelSeconds:
    """Return the seconds of the three products of a weight: y = x w, dx = dy w^T, dw = x^T dy."""
    peak = device.flops[precision] * device.sustained * device.flops_efficiency
    peak *= device.narrow_efficiency * profile.narrow.product_speed if precision.narrow else 1.0
    peak *= device.nvfp4_efficiency if precision is Precision.NVFP4 else 1.0
    m, n, k = work.m, work.n, work.k
    depth = DEPTH * device.flops[precision] / device.flops[precision.wide]
    split = SPLIT if precision is Precision.FP8 and Precision.MXFP8 not in device.flops else 1.0
    fused = work.count * n * k if adds and work.wgrad else 0
    seconds = []
    for flops, shape, share in (
        (work.flops, (m, n, k), 1.0),
        (work.dgrad, (m, k, n), split),
        (work.wgrad, (k, n, m), split),
    ):
        reached = peak * (product_efficiency(*shape, work.count, (n, k), device, depth) * share)
        seconds.append(max(flops / reached, traffic) if flops else 0.0)
    cast = profile.narrow.cast_moved_nbytes * work.count * m / device.moves if precision.narrow else 0.0
    cast *= profile.experts.separate_casts if work.experts else 1.0
    forward, backward = float(work.flops > 0), float(work.dgrad > 0) + float(work.wgrad > 0)
    return KernelSeconds(seconds[0] + cast * k, seconds[1] + seconds[2] + cast * n, forward, backward, fused)


def _unfused_attention(work: Work, device: Device, precision: Precision, traffic: float) -> KernelSeconds:
    """Return the seconds of attention as two products, with the work on the scores between them."""
    peak = device.flops[precision.wide] * device.sustained
    scores = work.count * work.m * work.n
    moved = scores * SCORE_TRAFFIC / device.moves
    flops = 2 * scores * work.k  # masked scores are computed too
    aligned = product_efficiency(
        work.m, work.n, work.k, work.count, (work.n, work.k), device, misaligned=MISALIGNED_HEADS
    )
    product = max(flops / (peak * device.flops_efficiency * aligned), traffic / 2)
    return KernelSeconds(2 * product + moved, 4 * product + 2 * moved, 2, 4)


def product_efficiency(
    m: int,
    n: int,
    k: int,
    count: int,
    rows: tuple[int, int],
    device: Device,
    depth: float = DEPTH,
    misaligned: float = MISALIGNED,
) -> float:
    """Return the share of a large product's speed that `count` products [m, k] x [k, n] reach.

    rows: lengths of the operands' rows; if they are not aligned, the share is `misaligned`. Each tile is computed
    whole; the multiprocessors take tiles in rounds, of which the last is not full, and each tile has to be started. A
    device of one unit (a CPU process) has no tiles.
    """
    if device.units == 1:
        return 1.0
    if rows[0] % ALIGNED or rows[1] % ALIGNED:
        return misaligned
    best, units = 0.0, device.units
    for tall, wide, speed in TILES:
        if best >= speed:  # a smaller tile cannot exceed its own speed
            break
        rounds = -(-(-(-m // tall) * -(-n // wide) * count) // units)
        best = max(best, speed * m * n * count / (rounds * units * tall * wide))
    return best * k / (k + depth)


def expert_launch_seconds(works: Iterable[Work], profile: FrameworkProfile, execution: Execution) -> float:
    """Return the seconds that a forward pass of experts waits for the host, after the dispatch.

    works: of the node. Experts whose weights are one parameter need as few launches as one layer.
    """
    if execution.stacked_experts:
        return 0.0
    experts = profile.experts
    each = experts.grouped_launch_seconds if execution.grouped_experts else None
    most = max(w.count for w in works if w.kind is WorkKind.PRODUCT)
    return most * (experts.launch_seconds if each is None else each)
