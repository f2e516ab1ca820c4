"""Cost of attention cores and scans by kernels that only bodies use: seconds, and transient bytes.

They are those of runtime/body: FlexAttention, attention by blocks of queries, and scans by chunks of the sequence.
`kernels` prices the others.
"""

from __future__ import annotations

from megaloom.dsl.dims import NBYTES, DType
from megaloom.dsl.facts.costs import Work
from megaloom.dsl.ops.attention_core import Attend
from megaloom.planner.contract.attention_blocks import block_scores
from megaloom.planner.contract.capability import SCAN_CHUNK, AttentionKernel, Core, ScanKernel
from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

from .kernels import ATTEND_BACKWARD, BACKWARD_TRAFFIC, HALF, HEAD, KernelSeconds, product_efficiency

FP32 = NBYTES[DType.FLOAT32]
# Share of the speed of fused attention that FlexAttention reaches: 340 to 361 TFLOP/s with windows of 4,096, ALiBi and
# sinks, 172 with a soft cap, where torch's own kernel reaches 541 (measured on an H200 with torch 2.11: 8,192 tokens,
# 32 heads of 128 channels, forward and backward).
FLEX, FLEX_SOFTCAP = 0.65, 0.32
# Times that the kernels of a block of queries pass over its scores, forward and backward without recompute. Counted in
# runtime/body/attention.py and runtime/reference/attention_scores.py. Forward: the product writes, the softmax reads
# and writes, the second product reads. Backward: a product writes the gradient, the softmax reads two and writes one,
# two products read it, and one the probabilities.
SCORE_PASSES = (4, 7)
CAUSAL_PASSES = (2, 2)  # the mask
SOFTCAP_PASSES = (6, 7)  # division, tanh, product
BIAS_PASSES = (4, 1)  # ALiBi or a relative bias is written, then added
SINK_PASSES = (4, 3)  # appended, and removed from the probabilities
# Scores that are alive at once in the backward pass of a block: the probabilities, their gradient, and that of the
# scores. A soft cap also saves its result. Counted in tests/runtime/body/test_kernels_of_bodies.py.
SCORES_ALIVE, SOFTCAP_ALIVE = 3, 1
BLOCK_KERNELS = (10, 25)  # kernels of a block, forward and backward with recompute, most of them on few bytes
# Bytes that the kernels of a scan move for each pair of positions within a chunk, forward and backward without
# recompute, as bytes that stay fp32 and passes over numbers of the precision: decays are fp32.
PAIR_FP32_NBYTES, PAIR_PASSES = (24, 36), (4, 6)
PAIRS_ALIVE_FP32, PAIRS_ALIVE = 2, 4  # numbers alive at once for each pair in the backward pass
SCAN_KERNELS = (30, 80)


def core_seconds(work: Work, core: Core, device: Device, precision: Precision, cp: int) -> KernelSeconds:
    """Return the seconds of one forward and one backward pass of an attention core or a scan."""
    if core.kernel is AttentionKernel.FLEX:
        return _flex(work, core, device, precision)
    if core.kernel is ScanKernel.CHUNKS:
        return _chunks(work, device, precision, cp)
    return _blocks(work, core, device, precision)


def _flex(work: Work, core: Core, device: Device, precision: Precision) -> KernelSeconds:
    """Return the seconds of FlexAttention. With a window a query reads as few keys as in a short sequence."""
    op, traffic = _attend(core), work.elements * precision.nbytes / device.moves
    keys = work.n if op.window is None else min(work.n, op.window)
    channels = min(1.0, work.k / (work.k + HEAD) / (128 / (128 + HEAD)))
    peak = device.flops[precision.wide] * device.sustained * device.attend_efficiency
    reached = peak * keys / (keys + HALF) * channels * (FLEX if op.softcap is None else FLEX_SOFTCAP)
    forward = max(work.flops / reached, traffic)
    return KernelSeconds(forward, max(ATTEND_BACKWARD * work.flops / reached, BACKWARD_TRAFFIC * traffic), 1, 1)


def _blocks(work: Work, core: Core, device: Device, precision: Precision) -> KernelSeconds:
    """Return the seconds of attention by blocks of queries. The backward pass computes the scores again."""
    op = _attend(core)
    scores, _, count = block_scores(op, work.count, work.m, work.n)
    options = [SCORE_PASSES, *([CAUSAL_PASSES] * op.causal), *([SOFTCAP_PASSES] * (op.softcap is not None))]
    options += [BIAS_PASSES] * (op.alibi + (op.relative is not None)) + [SINK_PASSES] * op.sink
    forward, backward = (sum(passes) for passes in zip(*options, strict=True))
    moved = scores * precision.nbytes / device.moves
    rows = -(-work.m // count)
    products = [
        2 * scores * c / _speed(rows, work.n, c, work.count, device, precision)
        for c in (work.k, core.value.shape["head_dim"].known)
    ]
    once = sum(products) + forward * moved
    return KernelSeconds(once, once + 2 * sum(products) + backward * moved, *(count * n for n in BLOCK_KERNELS))


def _chunks(work: Work, device: Device, precision: Precision, cp: int) -> KernelSeconds:
    """Return the seconds of a scan in chunks. Each context-parallel rank scans the whole sequence."""
    size, positions = min(SCAN_CHUNK, work.m), work.count * work.m * cp
    pairs, states = positions * size, positions * work.n
    flops = 2 * (pairs * (work.n + work.k) + 2 * states * work.k)
    products = flops / _speed(size, work.k, size, positions // size, device, precision)
    forward, backward = (
        pairs * (wide + passes * precision.nbytes) / device.moves
        for wide, passes in zip(PAIR_FP32_NBYTES, PAIR_PASSES, strict=True)
    )
    once = products + forward
    return KernelSeconds(once, once + 2 * products + backward, *SCAN_KERNELS)


def _speed(rows: int, columns: int, depth: int, count: int, device: Device, precision: Precision) -> float:
    """Return the FLOPs per second of `count` products [rows, depth] x [depth, columns]."""
    peak = device.flops[precision.wide] * device.sustained * device.flops_efficiency
    return peak * product_efficiency(rows, columns, depth, count, (columns, depth), device)


def transient_bytes(work: Work, core: Core, precision: Precision, cp: int) -> int:
    """Return the bytes that an attention core or a scan holds at once within its backward pass, and frees."""
    if core.kernel is ScanKernel.CHUNKS:
        pairs = work.count * work.m * cp * min(SCAN_CHUNK, work.m)
        return pairs * (FP32 * PAIRS_ALIVE_FP32 + precision.nbytes * PAIRS_ALIVE)
    if core.kernel is AttentionKernel.FLEX:
        return 0
    op = _attend(core)
    _, largest, _ = block_scores(op, work.count, work.m, work.n)
    return precision.nbytes * largest * (SCORES_ALIVE + SOFTCAP_ALIVE * (op.softcap is not None))


def _attend(core: Core) -> Attend:
    assert isinstance(core.value.op, Attend)
    return core.value.op
