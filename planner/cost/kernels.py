"""Seconds of one piece of work on one device: a roofline, with an efficiency that depends on the shape.

Protocol: `seconds` prices one forward and one backward pass of a `Work` of the model's facts on a device. A kernel
takes the longer of two, its arithmetic and its memory traffic; a layer's kernels take as long as the host needs to
launch them, at the least.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from megaloom.dsl.facts.costs import Work
from megaloom.dsl.value import Fusion
from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

from .profiles.frameworks import OWN
from .profiles.groups import ONE_PASS, ContextCommunication, FrameworkProfile

# The output tiles that cuBLAS has to choose from, with the share of its best speed that it reaches with each: smaller
# ones read their operands more often (NVIDIA, Deep Learning Performance, Matrix Multiplication Background, 4.1).
# Multiprocessors take tiles in rounds, of which the last is not full (4.2).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8))
# Rows that are no multiple of 16 bytes (8 elements of 16 bits) keep a product from the tensor cores' best kernels
# (NVIDIA, Deep Learning Performance, Matrix Multiplication Background, section 2.2). What is left: 118 TFLOP/s on
# an H200, measured in all three products of a vocabulary of 50,257.
ALIGNED, MISALIGNED = 8, 0.17
# Those of unfused attention, head by head, keep less: fitted to BLOOM's benchmarks with heads of 150 and 450 channels.
MISALIGNED_HEADS = 0.028
# Filling the pipeline of a tile and writing its output costs about as much as this much depth of a product of 16 bits;
# the same of a product of fewer bits is more depth, which takes less time.
DEPTH = 128

# Attention over s keys reaches s / (s + HALF) of its speed on long sequences, with heads of c channels
# c / (c + HEAD) of its limit: cuDNN on an H100, causal, 315, 410, 484, 518, 529, 539 TFLOP/s at 0.5k to 16k with
# heads of 128, and 412 with heads of 64 (Shah et al., arXiv:2407.08608, figure 5).
HALF, HEAD = 330, 45
# Its backward computes the scores again: five products for the forward's two (Dao, arXiv:2307.08691, section 3.1).
ATTEND_BACKWARD = 2.5

# Backward of what memory limits reads a gradient and what was saved, and writes a gradient; forward reads and writes.
BACKWARD_TRAFFIC = 1.5
# Attention without a fused kernel moves the scores, 2 bytes each: written by the product, read, masked and written by
# the softmax, read, dropped and written (and a mask of 1 byte), read by the second product; back it is twice as much.
SCORE_TRAFFIC = 13
# Selective scans, counted as Megatron-LM counts them, reach this much of the peak of fp32 outside of the tensor cores:
# fitted to steps of Nemotron-H 56B on H100; of Nemotron 3 Nano on Blackwell they take as much. Back they take twice.
SCAN, SCAN_BACKWARD = 0.5, 2
# A narrow product's operand is read once more and written twice, as it is and transposed (Transformer Engine's
# cast-transpose; each copy of 1 byte), unless the kernel before it does that.
CAST_TRAFFIC = 2 + 1 + 1
# Backward, products of 8 bits add up in fp32 (Transformer Engine: use_split_accumulator of dgrad and wgrad), for which
# Hopper leaves its fast accumulation: 0.85 to 1.01 of its speed on an H200, in the mean of 16 products this.
SPLIT = 0.94


@frozen
class KernelSeconds:
    """A forward and a backward pass: what its kernels keep the device busy for, and how many the host has to launch."""

    forward: float
    backward: float
    ahead: float  # kernels of the forward pass
    back: float

    def waits(self, device: Device, profile: FrameworkProfile) -> tuple[float, float]:
        """Seconds of the host, each way. A CUDA graph takes none."""
        one = 0.0 if profile.kernels.cuda_graphs else profile.kernels.launch_factor * device.launch_seconds
        return self.ahead * one, self.back * one


def kernel_seconds(
    work: Work, device: Device, precision: Precision, profile: FrameworkProfile = OWN, *, inside: bool = True
) -> KernelSeconds:
    """One forward and one backward pass of this work; `inside` a block, where products may be narrow.

    A device that is the host itself has no launches to wait for: they are a part of its work, as they are where each
    kernel is launched when the one before has ended.
    """
    took = _busy(work, device, precision, profile, inside)
    if device.units > 1 and not profile.kernels.blocking_launches:
        return took
    one = device.launch_seconds
    return KernelSeconds(took.forward + took.ahead * one, took.backward + took.back * one, 0, 0)


def _busy(work: Work, device: Device, precision: Precision, profile: FrameworkProfile, inside: bool) -> KernelSeconds:
    traffic = work.elements * precision.nbytes / device.moves
    if work.kind == "dot":
        used = precision if inside else precision.wide
        fast = device.flops[used] * device.sustained * device.flops_efficiency
        fast *= device.narrow_efficiency if used.narrow else 1.0
        fast *= device.nvfp4_efficiency if used is Precision.NVFP4 else 1.0
        m, n, k = work.m, work.n, work.k
        depth = DEPTH * device.flops[used] / device.flops[used.wide]
        shapes = (m, n, k), (m, k, n), (k, n, m)  # y = x w, dx = dy w^T, dw = x^T dy
        shares = [fill(*shape, work.count, device, depth) for shape in shapes]
        shares = [MISALIGNED] * len(shapes) if misaligned(n, k, device) else shares
        back = SPLIT if used is Precision.FP8 and Precision.MXFP8 not in device.flops else 1.0
        shares = [shares[0], *(share * back for share in shares[1:])]
        products = list(zip((work.flops, work.dgrad, work.wgrad), shares, strict=True))
        moved = traffic, traffic, traffic + concurrent_gradient_bytes(work, profile) / device.moves
        took = [max(f / (fast * share), t) if f else 0.0 for (f, share), t in zip(products, moved, strict=True)]
        kernels = [float(flops > 0) for flops, _ in products]
        cast = CAST_TRAFFIC * work.count * m / device.moves if used.narrow else 0.0
        cast *= profile.experts.separate_casts if work.experts else 1.0
        return KernelSeconds(took[0] + cast * k, took[1] + took[2] + cast * n, kernels[0], kernels[1] + kernels[2])
    if work.kind == "attend":
        return _attention(work, device, precision, profile, traffic)
    if work.kind == "scan" and Precision.FP32 in device.flops:
        busy = max(work.flops / (device.flops[Precision.FP32] * SCAN), traffic)
        return KernelSeconds(busy, SCAN_BACKWARD * busy, 1, 1)
    ahead, back = profile.kernels.memory_passes.get(memory_kernel(work), ONE_PASS)
    return KernelSeconds(ahead * traffic, back * BACKWARD_TRAFFIC * traffic, ahead, back)


# The kernel of a fusion group, by its name among a profile's memory passes, and that of the group inside experts.
KERNELS: Mapping[Fusion, tuple[str, str]] = {"gate": ("gate", "expert gate"), "bias": ("pointwise", "expert bias")}


def memory_kernel(work: Work) -> str:
    """Return the name of memory-bound work among a profile's memory passes."""
    return work.kind if work.fusion is None else KERNELS[work.fusion][work.experts]


def fused_gradient_elements(work: Work, profile: FrameworkProfile) -> int:
    """Elements of the gradient that a product adds to the main one as it writes it.

    Source: transformer_engine, fuse_wgrad_accumulation; megatron-core 0.16.1, gradient_accumulation_fusion.
    """
    return work.count * work.n * work.k if profile.kernels.wgrad_fusion and work.wgrad else 0


def concurrent_gradient_bytes(work: Work, profile: FrameworkProfile) -> int:
    """Bytes that products by several weights move for that while others compute, on streams of their own."""
    return 2 * profile.optimizer.gradient_nbytes * fused_gradient_elements(work, profile) if work.count > 1 else 0


def _attention(
    work: Work, device: Device, precision: Precision, profile: FrameworkProfile, traffic: float
) -> KernelSeconds:
    """One kernel each way, or two products and what is done to the scores between them."""
    peak = device.flops[precision.wide] * device.sustained
    if profile.attention.fused:
        keys = min(work.m, work.n) if profile.attention.context_communication is ContextCommunication.P2P else work.n
        fast = peak * device.attend_efficiency * reach(keys, work.k)
        back = max(ATTEND_BACKWARD * work.flops / fast, BACKWARD_TRAFFIC * traffic)
        return KernelSeconds(max(work.flops / fast, traffic), back, 1, 1)
    scores = work.count * work.m * work.n
    moved = scores * SCORE_TRAFFIC / device.moves
    product = 2 * scores * work.k  # nothing is left out where the mask is
    share = fill(work.m, work.n, work.k, work.count, device)
    share = MISALIGNED_HEADS if misaligned(work.n, work.k, device) else share
    one = max(product / (peak * device.flops_efficiency * share), traffic / 2)
    return KernelSeconds(2 * one + moved, 4 * one + 2 * moved, 2, 4)


def misaligned(n: int, k: int, device: Device) -> bool:
    """Whether rows of n or of k elements, those of the three products' operands, are not whole chunks of 16 bytes."""
    return device.units > 1 and bool(n % ALIGNED or k % ALIGNED)


def fill(m: int, n: int, k: int, count: int, device: Device, depth: float = DEPTH) -> float:
    """The share of a large product's speed that `count` products [m k] x [k n] reach.

    Each tile is computed whole, the multiprocessors take them in rounds of which the last is not full, and every tile
    has to be started. A device of one unit (a CPU process) has no tiles.
    """
    if device.units == 1:
        return 1.0
    best, units = 0.0, device.units
    for tall, wide, speed in TILES:
        if best >= speed:  # which no smaller tile exceeds
            break
        rounds = -(-(-(-m // tall) * -(-n // wide) * count) // units)
        best = max(best, speed * m * n * count / (rounds * units * tall * wide))
    return best * k / (k + depth)


def reach(keys: int, channels: int) -> float:
    """The share of its best speed that attention reaches over so many keys, with heads of so many channels."""
    return keys / (keys + HALF) * min(1.0, channels / (channels + HEAD) / (128 / (128 + HEAD)))
