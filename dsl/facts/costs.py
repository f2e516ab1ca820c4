"""The costs of one node on one device, for one micro-batch: work, collectives, saved activations, parameters.

`costs(node, batch=, seq=, split=)` sums over the primitives of a node. All counts are exact integers, of elements or
FLOPs. The precision of a workload, which a model does not know, turns elements into bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from attrs import evolve, frozen

from megaloom.dsl.dims import Dim, Shape, Sizes
from megaloom.dsl.errors import UserError
from megaloom.dsl.node import Node
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.loss import CrossEntropy, LossSums, StackLosses, is_loss
from megaloom.dsl.ops.sequence import Scan
from megaloom.dsl.ops.shape import Rename, Select, Slice
from megaloom.dsl.ops.weight import Input, Lookup, PositionLookup, Weight
from megaloom.dsl.sharding_table import (
    SEQUENCES,
    WHOLE,
    Local,
    Split,
)
from megaloom.dsl.value import Fusion, Value

from .collectives import Collective, collectives, gathers_sequence
from .primitives import Program, Step, effective_split, fitted, fusion_of, program, separate_ops
from .recompute import (
    CORE,
    NO_MODULES,
    RecomputedBy,
    modules_of_ops,
)
from .saved import (
    Saved,
    saved_inputs,
    saved_parts,
    saved_tensors,
    selected_modules,
)
from .separate_ops import Traffic, is_separate, traffic

__all__ = ["Collective", "Costs", "Saved", "Split", "Work", "costs", "saved"]

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


@frozen
class Costs:
    """Costs of one graph node on one device, for one micro-batch. Each node counts the weights that it shares.

    saved: the tensors that its backward pass reads. inputs: its inputs. `saved_parts` says which of them count for it.
    gathers_sequence: each context-parallel rank runs its convolutions and scans along whole sequences.
    params, expert_params: elements of trained weights, dense and of experts. frozen_params: elements of frozen weights.
    """

    work: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    saved: tuple[Saved, ...]
    inputs: tuple[Saved, ...]
    params: int
    expert_params: int
    gathers_sequence: bool = False
    frozen_params: int = 0


def saved(
    nodes: Iterable[Node],
    *,
    batch: int,
    seq: int,
    source: int | None = None,
    split: Split = WHOLE,
    recompute: str = "none",
    modules: Iterable[str] = CORE,
) -> tuple[Saved, ...]:
    """Return the tensors that these graph nodes save for the backward pass on one device, each distinct tensor once.

    nodes: of a model or a part of it, in program order. modules: what selective recompute recomputes. Raises UserError
    for an unknown recompute mode.
    """
    selected = selected_modules(recompute, modules)
    return tuple(
        s
        for node, part in saved_parts(nodes, recompute)
        for cost in (costs(node, batch=batch, seq=seq, source=source, split=split),)
        for s in part.tensors(cost.saved, cost.inputs, selected)
    )


def costs(
    node: Node,
    *,
    batch: int,
    seq: int,
    source: int | None = None,
    split: Split = WHOLE,
    losses: bool = True,
    separate: bool = False,
) -> Costs:
    """Return the costs of one graph node on one device, for a micro-batch of this many sequences.

    source: tokens of each sequence that an encoder reads, `seq` if not given. Routing is taken to be balanced: every
    expert gets equally many tokens. losses: with False, costs of a loss are without those of cross-entropies of its
    inputs, and without the logits and labels that it saves. separate: torch runs the ops of the node's body one by
    one. Nodes of equal layers and shapes are computed once.
    """
    p, source = program(node), seq if source is None else source
    function = _costs if losses or not is_loss(p.value) else _rest
    return function(p, batch, seq, source, split, separate)


@lru_cache(maxsize=1 << 12)
def _rest(p: Program, batch: int, seq: int, source: int, split: Split, separate: bool) -> Costs:
    """Return the costs of a loss without those of cross-entropies of its inputs."""
    facts, logits = _costs(p, batch, seq, source, split, separate), logits_ports(p)
    if not logits:
        return facts
    ports = {*logits, *(i for i, v in enumerate(p.inputs) if isinstance(v.source.op, Input))}
    return evolve(
        facts,
        work=tuple(w for w in facts.work if w.kind != "crossentropy"),
        collectives=tuple(c for c in facts.collectives if c.what != "crossentropy"),
        saved=tuple(s for s in facts.saved if s.port not in ports),
    )


def logits_ports(p: Program) -> tuple[int, ...]:
    """Return the inputs of a node of which it computes the cross-entropy, one for each cross-entropy."""
    ports = {id(v.source): i for i, v in reversed(list(enumerate(p.inputs)))}
    logits = (id(s.value.args[0].source) for s in p.steps if isinstance(s.value.op, CrossEntropy))
    return tuple(ports[i] for i in logits if i in ports)


@lru_cache(maxsize=1 << 15)
def _costs(p: Program, batch: int, seq: int, source: int, split: Split, separate: bool) -> Costs:
    split = effective_split(p, split)
    p, sizes = fitted(p, split), Sizes(batch=batch, seq=seq, source=source)
    p = separate_ops(p) if separate else p
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {size!r}")
    renames = [s.value.op for s in p.steps if isinstance(s.value.op, Rename)]
    sizes.update({op.new: sizes[op.old] for op in renames if op.old in sizes})
    dense, expert = _params(p, p.weights, sizes, split)
    gathers = separate and gathers_sequence(p, split)
    return Costs(
        work=tuple(_work(p, sizes, split)),
        collectives=collectives(p, sizes, split, gathers=gathers),
        saved=tuple(saved_tensors(p, sizes, split)),
        inputs=tuple(saved_inputs(p, sizes, split)),
        params=dense,
        expert_params=expert,
        gathers_sequence=gathers,
        frozen_params=sum(_params(p, p.frozen, sizes, split)),
    )


def _params(
    p: Program, weights: Iterable[tuple[tuple[Dim, ...], Shape]], sizes: Sizes, split: Split
) -> tuple[int, int]:
    """Return the elements of weights of a node on one device: (dense, of experts)."""
    out = {False: 0, True: 0}
    for outer, shape in weights:
        n = p.local_elements(shape, outer, sizes, split) // p.head_copies(shape, outer, split)
        out[p.table.among_experts(outer)] += n
    return out[False], out[True]


def _work(p: Program, sizes: Sizes, split: Split) -> Iterator[Work]:
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
