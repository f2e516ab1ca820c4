"""What each pipeline rank holds at its fullest moment, by what holds it, and which moment that is.

Protocol: `StageMemory` says what one chunk holds on one device, `peak` what the chunks of a rank come to under a schedule.
Sizes are in bytes. The moments that may be the fullest: the loss of a micro-batch, a backward (gradients beside what
is saved, a block made again), the optimizer's step. Reducing gradients and gathering weights takes no more than the
buffers of both, which are there throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.simulate.schedule import backward_moments, loss_moments

from .communication import process_group
from .profiles.frameworks import OWN
from .profiles.groups import FrameworkProfile

Rows = NDArray[np.float64]

PEERS = 8  # of an all-to-all that have channels of their own, as far as was measured: those of a node
MASTER = 4  # below fp32 the optimizer keeps a copy of the weight (megatron-core, optimizer.py:671)
# Of what passes between pipeline ranks, a rank holds an input, an output and a gradient of one of them beside what it
# saves (megatron-core 0.16.1, schedules.py: input_tensor, output_tensor and output_tensor_grad outlive their step).
RECEIVE_BUFFERS = 3
# torch's allocator reserves more than it hands out: SimuMax counts allocated / 0.94 for Megatron runs (perf_llm.py).
ALLOCATOR = 1 / 0.94 - 1
ALLOCATED = 1 + ALLOCATOR
# Above the point that is predicted: of the runs of Megatron's family 96 of 100 allocated up to 10.7 % more (`megaloom
# validate`), and torch reserved up to 7.9 % more than was allocated (SimuMax's; where there is room it reserves more,
# as on an H200 up to a third, and does without when there is none). CUDA graphs, which have memory of their own, took
# up to 0.75 of what is saved more (Hy3's).
MODEL_ERROR, RESERVED, GRAPH = 0.107, 0.079, 0.75
APART = ("allocator", "runtime", "graphs")  # what no tensor holds


def held_bytes(held: Mapping[str, int], kind: str = "device") -> int:
    """Bytes that a rank holds, as they are measured: what tensors take, what torch reserves for them, or a device."""
    beside = {"allocated": APART, "reserved": ("runtime",)}.get(kind, ())
    return sum(n for what, n in held.items() if what not in beside)


def required_bytes(held: Mapping[str, int]) -> int:
    """Bytes without which a rank runs out of memory: before it does, torch gives back what it holds in reserve.

    Source: c10/cuda/CUDACachingAllocator.cpp, malloc: release_cached_blocks, and once more.
    """
    return held_bytes(held) - held.get("allocator", 0)


def upper_bytes(held: Mapping[str, int], kind: str = "device", graphed: bool = False) -> int:
    """Bytes that a rank which is predicted to hold this should not exceed."""
    tensors = held_bytes(held, "allocated") * (1 + MODEL_ERROR)
    if kind == "allocated":
        return int(tensors)
    graphs = GRAPH * held.get("activations", 0) if graphed else 0.0
    return int(tensors * (1 + RESERVED) + graphs) + (held.get("runtime", 0) if kind == "device" else 0)


@frozen
class StageMemory:
    """What one chunk holds on one device."""

    params: int  # elements of dense weights
    expert_params: int  # elements of experts' weights
    saved: int  # bytes that the backward pass of one micro-batch needs
    workspace: int  # bytes that come and go within a backward
    library: int  # bytes that are there throughout, for libraries and for what passes between ranks
    loss: int  # bytes that come and go with the loss, if it is here


@frozen
class Peak:
    """The fullest moment of a rank, in words, and what it holds then."""

    moment: str
    held: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All that is held."""
        return sum(self.held.values())


def optimizer_shards(layout: Layout) -> tuple[int, int]:
    """Over how many devices the optimizer's state is cut: that of dense weights, and that of experts."""
    on = layout.distributed_optimizer  # counted with, as it may be that of many layouts in columns
    return 1 + on * (layout.dp * layout.cp - 1), 1 + on * (layout.edp - 1)


def optimizer_element_bytes(precision: Precision, profile: FrameworkProfile = OWN) -> int:
    """Bytes that the optimizer keeps of an element."""
    return 2 * profile.optimizer.moment_nbytes + (0 if precision is Precision.FP32 else MASTER)


def state_bytes(
    params: int, expert_params: int, layout: Layout, precision: Precision, profile: FrameworkProfile = OWN
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state. The distributed optimizer cuts the state, over copies alike."""
    dense, experts = optimizer_shards(layout)
    kept = optimizer_element_bytes(precision, profile) + profile.optimizer.extra_shard_nbytes
    return {
        "weights": (profile.optimizer.weight_nbytes or precision.nbytes) * (params + expert_params),
        "gradients": (profile.optimizer.gradient_nbytes + profile.optimizer.extra_weight_nbytes)
        * (params + expert_params),
        "optimizer": -(-kept * params // dense) - (-kept * expert_params // experts),
    }


def reserved_bytes(layout: Layout, cluster: Cluster, profile: FrameworkProfile) -> int:
    """Bytes that no tensor holds: the context, and buffers for each axis of more than one device, or for each pair."""
    axes = ["tp", "cp", "dp", "pp", "ep", "etp", *(["edp"] if layout.ep * layout.etp > 1 else [])]
    link = cluster.inter if cluster.nodes > 1 else cluster.intra
    peers = 0 if profile.experts.deduplicated_dispatch else min(layout.ep, PEERS) - 1
    groups = sum(process_group(axis, layout).size > 1 for axis in axes)
    return cluster.device.context_nbytes + link.group_nbytes * groups + link.peer_nbytes * peers


def optimizer_step_bytes(params: int, expert_params: int, layout: Layout, profile: FrameworkProfile = OWN) -> int:
    """Bytes that come and go with the optimizer's step."""
    dense, experts = optimizer_shards(layout)
    return -(-profile.optimizer.step_held_nbytes * params // dense) - (
        -profile.optimizer.step_held_nbytes * expert_params // experts
    )


def rank_peak(
    parts: Sequence[StageMemory],
    rank: int,
    layout: Layout,
    microbatches: int,
    precision: Precision,
    beside: int,
    profile: FrameworkProfile = OWN,
) -> Peak:
    """A pipeline rank at its fullest; `parts` are its chunks, `beside` is `runtime`."""
    params, experts = sum(p.params for p in parts), sum(p.expert_params for p in parts)
    library = max(p.library for p in parts)
    resting = state_bytes(params, experts, layout, precision, profile)

    def passing(moment: Moment) -> int:
        return moment.saved + moment.workspace + library + moment.logits

    def most(moment: Moment) -> int:
        return passing(moment) + int(ALLOCATOR * passing(moment)) + int(profile.buffers.graph_pool_share * moment.saved)

    moments = [Moment("optimizer's step", 0, optimizer_step_bytes(params, experts, layout, profile), 0)]
    schedule = (layout.pp, layout.vpp, microbatches, layout.microbatch_group)
    saved, workspace = [p.saved for p in parts], max(p.workspace for p in parts)
    for flight, (i, chunk) in backward_moments(rank, *schedule).items():
        name = f"backward of micro-batch {i}" + (f", chunk {chunk}" if layout.vpp > 1 else "")
        moments.append(Moment(name, sum(map(mul, flight, saved)), workspace, 0))
    if rank == layout.pp - 1:
        for flight, i in loss_moments(*schedule).items():
            moments.append(Moment(f"loss of micro-batch {i}", sum(map(mul, flight, saved)), 0, parts[-1].loss))
    fullest = max(moments, key=most)
    more = {"activations": fullest.saved, "workspace": fullest.workspace + library, "logits": fullest.logits}
    apart = {"allocator": int(ALLOCATOR * passing(fullest)), "runtime": beside}
    pools = (
        {"graphs": int(profile.buffers.graph_pool_share * fullest.saved)} if profile.buffers.graph_pool_share else {}
    )
    return Peak(fullest.name, {**resting, **more, **apart, **pools})


class Moment(NamedTuple):
    """What a rank holds at a moment beside what it always does, in bytes."""

    name: str
    saved: int
    workspace: int
    logits: int


@lru_cache(maxsize=1 << 14)
def in_flight_means(pp: int, interleaved: bool, group: int, microbatches: int) -> tuple[float, float, float]:
    """What `least` must know of a schedule: the fewest flights of any rank, the least and the sum of their inverses.

    A rank's flights are those of its last chunk before its first backward, which of no chunk are more: one at least.
    """
    ahead = [pp - 1 - r for r in range(pp)]
    flights = [min(2 * n + 1, group) if interleaved else min(n + 1, microbatches) for n in ahead]
    return min(flights), min(1 / f for f in flights), sum(1 / f for f in flights)


def least_rank_memory(state: Rows, saved: Rows, pp: Rows, flights: tuple[Rows, Rows, Rows]) -> Rows:
    """No cut of a model gives its fullest rank less: `state` and `saved` (of one micro-batch) are the whole model's.

    The fullest rank has at least any weighted mean of the ranks; two means are tried, equal weights and the inverse of
    the micro-batches in flight, of which `means` has what counts. For one layout, or for many in columns.
    """
    fewest, inverse, total = flights
    return np.maximum((state + fewest * saved) / pp, (inverse * state + saved) / total)
