"""Units of weights that are sharded over data-parallel ranks: the seconds of their gathers, and what they hold.

A unit is gathered for a pass and freed after it, as torch's `fully_shard` does: the weights of a block, and those of
each node outside blocks, such as the embedding and the head. The next unit is gathered while one computes; the
gradients of a unit are reduced while the unit before it computes. What takes longer than the computation is exposed,
and computation beside a collective is slower (`Job.contention`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.facts.placement import Transition
from megaloom.planner.contract.choices import ExpertShard, N, Reshard
from megaloom.planner.contract.layout import Layout, LayoutFields
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.state_placement import SHARDED, state_placements
from megaloom.planner.contract.workload import Precision
from megaloom.planner.model.structure import ModelStructure

from . import communication
from .columns import BACKWARD_COLUMNS, FORWARD_COLUMNS, CostColumn
from .job import Job
from .memory import MASTER
from .profiles.groups import ONE_PASS

# Share of the bandwidth of larger groups that an all-gather and a reduce-scatter between two GPUs of a node reach, of
# tensors from 64 MiB on: 200 to 277 GB/s, where four GPUs reach 256 to 328 (H100, torch 2.11, NCCL 2.28, 2026-11-27).
# An all-reduce reaches 0.93.
PAIR = 0.82


@frozen(eq=False)
class WeightUnits:
    """Units of the weights of a model on one device, before they are sharded over data-parallel ranks."""

    kinds: Rows  # [units, kinds] number of nodes of each kind
    counts: Rows  # [units] how often the model has the unit
    in_blocks: NDArray[np.bool_]  # [units] True for the weights of a block
    elements: Rows  # [kinds, 3] elements of a node: trained dense, of experts, frozen; a shared weight counts once
    shared: int  # elements of weights that several nodes share, which stay gathered from the first to the last of them

    @property
    def sizes(self) -> Rows:
        """Return the elements of each unit: [units, 3]."""
        return self.kinds @ self.elements

    def widths(self, job: Job) -> Rows:
        """Return the bytes of an element of each unit's weights as a pass gathers them: [units].

        Weights of blocks may be gathered in 8 bits; the embedding and the head are as wide as activations.
        """
        precision = job.workload.precision
        return np.where(self.in_blocks, job.profile.narrow.gathered_nbytes(precision), precision.nbytes)

    def gathered_nbytes(self, layout: Layout, job: Job) -> int:
        """Return the bytes beyond the state of the largest gathered unit, and of weights that stay gathered.

        A backward pass before Blackwell also reads the transposed copy of a weight in 8 bits with one scale
        (megatron-core 0.16.1, megatron_fsdp.py: fp8_create_transpose_cache).
        """
        dense, experts = (placed.weights == SHARDED for placed in state_placements(layout))
        precision = job.workload.precision
        one_scale = job.profile.narrow.shard_nbytes(precision) == 1
        transposed = self.in_blocks * (one_scale and Precision.MXFP8 not in job.cluster.device.flops)
        sizes = (self.sizes @ [dense, experts, dense]).astype(np.int64)
        largest = int(((self.widths(job) + transposed) * sizes).max(initial=0))
        return largest + precision.nbytes * dense * self.shared

    def transient_nbytes(self, layout: Layout, job: Job) -> int:
        """Return the bytes beyond the state that the largest unit holds in its backward pass.

        Its weights and those of the unit that is gathered next, its gradients, and their copy that is reduced. Experts
        are a unit inside their block.
        """
        dense, experts = self.sizes[:, 0] + self.sizes[:, 2], self.sizes[:, 1]
        gradients = job.workload.precision.nbytes + job.profile.optimizer.main_gradient_nbytes(layout.grad_reduce)
        held = (
            ((self.widths(job) * (placed.weights == SHARDED) + gradients) * sizes.astype(np.int64)).max(initial=0)
            for sizes, placed in zip((dense, experts), state_placements(layout), strict=True)
        )
        return int(max(held)) + self.gathered_nbytes(layout, job)

    def ending_nbytes(self, structure: ModelStructure, layout: Layout, job: Job) -> int:
        """Return what the last backward pass holds at its end, beside the shards of all gradients.

        These are the gradients of the first unit and their copy that is reduced. It counts where the shards come
        after the fullest moment: with one micro-batch. Exact for one pipeline rank; 0 for several, whose first units
        differ. Llama 3 8B on two H100, 29 of 32 blocks recomputed: torch allocated 62.83 GiB.
        """
        settings = job.profile.sharded_weights
        late = layout.microbatches(job.workload.batch) == 1 and not settings.keeps_gradients
        if not (settings.holds_first_unit and late and layout.pp == 1):
            return 0
        first = next(kind for kind in structure.kind_of_node if self.elements[kind].any())
        unit = int(np.flatnonzero(self.kinds[:, first])[-1])
        reduced = job.profile.optimizer.main_gradient_nbytes(layout.grad_reduce)
        return (job.workload.precision.nbytes + reduced) * int(self.sizes[unit, 0])


def weight_units(structure: ModelStructure, rows: Rows, shared_elements: Sequence[int]) -> WeightUnits:
    """Return the units of a model. rows: costs of node kinds, [kinds, columns]; shared_elements: as in `CostTable`."""
    elements = rows[:, [CostColumn.PARAMS, CostColumn.EXPERT_PARAMS, CostColumn.FROZEN_PARAMS]].copy()
    for (slot, nodes), count in zip(structure.shared_weights, shared_elements, strict=True):
        for node in nodes[1:]:
            kind = structure.kind_of_node[node]
            elements[kind, 0 if slot.trained else 2] -= count / structure.kind_counts[kind]
    outside = structure.kind_counts - structure.kind_counts_in_blocks
    alone = np.flatnonzero(outside)
    return WeightUnits(
        kinds=np.concatenate([structure.distinct_blocks, np.eye(len(rows))[alone]]),
        counts=np.concatenate([structure.block_repeats, outside[alone]]),
        in_blocks=np.arange(len(structure.distinct_blocks) + len(alone)) < len(structure.distinct_blocks),
        elements=elements,
        shared=sum(shared_elements),
    )


def gathered_fields(x: LayoutFields[N]) -> tuple[N, N]:
    """Return what the memory of gathered units depends on, beside node costs; zeros where none are gathered."""
    return x.fsdp * (len(ExpertShard) * x.shard + x.expert_shard), x.fsdp * (len(Reshard) * x.grad_reduce + x.reshard)


def pass_seconds(dense: float, experts: float, layout: Layout, job: Job) -> float:
    """Return the seconds in which a micro-batch gathers weights of these elements for both passes, and reduces them.

    The elements are those of one device before they are sharded, and move in one collective each. All count as weights
    of blocks, which are gathered in no more bytes than others.
    """
    least = np.array([job.profile.narrow.gathered_nbytes(job.workload.precision)])
    gathered, reduced = _unit_seconds(np.array([[dense, experts]]), least, job, layout)
    return float(2 * gathered[0] + reduced[0])


def waiting_seconds(rows: Rows, units: WeightUnits, job: Job, layout: Layout) -> Rows:
    """Return the seconds for which each pass of a node waits for weights or gradients: [kinds, 2].

    rows: costs of node kinds, [kinds, columns]. The seconds of a unit are spread over its nodes by their elements.
    """
    sizes, settings, widths = units.sizes, job.profile.sharded_weights, units.widths(job)
    gathered, reduced = _unit_seconds(sizes, widths, job, layout)
    dense, experts = (placed.weights == SHARDED for placed in state_placements(layout))
    shards = np.array([layout.dense_shards, layout.expert_shards, layout.dense_shards])
    # In bytes: out of the buffer of the gather, and the cast of the shard.
    moved = np.zeros(len(sizes))
    for width in {*widths.tolist()}:
        each = [dense, experts, dense] * (settings.gather_copies * width + (MASTER + width) / shards)
        moved = np.where(widths == width, sizes @ each, moved)
    copied, cast = moved / job.cluster.device.moves, units.kinds @ _cast_seconds(rows, job, layout)
    out = []
    passes = ((FORWARD_COLUMNS, gathered, copied), (BACKWARD_COLUMNS, gathered + reduced, copied + cast))
    for columns, took, moving in passes:
        compute = settings.hidden * units.kinds @ rows[:, columns].sum(axis=1)
        exposed = job.contention.exposed_seconds(took, compute) + moving
        by_element = units.counts * exposed / np.maximum(sizes.sum(axis=1), 1)
        out.append(by_element @ units.kinds / np.maximum(units.counts @ units.kinds, 1))
    seconds: Rows = units.elements.sum(axis=1)[:, None] * np.array(out).T
    return seconds


def _cast_seconds(rows: Rows, job: Job, layout: Layout) -> Rows:
    """Return the seconds by which casting weight gradients takes longer than products that add them: [kinds].

    rows: costs of node kinds, where products add the gradients of FUSED_PARAMS to main gradients. FSDP has no main
    gradients of whole weights: each gradient is read and written in the format that is reduced, and from the second
    micro-batch on a shard is added to that of those before (torch 2.13, fully_shard/_fsdp_collectives.py:
    foreach_reduce, _chunk_cat). Where a step reduces once, a kernel adds each gradient to that of the micro-batches
    before. Gradients of a node with experts are theirs.
    """
    if not job.frees_gradients:
        return np.zeros(len(rows))
    width = job.profile.optimizer.main_gradient_nbytes(layout.grad_reduce)
    passes = job.profile.kernels.memory_passes.get("gradient", ONE_PASS)[1]
    again = 1 - 1 / layout.microbatches(job.workload.batch)
    dense, experts = (
        passes * (job.workload.precision.nbytes + width)
        + (3 * width * again / layout.dense_shards if placed.pass_reduction.communication else passes * width)
        for placed in state_placements(layout)
    )
    moved = np.where(rows[:, CostColumn.EXPERT_PARAMS] > 0, experts, dense)
    seconds: Rows = rows[:, CostColumn.FUSED_PARAMS] * np.maximum(0.0, moved - 2 * width) / job.cluster.device.moves
    return seconds


def _unit_seconds(sizes: Rows, widths: Rows, job: Job, layout: Layout) -> tuple[Rows, Rows]:
    """Return the seconds in which a pass gathers each unit, and those in which its gradients are reduced: [units] each.

    Dense weights move first, then experts. sizes: elements of trained dense weights, of experts and of frozen weights,
    of which the last may be left out: [units, 3]. widths: bytes of a gathered element, [units].
    """
    gradient = job.profile.optimizer.main_gradient_nbytes(layout.grad_reduce)
    trained = sizes[:, :2].T
    whole = trained[0] + sizes[:, 2:].sum(axis=1), trained[1]
    gathered, reduced = np.zeros((2, len(sizes)))
    for placed, axis, all_elements, elements in zip(
        state_placements(layout), ("dp", "edp"), whole, trained, strict=True
    ):
        group = communication.process_group(axis, layout)
        gathered += _collectives(placed.pass_gather, widths * all_elements, group, job, layout)
        reduced += _collectives(placed.pass_reduction, gradient * elements, group, job, layout)
    return gathered, reduced


def _collectives(
    transition: Transition, nbytes: Rows, group: communication.ProcessGroup, job: Job, layout: Layout
) -> Rows:
    """Return the seconds of the collectives of a transition over tensors of these bytes, one by one; zeros for none."""
    kind, moved = transition.communication, (nbytes / _pair_share(group, job)).tolist()
    if kind is None:
        return np.zeros(len(moved))
    return np.array([communication.state_collective_seconds(kind, job.cluster, layout, (n, group)) for n in moved])


def _pair_share(group: communication.ProcessGroup, job: Job) -> float:
    """Return the share of the bandwidth of larger groups that gathers and reductions of a group reach."""
    cluster = job.cluster
    within = communication.group_nodes(group.size, group.stride, cluster.per_node, cluster.count)[0] == 1
    return PAIR if group.size == 2 and within and cluster.device.units > 1 else 1.0
