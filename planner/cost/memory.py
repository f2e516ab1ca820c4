"""Memory of a pipeline rank: one model, `rank_memory`, for peak, feasibility, lower bounds and the memory timeline.

The other functions give its terms: state, saved activations, transient bytes. All sizes are bytes on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Generic, Protocol, Self, TypeVar, get_args, overload

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.dims import NBYTES, DType, Sizes
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.primitives import Program, program
from megaloom.dsl.facts.recompute import CORE, NO_MODULES, RecomputedBy
from megaloom.dsl.facts.saved import AttentionTensor, Saved
from megaloom.dsl.node import Node, primitives
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.capability import Execution
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.contract.state_placement import is_sharded
from megaloom.planner.contract.workload import Precision
from megaloom.planner.model.structure import NodeKind
from megaloom.planner.pipeline.schedules import Moments

from . import communication
from .columns import CostColumn
from .job import Job
from .profiles.frameworks import OWN
from .profiles.groups import FrameworkProfile

# torch's allocator reserves more than it hands out: SimuMax counts allocated / 0.94 for Megatron runs (perf_llm.py).
ALLOCATOR = 1 / 0.94 - 1
ALLOCATED = 1 + ALLOCATOR
MASTER = 4  # bytes of the optimizer's fp32 copy of a 16-bit weight (megatron-core, optimizer.py:671)
# A rank holds an input, an output and a gradient of one p2p send beside its saved activations (megatron-core 0.16.1,
# schedules.py: input_tensor, output_tensor and output_tensor_grad outlive their step).
RECEIVE_BUFFERS = 3
# Bytes of an element of the copy that a product saves when it casts its input, with one scale for each 32 elements of
# MXFP8 and each 16 of NVFP4 (Transformer Engine's float8, mxfp8 and nvfp4 tensors; the weight gradient reads the copy).
MXFP8_BLOCK = 32  # elements of MXFP8 that have one scale, of one byte
CAST = {Precision.FP8: 1.0, Precision.MXFP8: 1 + 1 / MXFP8_BLOCK, Precision.NVFP4: 1 / 2 + 1 / 16}
# Tensor-parallel overlap needs a buffer of a micro-batch's hidden states for each product that gathers them (in 8 bits
# where products are) and for each that reduces them, and workspaces for two more streams (initialize_ub of Transformer
# Engine's module/base.py, and
# Megatron-LM's _initialize_tp_communicators).
GATHERING, REDUCING, STREAMS = 6, 4, 3

RECOMPUTED_CORE = frozenset(CORE)

Array = NDArray[Any]
Elements = TypeVar("Elements", int, Column)


class Linear(Protocol):
    """Bytes of many stages, such as `SegmentSums`: they add up, and a number scales them."""

    def __add__(self, other: Self | float, /) -> Self: ...
    def __rmul__(self, factor: float, /) -> Self: ...


Stages = TypeVar("Stages", bound=Linear)


@overload
def rank_memory(  # type: ignore[overload-overlap]  # Any array type also stands for numbers
    state: float, saved: float, in_flight: float, transient: float
) -> float: ...
@overload
def rank_memory(
    state: Array | float, saved: Array | float, in_flight: Array | float, transient: Array | float
) -> Rows: ...
@overload
def rank_memory(state: Stages, saved: Stages, in_flight: float, transient: Stages | int) -> Stages: ...


def rank_memory(state: Any, saved: Any, in_flight: Any, transient: Any) -> Any:
    """Return the bytes of a pipeline rank: state + a * (sum over its chunks c of in_flight[c] * saved[c] + transient).

    a is `ALLOCATED`: torch's allocator reserves more than it hands out; the state is allocated once and exactly.

    state: weights, gradients, optimizer, and what no tensor holds. saved: saved activations of one micro-batch, by
    chunk. in_flight: number of micro-batches in flight, by chunk. transient: workspace, logits, receive buffers.
    Numbers, arrays that broadcast, or `Linear` values. An `in_flight` of two or more dims is [..., moments, chunks];
    its product with `saved` [..., chunks, partitions] is one of matrices.
    """
    activations = in_flight @ saved if isinstance(in_flight, np.ndarray) and in_flight.ndim > 1 else in_flight * saved
    return state + ALLOCATED * (activations + transient)


@frozen
class StageMemory:
    """Memory of one stage on one device."""

    params: int  # elements of trained dense weights
    expert_params: int  # elements of trained expert weights
    frozen_params: int  # elements of weights that are not trained
    narrow_copies: int  # bytes of copies of weights in 8 bits
    saved: int  # bytes of saved activations of one micro-batch
    workspace: int  # transient bytes of a backward pass
    library: int  # bytes of libraries and receive buffers, for the whole run
    loss: int  # transient bytes of the loss; 0 if another stage has it
    ending: int = 0  # transient bytes at the end of the last backward pass


@frozen
class Peak:
    """The moment at which a rank holds most, and its bytes then by holder."""

    moment: str
    held: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all holders."""
        return sum(self.held.values())


@frozen(eq=False)
class RankPeaks:
    """Moments at which the ranks hold most, and their bytes then by holder."""

    numbers: NDArray[np.intp]  # [ranks] numbers of these moments; -1 is the optimizer's step
    moments: Moments
    holders: tuple[str, ...]
    held: Column  # [holders, ranks] bytes

    @property
    def nbytes(self) -> Column:
        """Return the bytes of all holders: [ranks]."""
        return np.asarray(self.held.sum(axis=0))

    @property
    def each(self) -> tuple[Peak, ...]:
        """Return the peak of each rank."""
        names = (*self.moments.names, "optimizer step")
        return tuple(
            Peak(names[number], dict(zip(self.holders, nbytes, strict=True)))
            for number, nbytes in zip(self.numbers.tolist(), self.held.T.tolist(), strict=True)
        )


def rank_peaks(
    sizes: NDArray[np.int64],
    workspace: int,
    loss: int,
    moments: Moments,
    layout: Layout,
    job: Job,
    copy_groups: NDArray[np.int64] | int = 0,
) -> RankPeaks:
    """Return the peak memory of each pipeline rank over these moments and the optimizer's step.

    sizes: params, expert_params, frozen_params, narrow_copies, saved, library and ending of `StageMemory`, [stages, 7].
    workspace, loss: transient bytes of a backward pass and of the loss. copy_groups: as in `Partition`, [ranks].
    Gradient reduction and weight gather need no more than their buffers, which are part of the state. The end of the
    last backward pass counts as part of the optimizer's step. Of moments with equal bytes the first one counts, that
    step before all.
    """
    chunks = sizes.T.reshape(7, layout.vpp, layout.pp)
    (params, experts, fixed, copies), (saved, library, ending) = chunks[:4].sum(axis=1), chunks[4:]
    state = rank_state(params, experts, layout, job, fixed, copies)
    ranks, count = moments.loss.shape
    activations, passing, logits = np.zeros((3, ranks, count + 1))  # the last moment is the optimizer's step
    activations[:, :-1] = (moments.in_flight @ saved.T[..., None])[..., 0]
    passing[:, :-1], logits[:, :-1] = workspace * moments.backward, loss * moments.loss
    passing[:, -1] = state.step + ending.max(axis=0)
    passing += library.max(axis=0)[:, None]
    groups = job.cluster.outer.group_nbytes * np.asarray(copy_groups)
    reserved = communication.reserved_bytes(layout, job.cluster, job.profile) + groups + np.zeros(ranks)
    total = np.trunc(rank_memory(reserved[:, None], activations, 1, passing + logits))
    share = job.profile.buffers.graph_pool_share  # CUDA graphs have memory of their own
    if share:
        total += np.trunc(share * activations)
    order = np.full((ranks, count + 1), -1)
    order[:, :-1] = moments.order
    fullest = np.where(total == total.max(axis=1, keepdims=True), order, order.max() + 1).argmin(axis=1)
    at = (np.arange(ranks), fullest)
    held = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
    held |= {"activations": activations[at], "workspace": passing[at], "logits": logits[at]}
    held["allocator"] = np.trunc(ALLOCATOR * (held["activations"] + held["workspace"] + held["logits"]))
    held["runtime"] = reserved
    if share:
        held["graphs"] = np.trunc(share * held["activations"])
    return RankPeaks(order[at], moments, tuple(held), np.array([*held.values()]).astype(np.int64))


@frozen
class StateBytes(Generic[Elements]):
    """Bytes of weights, gradients and optimizer state, for the whole run, and of the optimizer's step."""

    weights: Elements
    gradients: Elements
    optimizer: Elements
    step: Elements  # transient, during the optimizer's step

    def __add__(self, other: StateBytes[Elements]) -> StateBytes[Elements]:
        """Return the bytes of two sets of weights together, field by field."""
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.step + other.step,
        )

    @property
    def total(self) -> Elements:
        """Return the bytes that are held for the whole run."""
        return self.weights + self.gradients + self.optimizer


def rank_state(
    params: Elements,
    expert_params: Elements,
    layout: Layout | Layouts,
    job: Job,
    frozen_params: Elements | int = 0,
    narrow_copies: Elements | int = 0,
) -> StateBytes[Elements]:
    """Return the state of these elements of a rank of a job, see `state_bytes`, with these bytes of narrow copies."""
    workload, one = job.workload, layout.microbatches(job.workload.batch) == 1
    state = state_bytes(
        *(params, expert_params, layout, workload.precision, job.profile),
        frozen_params=frozen_params,
        one_microbatch=one,
    )
    return StateBytes(state.weights + narrow_copies, state.gradients, state.optimizer, state.step)


def state_bytes(
    params: Elements,
    expert_params: Elements,
    layout: Layout | Layouts,
    precision: Precision,
    profile: FrameworkProfile = OWN,
    *,
    frozen_params: Elements | int = 0,
    one_microbatch: Any = False,
) -> StateBytes[Elements]:
    """Return the state of these elements of trained dense and expert weights, and of frozen ones.

    Numbers, or one entry for each layout or rank. Frozen weights have neither gradients nor optimizer state, and are
    placed as dense ones. What is sharded is shared by all copies of a weight; a shard is rounded up. Where weights or
    gradients are sharded, the fp32 shard of each weight is the master weight, and a whole weight is gathered from it
    (`state_placement`).
    one_microbatch: whether a step has one micro-batch.
    """
    settings = profile.optimizer
    x: Any = layout  # one, or columns as the elements are
    gradient, step = settings.main_gradient_nbytes(x.grad_reduce), settings.held_in_step_nbytes(x.grad_reduce)
    moments = 2 * settings.moment_nbytes + settings.extra_shard_nbytes
    master = 0 if precision is Precision.FP32 else MASTER
    whole, sharding = settings.weight_nbytes or precision.nbytes, profile.sharded_weights
    fsdp, narrow = x.fsdp, profile.narrow.shard_nbytes(precision)
    optimizer = moments + master * (1 - fsdp)
    # The shard of a gradient begins with its first reduction: with one micro-batch, after the fullest moment.
    late = one_microbatch * (not sharding.keeps_gradients)
    # Each rank has the scales of whole weights, by rows and by columns (megatron-core 0.16.1,
    # megatron_fsdp/mixed_precision.py, fp8_set_raw_data: only the data of a weight is sharded).
    scales = 2 * fsdp * (precision is Precision.MXFP8 and narrow > 0 and profile.narrow.gathers_8_bits)

    def of(trained: Any, fixed: Any, shards: Any, experts: bool) -> StateBytes[Any]:
        weights, gradients = is_sharded(x, "weights", experts=experts), is_sharded(x, "gradients", experts=experts)

        def shared(nbytes: Any, count: Any) -> Any:
            return -(-nbytes * count // shards)

        # Mostly only the optimizer's state of a layout is sharded.
        none = isinstance(fsdp, bool) and not fsdp
        sums = 0 if none else shared(gradient * gradients, trained)
        shard = 0 if none else shared(fsdp * (MASTER + narrow * weights), trained + fixed)
        of_scales = 0 if none else -(-scales * weights * (trained + fixed) // MXFP8_BLOCK)
        return StateBytes(
            weights=whole * (1 - weights) * (trained + fixed) + shard + of_scales,
            gradients=(gradient * (1 - gradients) + settings.extra_weight_nbytes) * trained
            + (1 - gradients * late) * sums,
            optimizer=shared(optimizer, trained),
            step=shared(step, trained) + gradients * late * sums,
        )

    dense = of(params, frozen_params, x.dense_shards, experts=False)
    return dense + of(expert_params, 0, x.expert_shards, experts=True)


def saved_activations(
    job: Job, kind: NodeKind, facts: Costs, layout: Layout, execution: Execution
) -> Iterator[tuple[CostColumn, RecomputedBy, float]]:
    """Yield the saved activations of a node as (column, modules any of which recompute the tensor, bytes).

    A body gathers keys and values before the attention core, and without a fused kernel it saves nothing of the scores.
    """
    precision, profile = job.workload.precision, job.profile
    for s in kind.saved.tensors(facts.saved, facts.inputs):
        if s.attention == "log_sum_exp" and execution.recomputes_cores:
            continue
        modules = kind.saved.recomputed_by(s) if s.attention != "gathered" or execution.module else NO_MODULES
        yield CostColumn.SAVED, modules, tensor_bytes(s, precision, kind.in_recomputed_block)
    if profile.kernels.only_swiglu_fused and not execution.stacked_experts:  # whose gate is compiled
        for s in (s for s in facts.saved if s.eager_tensors):
            # Experts save one more, the weighted output (megatron-core 0.16.1, transformer/mlp.py: per_token_scale).
            nbytes = (s.eager_tensors + s.experts) * tensor_bytes(s, precision)
            yield CostColumn.SAVED, kind.saved.recomputed_by(s), nbytes
    if execution.stores_scores:
        for w in (w for w in facts.work if w.kind is WorkKind.ATTENTION):
            yield CostColumn.SAVED, w.recomputed_by, profile.attention.score_nbytes * w.count * w.m * w.n
    attention = dict.fromkeys(get_args(AttentionTensor), 0)
    for s in facts.saved:
        if s.attention is not None:
            attention[s.attention] += tensor_bytes(s, precision)
    if execution.saves_two_outputs:  # with and without the share of sinks, which is saved in fp32 and as it is applied
        share = attention["log_sum_exp"] * (1 + precision.nbytes / NBYTES[DType.FLOAT32])
        yield CostColumn.SAVED, RECOMPUTED_CORE, attention["output"] + share
    if not execution.module:
        return
    if profile.attention.values_share_qkv:  # one tensor has queries, keys and values: all of it stays for the values
        yield CostColumn.SAVED, NO_MODULES, max(0, attention["rotated"] - attention["projected"])
    if profile.attention.output_copied and layout.micro_batch > 1:  # the output is saved in both orders of its dims
        yield CostColumn.SAVED, NO_MODULES, attention["output"]


def tensor_bytes(s: Saved, precision: Precision, cast: bool = False) -> int:
    """Return the bytes of a saved tensor. cast: a product that reads it saves its narrow copy instead."""
    if cast and s.product and precision in CAST and s.dtype not in NBYTES:
        return int(s.elements * (precision.nbytes * s.other + CAST[precision]))
    return s.elements * NBYTES.get(s.dtype, precision.nbytes)


def narrow_copies(job: Job, kind: NodeKind, layout: Layout) -> int:
    """Return the bytes on one device of the copies in 8 bits of the weights that a node's products read.

    One of rows, and one of columns where products cannot read the former transposed: before Blackwell.
    """
    if not (job.profile.narrow.keeps_weight_copies and job.workload.precision is Precision.FP8):
        return 0
    copies = 1 if Precision.MXFP8 in job.cluster.device.flops else 2
    return copies * _product_weights(kind.node, layout, job) * kind.in_recomputed_block


def product_weight_elements(job: Job, layout: Layout) -> int:
    """Return the elements on one device of the weights that products read. Equal nodes count once."""
    distinct = {id(program(kind.node)): kind.node for kind in job.structure.kinds if not kind.has_loss}
    return sum(_product_weights(node, layout, job) for node in distinct.values())


def _product_weights(node: Node, layout: Layout, job: Job) -> int:
    """Return the elements on one device of the weights that a node's products read."""
    sizes, p = Sizes(batch=layout.micro_batch, seq=job.workload.seq), program(node)
    table, elements = p.table.at(layout.split), 0
    for read, slot in zip(_read_by_products(p), node.weights, strict=True):
        if read:
            dims = slot.value.shape.dims
            elements += table.local(sizes, layout.split, table.axes(slot.outer, dims))(dims)
    return elements


@lru_cache(maxsize=1 << 10)
def _read_by_products(p: Program) -> tuple[bool, ...]:
    """Return for each weight of a program whether a product reads it."""
    read = {id(x.source) for step in p.steps if isinstance(step.value.op, Dot) for x in step.value.args}
    return tuple(id(v.source) in read for v, *_ in primitives(p.value) if isinstance(v.op, Weight))
