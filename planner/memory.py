"""What each pipeline rank holds at its fullest moment, by what holds it.

Protocol: `Part` says what one chunk holds on one device, `peak` what the chunks of a rank come to under a schedule.
Sizes are in bytes. The parts of a peak are added as if their worst moments were one, which errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from .cluster import Cluster
from .layout import Layout, Precision
from .timeline import held
from .traffic import group

WEIGHT = {Precision.FP32: 4, Precision.BF16: 2}
GRADIENT = 4  # the main gradient, summed in fp32 over micro-batches (megatron-core 0.16.1, DistributedDataParallel)
# Adam's two moments in fp32, and for bf16 weights the fp32 master copy (megatron-core 0.16.1, optimizer.py:671).
STATE = {Precision.FP32: 8, Precision.BF16: 12}
# The loss computes in fp32 on a copy of the logits, in place, and hands back a gradient in their own type
# (megatron-core 0.16.1, tensor_parallel/cross_entropy.py); in fp32 the copy is the logits.
LOSS = {Precision.FP32: 4 + 4, Precision.BF16: 2 + 4}
# torch's allocator reserves more than it hands out: SimuMax counts allocated / 0.94 for Megatron runs (perf_llm.py).
ALLOCATOR = 1 / 0.94 - 1


@frozen
class Part:
    """What one chunk holds on one device."""

    params: int  # elements of dense weights
    expert_params: int  # elements of experts' weights
    saved: int  # bytes that the backward pass of one micro-batch needs
    workspace: int  # bytes that come and go within a step
    logits: int  # elements of logits, if the loss is here


def static(params: int, expert_params: int, layout: Layout, precision: Precision) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state. The distributed optimizer cuts the state, over copies alike."""
    dense, experts = copies(layout)
    return {
        "weights": WEIGHT[precision] * (params + expert_params),
        "gradients": GRADIENT * (params + expert_params),
        "optimizer": -(-STATE[precision] * params // dense) - (-STATE[precision] * expert_params // experts),
    }


def copies(layout: Layout) -> tuple[int, int]:
    """Over how many devices the optimizer's state is cut: that of dense weights, and that of experts."""
    return (group("dp", layout).size, layout.edp) if layout.distributed_optimizer else (1, 1)


def runtime(layout: Layout, cluster: Cluster) -> int:
    """Bytes that no tensor holds: the context, and buffers for each axis of more than one device."""
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp") if group(axis, layout).size > 1]
    link = cluster.inter if cluster.nodes > 1 else cluster.intra
    axes = [axis for axis in axes if not (axis == "edp" and layout.ep == layout.etp == 1)]
    return cluster.device.context_nbytes + link.group_nbytes * len(axes)


def peak(
    parts: Sequence[Part], rank: int, layout: Layout, microbatches: int, precision: Precision, cluster: Cluster
) -> dict[str, int]:
    """Bytes of pipeline rank `rank` at its fullest, by what holds them; `parts` are its chunks in order."""
    params, experts = sum(p.params for p in parts), sum(p.expert_params for p in parts)
    flights = held(rank, layout.pp, layout.vpp, microbatches)
    saved = max(sum(n * p.saved for n, p in zip(flight, parts, strict=True)) for flight in flights)
    workspace = max(p.workspace for p in parts)
    logits = LOSS[precision] * max(p.logits for p in parts)
    return {
        **static(params, experts, layout, precision),
        "activations": saved,
        "workspace": workspace,
        "logits": logits,
        "allocator": int(ALLOCATOR * (saved + workspace + logits)),
        "runtime": runtime(layout, cluster),
    }


def least(state: float, saved: float, layout: Layout, microbatches: int, cluster: Cluster) -> float:
    """No cut of a model gives its fullest rank less: `state` and `saved` (of one micro-batch) are the whole model's.

    The fullest rank has at least any weighted mean of the ranks; two means are tried, equal weights and the inverse of
    the micro-batches in flight.
    """
    pp, vpp = layout.pp, layout.vpp
    flights = [max(map(sum, held(r, pp, vpp, microbatches))) / vpp if vpp == 1 else 1 / vpp for r in range(pp)]
    inverse = [1 / f for f in flights]
    equal = (state + min(flights) * saved) / pp
    weighted = (min(inverse) * state + saved) / sum(inverse)
    return max(equal, weighted) + runtime(layout, cluster)
