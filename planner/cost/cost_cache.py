"""What one node of each kind costs: looked up once for all layouts under which it costs the same.

Protocol: `CostCache.base(layout)` has the costs of every kind. A node costs the same under layouts that divide it alike, and
most see of a micro-batch only its tokens; what the facts count is affine in these, so that two counts give all others.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
from attrs import define, evolve, field, fields, frozen

from megaloom.dsl.dims import Shape
from megaloom.dsl.facts.costs import Costs, costs
from megaloom.dsl.facts.primitives import Program, program
from megaloom.dsl.graph import Node
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Drop, Normalize
from megaloom.dsl.ops.routing import Combine, Gate, Route
from megaloom.dsl.ops.shape import Select
from megaloom.dsl.ops.weight import Input, Lookup, Weight
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.dsl.value import (
    Affine,
    Clamp,
    Op,
    Pointwise,
)
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import (
    Column,
    Layouts,
    Rows,
    alike,
)
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.model.structure import ModelStructure

from .cost_table import (
    BareTable,
    factors,
    loss,
    shared,
    split_of,
)
from .node_cost import NodeCost, node_cost, saved_bytes
from .profiles.groups import FrameworkProfile

# Transformer Engine's workspace, before Hopper and since; products by several experts have one for each stream
# (transformer_engine/pytorch/module/base.py: get_cublas_workspace_size_bytes, get_multi_stream_cublas_workspace).
ENGINE = {False: 2**22, True: 2**25}
# To overlap tensor-parallel exchanges it has a buffer of a micro-batch's hidden states for each product that gathers
# them and for each that reduces them, the former in 8 bits where products are, and two workspaces more, for streams
# (initialize_ub there, and Megatron-LM's _initialize_tp_communicators).
GATHERING, REDUCING, STREAMS = 6, 4, 3
APART = (Affine, Clamp, Combine, Dot, Drop, Gate, Input, Lookup, Normalize, Select, Pointwise, Route, Weight)
"""What may treat each token for itself."""


@frozen
class Reach:
    """What of a layout a kind of node sees."""

    experts: bool  # the axes of experts
    apart: bool  # of a micro-batch its tokens on a device, however many sequences they are of
    share: int  # of so many tokens every expert gets a whole number


# A value, what of it does not depend on the tokens, and each number that does, with what it is more for as many again.
Part = tuple[Any, dict[str, Any], dict[str, tuple[int, int]]]


@frozen(eq=False)
class Facts:
    """The facts of a node as they follow from its tokens: two counts, in which each expert gets whole tokens."""

    tokens: int  # of the one count; the other has twice as many
    plain: Costs
    parts: tuple[tuple[str, tuple[Part, ...]], ...]

    @classmethod
    def of(cls, one: Costs, two: Costs, tokens: int) -> Facts:
        """What follows from these two counts."""
        pairs = ((name, zip(getattr(one, name), getattr(two, name), strict=True)) for name in COUNTED)
        return cls(tokens, one, tuple((name, tuple(_part(a, b) for a, b in each)) for name, each in pairs))

    def at(self, tokens: int) -> Costs:
        """The facts for so many tokens. What is not whole is rounded up, as the facts do."""
        more, first = tokens - self.tokens, self.tokens
        lists: dict[str, Any] = {
            name: tuple(
                type(a)(**names, **{k: -(-(x * first + d * more) // first) for k, (x, d) in slopes.items()})
                if slopes
                else a
                for a, names, slopes in each
            )
            for name, each in self.parts
        }
        return Costs(**lists, params=self.plain.params, expert_params=self.plain.expert_params)

    def largest(self, tokens: int, precision: Precision) -> float:
        """Bytes of the largest saved tensor."""
        more = tokens / self.tokens - 1
        saved = dict(self.parts)["saved"]
        return max((saved_bytes(a, precision) * (1 + more * bool(slopes)) for a, _, slopes in saved), default=0)


COUNTED = ("work", "collectives", "saved", "inputs")


def _part(a: Any, b: Any) -> Part:
    values = {f.name: getattr(a, f.name) for f in fields(type(a))}
    slopes = {
        k: (x, getattr(b, k) - x) for k, x in values.items() if type(x) is int and k != "port" and getattr(b, k) != x
    }
    return a, {k: x for k, x in values.items() if k not in slopes}, slopes


@define(eq=False)
class CostCache:
    """The costs of one model's kinds of nodes on one cluster."""

    structure: ModelStructure
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile
    _reach: list[Reach] = field(init=False)
    _counts: dict[tuple[object, ...], Facts] = field(factory=dict, init=False)
    _lines: dict[tuple[object, ...], NodeCost] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._reach = [reach(kind.node) for kind in self.structure.kinds]

    def base(self, layout: Layout) -> BareTable:
        """The costs of each kind of node when nothing is computed again."""
        lines = [self.node_cost(i, layout) for i in range(len(self.structure.kinds))]
        return BareTable(
            rows=np.array([line.row for line in lines]),
            again=np.array([line.again for line in lines]),
            full=np.array([line.full for line in lines]),
            largest=max(line.largest for line in lines),
            library=self.library + self._dummies(layout) + self._shared_buffers(layout),
            loss=loss(self.structure, layout, self.workload, self.profile.kernels.loss_saved_nbytes),
        )

    @property
    def library(self) -> int:
        """Bytes that cuBLAS works in, and buffers that are there whatever is trained."""
        used, device = self.profile, self.cluster.device
        streams = used.buffers.grouped_streams if any(seen.experts for seen in self._reach) else 0
        engine = ENGINE["fp8" in device.flops] * (used.buffers.engine_workspace + streams)
        return used.buffers.cublas_workspaces * device.library_nbytes + engine + used.buffers.bucket_nbytes

    def _dummies(self, layout: Layout) -> int:
        """Bytes that stand for the gradients of products' weights."""
        if not self.profile.kernels.wgrad_fusion:
            return 0
        return self.workload.precision.nbytes * factors(self.structure, layout, self.workload)

    def _shared_buffers(self, layout: Layout) -> int:
        """Bytes through which devices exchange their parts of tensors while they compute."""
        if not (layout.has_overlap(Overlap.TENSOR) and self.profile.buffers.tensor_overlap_buffers):
            return 0
        precision, tokens = self.workload.precision, layout.micro_batch * self.workload.seq // layout.cp
        each = GATHERING * (1 if precision.narrow else precision.nbytes) + REDUCING * precision.nbytes
        return each * tokens * self.structure.hidden_size + (STREAMS - 1) * ENGINE["fp8" in self.cluster.device.flops]

    def rows(self, x: Layouts) -> tuple[Rows, Rows, Rows, Rows]:
        """The rows, the parts' share of them, what full recompute keeps and the largest saved tensor, of many layouts.

        [layouts, kinds, columns], [layouts, kinds, parts, MODULE_COLUMNS], [layouts, kinds], [layouts, kinds]
        """
        out, alike = [], self._alike(x)
        for i, seen in enumerate(self._reach):
            first, which = alike[seen.experts, seen.apart]
            lines = [self.node_cost(i, x[int(k)]) for k in first]
            columns = ([getattr(n, name) for n in lines] for name in ("row", "again", "full", "largest"))
            out.append([np.array(column, dtype=float)[which] for column in columns])
        rows, again, full, largest = (np.stack(column, axis=1) for column in zip(*out, strict=True))
        return rows, again, full, largest

    def largest(self, x: Layouts) -> Rows:
        """Bytes of the largest saved tensor of each of many layouts, sooner than its costs."""
        out, alike = np.zeros(len(x)), self._alike(x)
        for i, seen in enumerate(self._reach):
            first, which = alike[seen.experts, seen.apart]
            sizes = []
            for layout, workload in (self._seen(i, x[int(k)]) for k in first):
                tokens = layout.micro_batch * workload.seq
                sizes.append(self._counted(i, layout, workload).largest(tokens, workload.precision))
            out = np.maximum(out, np.array(sizes, dtype=float)[which])
        return out

    def _alike(self, x: Layouts) -> dict[tuple[bool, bool], tuple[Column, Column]]:
        """The layouts that kinds see differences between, and which of them each is like; by `experts` and `apart`."""
        tokens = {True: (x.micro_batch * (self.workload.seq // x.cp),), False: (x.micro_batch, x.cp)}
        experts: dict[bool, tuple[Column, ...]] = {
            True: (x.ep, x.etp, x.microbatch_overlap_bits),
            False: (x.has_overlap(Overlap.TENSOR).astype(np.int64),),
        }
        return {
            (of, apart): alike(x.tp, x.sequence_parallel, *tokens[apart], *experts[of])
            for of, apart in {(seen.experts, seen.apart) for seen in self._reach}
        }

    def shared(self, layout: Layout) -> tuple[int, ...]:
        """The elements of each shared weight on a device."""
        return shared(self.structure, layout, self.workload)

    def node_cost(self, i: int, layout: Layout) -> NodeCost:
        """The costs of one kind of node."""
        layout, workload = self._seen(i, layout)
        x = layout
        key = (i, x.tp, x.cp, x.ep, x.etp, x.sequence_parallel, x.micro_batch, x.overlaps, workload.seq)
        if key not in self._lines:
            found = self._counted(i, layout, workload).at(layout.micro_batch * workload.seq)
            kind, parts = self.structure.kinds[i], self.structure.recompute_parts
            self._lines[key] = node_cost(kind, parts, found, layout, workload, self.cluster, self.profile)
        return self._lines[key]

    def _seen(self, i: int, layout: Layout) -> tuple[Layout, Workload]:
        """The simplest layout and workload under which a kind costs the same."""
        x, seen, workload = layout, self._reach[i], self.workload
        ep, etp = (x.ep, x.etp) if seen.experts else (1, 1)
        inner = x.microbatch_overlap_bits if seen.experts else x.microbatch_overlap_bits & Overlap.TENSOR.bit
        cp, micro = x.cp, x.micro_batch
        if seen.apart and workload.seq % cp == 0:
            workload = evolve(workload, seq=micro * (workload.seq // cp))
            cp = micro = 1
        same = Layout(
            tp=x.tp,
            cp=cp,
            ep=ep,
            etp=etp,
            sequence_parallel=x.sequence_parallel,
            micro_batch=micro,
            overlaps=OverlapSet(inner),
        )
        return same, workload

    def _counted(self, i: int, layout: Layout, workload: Workload) -> Facts:
        """The facts of a node under a split."""
        where = (i, layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
        if where not in self._counts:
            node, split = self.structure.kinds[i].node, split_of(layout)
            batch = layout.micro_batch * self._reach[i].share
            one, two = (costs(node, batch=n, seq=workload.seq, split=split) for n in (batch, 2 * batch))
            self._counts[where] = Facts.of(one, two, batch * workload.seq)
        return self._counts[where]


def reach(node: Node) -> Reach:
    """What of a layout this node sees."""
    p = program(node)
    dims = [d for step in p.steps for v in (step.value, *step.value.args) for d in (*step.outer, *v.shape)]
    experts = any(step.table.axis(d) == "ep" for step in p.steps for d in (*step.outer, *step.value.shape))
    apart = all(_apart(step.value.op, step.value.shape) for step in p.steps) and _tokens(p)
    return Reach(experts, apart, lcm(*(d.share.denominator for d in dims)))


def _apart(op: Op, shape: Shape) -> bool:
    over = op.over if isinstance(op, Normalize) else (op.dim,) if isinstance(op, Select) else ()
    return isinstance(op, APART) and not SEQUENCES & set(over) and "source" not in shape


def _tokens(p: Program) -> bool:
    """Whether all tensors but weights have both batch and seq, or slots made of them."""
    tensors = [v for step in p.steps for v in (step.value, *step.value.args) if not isinstance(v.source.op, Weight)]
    shapes = [v.shape for v in tensors if not isinstance(v.op, Select) or not isinstance(v.args[0].source.op, Weight)]
    return all(("batch" in s and "seq" in s) or any(d.of for d in s) for s in shapes)
