"""What the backward pass reads, and what of it is kept rather than computed again.

Protocol: `tensors(program, sizes, split)` are those of one node on one device. Several nodes may read one tensor:
`keeps(nodes, recompute)` says in which of them it counts, so that a sum over nodes has each distinct tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, get_args

from attrs import frozen

from megaloom.dsl.dims import (
    Dim,
    DType,
    Shape,
    Sizes,
)
from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.graph import Node
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.routing import Combine
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import Split
from megaloom.dsl.value import Fusion, Value

from .primitives import (
    Program,
    Step,
    fusion_of,
    origin,
    program,
)
from .recompute import (
    CORE,
    NONE,
    Again,
    again,
    modules,
    norm,
)

# What is computed again: nothing, some modules, or all but what enters each block (an iteration of a repeat).
# Source: Korthikanti et al., arXiv:2205.05198, where it is the core of attention.
Recompute = Literal["none", "selective", "full"]


@frozen
class Saved:
    """A tensor that the backward pass reads, as one device holds it.

    port: which of the node's inputs it is (by position in `Node.inputs`), -1 its output, None neither. An input belongs
    to the node that reads it in its backward pass; where two do (or the node that made it), `saved` counts it once.
    again: the modules any of which make it again, and so need not keep it. product, other: whether a product with a
    weight reads it, which may do with a copy in fewer bits, and whether something else does.
    """

    elements: int
    dtype: DType
    what: str
    again: Again = NONE
    port: int | None = None
    product: bool = False
    other: bool = True
    fusion: Fusion | None = None  # of the op that made it
    experts: bool = False  # experts made it


@frozen
class Keeps:
    """What counts for one node among others.

    own: the ports of those saved tensors that count for it; the tensors without a port all do. enters: the ports of the
    inputs that full recompute keeps, to make a block again from. again: the rest is made again. norm: it is a norm in
    front of layers, which the module "layernorm" makes again; normed: its ports that such norms give, among its own.
    """

    own: frozenset[int]
    enters: tuple[int, ...] = ()
    again: bool = False
    norm: bool = False
    normed: frozenset[int] = frozenset()

    def of(self, saved: Iterable[Saved], inputs: tuple[Saved, ...], made: Again = NONE) -> Iterator[Saved]:
        """What is kept of the tensors that a node saves, or of its inputs, when these modules are made again."""
        if not self.again:
            yield from (s for s in saved if (s.port is None or s.port in self.own) and not made & self.frees(s))
        yield from (inputs[port] for port in self.enters)

    def frees(self, saved: Saved) -> Again:
        """The modules any of which make a tensor again."""
        return saved.again | {"layernorm"} if saved.port in self.normed else saved.again


def chosen(recompute: Recompute, names: Iterable[str] = CORE) -> Again:
    """The modules that are made again: those of these names when recompute is selective. Raises UserError."""
    return frozenset(modules(names)) if recompute == "selective" else NONE


def keeps(nodes: Iterable[Node], recompute: Recompute = "none") -> Iterator[tuple[Node, Keeps]]:
    """Each node with what counts for it: what several keep counts for the first of them. Raises UserError."""
    if recompute not in get_args(Recompute):
        known = get_args(Recompute)
        raise UserError(f"no recompute {recompute!r}{did_you_mean(recompute, known)}there are {', '.join(known)}")
    nodes = tuple(nodes)
    blocks = {n.name: n.block for n in nodes}
    norms = set(_norms(nodes))
    claimed: set[str] = set()

    def first(node: Node, port: int) -> bool:
        name = node.name if port < 0 else node.inputs[port]
        new = name not in claimed
        claimed.add(name)
        return new

    for n in nodes:
        if recompute == "full" and n.block is not None:
            entering = (i for i, name in enumerate(n.inputs) if blocks.get(name) != n.block)
            yield n, Keeps(frozenset(), tuple(i for i in entering if first(n, i)), again=True)
        else:
            own = frozenset(port for port in _ports(program(n)) if first(n, port))
            normed = frozenset(port for port in own if port >= 0 and n.inputs[port] in norms)
            yield n, Keeps(own, norm=n.name in norms, normed=normed)


def _norms(nodes: tuple[Node, ...]) -> Iterator[str]:
    """The norms in front of the layers of a block, and in no sum: of what is read beside, as by a residual."""
    readers: dict[str, list[Node]] = {}
    for n in nodes:
        for name in n.inputs:
            readers.setdefault(name, []).append(n)
    for n in nodes:
        if n.block is not None and norm(program(n)) and len(readers[n.inputs[0]]) > 1:
            after = readers.get(n.name, [])
            if after and all(isinstance(r.op, Layer) and r.block == n.block for r in after):
                yield n.name


def tensors(p: Program, sizes: Sizes, split: Split) -> Iterator[Saved]:
    """What a node's backward pass reads, as one device holds it."""
    for kept in _kept(p):
        n = p.held(kept.shape, kept.outer, sizes, split, data=kept.dtype is DType.INDEX)
        experts = p.table.among_experts(kept.outer)
        yield Saved(
            n, kept.dtype, kept.what, kept.again, kept.port, kept.product, kept.other, kept.fusion, experts=experts
        )
    for step in p.steps:
        for x in step.gathered(split):  # each device has its own part already
            n = (split.cp - 1) * p.held(x.shape, step.outer, sizes, split)
            yield Saved(n, x.dtype, "keys and values of other devices", again(p)[id(step.value)])


def inputs(p: Program, sizes: Sizes, split: Split) -> Iterator[Saved]:
    """A node's inputs, as one device holds them."""
    for i, x in enumerate(p.inputs):
        n = p.held(x.shape, (), sizes, split, data=x.dtype is DType.INDEX)
        yield Saved(n, x.dtype, "input", port=i)


@frozen
class _Kept:
    """A saved tensor before it has a size, and the copies around it."""

    shape: Shape
    dtype: DType
    outer: tuple[Dim, ...]
    what: str
    again: Again = NONE
    port: int | None = None
    product: bool = False
    other: bool = True
    fusion: Fusion | None = None


@lru_cache(maxsize=1 << 12)
def _kept(p: Program) -> tuple[_Kept, ...]:
    """Of a chain of pointwise ops what enters it, as its inside is quickly made again."""
    return tuple(_read(p, {id(s.value): s for s in p.steps}))


def _read(p: Program, steps: dict[int, Step]) -> Iterator[_Kept]:
    ports = {id(v.source): i for i, v in reversed(list(enumerate(p.inputs)))}
    seen: set[int] = set()
    entries = [(step.value, tuple(_entries(p, step.value))) for step in p.steps]
    reads = {(id(x.source), _weighs(v)) for v, read in entries for x in read}
    for step, (v, read) in zip(p.steps, entries, strict=True):
        for x in read:
            if id(x.source) in seen or isinstance(x.source.op, Weight):
                continue
            seen.add(id(x.source))
            around, maker = steps.get(id(origin(x))), steps.get(id(x.source))
            port = -1 if x.source is p.value.source else ports.get(id(x.source))
            yield _Kept(
                shape=x.shape,
                dtype=x.dtype,
                outer=around.outer if around else (),
                what=maker.name if maker else "input",
                again=again(p)[id(maker.value)] - frozenset(CORE) if maker and port is None else NONE,
                port=port,
                product=(id(x.source), True) in reads,
                other=(id(x.source), False) in reads,
                fusion=fusion_of(maker.value.op) if maker else None,
            )
        for what, shape, dtype in v.op.saved_buffers(v):
            yield _Kept(shape, dtype, step.outer, what, again=again(p)[id(v)])
    yield from _weighted(p, steps)


def _weighted(p: Program, steps: dict[int, Step]) -> Iterator[_Kept]:
    """What experts keep to weight what enters their last product: see `Combine`.

    Of a gated unit the same kernel weights it (megatron-core 0.16.1, fusions/fused_bias_swiglu.py: weighted_swiglu), of
    another activation a product of its own, which keeps what it weights (transformer/moe/experts.py).
    """
    products = [step for step in p.steps if step.outer and isinstance(step.value.op, Dot)]
    if products and any(isinstance(step.value.op, Combine) for step in p.steps):
        h = products[-1].value.args[0].source
        if len(h.args) == 1 and h.op.elementwise:
            made = again(p)[id(h)] - frozenset(CORE)
            yield _Kept(h.shape, h.dtype, products[-1].outer, f"{steps[id(h)].name}, weighted", again=made)


def _weighs(v: Value) -> bool:
    """Whether this is a product with a weight."""
    return isinstance(v.op, Dot) and any(isinstance(x.source.op, Weight) for x in v.args)


def _entries(p: Program, v: Value) -> Iterator[Value]:
    for kept in v.op.saved_values(v):
        yield from p.entries(kept)


def _ports(p: Program) -> Iterator[int]:
    return (kept.port for kept in _kept(p) if kept.port is not None)
