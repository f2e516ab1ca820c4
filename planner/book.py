"""What one node of each kind costs: looked up once for all layouts under which it costs the same.

Protocol: `Book.base(layout)` has the costs of every kind. A node costs the same under layouts that divide it alike, and
most see of a micro-batch only its tokens; what the facts count is affine in these, so that two counts give all others.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, lcm
from typing import Any

import numpy as np
from attrs import define, evolve, field, fields, frozen

from megaloom.dsl.dims import DType, Shape
from megaloom.dsl.facts import Costs, costs
from megaloom.dsl.graph import Node
from megaloom.dsl.keep import Keeps, Saved
from megaloom.dsl.keep import Recompute as Mode
from megaloom.dsl.ops import Dot, Drop, Input, Lookup, Normalize, Weight
from megaloom.dsl.program import Program, program
from megaloom.dsl.routing import Combine, Gate, Route
from megaloom.dsl.splits import SEQUENCES
from megaloom.dsl.value import Affine, Clamp, Op, Pointwise
from megaloom.dsl.views import Pick

from . import kernels, traffic
from .cluster import Cluster
from .layout import Layout, Precision, Workload
from .practice import Practice
from .sheet import NBYTES, TRAFFIC, Anatomy, Base, Col, Kind, Rows, local, split_of

# Without a fused kernel each score is kept thrice: softmaxed, its dropout's mask, dropped (Korthikanti et al.,
# arXiv:2205.05198, section 4.1).
SCORES = 2 + 1 + 2
APART = (Affine, Clamp, Combine, Dot, Drop, Gate, Input, Lookup, Normalize, Pick, Pointwise, Route, Weight)
"""What may treat each token for itself."""


@frozen(eq=False)
class Line:
    """What one node costs, nothing computed again."""

    row: Rows  # [columns]
    core: Rows  # of the core of attention: forward kernels, forward collectives, saved bytes
    full: float  # bytes that full recompute keeps
    largest: int  # bytes of its largest saved tensor


@frozen
class Reach:
    """What of a layout a kind of node sees."""

    experts: bool  # the axes of experts
    apart: bool  # of a micro-batch its tokens on a device, however many sequences they are of
    share: int  # of so many tokens every expert gets a whole number


@define(eq=False)
class Book:
    """The costs of one model's kinds of nodes on one cluster."""

    anatomy: Anatomy
    workload: Workload
    cluster: Cluster
    practice: Practice
    _reach: list[Reach] = field(init=False)
    _counts: dict[tuple[object, ...], tuple[int, Costs, Costs]] = field(factory=dict, init=False)
    _lines: dict[tuple[object, ...], Line] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._reach = [reach(kind.node) for kind in self.anatomy.kinds]

    def base(self, layout: Layout) -> Base:
        """The costs of each kind of node when nothing is computed again."""
        lines = [self.line(i, layout) for i in range(len(self.anatomy.kinds))]
        return Base(
            rows=np.array([line.row for line in lines]),
            core=np.array([line.core for line in lines]),
            full=np.array([line.full for line in lines]),
            largest=max(line.largest for line in lines),
            library=self.practice.libraries * self.cluster.device.library_nbytes,
        )

    def line(self, i: int, layout: Layout) -> Line:
        """The costs of one kind of node."""
        layout, workload = self._seen(i, layout)
        where = (i, layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
        key = (*where, layout.micro_batch, workload.seq)
        if key not in self._lines:
            found = self._counted(where, i, layout, workload)
            self._lines[key] = line(self.anatomy.kinds[i], found, layout, workload, self.cluster, self.practice)
        return self._lines[key]

    def _seen(self, i: int, layout: Layout) -> tuple[Layout, Workload]:
        """The simplest layout and workload under which a kind costs the same."""
        x, seen, workload = layout, self._reach[i], self.workload
        ep, etp = (x.ep, x.etp) if seen.experts else (1, 1)
        cp, micro = x.cp, x.micro_batch
        if seen.apart and workload.seq % cp == 0:
            workload = evolve(workload, seq=micro * (workload.seq // cp))
            cp = micro = 1
        same = Layout(tp=x.tp, cp=cp, ep=ep, etp=etp, sequence_parallel=x.sequence_parallel, micro_batch=micro)
        return same, workload

    def _counted(self, where: tuple[object, ...], i: int, layout: Layout, workload: Workload) -> Costs:
        """The facts of a node, from two counts of the same split in which each expert gets whole tokens."""
        now = layout.micro_batch * workload.seq
        if where not in self._counts:
            node, split = self.anatomy.kinds[i].node, split_of(layout)
            batch = layout.micro_batch * self._reach[i].share
            one, two = (costs(node, batch=n, seq=workload.seq, split=split) for n in (batch, 2 * batch))
            self._counts[where] = (batch * workload.seq, one, two)
        first, one, two = self._counts[where]
        return between(one, two, Fraction(now - first, first))


def reach(node: Node) -> Reach:
    """What of a layout this node sees."""
    p = program(node)
    dims = [d for step in p.steps for v in (step.value, *step.value.args) for d in (*step.outer, *v.shape)]
    experts = any(step.table.get(d.name) == "ep" for step in p.steps for d in (*step.outer, *step.value.shape))
    apart = all(_apart(step.value.op, step.value.shape) for step in p.steps) and _tokens(p)
    return Reach(experts, apart, lcm(*(d.share.denominator for d in dims)))


def _apart(op: Op, shape: Shape) -> bool:
    over = op.over if isinstance(op, Normalize) else (op.dim,) if isinstance(op, Pick) else ()
    return isinstance(op, APART) and not SEQUENCES & set(over) and "source" not in shape


def _tokens(p: Program) -> bool:
    """Whether all tensors but weights have both batch and seq, or slots made of them."""
    tensors = [v for step in p.steps for v in (step.value, *step.value.args) if not isinstance(v.source.op, Weight)]
    shapes = [v.shape for v in tensors if not isinstance(v.op, Pick) or not isinstance(v.args[0].source.op, Weight)]
    return all(("batch" in s and "seq" in s) or any(d.of for d in s) for s in shapes)


def between(one: Costs, two: Costs, more: Fraction) -> Costs:
    """The costs of `1 + more` times the tokens of `one`, of which `two` has twice as many."""

    def mix(a: Any, b: Any) -> Any:
        changes = {
            name: ceil(x + more * (y - x))
            for name in (f.name for f in fields(type(a)))
            if type(x := getattr(a, name)) is int and name not in FIXED and x != (y := getattr(b, name))
        }
        return evolve(a, **changes) if changes else a

    def each(name: str) -> tuple[Any, ...]:
        return tuple(mix(a, b) for a, b in zip(getattr(one, name), getattr(two, name), strict=True))

    lists: dict[str, Any] = {name: each(name) for name in ("work", "collectives", "saved", "inputs")}
    return evolve(one, **lists)


FIXED = ("port",)  # a number that counts nothing


def line(kind: Kind, found: Costs, layout: Layout, workload: Workload, cluster: Cluster, practice: Practice) -> Line:
    """What a node costs by these facts."""
    row, core, precision = np.zeros(len(Col)), np.zeros(3), workload.precision
    _compute(row, core, found, cluster, precision, practice, kind)
    _exchange(row, core, found, layout, cluster, precision, practice)
    modes: tuple[tuple[Keeps, Mode], ...] = (kind.keeps, "none"), (kind.keeps, "selective"), (kind.full, "full")
    kept, cored, made = (
        sum(_nbytes(s, precision) for s in how.of(found.saved, found.inputs, mode)) for how, mode in modes
    )
    row[Col.SAVED], core[2] = kept, kept - cored
    row[Col.PARAMS], row[Col.EXPERT_PARAMS] = found.params, found.expert_params
    if not practice.flash:
        scores = SCORES * sum(w.count * w.m * w.n for w in found.work if w.kind == "attend")
        row[Col.SAVED] += scores
        core[2] += scores
    if kind.ends:
        _loss(row, kind.node, layout, workload, cluster, practice)
    return Line(row, core, made, max((_nbytes(s, precision) for s in found.saved), default=0))


def _nbytes(s: Saved, precision: Precision) -> int:
    return s.elements * NBYTES.get(s.dtype, precision.nbytes)


def _compute(
    row: Rows, core: Rows, found: Costs, cluster: Cluster, precision: Precision, practice: Practice, kind: Kind
) -> None:
    device = cluster.device
    for work in found.work:
        took = kernels.seconds(work, device, precision, practice, inside=kind.inside)
        if work.kind == "route":
            row[Col.FORWARD] += practice.dispatch_seconds
            row[Col.BACKWARD] += practice.dispatch_seconds
        row[Col.FORWARD] += took.forward
        row[Col.BACKWARD] += took.backward
        core[0] += took.forward * work.core
    # Each micro-batch's gradient is added to the main one: a read of it, a read and a write of the buffer.
    added = (precision.nbytes + 2 * practice.gradient_nbytes) * (found.params + found.expert_params)
    row[Col.BACKWARD] += added / (device.bandwidth * device.bandwidth_efficiency)


def _exchange(
    row: Rows,
    core: Rows,
    found: Costs,
    layout: Layout,
    cluster: Cluster,
    precision: Precision,
    practice: Practice,
) -> None:
    hidden = {"tp": practice.hidden_tensor, "ep": practice.hidden_experts}
    for c in found.collectives:
        nbytes = c.elements * precision.nbytes
        took = traffic.seconds(c.kind, nbytes, traffic.group(c.axis, layout), cluster)
        took *= 1 - hidden.get(c.axis, 0.0)
        row[TRAFFIC[c.axis][c.backward]] += took
        core[1] += took * c.core


def _loss(row: Rows, node: Node, layout: Layout, workload: Workload, cluster: Cluster, practice: Practice) -> None:
    """Cross-entropy of the logits; over a divided vocabulary with the sums of three numbers a token.

    Source: megatron-core 0.16.1, tensor_parallel/cross_entropy.py.
    """
    device, tokens = cluster.device, layout.micro_batch * workload.seq // layout.cp
    moved = practice.loss_nbytes * local(node, node.shape.dims, layout, workload)
    for col in (Col.FORWARD, Col.BACKWARD):
        row[col] += moved / 2 / (device.bandwidth * device.bandwidth_efficiency)
    group = traffic.group("tp", layout)
    row[Col.TP_FORWARD] += 3 * traffic.seconds("all_reduce", NBYTES[DType.FLOAT32] * tokens, group, cluster)
