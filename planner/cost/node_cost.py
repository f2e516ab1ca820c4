"""What one node costs by its facts: seconds of kernels and collectives, bytes that it keeps, elements of its weights.

Protocol: `line(kind, found, …)` is the `NodeCost` of a node under one split and micro-batch, nothing computed again; what
modules take that are is in its `again`.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen

from megaloom.dsl.dims import NBYTES, DType
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.facts.recompute import Again
from megaloom.dsl.facts.saved import Saved
from megaloom.dsl.graph import Node
from megaloom.dsl.layers.mlp import ClampedGLU, GeGLU
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.ops.routing import Route
from megaloom.dsl.value import Op
from megaloom.planner.contract.capability import assumed_environment, capability
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.model.structure import NodeKind

from . import communication, context_parallel, kernels
from .cost_table import (
    AXIS_COLUMNS,
    MODULE_COLUMNS,
    CostColumn,
    local,
)
from .profiles.groups import ONE_PASS, FrameworkProfile

# Bytes of an element that a product keeps of what it has cast, with a scale for each 32 of 8 bits, each 16 of 4 bits
# (Transformer Engine's float8, mxfp8 and nvfp4 tensors, of which what the weight's gradient reads stays).
CAST = {Precision.FP8: 1.0, Precision.MXFP8: 1 + 1 / 32, Precision.NVFP4: 1 / 2 + 1 / 16}
# What other gated units than SwiGLU keep beside when each operation is a kernel, in tensors as large as what their last
# product reads: the activation, and its factor, to which an offset was added; where both are clamped the gate too, and
# its sigmoid. Those of experts are weighted besides (megatron-core 0.16.1, transformer/mlp.py: glu, per_token_scale).
EAGER: dict[type[Op], int] = {GeGLU: 2, ClampedGLU: 4}
CAPABILITY = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, ""))
NORM: Again = frozenset({"layernorm"})


@frozen(eq=False)
class NodeCost:
    """What one node costs, nothing computed again."""

    row: Rows  # [columns]
    again: Rows  # [parts, MODULE_COLUMNS] of it, what modules that are computed again take again and free
    full: float  # bytes that full recompute keeps
    largest: int  # bytes of its largest saved tensor


def node_cost(
    kind: NodeKind,
    parts: tuple[Again, ...],
    found: Costs,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    profile: FrameworkProfile,
) -> NodeCost:
    """What a node costs by these facts."""
    row, precision = np.zeros(len(CostColumn)), workload.precision
    again = Made(parts, kind)
    _compute(row, again, found, cluster, precision, profile)
    _exchange(row, again, found, layout, cluster, precision, profile)
    for s in kind.saved.of(found.saved, found.inputs):
        nbytes = saved_bytes(s, precision, kind.in_recomputed_block)
        row[CostColumn.SAVED] += nbytes
        again.add(CostColumn.SAVED, kind.saved.frees(s), nbytes)
    made = sum(saved_bytes(s, precision) for s in kind.saved_under_full.of(found.saved, found.inputs))
    row[CostColumn.SAVED] += _joined(found, precision) if profile.attention.values_share_qkv else 0
    row[CostColumn.SAVED] += (
        _given(found, precision) if profile.attention.output_copied and layout.micro_batch > 1 else 0
    )
    row[CostColumn.PARAMS], row[CostColumn.EXPERT_PARAMS] = found.params, found.expert_params
    if profile.kernels.only_swiglu_fused:
        for s, n in _eager(kind.node.op, found):
            row[CostColumn.SAVED] += n * saved_bytes(s, precision)
            again.add(CostColumn.SAVED, kind.saved.frees(s), n * saved_bytes(s, precision))
    if not profile.attention.fused:
        for w in (w for w in found.work if w.kind == "attend"):
            row[CostColumn.SAVED] += profile.attention.score_nbytes * w.count * w.m * w.n
            again.add(CostColumn.SAVED, w.again, profile.attention.score_nbytes * w.count * w.m * w.n)
    if kind.has_loss:
        _loss(row, kind.node, layout, workload, cluster, profile)
    return NodeCost(row, again.rows, made, max((saved_bytes(s, precision) for s in found.saved), default=0))


@define(eq=False)
class Made:
    """What modules take again of a node that they compute again, and what they free: [parts, MODULE_COLUMNS]."""

    parts: tuple[Again, ...]
    kind: NodeKind
    rows: Rows = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rows = np.zeros((len(self.parts), len(MODULE_COLUMNS)))

    def add(self, column: CostColumn, again: Again, amount: float) -> None:
        """So much is done again, or freed, by any of these modules."""
        if self.kind.saved.norm and column is not CostColumn.SAVED:
            again = NORM
        if again:
            self.rows[self.parts.index(again), MODULE_COLUMNS.index(column)] += amount


def _joined(found: Costs, precision: Precision) -> int:
    """Bytes of queries and keys before they are turned, which are kept as a part of what values are a part of."""
    turned, before = (
        sum(saved_bytes(s, precision) for s in found.saved if s.what in named) for named in (("rope",), ("q", "k"))
    )
    return max(0, turned - before)


def _eager(op: Op, found: Costs) -> list[tuple[Saved, int]]:
    """What a gated unit's last product reads, and how many tensors like it are kept beside."""
    unit = op.expert if isinstance(op, MoE) else op
    beside = EAGER.get(type(unit), 0)
    return [
        (s, beside + isinstance(op, MoE))
        for s in found.saved
        if beside and s.fusion == "gate" and s.experts == isinstance(op, MoE)
    ]


def _given(found: Costs, precision: Precision) -> int:
    """Bytes of what attention gives."""
    return sum(saved_bytes(s, precision) for s in found.saved if s.what == "attend")


def saved_bytes(s: Saved, precision: Precision, cast: bool = False) -> int:
    """Bytes of a saved tensor, of which products keep what they have cast."""
    if cast and s.product and precision in CAST and s.dtype not in NBYTES:
        return int(s.elements * (precision.nbytes * s.other + CAST[precision]))
    return s.elements * NBYTES.get(s.dtype, precision.nbytes)


def _compute(
    row: Rows, again: Made, found: Costs, cluster: Cluster, precision: Precision, profile: FrameworkProfile
) -> None:
    device = cluster.slowest
    ahead = back = 0.0  # of the host
    for work in found.work:
        took = kernels.kernel_seconds(work, device, precision, profile, inside=again.kind.in_recomputed_block)
        waits = each = 0.0
        launched = took.waits(device, profile)
        if work.kind == "route" and device.units > 1:
            each = _experts(found, precision, profile)
            waits = profile.experts.dispatch_seconds + each
            if profile.experts.padded_tokens:
                launched, waits, each = (launched[0] + waits, launched[1] + waits + each), 0.0, 0.0
        row[CostColumn.FORWARD] += took.forward + waits
        row[CostColumn.BACKWARD] += took.backward + waits + each
        ahead, back = ahead + launched[0], back + launched[1]
        again.add(CostColumn.FORWARD, work.again, max(took.forward + waits, launched[0]))
    row[CostColumn.FORWARD] = max(row[CostColumn.FORWARD], ahead)
    row[CostColumn.BACKWARD] = max(row[CostColumn.BACKWARD], back)
    # Each micro-batch's gradient is added to the main one: a read and a write of that, by a product as it ends, or else
    # by a kernel that reads the gradient too.
    fused = [(w, kernels.fused_gradient_elements(w, profile)) for w in found.work if w.kind == "dot"]
    apart = max(0, found.params + found.expert_params - sum(n for _, n in fused))
    added = (precision.nbytes + 2 * profile.optimizer.gradient_nbytes) * apart
    added += sum(
        2 * profile.optimizer.gradient_nbytes * n - kernels.concurrent_gradient_bytes(w, profile) for w, n in fused
    )
    row[CostColumn.BACKWARD] += profile.kernels.memory_passes.get("gradient", ONE_PASS)[1] * added / device.moves


def _experts(found: Costs, precision: Precision, profile: FrameworkProfile) -> float:
    """Seconds that a layer of experts waits for the host forward, beside its dispatch."""
    products = [w for w in found.work if w.kind == "dot"]
    count = max(w.count for w in products)
    last = [w for w in products if w.count == count][-1]
    biased = any(w.fusion == "bias" and w.experts for w in found.work)
    small = CAPABILITY.groups_experts(last.n * last.k, count, biased, precision)
    each = profile.experts.grouped_launch_seconds if small else None
    return count * (profile.experts.launch_seconds if each is None else each)


def _exchange(
    row: Rows,
    again: Made,
    found: Costs,
    layout: Layout,
    cluster: Cluster,
    precision: Precision,
    profile: FrameworkProfile,
) -> None:
    hidden = {
        "tp": profile.overlap.tensor_hidden * layout.has_overlap(Overlap.TENSOR),
        "ep": profile.overlap.experts_hidden
        * layout.has_overlap(Overlap.EXPERTS)
        * (1 - communication.sm_share(cluster.device)),
    }
    for c in found.collectives:
        nbytes = c.elements * precision.nbytes
        group = communication.process_group(c.axis, layout)
        if c.axis == "cp" and any(w.kind == "attend" for w in found.work):
            took = context_parallel.context_parallel_seconds(
                profile.attention.context_communication, c, found, layout, cluster, precision
            )
        elif c.kind == "all_to_all" and c.axis == "ep" and profile.experts.deduplicated_dispatch:
            took = communication.deduplicated_seconds(nbytes, _copies(again.kind), group, cluster)
        else:
            took = communication.collective_seconds(c.kind, nbytes, group, cluster)
        took *= 1 - hidden.get(c.axis, 0.0)
        ahead, back = AXIS_COLUMNS[c.axis]
        row[back if c.backward else ahead] += took
        if not c.backward:
            again.add(ahead, c.again, took)


def _copies(kind: NodeKind) -> int:
    """To how many experts a token goes."""
    return max((s.value.op.top_k for s in program(kind.node).steps if isinstance(s.value.op, Route)), default=1)


def _loss(
    row: Rows, node: Node, layout: Layout, workload: Workload, cluster: Cluster, profile: FrameworkProfile
) -> None:
    """Cross-entropy of the logits; over a divided vocabulary with the sums of three numbers a token.

    Source: megatron-core 0.16.1, tensor_parallel/cross_entropy.py.
    """
    device, tokens = cluster.device, layout.micro_batch * workload.seq // layout.cp
    moved = profile.kernels.loss_moved_nbytes * local(node, node.shape.dims, layout, workload)
    for col in (CostColumn.FORWARD, CostColumn.BACKWARD):
        row[col] += moved / 2 / device.moves
    group = communication.process_group("tp", layout)
    row[CostColumn.TP_FORWARD] += 3 * communication.collective_seconds(
        "all_reduce", NBYTES[DType.FLOAT32] * tokens, group, cluster
    )
