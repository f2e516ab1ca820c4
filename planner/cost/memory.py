"""Memory of a pipeline rank: one model, `rank_memory`, for peak, feasibility, lower bounds and the memory timeline.

The other functions give its terms: state, saved activations, transient bytes. All sizes are bytes on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.dims import NBYTES, Dim, Sizes
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.facts.recompute import NO_MODULES, RecomputedBy
from megaloom.dsl.facts.saved import Saved
from megaloom.dsl.graph import Node, primitives
from megaloom.dsl.layers.mlp import ClampedGLU, GeGLU
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import Split
from megaloom.dsl.value import Op
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.contract.workload import Precision
from megaloom.planner.model.structure import NodeKind

from .columns import CostColumn
from .job import Job
from .profiles.frameworks import OWN
from .profiles.groups import FrameworkProfile

if TYPE_CHECKING:
    from megaloom.planner.partition.dynamic_program import SegmentSums

# torch's allocator reserves more than it hands out: SimuMax counts allocated / 0.94 for Megatron runs (perf_llm.py).
ALLOCATOR = 1 / 0.94 - 1
ALLOCATED = 1 + ALLOCATOR
MASTER = 4  # bytes of the optimizer's fp32 copy of a 16-bit weight (megatron-core, optimizer.py:671)
# A rank holds an input, an output and a gradient of one p2p send beside its saved activations (megatron-core 0.16.1,
# schedules.py: input_tensor, output_tensor and output_tensor_grad outlive their step).
RECEIVE_BUFFERS = 3
# Bytes of an element of the copy that a product saves when it casts its input, with one scale for each 32 elements of
# MXFP8 and each 16 of NVFP4 (Transformer Engine's float8, mxfp8 and nvfp4 tensors; the weight gradient reads the copy).
CAST = {Precision.FP8: 1.0, Precision.MXFP8: 1 + 1 / 32, Precision.NVFP4: 1 / 2 + 1 / 16}
# Saved tensors of gated units other than SwiGLU when each operation is a kernel, in tensors as large as the input of
# their last product: the activation and its factor with an offset; where both are clamped also the gate and its
# sigmoid. Experts save one more, the weighted output (megatron-core 0.16.1, transformer/mlp.py: glu, per_token_scale).
EAGER_TENSORS: dict[type[Op], int] = {GeGLU: 2, ClampedGLU: 4}
# Transformer Engine's cuBLAS workspace, before Hopper and since. Products by several experts have one for each stream
# (transformer_engine/pytorch/module/base.py: get_cublas_workspace_size_bytes, get_multi_stream_cublas_workspace).
ENGINE_WORKSPACE = {False: 2**22, True: 2**25}
# Tensor-parallel overlap needs a buffer of a micro-batch's hidden states for each product that gathers them (in 8 bits
# where products are) and for each that reduces them, and workspaces for two more streams (initialize_ub there, and
# Megatron-LM's _initialize_tp_communicators).
GATHERING, REDUCING, STREAMS = 6, 4, 3

Array = NDArray[Any]
Elements = TypeVar("Elements", int, Column)


@overload
def rank_memory(  # type: ignore[overload-overlap]  # Any array type also stands for numbers
    state: float, saved: float, in_flight: float, transient: float
) -> float: ...
@overload
def rank_memory(
    state: SegmentSums, saved: SegmentSums, in_flight: float, transient: SegmentSums | int
) -> SegmentSums: ...
@overload
def rank_memory(
    state: Array | float, saved: Array | float, in_flight: Array | float, transient: Array | float
) -> Rows: ...


def rank_memory(state: Any, saved: Any, in_flight: Any, transient: Any) -> Any:
    """Return the bytes of a pipeline rank: state + a * (sum over its chunks c of in_flight[c] * saved[c] + transient).

    a is `ALLOCATED`: torch's allocator reserves more than it hands out; the state is allocated once and exactly.

    state: weights, gradients, optimizer, and what no tensor holds. saved: saved activations of one micro-batch, by
    chunk. in_flight: number of micro-batches in flight, by chunk. transient: workspace, logits, receive buffers.
    Numbers, arrays that broadcast, or `SegmentSums`. An `in_flight` of two or more dims is [..., moments, chunks];
    its product with `saved` [..., chunks, partitions] is one of matrices.
    """
    activations = in_flight @ saved if isinstance(in_flight, np.ndarray) and in_flight.ndim > 1 else in_flight * saved
    return state + ALLOCATED * (activations + transient)


@frozen
class StageMemory:
    """Memory of one stage on one device."""

    params: int  # elements of dense weights
    expert_params: int  # elements of expert weights
    saved: int  # bytes of saved activations of one micro-batch
    workspace: int  # transient bytes of a backward pass
    library: int  # bytes of libraries and receive buffers, for the whole run
    loss: int  # transient bytes of the loss; 0 if another stage has it


@frozen
class Moment:
    """A moment of a step at which the memory of a rank may be largest."""

    name: str
    in_flight: tuple[int, ...]  # micro-batches in flight, by chunk
    loss: bool = False  # at the loss; else at the start of a backward pass


@frozen
class Peak:
    """The moment at which a rank holds most, and its bytes then by holder."""

    moment: str
    held: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all holders."""
        return sum(self.held.values())


def rank_peak(
    stages: Sequence[StageMemory],
    moments: Iterable[Moment],
    layout: Layout,
    precision: Precision,
    reserved: int,
    profile: FrameworkProfile = OWN,
) -> Peak:
    """Return the peak memory of a pipeline rank over these moments and the optimizer's step.

    stages: the rank's chunks. reserved: bytes that no tensor holds, see `communication.reserved_bytes`. Gradient
    reduction and weight gather need no more than their buffers, which are part of the state.
    """
    params, experts = sum(s.params for s in stages), sum(s.expert_params for s in stages)
    state = state_bytes(params, experts, layout, precision, profile)
    library, saved = max(s.library for s in stages), [s.saved for s in stages]
    step = optimizer_step_bytes(params, experts, layout, profile)
    cases = [("optimizer step", 0, {"workspace": step, "logits": 0})]
    for moment in moments:
        kept = sum(n * nbytes for n, nbytes in zip(moment.in_flight, saved, strict=True))
        workspace = 0 if moment.loss else max(s.workspace for s in stages)
        cases.append((moment.name, kept, {"workspace": workspace, "logits": stages[-1].loss * moment.loss}))
    held, pools = sum(state.values()) + reserved, profile.buffers.graph_pool_share
    fullest = [int(rank_memory(held, n, 1, library + sum(t.values()))) + int(pools * n) for _, n, t in cases]
    name, kept, transient = cases[fullest.index(max(fullest))]
    transient["workspace"] += library
    no_tensor = {"allocator": int(ALLOCATOR * (kept + sum(transient.values()))), "runtime": reserved}
    graphs = {"graphs": int(pools * kept)} if pools else {}  # CUDA graphs have memory of their own
    return Peak(name, {**state, "activations": kept, **transient, **no_tensor, **graphs})


def peak_nbytes(
    stages: Sequence[StageMemory],
    in_flight: Rows,
    backwards: int,
    layout: Layout,
    precision: Precision,
    reserved: int,
    profile: FrameworkProfile = OWN,
) -> list[int]:
    """Return the bytes of `rank_peak` of every pipeline rank.

    stages: of all ranks, in model order. in_flight: micro-batches in flight, [ranks, moments, chunks]; the first
    `backwards` moments are starts of backward passes, the rest losses on the last rank.
    """
    ranks, moments, chunks = in_flight.shape
    sizes = np.array([(s.params, s.expert_params, s.saved, s.workspace, s.library, s.loss) for s in stages])
    params, experts, saved, workspace, library, loss = sizes.T.reshape(6, chunks, ranks)
    elements = list(zip(params.sum(axis=0).tolist(), experts.sum(axis=0).tolist(), strict=True))
    state = [sum(state_bytes(*each, layout, precision, profile).values()) for each in elements]
    kept, transient = np.zeros((2, ranks, moments + 1))  # the last moment is the optimizer's step
    kept[:, :-1] = (in_flight @ saved.T[..., None])[..., 0]
    transient[:, :backwards], transient[-1, backwards:-1] = workspace.max(axis=0)[:, None], loss[-1, -1]
    transient[:, -1] = [optimizer_step_bytes(*each, layout, profile) for each in elements]
    transient += library.max(axis=0)[:, None]
    allocator, graphs = ALLOCATOR * (kept + transient), profile.buffers.graph_pool_share * kept
    held = (kept + transient + np.trunc(allocator) + np.trunc(graphs)).max(axis=1)
    return [int(of_state + of_rank) + reserved for of_state, of_rank in zip(state, held.tolist(), strict=True)]


def optimizer_shards(layout: Layout | Layouts) -> tuple[Any, Any]:
    """Return the number of devices that share the optimizer's state: of dense weights, and of expert weights."""
    on = layout.distributed_optimizer
    return 1 + on * (layout.dp * layout.cp - 1), 1 + on * (layout.edp - 1)


def optimizer_element_bytes(precision: Precision, profile: FrameworkProfile = OWN) -> int:
    """Return the bytes of the optimizer's state of one weight element."""
    return 2 * profile.optimizer.moment_nbytes + (0 if precision is Precision.FP32 else MASTER)


def state_bytes(
    params: Elements,
    expert_params: Elements,
    layout: Layout | Layouts,
    precision: Precision,
    profile: FrameworkProfile = OWN,
) -> dict[str, Elements]:
    """Return the bytes of weights, gradients and optimizer state. Numbers, or one entry for each layout.

    The distributed optimizer shards its state over the copies of a weight; a shard is rounded up.
    """
    dense, experts = optimizer_shards(layout)
    state = optimizer_element_bytes(precision, profile) + profile.optimizer.extra_shard_nbytes
    return {
        "weights": (profile.optimizer.weight_nbytes or precision.nbytes) * (params + expert_params),
        "gradients": (profile.optimizer.gradient_nbytes + profile.optimizer.extra_weight_nbytes)
        * (params + expert_params),
        "optimizer": -(-state * params // dense) - (-state * expert_params // experts),
    }


def optimizer_step_bytes(params: int, expert_params: int, layout: Layout, profile: FrameworkProfile = OWN) -> int:
    """Return the transient bytes of the optimizer's step."""
    dense, experts = optimizer_shards(layout)
    return int(
        -(-profile.optimizer.step_held_nbytes * params // dense)
        - (-profile.optimizer.step_held_nbytes * expert_params // experts)
    )


def saved_activations(
    job: Job, kind: NodeKind, facts: Costs, layout: Layout
) -> Iterator[tuple[CostColumn, RecomputedBy, float]]:
    """Yield the saved activations of a node as (column, modules any of which recompute the tensor, bytes)."""
    precision, profile = job.workload.precision, job.profile
    for s in kind.saved.tensors(facts.saved, facts.inputs):
        yield CostColumn.SAVED, kind.saved.recomputed_by(s), tensor_bytes(s, precision, kind.in_recomputed_block)
    op = kind.node.op
    unit = op.expert if isinstance(op, MoE) else op
    if profile.kernels.only_swiglu_fused and (tensors := EAGER_TENSORS.get(type(unit), 0)):
        for s in (s for s in facts.saved if s.fusion == "gate" and s.experts == isinstance(op, MoE)):
            nbytes = (tensors + isinstance(op, MoE)) * tensor_bytes(s, precision)
            yield CostColumn.SAVED, kind.saved.recomputed_by(s), nbytes
    if not profile.attention.fused:
        for w in (w for w in facts.work if w.kind == "attend"):
            yield CostColumn.SAVED, w.recomputed_by, profile.attention.score_nbytes * w.count * w.m * w.n
    named = {what: [tensor_bytes(s, precision) for s in facts.saved if s.what == what] for what in ("rope", "q", "k")}
    if profile.attention.values_share_qkv:  # one tensor has queries, keys and values: all of it stays for the values
        yield CostColumn.SAVED, NO_MODULES, max(0, sum(named["rope"]) - sum(named["q"]) - sum(named["k"]))
    if profile.attention.output_copied and layout.micro_batch > 1:  # the output is saved in both orders of its dims
        yield CostColumn.SAVED, NO_MODULES, sum(tensor_bytes(s, precision) for s in facts.saved if s.what == "attend")


def tensor_bytes(s: Saved, precision: Precision, cast: bool = False) -> int:
    """Return the bytes of a saved tensor. cast: a product that reads it saves its narrow copy instead."""
    if cast and s.product and precision in CAST and s.dtype not in NBYTES:
        return int(s.elements * (precision.nbytes * s.other + CAST[precision]))
    return s.elements * NBYTES.get(s.dtype, precision.nbytes)


def library_bytes(job: Job) -> int:
    """Return the bytes of cuBLAS workspaces and of buffers that every layout has."""
    profile, device = job.profile, job.cluster.device
    streams = profile.buffers.grouped_streams if job.structure.has_experts else 0
    engine = ENGINE_WORKSPACE["fp8" in device.flops] * (profile.buffers.engine_workspace + streams)
    return profile.buffers.cublas_workspaces * device.library_nbytes + engine + profile.buffers.bucket_nbytes


def buffer_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes of a layout's buffers: of tensor-parallel overlap, and in place of fused weight gradients."""
    precision, nbytes = job.workload.precision, 0
    if job.profile.kernels.wgrad_fusion:
        nbytes += precision.nbytes * product_weight_elements(job, layout)
    if layout.has_overlap(Overlap.TENSOR) and job.profile.buffers.tensor_overlap_buffers:
        tokens = layout.micro_batch * job.workload.seq // layout.cp
        each = GATHERING * (1 if precision.narrow else precision.nbytes) + REDUCING * precision.nbytes
        nbytes += each * tokens * job.structure.hidden_size
        nbytes += (STREAMS - 1) * ENGINE_WORKSPACE["fp8" in job.cluster.device.flops]
    return nbytes


def loss_bytes(job: Job, layout: Layout) -> int:
    """Return the transient bytes of the loss.

    The forward pass has the logits and what the loss saves of them, the backward pass the gradients of logits and
    of the weights that make them.
    """
    graph, width = job.structure.graph, job.workload.precision.nbytes
    ends = [graph.nodes[graph.index[name]] for name in graph.outputs]
    logits = sum(local_elements(node, node.shape.dims, layout, job.workload.seq) for node in ends)
    weights = [local_elements(node, slot.dims, layout, job.workload.seq) for node in ends for slot in node.weights]
    copies = (
        0 if job.workload.precision is Precision.FP32 else job.profile.kernels.loss_saved_nbytes
    )  # fp32 logits are not copied
    return max((width + copies) * logits, width * (logits + max(weights, default=0)))


def product_weight_elements(job: Job, layout: Layout) -> int:
    """Return the elements on one device of the weights that products read. Equal nodes count once."""
    elements, seq = 0, job.workload.seq
    for node in {id(program(kind.node)): kind.node for kind in job.structure.kinds if not kind.has_loss}.values():
        p = program(node)
        read = {id(x.source) for step in p.steps if isinstance(step.value.op, Dot) for x in step.value.args}
        weights = (v for v, *_ in primitives(p.value) if isinstance(v.op, Weight))
        for v, slot in zip(weights, node.weights, strict=True):
            if id(v.source) in read:
                elements += local_elements(node, slot.value.shape.dims, layout, seq, slot.outer)
    return elements


def shared_elements(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return the elements on one device of each weight that several nodes share."""
    nodes, shared = job.structure.graph.nodes, job.structure.shared_weights
    return tuple(local_elements(nodes[users[0]], slot.dims, layout, job.workload.seq) for slot, users in shared)


def local_elements(node: Node, dims: tuple[Dim, ...], layout: Layout, seq: int, outer: tuple[Dim, ...] = ()) -> int:
    """Return the elements on one device of a tensor of a node. outer: dims of the copies around it."""
    sizes = Sizes(batch=layout.micro_batch, seq=seq)
    split = split_of(layout)
    table = program(node).table.at(split)
    return table.local(sizes, split, table.axes(outer, dims))(dims)


def split_of(layout: Layout) -> Split:
    """Return the axes of a layout that shard tensors."""
    return Split(tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp, sequence_parallel=layout.sequence_parallel)
