"""The work of the primitives of a node on one device: FLOPs, elements read and written, shapes of products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attrs import frozen

from megaloom.dsl.dims import Sizes
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import SEQUENCES, Local, Split
from megaloom.dsl.value import Fusion, Value
from megaloom.dsl.work_kinds import Traffic, WorkKind

from .primitives import Program, Step, fusion_of
from .recompute import NO_MODULES, RecomputedBy, modules_of_ops
from .separate_ops import traffic


@frozen
class Work:
    """The work of one primitive on one device. A chain of pointwise ops is one piece of work.

    elements: read and written in the forward pass; a chain reads its inputs and writes its output. recomputed_by: the
    modules that recompute it. fusion: its fusion group. experts: experts compute it. A product is `count` products of
    [m, k] with [k, n]; `count` is 0 for other work. Attention has m queries, n keys and k channels. A scan has `count`
    heads of m positions, n states and k channels. Where torch runs ops one by one (`separate` of `costs`),
    forward_elements and backward_elements are what all kernels around this primitive read and write, forward_kernels
    and backward_kernels their numbers, beside the product, the attention core or the scan; whole: there is none.
    """

    kind: WorkKind
    path: str
    flops: int
    dgrad: int
    wgrad: int
    elements: int
    recomputed_by: RecomputedBy = NO_MODULES
    fusion: Fusion | None = None
    experts: bool = False
    count: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    forward_elements: int = 0
    backward_elements: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    whole: bool = False


def work_of(p: Program, sizes: Sizes, split: Split) -> Iterator[Work]:
    """Yield the work of the primitives of a node."""
    for step in p.steps:
        v = step.value
        if v.op.work_kind is WorkKind.NONE or id(v) in p.fused:
            continue
        local = step.at(sizes, split)
        forward, dgrad, wgrad = _flops(p, step, local, split)
        count, m, n, k = _extents(step, local, split)
        moved, whole = traffic(p, step, partial(_elements, step, local, split)) if p.separate else (Traffic(), False)
        yield Work(
            kind=v.op.work_kind,
            path=step.name,
            flops=forward,
            dgrad=dgrad,
            wgrad=wgrad,
            elements=sum(_touched(step, x, local, split) for x in (*_reads(p, step), v)),
            recomputed_by=modules_of_ops(p)[id(v)],
            fusion=fusion_of(v.op),
            experts=step.table.among_experts(step.outer),
            count=count,
            m=m,
            n=n,
            k=k,
            forward_elements=moved.forward,
            backward_elements=moved.backward,
            forward_kernels=moved.forward_kernels,
            backward_kernels=moved.backward_kernels,
            whole=whole,
        )


def _elements(step: Step, local: Local, split: Split, x: Value) -> int:
    return _touched(step, x, local, split)


def _touched(step: Step, x: Value, local: Local, split: Split) -> int:
    """Return the elements of a tensor that a device reads or writes. Gates span all experts on every device."""
    if "ep" in step.axes.values():
        own = step.table.axes(step.outer, x.shape)
        whole = {name for name, axis in step.axes.items() if axis == "ep" and name not in own}
        local = step.at(local, split, whole=whole)
    n = local((*step.outer, *x.shape))
    return n * split.cp if x in step.gathered(split) else n


def _flops(p: Program, step: Step, local: Local, split: Split) -> tuple[int, int, int]:
    """Return the FLOPs of (forward, dgrad, wgrad). The gradient of each argument costs as much as the forward pass."""
    v = step.value
    shapes = tuple(a.shape for a in v.args)
    if v.op.work_kind is WorkKind.ATTENTION:  # a device has its shard of the queries and all keys
        local = step.at(local, split, whole=SEQUENCES)
        shares = split.cp if SEQUENCES & step.axes.keys() else 1
        forward = -(-v.op.flops(v.shape, shapes, local) * local(step.outer) // shares)
        return forward, 2 * forward, 0
    forward = v.op.flops(v.shape, shapes, local) * local(step.outer)
    if v.op.work_kind.is_scan:
        return forward, 2 * forward, 0
    activations = sum(not isinstance(a.op, Weight) and id(a.source) not in p.data for a in v.args)
    return forward, forward * activations, forward * len(step.weights)


def _extents(step: Step, local: Local, split: Split) -> tuple[int, int, int, int]:
    """Return (count, m, n, k) of work that has FLOPs, as in `Work`; zeros for other work."""
    v = step.value
    if not v.op.work_kind.has_flops:
        return 0, 0, 0, 0
    e = v.op.extents(v)
    keys = split.cp if step.gathered(split) else 1
    return local((*step.outer, *e.count)), local(e.m), local(e.n) * keys, local(e.k)


def _reads(p: Program, step: Step) -> Iterator[Value]:
    """Yield the distinct tensors that a piece of work reads; for rows of a table, its result, which is as large."""
    v = step.value
    if any(reads.rows for reads in step.reads):
        yield v
        return
    seen: set[int] = set()
    for a in v.args:
        for x in p.entries(a):
            if id(x.source) not in seen:
                seen.add(id(x.source))
                yield x
