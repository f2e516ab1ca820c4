"""The work of the primitives of a node on one device: FLOPs, elements read and written, shapes of products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attrs import frozen

from megaloom.dsl.dims import Sizes
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.loss import LossSums, StackLosses
from megaloom.dsl.ops.sequence import Scan
from megaloom.dsl.ops.shape import Rename, Select, Slice
from megaloom.dsl.ops.weight import Input, Lookup, PositionLookup, Weight
from megaloom.dsl.sharding_table import SEQUENCES, Local, Split
from megaloom.dsl.value import Fusion, Value

from .primitives import Program, Step, fusion_of
from .recompute import NO_MODULES, RecomputedBy, modules_of_ops
from .separate_ops import Traffic, is_separate, traffic

# No work: the tensor is there already, or has no more than a number for each token.
VIEWS = (Weight, Input, Select, Rename, Slice, LossSums, StackLosses)


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

    kind: str
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
        if isinstance(v.op, VIEWS) or id(v) in p.fused:
            continue
        local = step.at(sizes, split)
        forward, dgrad, wgrad = _flops(p, step, local, split)
        count, m, n, k = _product(step, local, split)
        moved = traffic(p, step, partial(_elements, step, local, split)) if p.separate else Traffic()
        yield Work(
            kind=type(v.op).__name__.lower(),
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
            whole=p.separate and is_separate(v),
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
    if isinstance(v.op, Attend):  # a device has its shard of the queries and all keys
        local = step.at(local, split, whole=SEQUENCES)
        shares = split.cp if SEQUENCES & step.axes.keys() else 1
        forward = -(-v.op.flops(v.shape, shapes, local) * local(step.outer) // shares)
        return forward, 2 * forward, 0
    forward = v.op.flops(v.shape, shapes, local) * local(step.outer)
    if isinstance(v.op, Scan):
        return forward, 2 * forward, 0
    activations = sum(not isinstance(a.op, Weight) and id(a.source) not in p.data for a in v.args)
    return forward, forward * activations, forward * len(step.weights)


def _product(step: Step, local: Local, split: Split) -> tuple[int, int, int, int]:
    """Return (count, m, n, k) of a matrix product or an attention core, as in `Work`; zeros for other work."""
    v = step.value
    match v.op:
        case Dot(over):
            x, w = (a.shape for a in v.args)
            both = [d for d in x if d.name in w and d.name not in over]
            names = [*over, *(d.name for d in both)]
            count = local((*step.outer, *both))
            return count, local(x.without(*names)), local(w.without(*names)), local(x[name] for name in over)
        case Attend():
            q, k = v.args[0].shape, v.args[1].shape
            heads = [d for d in q if d.name in ("batch", "heads")]
            queries = local(q.without("batch", "heads", "head_dim"))
            keys = local(k.without("batch", "kv_heads", "head_dim")) * (split.cp if step.gathered(split) else 1)
            return local(heads), queries, keys, local.of(q["head_dim"])
        case Scan(along):
            x, b = v.shape, v.args[3].shape
            return (
                local(x.without(along, "head_dim")),
                local.of(x[along]),
                local.of(b["state"]),
                local.of(x["head_dim"]),
            )
    return 0, 0, 0, 0


def _reads(p: Program, step: Step) -> Iterator[Value]:
    """Yield the distinct tensors that a piece of work reads. From a table it reads as many elements as it writes."""
    v = step.value
    if isinstance(v.op, Lookup | PositionLookup):
        yield v
        return
    seen: set[int] = set()
    for a in v.args:
        for x in p.entries(a):
            if id(x.source) not in seen:
                seen.add(id(x.source))
                yield x
