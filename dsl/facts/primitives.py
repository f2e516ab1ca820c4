"""Primitives of one node, with the dims of the copies around each and the axes that shard it.

`program(node)` returns them. Every fact of a node is a sum over its primitives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from math import prod

from attrs import evolve, field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node, primitives
from megaloom.dsl.op import Op, Reads
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.ops.weight import Input, Weight
from megaloom.dsl.sharding_table import (
    SHARED_BY_HEADS,
    Local,
    Sharded,
    ShardingTable,
    Split,
    sequential,
)
from megaloom.dsl.value import Fusion, Pointwise, Value
from megaloom.dsl.work_kinds import WorkKind


@frozen(eq=False)
class Step:
    """A primitive: its value, its name inside the node, and the dims of the copies around it.

    axes: the sharded dims of all tensors that it reads and writes, with the axis of each. reads: what it reads of each
    argument.
    """

    value: Value
    name: str
    outer: tuple[Dim, ...]
    table: ShardingTable
    axes: Mapping[str, str] = field(init=False)
    reads: tuple[Reads, ...] = field(init=False)

    @axes.default
    def _axes(self) -> dict[str, str]:
        return self.table.axes(self.outer, *(v.shape for v in (*self.value.args, self.value)))

    @reads.default
    def _reads(self) -> tuple[Reads, ...]:
        return self.value.op.reads(self.value)

    def at(self, sizes: Mapping[str, int], split: Split, *, whole: Container[str] = ()) -> Local:
        """Return the local sizes of this primitive's dims. The dims named in `whole` count as not sharded."""
        axes = {n: a for n, a in self.axes.items() if n not in whole}
        return self.table.local(sizes, split, axes, self.table.among_experts(self.outer))

    def gathered(self, split: Split) -> tuple[Value, ...]:
        """Return the keys and values that context parallelism gathers for this primitive, along their sequence."""
        if self.value.op.work_kind is not WorkKind.ATTENTION or split.cp == 1:
            return ()
        return tuple(a for a in self.value.args[1:] if sequential(a.shape))

    @property
    def weights(self) -> tuple[Value, ...]:
        """The trained weights that it reads."""
        return tuple(a for a in self.value.args if isinstance(a.op, Weight) and a.op.trained and not a.op.frozen)


@frozen(eq=False, slots=False)
class Program:
    """The primitives of one node. Nodes with equal layers, shapes and weights have one program.

    weights, frozen: for each trained and each frozen weight, the dims of the copies around it, and its own shape.
    fused: values inside a chain of pointwise ops, which no kernel writes; by the identity of their source.
    data: values computed from data alone, which have no gradient; by the identity of their source.
    separate: each op is a kernel of its own, or several; there are no chains.
    """

    value: Value
    table: ShardingTable
    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    weights: tuple[tuple[tuple[Dim, ...], Shape], ...]
    frozen: tuple[tuple[tuple[Dim, ...], Shape], ...]
    fused: frozenset[int]
    data: frozenset[int]
    separate: bool = False

    @cached_property
    def first_readers(self) -> dict[int, Step]:
        """The first primitive that reads each value, by the identity of the value's source."""
        return {id(a.source): step for step in reversed(self.steps) for a in step.value.args}

    @cached_property
    def dims(self) -> frozenset[tuple[Dim, bool]]:
        """The dims of all tensors and of the copies around them, each with whether it is inside experts."""
        steps = ((s.outer, v.shape) for s in self.steps for v in (s.value, *s.value.args))
        return frozenset((d, self.table.among_experts(outer)) for outer, shape in steps for d in (*outer, *shape))

    def local_elements(
        self, dims: Iterable[Dim], outer: tuple[Dim, ...], sizes: Mapping[str, int], split: Split, data: bool = False
    ) -> int:
        """Return the elements of a tensor on one device. outer: the dims of the copies around it.

        data: the tensor is data, which sequence parallelism does not shard.
        """
        tensor = tuple(dims)
        split = evolve(split, sequence_parallel=False) if data else split
        local = self.table.local(sizes, split, self.table.axes(outer, tensor), self.table.among_experts(outer))
        return local((*outer, *tensor))

    def head_copies(self, dims: Iterable[Dim], outer: tuple[Dim, ...], split: Split) -> int:
        """Return the number of devices that hold one key/value head of a tensor; 1 if there are heads enough for all.

        The weights of these heads are sharded nevertheless: each device holds 1/copies of a head's weights.
        """
        tensor = tuple(dims)
        axes = self.table.axes(outer, tensor)
        heads = (d for d in (*outer, *tensor) if d.name in SHARED_BY_HEADS and d.name in axes)
        sizes = ((d.size, split.degree(axes[d.name])) for d in heads)
        return prod(degree // size for size, degree in sizes if size is not None and size < degree)

    def entries(self, v: Value) -> Iterator[Value]:
        """Yield the value itself or, inside a chain of pointwise ops, the inputs of the chain that it depends on.

        Each comes once: a value that is used twice doubles the number of paths to it.
        """
        seen, todo = set[int](), [v]
        while todo:
            x = todo.pop()
            if id(x.source) in seen:
                continue
            seen.add(id(x.source))
            if id(x.source) in self.fused:
                todo += reversed(x.source.args)
            else:
                yield x


def output_sizes(node: Node, sizes: Mapping[str, int], split: Split) -> tuple[int, ...]:
    """Return the sizes on one device of the dims of a node's output, in declared order."""
    table = program(node).table
    local = table.local(sizes, split, table.axes((), node.shape.dims))
    return tuple(map(local.of, node.shape))


def output_elements(nodes: Iterable[Node], sizes: Mapping[str, int], split: Split) -> list[int]:
    """Return the elements on one device of the output of each node."""
    return [prod(output_sizes(node, sizes, split)) for node in nodes]


def origin(v: Value) -> Value:
    """Return the value that a layer's output stands for: the output of its body, and so on down to an `Each`."""
    while v.body is not None and not isinstance(v.op, Each):
        v = v.body
    return v


@frozen(cache_hash=True)
class _ProgramKey:
    """Properties on which all facts of a node depend, and a node that has them.

    inputs: for each, its shape, its element type, the index of the first argument that is equal to it, and True if it
    is data.
    """

    op: Op
    inputs: tuple[tuple[Shape, DType, int, bool], ...]
    weights: tuple[tuple[tuple[Dim, ...], Shape], ...]
    frozen: tuple[tuple[tuple[Dim, ...], Shape], ...]
    node: Node = field(eq=False)


@lru_cache(maxsize=1 << 14)
def program(node: Node) -> Program:
    """Return the program of a node. It is computed once for all nodes with equal layers, shapes and weights."""
    args = node.value.args
    weights = tuple((s.outer, s.value.shape) for s in node.weights if s.trained)
    frozen = tuple((s.outer, s.value.shape) for s in node.weights if s.frozen)
    inputs = tuple((a.shape, a.dtype, args.index(a), isinstance(a.source.op, Input)) for a in args)
    return _program(_ProgramKey(node.op, inputs, weights, frozen, node))


@lru_cache(maxsize=1 << 12)
def _program(key: _ProgramKey) -> Program:
    value = key.node.value
    table = ShardingTable.of(_splits(value, {id(a) for a in value.args}))
    steps = tuple(Step(v, _name(v, path), outer, table) for v, path, outer in primitives(value))
    inputs = tuple(a for a in value.args if not isinstance(a.op, Weight))
    return Program(value, table, steps, inputs, key.weights, key.frozen, _fused(value, steps), _data(inputs, steps))


def effective_split(p: Program, split: Split) -> Split:
    """Return the split under which a node is sharded: a loss of sharded logits has no use for sequence parallelism.

    Its numbers are one for each token, equal on all devices of tp. A loss of hidden states keeps their placement.
    """
    if not split.sequence_parallel or not is_loss(p.value):
        return split
    shapes = [v.shape for v in p.inputs if not isinstance(v.source.op, Input)]
    sharded = all("tp" in p.table.axes((), s).values() or not sequential(s) for s in shapes)
    return evolve(split, sequence_parallel=False) if sharded else split


def fusion_of(op: Op) -> Fusion | None:
    """Return the fusion group of an op."""
    return op.fusion if isinstance(op, Pointwise) else None


def eager_tensors(op: Op) -> int:
    """Return the tensors that a framework saves of an op's chain if its fused kernel supports SwiGLU only."""
    return op.eager_tensors if isinstance(op, Pointwise) else 0


@lru_cache(maxsize=1 << 13)
def fitted(p: Program, split: Split, whole: frozenset[str] = frozenset()) -> Program:
    """Return the program in which no axis shards a dim that `split` does not divide and whose shard policy is `whole`.

    whole: dims that have this policy here, whatever the sharding table says. A dim of experts that etp does not divide
    is padded: only bodies compute such experts.
    """
    table = p.table.at(split, whole)
    inner = {d.name for d, inside in p.dims if inside and table.axis(d, inside) == "etp" and (d.size or 0) % split.etp}
    padded = {name for name in inner if table.dims[name].policy == "even"}
    if not padded and all(table.axis(d, inside) == p.table.axis(d, inside) for d, inside in p.dims):
        return p
    table = evolve(table, dims={n: evolve(e, policy="pad") if n in padded else e for n, e in table.dims.items()})
    return evolve(p, table=table, steps=tuple(Step(s.value, s.name, s.outer, table) for s in p.steps))


@lru_cache(maxsize=1 << 12)
def separate_ops(p: Program) -> Program:
    """Return the program without chains of pointwise ops: torch runs and differentiates them one by one."""
    return evolve(p, fused=frozenset(), separate=True)


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
    """Return the name of a primitive: that of its weight, or its kind if it has none or a weight only adjusts it."""
    weights = () if v.op.work_kind in (WorkKind.ATTENTION, WorkKind.GATE) else v.args
    named = next((a.op.name for a in weights if isinstance(a.op, Weight)), None)
    return path + (named or (v.op.fn if isinstance(v.op, Pointwise) else type(v.op).__name__.lower()))


def _data(inputs: tuple[Value, ...], steps: tuple[Step, ...]) -> frozenset[int]:
    data = {id(a.source) for a in inputs if isinstance(a.source.op, Input)}
    for s in steps:
        if s.value.args and all(id(a.source) in data for a in s.value.args):
            data.add(id(s.value))
    return frozenset(data)


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
