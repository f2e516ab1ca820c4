"""The outline of a model: its layers as a tree in which equal neighbours are one that is repeated, with their figures.

Protocol: `outline(model, batch=, seq=)` is an `Outline` of columns, each a chain of items one below the other. An item
is a `Leaf` (a node of the graph) or a `Group` of items; where several are equal it is the first of them, and reads the
first of what it reads. The figures of all items, each times its repeats, add up to the model's: exactly what `params`,
`flops` and `saved` say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from attrs import define, field, frozen

from megaloom.dsl.combine import Block, Repeat
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.facts.positions import longest
from megaloom.dsl.graph import (
    Model,
    Node,
    Slot,
    graph,
)
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.value import Value

from .figures import (
    Figures,
    Path,
    account,
    size,
    total,
)
from .fold import Fold
from .items import (
    Group,
    Item,
    Leaf,
    leaves,
    reads,
)


@frozen
class Outline:
    """A model as columns of items. shared: the weights that iterations of a repeat have in common."""

    model: Model
    batch: int
    seq: int
    source: int | None
    columns: tuple[tuple[Item, ...], ...]
    shared: tuple[Slot, ...]

    @property
    def figures(self) -> Figures:
        """What the model costs."""
        parts = total(item.figures for column in self.columns for item in column)
        return parts + Figures(params=sum(map(size, self.shared)))


def outline(m: Model, *, batch: int, seq: int, source: int | None = None, element: int = 2) -> Outline:
    """The outline of a model for a batch of sequences, whose activations take this many bytes an element."""
    g = graph(m)
    limits = longest(g)
    for name, tokens in {"seq": seq, "source": seq if source is None else source}.items():
        if tokens > (most := limits.get(name, tokens)):
            raise UserError(f"{name} of {tokens}: {m.name} has learned positions for {most}\ngive {most} or less")
    walk = _Walk({id(n.value): n for n in g.nodes})
    walk.read(m.outputs)
    chains = _columns(walk.levels[0])
    paths = {leaf.out: walk.paths[leaf.out] for column in chains for leaf in leaves(column)}
    accounts = account(g, paths, partial(costs, batch=batch, seq=seq, source=source), element)
    fold = Fold(accounts)
    folded = [fold.level(column, reads(column[0])[:1]) for column in chains]
    columns = tuple(tuple(map(fold.settled, column)) for column in folded)
    return Outline(m, batch, seq, source, columns, accounts.shared)


@define
class _Walk:
    """The state of reading a program into items. Iterative: programs are deeper than Python's stack."""

    nodes: Mapping[int, Node]  # by the identity of their values
    levels: list[list[Item]] = field(factory=lambda: [[]])
    paths: dict[str, Path] = field(factory=dict)
    path: list[int] = field(factory=list)
    seen: set[int] = field(factory=set)
    todo: list[Callable[[], None]] = field(factory=list)

    def read(self, outputs: Sequence[Value]) -> None:
        """Add all that these values are made from."""
        self.todo = [partial(self.see, v) for v in reversed(outputs)]
        while self.todo:
            self.todo.pop()()

    def see(self, v: Value) -> None:
        if id(v) in self.seen or isinstance(v.op, Weight):
            return
        self.seen.add(id(v))
        steps = [partial(self.see, a) for a in v.args]  # what goes in lies outside
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
        """The name of the node that a value comes from; "" for a weight."""
        while id(v) not in self.nodes and v.body is not None:
            v = v.body
        return self.nodes[id(v)].name if id(v) in self.nodes else ""


def _columns(items: Iterable[Item]) -> list[list[Item]]:
    """The items as chains, each of which goes on with one that reads its end; those that end first come first."""
    columns: list[list[tuple[int, Item]]] = []
    for i, item in enumerate(items):
        home = next((c for name in reads(item) for c in columns if c[-1][1].out == name), None)
        if home is None:
            columns.append(home := [])
        home.append((i, item))
    return [[item for _, item in c] for c in sorted(columns, key=lambda c: c[-1][0])]
