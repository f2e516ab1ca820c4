"""The layer graph of a model: its applied layers in program order, with combinators looked through.

A node is a layer, or an addition between layers. Nodes are named by kind and number (`attention.3`), weights by their
node (`attention.3.q`). Names depend neither on the layout nor on how the program groups its layers. A weight that is
made outside the layers keeps the name that it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from megaloom.dsl.ops.weight import INITIAL_STD, Input, Weight

from .combine import Block
from .dims import Dim
from .errors import ShapeError, UserError, add_location, did_you_mean
from .layer import Given, Layer, held_values, op_name
from .low_rank import LoRA
from .node import Node, Slot, primitives
from .pipeline_cuts import cut_points, live_values
from .quoting import is_printable
from .rewriting import with_single_inputs
from .value import Value

if TYPE_CHECKING:
    import networkx as nx


@frozen(eq=False)
class Model:
    """A name and the values that a program computes. Compare models by `fingerprint`.

    std: standard deviation of the initial values of weights that have none of their own. unused: fields of the
    config.json that the model was read from, with their values, that have no effect on it. lora: the adapters that were
    added to the model `base`.
    """

    name: str
    outputs: tuple[Value, ...]
    std: float = INITIAL_STD
    unused: tuple[str, ...] = ()
    base: Model | None = None
    lora: LoRA | None = None

    @property
    def without_adapters(self) -> Model:
        """The model itself, or the one that adapters were added to."""
        return self.base or self


def model(name: str, *outputs: Value, std: float = INITIAL_STD) -> Model:
    """Return a model that computes these outputs. Raises ShapeError if an output is not a value.

    std: standard deviation of the initial values of weights that have none of their own. Inputs of one name, shape and
    element type are one input.
    """
    if not isinstance(name, str):
        raise ShapeError(f"a model's first argument is its name, got {name!r}: write model('name', value)")
    if not name.strip() or not is_printable(name) or name.startswith("-"):
        raise ShapeError(f"a model cannot have the name {name!r}: use letters, digits and dashes, such as 'my-model'")
    if not outputs:
        raise ShapeError(f"model {name!r} has no outputs: write model({name!r}, value)")
    for v in outputs:
        if not isinstance(v, Value):
            raise ShapeError(f"an output of a model must be a value, such as ids() >> layer, got {v}")
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 <= std < inf:
        raise ShapeError(f"model {name!r} cannot have weights of standard deviation {std}: use 0 or more")
    return Model(name, with_single_inputs(outputs), std)


@frozen(eq=False, slots=False)
class Graph:
    """The graph nodes of a model in topological order: first what the last output needs, then the rest."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    std: float = field(default=INITIAL_STD, kw_only=True)  # of the initial values of weights with none of their own

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each node."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    def value(self, name: str) -> Value:
        """Return the value of a node, such as that of the input "tokens". Raise UserError for another name."""
        if name not in self.index:
            inputs = ", ".join(n.name for n in self.nodes if n.is_input)
            raise UserError(f"{self.name} has no node {name!r}{did_you_mean(name, self.index)}its inputs are {inputs}")
        return self.nodes[self.index[name]].value

    @cached_property
    def live_values(self) -> tuple[tuple[str, ...], ...]:
        """For each position i, the nodes before i that a node at or after i reads; inputs of the model don't count."""
        return live_values(self.nodes, self.outputs)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """The positions where a pipeline stage may begin."""
        return cut_points(self.nodes, self.predictions, self.live_values)

    @cached_property
    def hidden_sizes(self) -> frozenset[int]:
        """The widths of the hidden states between layers."""
        return frozenset(n.shape["embed"].known for n in self.nodes if "embed" in n.shape)

    @cached_property
    def predictions(self) -> tuple[str, ...]:
        """The nodes that the losses read, such as logits; of an output that is no loss, the output itself."""
        return tuple(dict.fromkeys(self._predictions(self.outputs)))

    def _predictions(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            node = self.nodes[self.index[name]]
            if node.is_loss:
                yield from self._predictions(i for i in node.inputs if not self.nodes[self.index[i]].is_input)
            else:
                yield name

    @cached_property
    def only_for_losses(self) -> frozenset[str]:
        """The losses, and the nodes that nothing else reads, such as labels."""
        out = {n.name for n in self.nodes if n.is_loss}
        readers: dict[str, set[str]] = {}
        for n in self.nodes:
            for name in n.inputs:
                readers.setdefault(name, set()).add(n.name)
        for n in reversed(self.nodes):
            if n.name not in self.predictions and n.name in readers and readers[n.name] <= out:
                out.add(n.name)
        return frozenset(out)

    @cached_property
    def weights(self) -> dict[str, Slot]:
        """The weights of the model by name, shared ones once."""
        return {s.name: s for n in self.nodes for s in n.weights}

    def networkx(self) -> nx.DiGraph[str]:
        """Return the graph as a `networkx.DiGraph`, to analyse it with the tools of that library.

        Each node has the attribute `node`, a `Node`; each edge has `shape`, that of the value that flows along it.

        >>> import networkx as nx
        >>> from megaloom.dsl import graph
        >>> from megaloom.dsl.catalog import find
        >>> g = graph(find("gpt2")[0]).networkx()
        >>> nx.is_directed_acyclic_graph(g)
        True
        >>> len(nx.ancestors(g, "attention.0"))  # tokens, two embeddings, norm
        4
        >>> str(g.edges["layer_norm.0", "attention.0"]["shape"])
        '[batch seq embed=768]'
        >>> nx.dag_longest_path(g)[-3:]
        ['layer_norm.24', 'unembed.0', 'next_token.0']
        """
        import networkx as nx  # not at the top: the import takes 0.1 to 0.2 s, and planning needs none of it

        g: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for n in self.nodes:
            g.add_node(n.name, node=n)
            g.add_edges_from((i, n.name, {"shape": self.nodes[self.index[i]].shape}) for i in n.inputs)
        return g


@define
class _Walk:
    """The state of a depth-first walk that turns a program into nodes."""

    nodes: list[Node] = field(factory=list)
    names: dict[int, str] = field(factory=dict)  # the node of each value, by the id of the value
    kinds: Counter[str] = field(factory=Counter)
    blocks: dict[int, int] = field(factory=dict)  # the number of each outermost Block, by the id of its value

    def read(self, root: Value) -> None:
        """Add every node that `root` needs. Without recursion: programs are deeper than Python's stack."""
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
                if inner is not None:  # arguments come first and are outside the block; side inputs before them
                    side = v.op.side.values() if isinstance(v.op, Given) else ()
                    todo += [(a, block, False) for a in (*reversed(v.args), *side)]
            elif inner is not None:
                self.names[id(v)] = self.names[id(inner)]
            else:
                self.add(v, block)

    def add(self, v: Value, block: int | None) -> None:
        base = op_name(v.op)
        name = base if isinstance(v.op, Input) else f"{base}.{self.kinds[base]}"
        self.kinds[base] += 1
        if isinstance(v.op, Input):
            self._check_input(v)
        self.names[id(v)] = name
        inputs = tuple(self.names[id(a)] for a in v.args if not isinstance(a.op, Weight))
        number = None if block is None else self.blocks.setdefault(block, len(self.blocks))
        self.nodes.append(Node(name, v.op, inputs, v, number))

    def _check_input(self, v: Value) -> None:
        """Raise ShapeError if the program has another input of this name."""
        for n in self.nodes:
            if isinstance(n.op, Input) and str(n.op) == str(v.op):
                error = ShapeError(
                    f"two inputs are named {n.name!r}, {n.value.dtype.value} {n.shape} and {v.dtype.value} {v.shape}: "
                    "give each its own name"
                )
                for value in (n.value, v):
                    add_location(error, f"input {n.name}", value.at)
                raise error


def _slots(
    node: Node, weights: Iterable[tuple[Value, str, tuple[Dim, ...]]], shared: Container[int], std: float
) -> tuple[Slot, ...]:
    """Return the weight slots of a node."""
    given = {id(v) for v in held_values(node.op)}
    out = []
    for v, path, outer in weights:
        own = id(v) not in given and id(v) not in shared
        out.append(Slot(f"{node.name}.{path}{v.op}" if own else str(v.op), v, outer if own else (), std))
    return tuple(out)


@lru_cache(maxsize=256)  # more than there are examples, with their losses and without
def graph(m: Model) -> Graph:
    """Return the graph of a model.

    Raises ShapeError if two of its weights, or two of its inputs, have one name, or if a body creates an input.
    """
    walk = _Walk()
    for v in m.outputs:
        walk.read(v)
    ordered = _heads_last(walk.nodes, walk.names[id(m.outputs[-1])])
    for n in ordered:
        _check_body(n)
    weights = [[it for it in primitives(n.value) if isinstance(it[0].op, Weight)] for n in ordered]
    uses = Counter(id(v) for them in weights for v, *_ in them)
    shared = {i for i, n in uses.items() if n > 1}
    nodes = tuple(evolve(n, weights=_slots(n, w, shared, m.std)) for n, w in zip(ordered, weights, strict=True))
    named: dict[str, tuple[Slot, Node]] = {}
    for n in nodes:
        for s in n.weights:
            slot, node = named.setdefault(s.name, (s, n))
            if slot.value is not s.value:
                raise _duplicate_name((slot, node), (s, n))
    return Graph(m.name, nodes, tuple(walk.names[id(v)] for v in m.outputs), std=m.std)


def _check_body(node: Node) -> None:
    """Raise ShapeError if the body of a node creates an input, of which the graph would not know."""
    for v, *_ in primitives(node.value):
        if isinstance(v.op, Input) and not node.is_input:
            error = ShapeError(
                f"the body of {node.name} creates the input {str(v.op)!r}: give it to the layer as a field, such as "
                "`labels: Value = field(factory=labels)`"
            )
            add_location(error, f"input {v.op}", v.at)
            raise error


def _heads_last(nodes: list[Node], last: str) -> list[Node]:
    """Sort the nodes: first what the last output needs, then the rest, so that the heads of a model are together.

    If the last output is a loss, what its last prediction needs is first.
    """
    by_name = {n.name: n for n in nodes}
    while by_name[last].is_loss:
        last = next(name for name in reversed(by_name[last].inputs) if not by_name[name].is_input)
    needed = {last}
    for n in reversed(nodes):
        needed.update(n.inputs if n.name in needed else ())
    return sorted(nodes, key=lambda n: n.name not in needed)


def _duplicate_name(*pair: tuple[Slot, Node]) -> ShapeError:
    (slot, node), (_, other) = pair
    fix = "give each its own name"
    if node is other:
        layer = type(node.op).__name__
        fix += f", or set `transparent = True` in {layer}, so that each layer of its body has its own name"
    error = ShapeError(f"two weights are named {slot.name!r}: {fix}")
    for s, n in pair:
        add_location(error, n.name, s.value.at)
    return error


@lru_cache(maxsize=128)
def without_loss(m: Model) -> Model:
    """Return the model without its losses: its outputs are the values that the losses read, such as logits."""
    g = graph(m)
    if not any(g.nodes[g.index[name]].is_loss for name in g.outputs):
        return m
    return evolve(m, outputs=tuple(g.nodes[g.index[name]].value for name in g.predictions))


def one_prediction(m: Model) -> Node:
    """Return the only value that a model predicts. Raises UserError if it predicts several."""
    g = graph(m)
    if len(g.predictions) != 1:
        names = ", ".join(g.predictions)
        raise UserError(f"model {m.name!r} has {len(g.predictions)} outputs, {names}: it must have one here")
    return g.nodes[g.index[g.predictions[0]]]


def vocabulary(m: Model) -> int:
    """Return the size of the dim `vocab` of a model's logits. Raises UserError if it predicts something else."""
    last = one_prediction(m)
    if "vocab" not in last.shape:
        raise UserError(f"model {m.name!r} ends in {last.name} {last.shape}, not in logits: end it with Unembed")
    return last.shape["vocab"].known
