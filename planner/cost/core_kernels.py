"""Cost of attention, scans and convolutions by kernels that only bodies use: seconds, and transient bytes.

They are those of runtime/ops: FlexAttention, attention by blocks of queries, scans by chunks of the sequence, and
compiled convolutions.
`kernels` prices the others.
"""

from __future__ import annotations

from math import prod

from attrs import frozen

from megaloom.dsl.dims import NBYTES, DType
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.work import Work
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.attention_blocks import block_scores
from megaloom.planner.contract.capability import (
    SCAN_CHUNK,
    AttentionKernel,
    ConvolutionKernel,
    Core,
    Execution,
    ScanKernel,
)
from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

from .kernels import ATTEND_BACKWARD, BACKWARD_TRAFFIC, HEAD, KernelSeconds, product_efficiency
from .triangular_scan import triangular_bytes, triangular_seconds

FP32 = NBYTES[DType.FLOAT32]
# FlexAttention, with queries that read s keys on average, reaches FLEX * s / (s + FLEX_HALF) of the speed of fused
# attention over long sequences: 349 TFLOP/s with a window of 4,096 and 50 with one of 128 (benchmarks/attention.py on
# an H100 with torch 2.11, 2026-11-22: 8,192 tokens, 32 heads of 128 channels, forward and backward). What changes
# scores costs more: 310 TFLOP/s with ALiBi, 171 with a soft cap there, 340 with sinks on an H200.
FLEX, FLEX_HALF = 1.03, 1033
FLEX_BIAS, FLEX_SOFTCAP, FLEX_SINK = 0.83, 0.46, 0.91
# Heads of more than 128 channels fit smaller blocks only: fitted to a step of Gemma 3 4B with 12 layers and
# heads of 256 channels on an H100 with torch 2.11 (benchmarks/steps.py, 2026-11-22: 0.938 s).
FLEX_NARROW, FLEX_WIDE = 128, 0.38
# Times that the kernels of a block of queries pass over its scores, forward and backward without recompute. Counted in
# runtime/ops/attention_kernels.py and attention_scores.py. Forward: the product writes, the softmax reads
# and writes, the second product reads. Backward: a product writes the gradient, the softmax reads two and writes one,
# two products read it, and one the probabilities.
SCORE_PASSES = (4, 7)
CAUSAL_PASSES = (2, 2)  # the mask
SOFTCAP_PASSES = (6, 7)  # division, tanh, product
BIAS_PASSES = (4, 1)  # ALiBi or a relative bias is written, then added
SINK_PASSES = (4, 3)  # appended, and removed from the probabilities
# Scores that are alive at once in the backward pass of a block: the probabilities, their gradient, and that of the
# scores. A soft cap also saves its result. Counted in tests/runtime/ops/test_kernels_of_bodies.py.
SCORES_ALIVE, SOFTCAP_ALIVE = 3, 1
BLOCK_KERNELS = (10, 25)  # kernels of a block, forward and backward with recompute, most of them on few bytes


@frozen(kw_only=True)
class ScanTraffic:
    """Memory traffic of the kernels of a scan in chunks, forward and backward without recompute.

    pair_fp32_nbytes, head_fp32_nbytes: bytes of fp32 for each pair of positions within a chunk, and for each position
    and head. Passes are over numbers of the precision: pairs, x, states of the chunks, positions and heads. Those of
    the matrix products are apart. Alive: numbers held at once in the backward pass. kernels: backward with recompute.
    """

    pair_fp32_nbytes: tuple[int, int] = (0, 0)
    pair_passes: tuple[int, int]
    x_passes: tuple[int, int]
    state_passes: tuple[int, int]
    head_fp32_nbytes: tuple[int, int] = (0, 0)
    head_passes: tuple[int, int] = (0, 0)
    pairs_alive_fp32: int = 0
    pairs_alive: int
    x_alive: int = 0
    states_alive: int = 0
    kernels: tuple[int, int]


SCAN_TRAFFIC = {
    # Counted by torch's dispatcher in runtime/ops/chunked_scan.py (tests/runtime/ops/test_scan_traffic.py).
    ScanKernel.CHUNKS: ScanTraffic(
        pair_fp32_nbytes=(24, 24),
        pair_passes=(3, 7),
        x_passes=(15, 29),
        state_passes=(4, 4),
        head_fp32_nbytes=(76, 180),
        head_passes=(6, 14),
        pairs_alive_fp32=2,
        pairs_alive=4,
        kernels=(45, 145),
    ),
    # Measured with torch 2.11 on an H100 (benchmarks/steps.py, 2026-11-23) in bf16: 1.15 and 2.56 ms for 4 x 4,096
    # positions, 64 heads of 64 channels and 128 states, 1.58 and 3.2 ms for 128 channels and 64 states.
    ScanKernel.COMPILED_CHUNKS: ScanTraffic(
        pair_passes=(3, 13),
        x_passes=(6, 8),
        state_passes=(4, 4),
        pairs_alive=1,
        x_alive=6,
        states_alive=2,
        kernels=(26, 76),
    ),
}
# Passes of the matrix products of a scan over pairs, x and states.
PRODUCT_PAIR_PASSES, PRODUCT_X_PASSES, PRODUCT_STATE_PASSES = (1, 2), (4, 8), (4, 8)
# Passes of a compiled convolution over its result, forward and backward, measured as above: 0.12 and 0.27 ms for
# 4 x 4,096 positions of 4,096 channels in bf16. One kernel reads and writes; backward, sums read two tensors.
CONV_PASSES, CONV_KERNELS = (2.8, 6.2), (2, 6)


def core_seconds(work: Work, core: Core, device: Device, precision: Precision, cp: int, gathers: bool) -> KernelSeconds:
    """Return the seconds of one forward and one backward pass of an attention core, a scan or a convolution.

    gathers: each context-parallel rank runs along the whole sequence of all its channels, else of 1/cp of them.
    """
    copies = cp if gathers else 1
    if core.kernel is AttentionKernel.FLEX:
        return _flex(work, core, device, precision)
    if core.kernel is ScanKernel.TRIANGULAR_CHUNKS:
        return triangular_seconds(work, device, cp, copies)
    if isinstance(core.kernel, ScanKernel):
        return _chunks(work, core, device, precision, cp, copies)
    if isinstance(core.kernel, ConvolutionKernel):
        return _convolution(work, device, precision, copies)
    return _blocks(work, core, device, precision)


def _flex(work: Work, core: Core, device: Device, precision: Precision) -> KernelSeconds:
    """Return the seconds of FlexAttention."""
    op, traffic = _attend(core), work.elements * precision.nbytes / device.moves
    keys = work.flops / (4 * work.count * work.m * work.k)  # that a query reads on average
    channels = min(1.0, work.k / (work.k + HEAD) / (128 / (128 + HEAD)))
    peak = device.flops[precision.wide] * device.sustained * device.attend_efficiency
    biased = op.alibi or op.relative is not None
    shares = (FLEX, FLEX_SOFTCAP if op.softcap is not None else FLEX_BIAS if biased else FLEX_SINK if op.sink else 1.0)
    reached = peak * keys / (keys + FLEX_HALF) * channels * prod(shares)
    reached *= FLEX_WIDE if work.k > FLEX_NARROW else 1.0
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


def _chunks(work: Work, core: Core, device: Device, precision: Precision, cp: int, copies: int) -> KernelSeconds:
    """Return the seconds of a scan in chunks. Each context-parallel rank scans whole sequences."""
    size, positions = min(SCAN_CHUNK, work.m * cp), work.count * work.m * copies
    x, b = (core.value.args[i].shape for i in (0, 3))
    pairs, channels, states = positions * size, positions * work.k, positions // size * work.n * work.k
    # Scores are those of a group of heads. The last product passes states from chunk to chunk.
    flops = 2 * pairs * (work.k + work.n * b["groups"].known / x["heads"].known)
    flops += 4 * positions * work.n * work.k + 2 * states * (work.m * cp // size)
    products = flops / _speed(size, work.k, size, positions // size, device, precision)
    moved, multiplied, t = [], [], SCAN_TRAFFIC[ScanKernel(core.kernel)]
    for i in (0, 1):
        wide = t.pair_fp32_nbytes[i] * pairs + t.head_fp32_nbytes[i] * positions
        passes = t.pair_passes[i] * pairs + t.x_passes[i] * channels
        passes += t.state_passes[i] * states + t.head_passes[i] * positions
        moved.append((wide + passes * precision.nbytes) / device.moves)
        read = PRODUCT_PAIR_PASSES[i] * pairs + PRODUCT_X_PASSES[i] * channels + PRODUCT_STATE_PASSES[i] * states
        multiplied.append(max((i + 1) * products, read * precision.nbytes / device.moves))
    once = moved[0] + multiplied[0]
    return KernelSeconds(once, once + moved[1] + multiplied[1], *t.kernels)


def _convolution(work: Work, device: Device, precision: Precision, copies: int) -> KernelSeconds:
    """Return the seconds of a compiled convolution along the sequence."""
    result = copies * work.elements // 2  # it reads about as many elements as it writes
    forward, backward = (passes * result * precision.nbytes / device.moves for passes in CONV_PASSES)
    return KernelSeconds(forward, backward, *CONV_KERNELS)


def separate_seconds(work: Work, device: Device, precision: Precision) -> KernelSeconds:
    """Return the seconds of the kernels that torch runs one by one for and around a primitive."""
    forward, backward = (n * precision.nbytes / device.moves for n in (work.forward_elements, work.backward_elements))
    return KernelSeconds(forward, backward, work.forward_kernels, work.backward_kernels)


def _speed(rows: int, columns: int, depth: int, count: int, device: Device, precision: Precision) -> float:
    """Return the FLOPs per second of `count` products [rows, depth] x [depth, columns]."""
    peak = device.flops[precision.wide] * device.sustained * device.flops_efficiency
    return peak * product_efficiency(rows, columns, depth, count, (columns, depth), device)


def transient_bytes(facts: Costs, execution: Execution, precision: Precision, cp: int) -> int:
    """Return the bytes that kernels of a node hold at once within its backward pass, and free."""
    copies = cp if facts.gathers_sequence else 1
    cores = (_core_bytes(work, core, precision, cp, copies) for work, core in execution.body_cores(facts).items())
    return max((*cores, _stacked_gradient_bytes(facts, precision) if execution.stacked_experts else 0))


def _stacked_gradient_bytes(facts: Costs, precision: Precision) -> int:
    """Return the bytes of the largest gradient of stacked expert weights, which is made before a kernel adds it.

    One parameter has the weights of all products that read the tokens, another those of the last product.
    """
    weights = [w.count * w.k * w.n for w in facts.work if w.experts and w.kind is WorkKind.PRODUCT]
    return precision.nbytes * max(sum(weights[:-1]), weights[-1])


def _core_bytes(work: Work, core: Core, precision: Precision, cp: int, copies: int) -> int:
    if core.kernel is ScanKernel.TRIANGULAR_CHUNKS:
        return triangular_bytes(work, cp, copies)
    if isinstance(core.kernel, ScanKernel):
        t, positions, size = SCAN_TRAFFIC[core.kernel], work.count * work.m * copies, min(SCAN_CHUNK, work.m * cp)
        alive = t.pairs_alive * size + t.x_alive * work.k + t.states_alive * work.n * work.k // size
        return positions * (FP32 * t.pairs_alive_fp32 * size + precision.nbytes * alive)
    if core.kernel in (AttentionKernel.FLEX, ConvolutionKernel.COMPILED):
        return 0
    op = _attend(core)
    _, largest, _ = block_scores(op, work.count, work.m, work.n)
    return precision.nbytes * largest * (SCORES_ALIVE + SOFTCAP_ALIVE * (op.softcap is not None))


def _attend(core: Core) -> Attend:
    assert isinstance(core.value.op, Attend)
    return core.value.op
