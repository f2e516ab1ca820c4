"""The layer graph of a model: its applied layers in program order, with combinators looked through.

A node is a layer (or an addition between layers). Nodes are named by kind and count, `attention.3`, and
weights by their node, `attention.3.q`; both are the same whatever the layout, and however the program
was grouped. A weight made outside the layers keeps the name it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from megaloom.dsl.ops.weight import Input, Weight

from .combine import Block, Each
from .dims import Dim, Shape
from .errors import ShapeError, UserError, located
from .layer import (
    Given,
    Layer,
    Named,
    held,
    kind,
)
from .pipeline_cuts import crossing, divides
from .value import Op, Value

if TYPE_CHECKING:
    import networkx as nx


@frozen(eq=False)
class Model:
    """Named outputs: what a program computes. Compare models by `fingerprint`."""

    name: str
    outputs: tuple[Value, ...]


def model(name: str, *outputs: Value) -> Model:
    """The model of this name that computes these outputs. Raises ShapeError for what is no value."""
    if not isinstance(name, str):
        raise ShapeError(f"a model has a name first, and {name!r} is none: model('name', value)")
    if not outputs:
        raise ShapeError(f"model {name!r} computes nothing: give it a name and at least one output")
    for v in outputs:
        if not isinstance(v, Value):
            raise ShapeError(f"{v} is no output: an output is a value, such as ids() >> layer")
    return Model(name, outputs)


@frozen
class Slot:
    """A weight in its place: its name in the model, and the dims of the copies around it (experts)."""

    name: str
    value: Value
    outer: tuple[Dim, ...] = ()

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All its dims, those of the copies first."""
        return (*self.outer, *self.value.shape.dims)

    @property
    def trained(self) -> bool:
        """Whether it is a parameter, and no buffer."""
        return isinstance(self.value.op, Weight) and self.value.op.trained


@frozen(eq=False)
class Node:
    """One applied layer: its name, its op, the nodes it reads, its weights, and the repeat's iteration it is in."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    value: Value
    block: int | None
    weights: tuple[Slot, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the node's output."""
        return self.value.shape

    @property
    def input(self) -> bool:
        """Whether the data provides this node."""
        return isinstance(self.op, Input)


@frozen(eq=False, slots=False)
class Graph:
    """The nodes of a model in program order: each after those that it reads; those of the last output first."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Each node's position."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    @cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """For each position i, the nodes before it whose values are read at or after it; inputs don't count."""
        return crossing(self.nodes, self.outputs)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The positions where the graph may be cut into stages."""
        return tuple(i for i in range(len(self.nodes)) if divides(self, i))

    @cached_property
    def weights(self) -> dict[str, Slot]:
        """Every distinct weight by its name."""
        return {s.name: s for n in self.nodes for s in n.weights}

    def networkx(self) -> nx.DiGraph[str]:
        """The graph for networkx: nodes carry `node`, edges the `shape` that flows."""
        import networkx as nx  # a tenth of a second, for those who ask

        g: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for n in self.nodes:
            g.add_node(n.name, node=n)
            g.add_edges_from((i, n.name, {"shape": self.nodes[self.index[i]].shape}) for i in n.inputs)
        return g


@define
class _Walk:
    """The state of reading a program into nodes."""

    nodes: list[Node] = field(factory=list)
    names: dict[int, str] = field(factory=dict)  # of each value seen, by identity
    kinds: Counter[str] = field(factory=Counter)
    blocks: dict[int, int] = field(factory=dict)  # the number of each outermost Block, by identity

    def read(self, root: Value) -> None:
        """Add every node that `root` needs. Iterative: programs are deeper than Python's stack."""
        todo: list[tuple[Value, int | None, bool]] = [(root, None, False)]
        while todo:
            v, block, ready = todo.pop()
            if id(v) in self.names or isinstance(v.op, Weight):
                continue
            inner = v.body if isinstance(v.op, Layer) and v.op.transparent else None
            needs = v.args if inner is None else (inner,)
            if not ready:
                todo.append((v, block, True))
                inside = id(v) if isinstance(v.op, Block) and block is None else block
                todo += [(a, inside, False) for a in reversed(needs)]
                if inner is not None:  # what goes in comes first, and lies outside the block; an encoder before all
                    side = v.op.side.values() if isinstance(v.op, Given) else ()
                    todo += [(a, block, False) for a in (*reversed(v.args), *side)]
            elif inner is not None:
                self.names[id(v)] = self.names[id(inner)]
            else:
                self.add(v, block)

    def add(self, v: Value, block: int | None) -> None:
        base = kind(v.op)
        name = base if isinstance(v.op, Input) else f"{base}.{self.kinds[base]}"
        self.kinds[base] += 1
        if isinstance(v.op, Input):
            self.inputs(v)
        self.names[id(v)] = name
        inputs = tuple(self.names[id(a)] for a in v.args if not isinstance(a.op, Weight))
        number = None if block is None else self.blocks.setdefault(block, len(self.blocks))
        self.nodes.append(Node(name, v.op, inputs, v, number))

    def inputs(self, v: Value) -> None:
        """Check that the data can tell this input from those before it."""
        for n in self.nodes:
            if n.op == v.op:
                error = ShapeError(f"two inputs are named {n.name!r}: name them apart, or make one and use it twice")
                for made in (n.value, v):
                    located(error, f"input {n.name}", made.at)
                raise error


def primitives(value: Value) -> Iterator[tuple[Value, str, tuple[Dim, ...]]]:
    """Each primitive of one applied layer, inputs before outputs: (value, path inside the layer, dims of copies)."""
    outside = {id(a) for a in value.args if not isinstance(a.op, Weight)}
    seen: set[int] = set()

    def visit(v: Value, path: str, outer: tuple[Dim, ...]) -> Iterator[tuple[Value, str, tuple[Dim, ...]]]:
        if id(v) in seen or id(v) in outside:
            return
        seen.add(id(v))
        for a in v.args:
            yield from visit(a, path, outer)
        if v.body is None:
            yield v, path, outer
        elif isinstance(v.op, Each):
            yield from visit(v.body, f"{path}{v.op.dim}.", (*outer, v.shape.dims[0]))
        elif isinstance(v.op, Named):
            yield from visit(v.body, f"{path}{v.op.name}.", outer)
        else:
            yield from visit(v.body, path, outer)

    yield from visit(value, "", ())


def _slots(
    node: Node, weights: Iterable[tuple[Value, str, tuple[Dim, ...]]], shared: Container[int]
) -> tuple[Slot, ...]:
    """The weights of a node, each under its name in the model."""
    given = {id(v) for v in held(node.op)}
    out = []
    for v, path, outer in weights:
        own = id(v) not in given and id(v) not in shared
        out.append(Slot(f"{node.name}.{path}{v.op}" if own else str(v.op), v, outer if own else ()))
    return tuple(out)


@lru_cache(maxsize=64)
def graph(m: Model) -> Graph:
    """The layer graph of a model. Raises ShapeError when two of its weights, or two of its inputs, share a name."""
    walk = _Walk()
    for v in m.outputs:
        walk.read(v)
    ordered = _heads_last(walk.nodes, walk.names[id(m.outputs[-1])])
    weights = [[it for it in primitives(n.value) if isinstance(it[0].op, Weight)] for n in ordered]
    uses = Counter(id(v) for them in weights for v, *_ in them)
    shared = {i for i, n in uses.items() if n > 1}
    nodes = tuple(evolve(n, weights=_slots(n, w, shared)) for n, w in zip(ordered, weights, strict=True))
    named: dict[str, tuple[Slot, Node]] = {}
    for n in nodes:
        for s in n.weights:
            slot, node = named.setdefault(s.name, (s, n))
            if slot.value is not s.value:
                raise _namesakes((slot, node), (s, n))
    return Graph(m.name, nodes, tuple(walk.names[id(v)] for v in m.outputs))


def _heads_last(nodes: list[Node], last: str) -> list[Node]:
    """First what the last output needs, in program order, then what only others do: so that all heads are together."""
    needed = {last}
    for n in reversed(nodes):
        needed.update(n.inputs if n.name in needed else ())
    return sorted(nodes, key=lambda n: n.name not in needed)


def _namesakes(*pair: tuple[Slot, Node]) -> ShapeError:
    (slot, node), (_, other) = pair
    how = "name them apart"
    if node is other:
        how += f", or say `transparent = True` in {type(node.op).__name__}: each layer in its body is then a node"
    error = ShapeError(f"two weights are named {slot.name!r}: {how}")
    for s, n in pair:
        located(error, n.name, s.value.at)
    return error


def fingerprint(m: Model) -> str:
    """A model's identity, the same in every process: a digest of its nodes, their weights and their primitives."""
    digest = sha256()
    for n in graph(m).nodes:
        order = {id(a): -1 - i for i, a in enumerate(n.value.args)}  # of each value of the node, inputs below zero
        said = [n.name, repr(n.op), *n.inputs, *(f"{s.name}{list(map(str, s.dims))}" for s in n.weights)]
        for v, path, _ in primitives(n.value):
            said.append(f"{path}{v.op!r}{[order[_known(a, order)] for a in v.args]}{v.shape}")
            order[id(v)] = len(order)
        digest.update("\n".join(said).encode() + b"\0")
    digest.update("\n".join(graph(m).outputs).encode())
    return digest.hexdigest()[:16]


def _known(v: Value, known: Container[int]) -> int:
    """The value itself or, if it is a layer's output, the first known one that it stands for; by identity."""
    while id(v) not in known and v.body is not None:
        v = v.body
    return id(v)


def one_output(m: Model) -> Node:
    """The only output of a model, for those who can use no more. Raises UserError."""
    g = graph(m)
    if len(g.outputs) != 1:
        raise UserError(f"model {m.name!r} has {len(g.outputs)} outputs ({', '.join(g.outputs)}); one is needed here")
    return g.nodes[g.index[g.outputs[0]]]


def vocabulary(m: Model) -> int:
    """How many tokens the logits of a model tell apart. Raises UserError for a model that does not end in logits."""
    last = one_output(m)
    found = next((d.known for d in last.shape if d.name == "vocab"), None)
    if found is None:
        raise UserError(f"model {m.name!r} ends in {last.name} {last.shape}, and not in logits: end it with Unembed")
    return found
