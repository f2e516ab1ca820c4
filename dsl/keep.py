"""What the backward pass reads, and what of it is kept rather than computed again.

Protocol: `tensors(program, sizes, split)` are those of one node on one device. Several nodes may read one tensor:
`keeps(nodes, recompute)` says in which of them it counts, so that a sum over nodes has each distinct tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, get_args

from attrs import frozen

from .attend import Attend
from .dims import Dim, DType, Shape, Sizes
from .errors import UserError, nearest
from .graph import Node
from .ops import Weight
from .program import Program, Step, origin, program
from .splits import Split
from .value import Value

# What is computed again: nothing, the core of attention, or all but what enters each block (an iteration of a repeat).
# Source: Korthikanti et al., arXiv:2205.05198.
Recompute = Literal["none", "selective", "full"]


@frozen
class Saved:
    """A tensor that the backward pass reads, as one device holds it.

    port: which of the node's inputs it is (by position in `Node.inputs`), -1 its output, None neither. An input belongs
    to the node that reads it in its backward pass; where two do (or the node that made it), `saved` counts it once.
    core: selective recompute, which keeps what enters the core of attention and makes the rest again, does not keep it.
    """

    elements: int
    dtype: DType
    what: str
    core: bool = False
    port: int | None = None


@frozen
class Keeps:
    """What counts for one node among others.

    own: the ports of those saved tensors that count for it; the tensors without a port all do. enters: the ports of the
    inputs that full recompute keeps, to make a block again from. again: the rest is made again.
    """

    own: frozenset[int]
    enters: tuple[int, ...] = ()
    again: bool = False

    def of(self, saved: Iterable[Saved], inputs: tuple[Saved, ...], recompute: Recompute) -> Iterator[Saved]:
        """What is kept of the tensors that a node saves, or of its inputs."""
        if not self.again:
            core = recompute == "selective"
            yield from (s for s in saved if (s.port is None or s.port in self.own) and not (s.core and core))
        yield from (inputs[port] for port in self.enters)


def keeps(nodes: Iterable[Node], recompute: Recompute = "none") -> Iterator[tuple[Node, Keeps]]:
    """Each node with what counts for it: what several keep counts for the first of them. Raises UserError."""
    if recompute not in get_args(Recompute):
        known = get_args(Recompute)
        raise UserError(f"no recompute {recompute!r}{nearest(recompute, known)}there are {', '.join(known)}")
    nodes = tuple(nodes)
    blocks = {n.name: n.block for n in nodes}
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
            yield n, Keeps(frozenset(port for port in _ports(program(n)) if first(n, port)))


def tensors(p: Program, sizes: Sizes, split: Split) -> Iterator[Saved]:
    """What a node's backward pass reads, as one device holds it."""
    for kept in _kept(p):
        n = p.held(kept.shape, kept.outer, sizes, split, data=kept.dtype is DType.INDEX)
        yield Saved(n, kept.dtype, kept.what, kept.core, kept.port)
    for step in p.steps:
        for x in step.gathered(split):  # each device has its own part already
            n = (split.cp - 1) * p.held(x.shape, step.outer, sizes, split)
            yield Saved(n, x.dtype, "keys and values of other devices", core=True)


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
    core: bool = False
    port: int | None = None


@lru_cache(maxsize=1 << 12)
def _kept(p: Program) -> tuple[_Kept, ...]:
    """Of a chain of pointwise ops what enters it, as its inside is quickly made again."""
    return tuple(_read(p, {id(s.value): s for s in p.steps}))


def _read(p: Program, steps: dict[int, Step]) -> Iterator[_Kept]:
    ports = {id(v.source): i for i, v in reversed(list(enumerate(p.inputs)))}
    seen: set[int] = set()
    for step in p.steps:
        v = step.value
        for x in _entries(p, v):
            if id(x.source) in seen or isinstance(x.source.op, Weight):
                continue
            seen.add(id(x.source))
            around, maker = steps.get(id(origin(x))), steps.get(id(x.source))
            yield _Kept(
                shape=x.shape,
                dtype=x.dtype,
                outer=around.outer if around else (),
                what=maker.name if maker else "input",
                port=-1 if x.source is p.value.source else ports.get(id(x.source)),
            )
        for what, shape, dtype in v.op.notes(v):
            yield _Kept(shape, dtype, step.outer, what, core=isinstance(v.op, Attend))


def _entries(p: Program, v: Value) -> Iterator[Value]:
    for kept in v.op.keeps(v):
        yield from p.entries(kept)


def _ports(p: Program) -> Iterator[int]:
    return (kept.port for kept in _kept(p) if kept.port is not None)
