"""The outline of a model: a tree of its layers in which consecutive equal layers are folded into one, with figures.

`outline(model, batch=, seq=)` returns an `Outline` of columns, each a chain of items. An item is a `Leaf` (a node of
the graph) or a `Group` of items. A folded item is the first of its repetitions and names the inputs of that one. The
figures of all items, times their repetitions, add up to those of `params`, `flops` and `saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from attrs import define, field, frozen

from megaloom.dsl.combine import Block
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.facts.positions import longest
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node, Slot
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.transforms.repetition import Repeat
from megaloom.dsl.value import Value

from .figures import (
    Figures,
    RepeatPath,
    node_figures,
    size,
    total,
)
from .fold import Fold
from .items import (
    Group,
    Item,
    Leaf,
    inputs_of,
    leaves,
)


@frozen
class Outline:
    """A model as columns of items. `shared` are weights that several iterations of a repeat use."""

    model: Model
    batch: int
    seq: int
    source: int | None
    columns: tuple[tuple[Item, ...], ...]
    shared: tuple[Slot, ...]

    @property
    def figures(self) -> Figures:
        """Return the figures of the model."""
        parts = total(item.figures for column in self.columns for item in column)
        return parts + Figures(params=sum(map(size, self.shared)))


def outline(m: Model, *, batch: int, seq: int, source: int | None = None, element: int = 2) -> Outline:
    """Return the outline of a model for `batch` sequences. `element` is the size of an activation element in bytes.

    Raise UserError if a sequence is longer than the learned positions.
    """
    g = graph(m)
    limits = longest(g)
    for name, tokens in {"seq": seq, "source": seq if source is None else source}.items():
        if tokens > (most := limits.get(name, tokens)):
            raise UserError(
                f"{name} {tokens} is longer than the {most} learned positions of {m.name}\nuse --{name} {most} or less"
            )
    walk = _Walk({id(n.value): n for n in g.nodes})
    walk.read(m.outputs)
    chains = _columns(walk.levels[0])
    paths = {leaf.out: walk.paths[leaf.out] for column in chains for leaf in leaves(column)}
    node_totals = node_figures(g, paths, partial(costs, batch=batch, seq=seq, source=source), element)
    fold = Fold(node_totals)
    folded = [fold.fold_chain(column, inputs_of(column[0])[:1]) for column in chains]
    columns = tuple(tuple(map(fold.resolve_names, column)) for column in folded)
    return Outline(m, batch, seq, source, columns, node_totals.shared)


@define
class _Walk:
    """The state of reading a model into items. Iterative, because models are deeper than Python's call stack."""

    nodes: Mapping[int, Node]  # by the identity of their values
    levels: list[list[Item]] = field(factory=lambda: [[]])
    paths: dict[str, RepeatPath] = field(factory=dict)
    path: list[int] = field(factory=list)
    seen: set[int] = field(factory=set)
    todo: list[Callable[[], None]] = field(factory=list)

    def read(self, outputs: Sequence[Value]) -> None:
        """Add the items that compute these values."""
        self.todo = [partial(self.see, v) for v in reversed(outputs)]
        while self.todo:
            self.todo.pop()()

    def see(self, v: Value) -> None:
        if id(v) in self.seen or isinstance(v.op, Weight):
            return
        self.seen.add(id(v))
        steps = [partial(self.see, a) for a in v.args]  # inputs belong to the level outside
        if id(v) in self.nodes:
            steps.append(partial(self.add, self.nodes[id(v)]))
        else:
            assert v.body is not None
            steps += [partial(self.enter, v), partial(self.see, v.body), partial(self.leave, v)]
        self.todo += reversed(steps)

    def add(self, node: Node) -> None:
        self.paths[node.name] = tuple(self.path)
        self.levels[-1].append(Leaf(node, node.inputs))

    def enter(self, v: Value) -> None:
        self.levels.append([])
        if isinstance(v.op, Block):
            self.path.append(id(v))

    def leave(self, v: Value) -> None:
        items, op = self.levels.pop(), v.op
        assert isinstance(op, Layer)
        if isinstance(op, Block):
            self.path.pop()
        if isinstance(op, Repeat) or not items or not (op.named_in_errors or isinstance(op, Block)):
            self.levels[-1] += items
        else:
            layer = None if isinstance(op, Block) else op
            self.levels[-1].append(Group(layer, tuple(items), self.name(v.args[0]), self.name(v), self.name(v)))

    def name(self, v: Value) -> str:
        """Return the name of the node that computes a value; "" for a weight."""
        while id(v) not in self.nodes and v.body is not None:
            v = v.body
        return self.nodes[id(v)].name if id(v) in self.nodes else ""


def _columns(items: Iterable[Item]) -> list[list[Item]]:
    """Return the items as chains, in which each item reads the one above. Chains are ordered by their last item."""
    columns: list[list[tuple[int, Item]]] = []
    for i, item in enumerate(items):
        chain = next((c for name in inputs_of(item) for c in columns if c[-1][1].out == name), None)
        if chain is None:
            columns.append(chain := [])
        chain.append((i, item))
    return [[item for _, item in c] for c in sorted(columns, key=lambda c: c[-1][0])]
