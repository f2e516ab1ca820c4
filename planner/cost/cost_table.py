"""Cost of every graph node under one layout: seconds and bytes of one micro-batch on one device.

`cost_table(job, layout)` does all of it. The table has one row for each node kind and one column for each `CostColumn`.
`CostTable.stage_sums` adds up the nodes of each stage. `cost_cache.py` keeps node costs from one layout to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from megaloom.dsl.dims import NBYTES, DType, Sizes
from megaloom.dsl.facts.costs import Costs, costs
from megaloom.dsl.facts.primitives import output_elements, program
from megaloom.dsl.facts.recompute import NO_MODULES, RecomputedBy
from megaloom.dsl.facts.work import Work
from megaloom.dsl.ops.routing import Gate, Route
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.capability import Core, Execution
from megaloom.planner.contract.choices import Module, Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.workload import Precision
from megaloom.planner.model.structure import ModelStructure, NodeKind

from . import communication, kernels, memory, torch_blocks
from .columns import AXIS_COLUMNS, FORWARD_COLUMNS, MODULE_COLUMNS, RECOMPUTE_COLUMNS, CostColumn
from .core_kernels import core_seconds, separate_seconds, transient_bytes
from .job import ENGINE_WORKSPACE, Job
from .profiles.groups import ONE_PASS
from .weight_units import WeightUnits, weight_units


@frozen(eq=False)
class NodeCost:
    """Cost of one graph node without recompute."""

    row: Rows  # [columns]
    by_part: Rows  # [recompute parts, MODULE_COLUMNS] seconds that a part repeats, bytes that it frees
    saved_under_full: float  # bytes of saved activations under full recompute
    kept_under_full: Rows  # [FORWARD_COLUMNS] seconds that full recompute does not repeat
    workspace: int  # transient bytes of its backward pass: gradients of activations, and what its kernels hold


@frozen(eq=False)
class BareTable:
    """Costs of all node kinds without recompute, and the share of each recompute part."""

    rows: Rows  # [kinds, columns]
    by_part: Rows  # [kinds, recompute parts, MODULE_COLUMNS]
    saved_under_full: Rows  # [kinds] bytes of saved activations under full recompute
    kept_under_full: Rows  # [kinds, FORWARD_COLUMNS] seconds that full recompute does not repeat
    boundary: NDArray[np.int64]  # [nodes + 1] bytes that cross a stage boundary before each node
    workspace: int  # transient bytes of a backward pass
    library: int  # bytes that libraries hold for the whole run
    loss: int  # transient bytes of the loss
    shared_elements: tuple[int, ...]  # elements on one device of each weight that several nodes share


@frozen(eq=False, slots=False)
class CostTable:
    """Costs of all graph nodes under one layout. Nodes of one kind share a row."""

    job: Job
    rows: Rows  # [kinds, columns]
    boundary: NDArray[np.int64]  # [nodes + 1] bytes that cross a stage boundary before each node
    workspace: int  # transient bytes of a backward pass: gradients of activations, and a recomputed block
    library: int  # bytes that libraries hold for the whole run
    loss: int  # transient bytes of the loss
    shared_elements: tuple[int, ...]  # elements on one device of each weight that several nodes share
    # Where only the first blocks of a stage are recomputed: what recompute adds to their rows, and their number.
    recompute_rows: Rows | None = None
    recompute_blocks: int = 0
    units: WeightUnits | None = None  # where weights or gradients are sharded over data-parallel ranks
    ending: int = 0  # transient bytes at the end of the last backward pass, beside sharded gradients of all weights
    known_sums: dict[tuple[int, ...], Any] = field(factory=dict, init=False)  # of segments, by cut points and columns

    @property
    def structure(self) -> ModelStructure:
        """Return the structure of the model."""
        return self.job.structure

    @cached_property
    def least_boundary(self) -> int:
        """Return the fewest bytes that cross a stage boundary."""
        return int(self.boundary[self.structure.cut_points[1:]].min())

    @cached_property
    def by_node(self) -> Rows:
        """Return the costs of each node: [nodes, columns]."""
        return self.rows[self.structure.kind_of_node]

    def stage_sums(self, boundaries: Sequence[int]) -> Rows:
        """Return the costs of each stage, given the stage boundaries as node numbers: [stages, columns]."""
        sums: Rows = np.add.reduceat(self.by_node, boundaries[:-1])
        if self.recompute_rows is not None:
            first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
            stop = np.minimum(last, self.structure.recompute_end(self.recompute_blocks)[first])
            sums += self.recompute_before[stop] - self.recompute_before[first]
        return sums

    @cached_property
    def recompute_before(self) -> Rows:
        """Return the sums of `recompute_rows` over all nodes before each node: [nodes + 1, columns]."""
        assert self.recompute_rows is not None
        rows = self.recompute_rows[self.structure.kind_of_node]
        return np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows, axis=0)])


def bare_table(job: Job, layout: Layout, nodes: Sequence[NodeCost] | None = None) -> BareTable:
    """Return the costs of all node kinds without recompute. nodes: the cost of one node of each kind, if known.

    Buffers are those of tensor-parallel overlap and of weights whose gradients are fused. The loss holds, forward, the
    logits and what it saves of them; backward, the gradients of logits and of the weights that make them.
    """
    graph, seq, profile, precision = job.structure.graph, job.workload.seq, job.profile, job.workload.precision
    sizes, split = Sizes(batch=layout.micro_batch, seq=seq, source=seq), layout.split
    if nodes is None:
        nodes = []
        for kind in job.structure.kinds:
            execution = job.execution(kind.node, split)
            facts = costs(kind.node, **sizes, split=split, losses=False, separate=not execution.module)
            nodes.append(node_cost(job, kind, facts, execution, layout, seq))
    buffers = precision.nbytes * memory.product_weight_elements(job, layout) if job.keeps_stand_ins else 0
    if layout.has_overlap(Overlap.TENSOR) and profile.buffers.tensor_overlap_buffers:
        gathered = memory.GATHERING * (1 if precision.narrow else precision.nbytes)
        tokens = layout.micro_batch * seq // layout.cp
        buffers += (gathered + memory.REDUCING * precision.nbytes) * tokens * job.structure.hidden_size
        buffers += (memory.STREAMS - 1) * ENGINE_WORKSPACE["fp8" in job.cluster.device.flops]
    ends = [graph.nodes[graph.index[name]] for name in job.structure.losses]
    logits = sum(program(node).local_elements(node.shape, (), sizes, split) for node in ends)
    weights = [program(n).local_elements(s.dims, (), sizes, split) for n in ends for s in n.weights if s.trained]
    copies = 0 if precision is Precision.FP32 else profile.kernels.loss_saved_nbytes  # fp32 logits are not copied
    shapes, crossing = job.structure.live_shapes
    rows, by_part, kept = (np.array([getattr(n, x) for n in nodes]) for x in ("row", "by_part", "kept_under_full"))
    wait_for_host(job.structure, rows, by_part, kept)
    uses = ((graph.nodes[nodes[0]], weight) for weight, nodes in job.structure.shared_weights)
    return BareTable(
        rows=rows,
        by_part=by_part,
        saved_under_full=np.array([node.saved_under_full for node in nodes]),
        kept_under_full=kept,
        boundary=precision.nbytes * (crossing @ np.array(output_elements(shapes, sizes, split), dtype=np.int64)),
        workspace=max(node.workspace for node in nodes),
        library=job.library_nbytes + buffers,
        loss=max((precision.nbytes + copies) * logits, precision.nbytes * (logits + max(weights, default=0))),
        shared_elements=tuple(program(n).local_elements(w.dims, (), sizes, split) for n, w in uses),
    )


def wait_for_host(structure: ModelStructure, rows: Rows, by_part: Rows, kept: Rows | None = None) -> None:
    """Stretch the seconds of all kernels, in place, where the host takes longer to launch those of a micro-batch.

    The host runs ahead of the device, so one node waits for the launches of another: what counts is the sum over the
    model. rows: [.., kinds, columns]. by_part: [.., kinds, recompute parts, MODULE_COLUMNS]. kept: [.., kinds,
    FORWARD_COLUMNS].
    """
    kernels_of, counts = [CostColumn.FORWARD, CostColumn.BACKWARD], structure.kind_counts
    device = (rows[..., kernels_of].sum(axis=-1) * counts).sum(axis=-1)
    host = (rows[..., CostColumn.HOST] * counts).sum(axis=-1)
    factor = np.divide(host, device, out=np.ones_like(host), where=host > device)[..., None]
    rows[..., kernels_of] *= factor[..., None]
    by_part[..., MODULE_COLUMNS.index(CostColumn.FORWARD)] *= factor[..., None]
    if kept is not None:
        kept[..., FORWARD_COLUMNS.index(CostColumn.FORWARD)] *= factor


def cost_table(job: Job, layout: Layout, bare: BareTable | None = None) -> CostTable:
    """Return the costs of all graph nodes under a layout. bare: its costs without recompute, if known.

    Recompute moves forward seconds to the backward pass and frees saved memory. What it recomputes of one block
    is in the workspace. With `--overlap experts` the workspace has a second block, whose forward pass runs meanwhile.
    Where weights are sharded over data-parallel ranks, a pass also holds the gathered units that it works with.
    """
    bare, structure = bare or bare_table(job, layout), job.structure
    rows, workspace = bare.rows.copy(), bare.workspace
    if layout.recompute is Recompute.SELECTIVE:
        repeated = bare.by_part[:, structure.recomputed_parts(layout.recomputed_modules)].sum(axis=1)
        rows[:, RECOMPUTE_COLUMNS] += repeated[:, : len(FORWARD_COLUMNS)]
        rows[:, CostColumn.SAVED] -= repeated[:, -1]
        workspace += int(repeated[:, -1].max())
    elif layout.recompute is Recompute.FULL:
        inside = np.array([kind.in_recomputed_block for kind in structure.kinds])
        rows[:, RECOMPUTE_COLUMNS] += inside[:, None] * (rows[:, FORWARD_COLUMNS] - bare.kept_under_full)
        workspace += int(structure.largest_block @ bare.rows[:, CostColumn.SAVED])
        rows[:, CostColumn.SAVED] = bare.saved_under_full
    if layout.has_overlap(Overlap.EXPERTS):
        workspace += int(structure.largest_block @ rows[:, CostColumn.SAVED])
    partial = layout.full_recompute and layout.recompute_layers > 0
    recomputed, loss = rows - bare.rows if partial else None, bare.loss
    rows = bare.rows if partial else rows
    units = weight_units(structure, rows, bare.shared_elements) if layout.fsdp else None
    if units:
        workspace += units.transient_nbytes(layout, job)
        loss += units.gathered_nbytes(layout, job)
    return CostTable(
        job=job,
        rows=rows,
        boundary=bare.boundary,
        workspace=workspace,
        library=bare.library,
        loss=loss,
        shared_elements=bare.shared_elements,
        recompute_rows=recomputed,
        recompute_blocks=layout.recompute_layers,
        units=units,
        ending=units.ending_nbytes(structure, layout, job) if units else 0,
    )


def node_cost(job: Job, kind: NodeKind, facts: Costs, execution: Execution, layout: Layout, seq: int) -> NodeCost:
    """Return the cost of one node on one device, by its facts and by how the runtime executes it."""
    row = np.zeros(len(CostColumn))
    by_part = np.zeros((len(job.structure.recompute_parts), len(MODULE_COLUMNS)))
    repeated = [
        *_add_kernels(row, job, kind, facts, execution, layout),
        *_add_collectives(row, job, kind, facts, layout),
        *memory.saved_activations(job, kind, facts, layout, execution),
    ]
    for column, modules, amount in repeated:
        if column is CostColumn.SAVED:
            row[column] += amount
        elif kind.saved.norm:
            modules = frozenset({Module.LAYERNORM})
        if modules:
            by_part[job.structure.recompute_parts.index(modules), MODULE_COLUMNS.index(column)] += amount
    row[CostColumn.PARAMS], row[CostColumn.EXPERT_PARAMS] = facts.params, facts.expert_params
    row[CostColumn.FROZEN_PARAMS] = facts.frozen_params
    row[CostColumn.NARROW_COPIES] = memory.narrow_copies(job, kind, layout)
    if kind.has_loss:
        row += cross_entropy_costs(job, kind, layout, seq)
    each = [memory.tensor_bytes(s, job.workload.precision) for s in facts.saved]
    full = kind.saved_under_full.tensors(facts.saved, facts.inputs)
    full_saved = sum(memory.tensor_bytes(s, job.workload.precision) for s in full)
    kept, kept_nbytes = torch_blocks.kept_results(job, facts, layout)
    full_saved += kept_nbytes * kind.in_recomputed_block
    transient = transient_bytes(facts, execution, job.workload.precision, layout.cp) if execution.holds_extra else 0
    return NodeCost(row, by_part, full_saved, kept, 2 * max(each, default=0) + transient)


def cross_entropy_costs(job: Job, kind: NodeKind, layout: Layout, seq: int) -> Rows:
    """Return the costs of the cross-entropies of a node's output, which are counted with the node.

    Over a sharded vocabulary each all-reduces three fp32 numbers a token (megatron-core 0.16.1,
    tensor_parallel/cross_entropy.py).
    """
    row = np.zeros(len(CostColumn))
    sizes = Sizes(batch=layout.micro_batch, seq=seq)
    logits = program(kind.node).local_elements(kind.node.shape, (), sizes, layout.split)
    work = Work(WorkKind.LOGITS_LOSS, kind.node.name, 0, 0, 0, elements=logits)
    took = kernels.kernel_seconds(work, job.cluster.device, job.workload.precision, job.profile)
    part = (NBYTES[DType.FLOAT32] * (layout.micro_batch * seq // layout.cp), communication.process_group("tp", layout))
    exchanged = 3 * communication.collective_seconds("all_reduce", job.cluster, part)
    row[[CostColumn.FORWARD, CostColumn.BACKWARD, CostColumn.TP_FORWARD]] = took.forward, took.backward, exchanged
    return kind.cross_entropies * row


Repeated = tuple[CostColumn, RecomputedBy, float]  # column, the modules any of which recompute it, amount


PricedWork = tuple[Work, Core | None, kernels.KernelSeconds]


def kernels_of(job: Job, kind: NodeKind, facts: Costs, execution: Execution, layout: Layout) -> Iterator[PricedWork]:
    """Yield each piece of work of a node: its core, if a body computes it, and its seconds."""
    device, precision, profile = job.cluster.slowest, job.workload.precision, job.profile
    stored, cores, cp = execution.stores_scores, execution.body_cores(facts), layout.cp
    for work in facts.work:
        core, whole = cores.get(work), facts.gathers_sequence
        beside = None if execution.module else separate_seconds(work, device, precision)
        priced = core_seconds(work, core, device, precision, cp, whole) if core else beside if work.whole else None
        took = kernels.kernel_seconds(
            work,
            device,
            precision,
            profile,
            inside=kind.in_recomputed_block,
            stored_scores=stored,
            priced=priced,
            adds=execution.product_adds(work),
        )
        yield work, core, took if beside is None or work.whole else took.plus(beside)


def _add_kernels(
    row: Rows, job: Job, kind: NodeKind, facts: Costs, execution: Execution, layout: Layout
) -> Iterator[Repeated]:
    """Add the seconds of a node's kernels to its row; yield the seconds that recompute repeats.

    Seconds of the host are those of its launches; a CUDA graph needs none. Adding weight gradients to the main
    gradients reads and writes the latter, and reads the former where no product adds them.
    """
    device, precision, profile = job.cluster.slowest, job.workload.precision, job.profile
    width = profile.optimizer.main_gradient_nbytes(layout.grad_reduce)
    one = profile.host.launches * device.launch_seconds
    apart, alone = facts.params + facts.expert_params, 0  # gradients added by kernels of their own, by one product
    for work, core, took in kernels_of(job, kind, facts, execution, layout):
        row[CostColumn.HOST] += (took.forward_kernels + took.backward_kernels) * one
        apart -= took.fused_gradients
        alone += took.fused_gradients
        wait_forward = wait_backward = 0.0
        if work.kind is WorkKind.DISPATCH and device.units > 1:
            experts = kernels.expert_launch_seconds(facts.work, profile, execution)
            wait_forward = profile.experts.dispatch_seconds + experts
            wait_backward = wait_forward + experts
            if profile.experts.padded_tokens:  # the host knows each expert's number of tokens, so it launches ahead
                row[CostColumn.HOST] += wait_forward + wait_backward
                wait_forward = wait_backward = 0.0
        row[CostColumn.FORWARD] += took.forward + wait_forward
        row[CostColumn.BACKWARD] += took.backward + wait_backward
        modules = NO_MODULES if core and core.kernel.recomputes else work.recomputed_by
        yield CostColumn.FORWARD, modules, took.forward + wait_forward
    if kind.in_recomputed_block:
        cast = profile.narrow.cast_moved_nbytes / device.moves
        uncast_forward, uncast_backward = torch_blocks.uncast_elements(job, facts, layout)
        row[CostColumn.FORWARD] -= cast * uncast_forward
        row[CostColumn.BACKWARD] -= cast * uncast_backward
    passes = profile.kernels.memory_passes.get("gradient", ONE_PASS)[1]
    moved = passes * (precision.nbytes + 2 * width) * max(0, apart) + 2 * width * alone
    row[CostColumn.BACKWARD] += moved / device.moves
    row[CostColumn.FUSED_PARAMS] = facts.params + facts.expert_params - max(0, apart)


def _token_routing(kind: NodeKind) -> communication.TokenRouting:
    """Return how the router of a node spreads tokens; a gate of another node is taken to have no groups."""
    ops = [s.value.op for s in program(kind.node).steps]
    gate = next((op for op in ops if isinstance(op, Gate)), None)
    copies = max((op.top_k for op in ops if isinstance(op, Route)), default=1)
    return communication.TokenRouting(copies, *((gate.groups, gate.top_groups) if gate else ()))


def _add_collectives(row: Rows, job: Job, kind: NodeKind, facts: Costs, layout: Layout) -> Iterator[Repeated]:
    """Add the seconds of a node's exposed collectives to its row; yield those that recompute repeats."""
    cluster, precision, profile = job.cluster, job.workload.precision, job.profile
    hidden = {
        "tp": profile.overlap.tensor_hidden * layout.has_overlap(Overlap.TENSOR),
        "ep": profile.overlap.experts_hidden * layout.has_overlap(Overlap.EXPERTS) * (1 - job.sm_share),
    }
    attention = [w for w in facts.work if w.kind is WorkKind.ATTENTION]
    for c in torch_blocks.run_collectives(job, facts):
        width = torch_blocks.gathered_nbytes(job, c, kind.in_recomputed_block)
        nbytes, group = c.elements * width, communication.process_group(c.axis, layout)
        if c.axis == "cp" and attention:
            passes = [kernels.kernel_seconds(w, cluster.slowest, precision) for w in attention]
            compute = sum(p.backward if c.backward else p.forward for p in passes)
            queries = sum(w.count * w.m * w.k for w in attention) * precision.nbytes
            keys = nbytes * torch_blocks.key_repeats(job, facts, layout)
            exchange = communication.AttentionExchange(c.kind, keys, queries, compute, c.backward)
            way = profile.attention.context_communication
            took = communication.context_parallel_seconds(way, exchange, group, cluster)
        elif c.kind == "all_to_all" and c.axis == "ep" and profile.experts.deduplicated_dispatch:
            took = communication.deduplicated_seconds(nbytes, _token_routing(kind), group, cluster)
        else:
            took = communication.collective_seconds(c.kind, cluster, (nbytes, group))
        took *= 1 - hidden.get(c.axis, 0.0)
        forward, backward = AXIS_COLUMNS[c.axis]
        row[backward if c.backward else forward] += took
        if not c.backward:
            yield forward, c.recomputed_by, took
    for c in torch_blocks.gathered_inputs(job, facts):
        yield CostColumn.SAVED, c.recomputed_by, (c.elements - c.elements // layout.tp) * precision.nbytes
