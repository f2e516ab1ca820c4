"""Primitives of one node, each with the dims and axes around it. All facts are sums over them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod

from attrs import evolve, field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.graph import primitives
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.routing import Gate
from megaloom.dsl.ops.weight import Input, Weight
from megaloom.dsl.sharding_table import (
    SHARED_BY_HEADS,
    Local,
    Sharded,
    ShardingTable,
    Split,
    sequential,
)
from megaloom.dsl.value import Fusion, Op, Pointwise, Value


@frozen(eq=False)
class Step:
    """A primitive: its value, its name inside the node, the copies around it, and which dims it divides."""

    value: Value
    name: str
    outer: tuple[Dim, ...]
    table: ShardingTable
    axes: Mapping[str, str] = field(init=False)  # of all tensors that the primitive touches

    @axes.default
    def _axes(self) -> dict[str, str]:
        return self.table.axes(self.outer, *(v.shape for v in (*self.value.args, self.value)))

    def at(self, sizes: Mapping[str, int], split: Split, *, whole: Container[str] = ()) -> Local:
        """The sizes that this primitive works on, with the dims of some names left whole."""
        axes = {n: a for n, a in self.axes.items() if n not in whole}
        return self.table.local(sizes, split, axes, self.table.among_experts(self.outer))

    def gathered(self, split: Split) -> tuple[Value, ...]:
        """The keys and values of which every device of cp needs the whole sequence, where it holds a part."""
        if not isinstance(self.value.op, Attend) or split.cp == 1:
            return ()
        return tuple(a for a in self.value.args[1:] if sequential(a.shape))

    @property
    def weights(self) -> tuple[Value, ...]:
        """The weights that it reads and that are trained."""
        return tuple(a for a in self.value.args if isinstance(a.op, Weight) and a.op.trained)


@frozen(eq=False)
class Program:
    """The primitives of one node, and of all that are like it."""

    value: Value
    table: ShardingTable
    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    weights: tuple[tuple[tuple[Dim, ...], Shape], ...]  # of each, the copies around it and its own dims
    fused: frozenset[int]  # the source of each value that only exists inside a chain of pointwise ops
    data: frozenset[int]  # the source of each value that is made of data alone, which has no gradient

    def held(
        self, dims: Iterable[Dim], outer: tuple[Dim, ...], sizes: Mapping[str, int], split: Split, data: bool = False
    ) -> int:
        """The elements that one device holds of a tensor among these copies; of data all that its tp group does."""
        tensor = tuple(dims)
        split = evolve(split, sequence_parallel=False) if data else split
        local = self.table.local(sizes, split, self.table.axes(outer, tensor), self.table.among_experts(outer))
        return local((*outer, *tensor))

    def repeated(self, dims: Iterable[Dim], outer: tuple[Dim, ...], split: Split) -> int:
        """Return how many devices have the same part of a tensor, where they outnumber its key/value heads.

        Of the weights of these heads each device holds its share nevertheless.
        """
        tensor = tuple(dims)
        axes = self.table.axes(outer, tensor)
        heads = (d for d in (*outer, *tensor) if d.name in SHARED_BY_HEADS and d.name in axes)
        sizes = ((d.size, split.degree(axes[d.name])) for d in heads)
        return prod(degree // size for size, degree in sizes if size is not None and size < degree)

    def entries(self, v: Value) -> Iterator[Value]:
        """The value itself or, if it only exists inside a chain of pointwise ops, what that chain reads of it."""
        if id(v.source) in self.fused:
            for a in v.source.args:
                yield from self.entries(a)
        else:
            yield v


def origin(v: Value) -> Value:
    """The value behind applied layers, up to the edge of repeated copies."""
    while v.body is not None and not isinstance(v.op, Each):
        v = v.body
    return v


@frozen(cache_hash=True)
class _Like:
    """What nodes of which every fact is the same have in common, and one of them."""

    op: Op
    inputs: tuple[tuple[Shape, DType, int, bool], ...]  # the place of the first that is the same value; if it is data
    weights: tuple[tuple[tuple[Dim, ...], Shape], ...]
    node: Node = field(eq=False)


@lru_cache(maxsize=1 << 14)
def program(node: Node) -> Program:
    """The program of a node; nodes of equal layers on equal shapes have the same one, made once."""
    args, weights = node.value.args, tuple((s.outer, s.value.shape) for s in node.weights if s.trained)
    inputs = tuple((a.shape, a.dtype, args.index(a), isinstance(a.source.op, Input)) for a in args)
    return _made(_Like(node.op, inputs, weights, node))


@lru_cache(maxsize=1 << 12)
def _made(like: _Like) -> Program:
    value = like.node.value
    table = ShardingTable.of(_splits(value, {id(a) for a in value.args}))
    steps = tuple(Step(v, _name(v, path), outer, table) for v, path, outer in primitives(value))
    inputs = tuple(a for a in value.args if not isinstance(a.op, Weight))
    return Program(value, table, steps, inputs, like.weights, _fused(value, steps), _data(inputs, steps))


def fusion_of(op: Op) -> Fusion | None:
    """Return the fusion group of an op."""
    return op.fusion if isinstance(op, Pointwise) else None


@lru_cache(maxsize=1 << 13)
def fitted(p: Program, split: Split, whole: frozenset[str] = frozenset()) -> Program:
    """Return the program with the dims that `split` keeps whole on every device taken off their axes.

    whole: dims that are kept whole where they do not divide, whatever their shard policy.
    """
    table = p.table.at(split, whole)
    steps = ((s.outer, v.shape) for s in p.steps for v in (s.value, *s.value.args))
    dims = {(d, p.table.among_experts(outer)) for outer, shape in steps for d in (*outer, *shape)}
    if all(table.axis(d, inside) == p.table.axis(d, inside) for d, inside in dims):
        return p
    return evolve(p, table=table, steps=tuple(Step(s.value, s.name, s.outer, table) for s in p.steps))


def _splits(value: Value, outside: set[int]) -> dict[str, str | Sharded]:
    """Return the entries that the layers inside a node add to the sharding table."""
    out: dict[str, str | Sharded] = {}
    seen, todo = set(outside), [value]
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v.op, Layer):
            out.update(v.op.splits)
        todo += [*v.args, *([v.body] if v.body is not None else [])]
    return out


def _name(v: Value, path: str) -> str:
    """A primitive with a weight is known by the weight, others (and those that weights only modify) by their kind."""
    weights = () if isinstance(v.op, Attend | Gate) else v.args
    named = next((a.op.name for a in weights if isinstance(a.op, Weight)), None)
    return path + (named or (v.op.fn if isinstance(v.op, Pointwise) else type(v.op).__name__.lower()))


def _data(inputs: tuple[Value, ...], steps: tuple[Step, ...]) -> frozenset[int]:
    found = {id(a.source) for a in inputs if isinstance(a.source.op, Input)}
    for s in steps:
        if s.value.args and all(id(a.source) in found for a in s.value.args):
            found.add(id(s.value))
    return frozenset(found)


def _fused(value: Value, steps: tuple[Step, ...]) -> frozenset[int]:
    readers: dict[int, list[Op]] = {}
    for s in steps:
        for a in s.value.args:
            readers.setdefault(id(a.source), []).append(s.value.op)
    return frozenset(
        id(s.value)
        for s in steps
        if s.value.op.elementwise and s.value is not value.source and all(op.elementwise for op in readers[id(s.value)])
    )
