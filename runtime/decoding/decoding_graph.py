"""The part of a model that writes text: the nodes that its logits need, and which of them run for each new token.

Nodes that depend on the written tokens are incremental: they run once for the prompt, then for each token. The others,
such as an encoder, run once. Learned positions become lookups by position ids, since rows of a batch may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from attrs import evolve, frozen

from megaloom.dsl import (
    Attend,
    DocumentIndices,
    DType,
    Each,
    Graph,
    Input,
    Layer,
    Lookup,
    Node,
    PositionLookup,
    UserError,
    Value,
    Weight,
)
from megaloom.dsl.dims import BATCH, Dim, Shape
from megaloom.dsl.facts.primitives import Program, Step, program
from megaloom.dsl.node import primitives
from megaloom.dsl.op import Op
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import apply
from megaloom.runtime.ops.registry import check_next_position

POSITIONS = "positions of the rows + "
"""Begin of the names of the inputs of position ids; the offset follows."""


@frozen
class ByPositionIds(Layer):
    """A layer whose learned positions are looked up by position ids."""

    layer: Op


@frozen(eq=False, slots=False)
class DecodingGraph:
    """The nodes of a model that its logits need, in order, without inputs."""

    graph: Graph
    nodes: tuple[Node, ...]
    logits: Node
    sequence: Dim  # of the written tokens
    tokens: str  # the input of written tokens
    source: str | None  # the input of an encoder's tokens
    documents: tuple[str, ...]  # inputs of document indices: all tokens are of one document
    source_documents: tuple[str, ...]  # those of an encoder's tokens
    incremental: frozenset[str]  # names of nodes and inputs that depend on the written tokens

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the offsets of the inputs of position ids."""
        names = {name for n in self.nodes for name in n.inputs if name.startswith(POSITIONS)}
        return tuple(sorted(int(name.removeprefix(POSITIONS)) for name in names))

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of the nodes."""
        return frozenset(n.name for n in self.nodes)

    @cached_property
    def last_reads(self) -> dict[int, tuple[str, ...]]:
        """Return, by the index of a node, the values that no later node reads."""
        last = {name: i for i, n in enumerate(self.nodes) for name in n.inputs}
        return {i: tuple(name for name, at in last.items() if at == i) for i in set(last.values())}

    def live(self, index: int) -> tuple[Node, ...]:
        """Return the nodes before `index` that a node from there on reads."""
        read = {name for n in self.nodes[index:] for name in n.inputs}
        return tuple(n for n in self.nodes[:index] if n.name in read) if index < len(self.nodes) else ()


def decoding_graph(graph: Graph) -> DecodingGraph:
    """Return the part of a model that writes text. Raise UserError if the model does not predict tokens in order."""
    logits = graph.nodes[graph.index[graph.predictions[0]]]
    positions = logits.shape.without("batch", "vocab").dims
    if "vocab" not in logits.shape or len(positions) != 1:
        raise UserError(
            f"{graph.name} predicts {logits.name} {logits.shape}, not a token for each position, so it writes no text\n"
            "give the run of a decoder, or of an encoder-decoder"
        )
    needed = {logits.name}
    for n in reversed(graph.nodes):
        needed.update(n.inputs if n.name in needed else ())
    nodes = [n for n in graph.nodes if n.name in needed]
    _check_causal(graph, nodes, positions[0])
    tokens, source, documents, source_documents = _inputs(graph, nodes, positions[0])
    incremental = {tokens, *documents}
    for n in nodes:
        if incremental.intersection(n.inputs):
            incremental.add(n.name)
    nodes = [_by_position_ids(n, positions[0]) if n.name in incremental else n for n in nodes if not n.is_input]
    names = frozenset(incremental | {name for n in nodes for name in n.inputs if name.startswith(POSITIONS)})
    inputs = tokens, source, documents, source_documents
    return DecodingGraph(graph, tuple(nodes), logits, positions[0], *inputs, names)


def _check_causal(graph: Graph, nodes: list[Node], sequence: Dim) -> None:
    """Raise UserError if the tokens of the sequence read later ones."""
    for n in nodes:
        for v, *_ in primitives(n.value):
            whole = isinstance(v.op, Attend) and not v.op.causal
            if whole and all(sequence_dim(a.shape) == sequence for a in v.args[:2]):
                raise UserError(
                    f"{n.name} of {graph.name} is not causal: tokens read later ones, so it writes no text\n"
                    "give the run of a causal decoder, or of an encoder-decoder"
                )


def _inputs(graph: Graph, nodes: list[Node], sequence: Dim) -> tuple[str, str | None, tuple[str, ...], tuple[str, ...]]:
    """Return the names of the inputs: written tokens, an encoder's tokens, document indices of each."""
    inputs = [n for n in nodes if n.is_input]
    documents = [n for n in inputs if isinstance(n.op, DocumentIndices)]
    ids = [n for n in inputs if n.value.dtype is DType.INDEX and not isinstance(n.op, DocumentIndices)]
    tokens = [n for n in ids if sequence in n.shape.dims]
    sources = [n for n in ids if n not in tokens]
    known = [*documents, *tokens[:1], *sources[:1]]
    if not tokens or len(known) < len(inputs):
        other = next((n for n in inputs if n not in known), None)
        reads = "no tokens" if other is None else f"the input {other.name!r} {other.shape}"
        raise UserError(f"{graph.name} reads {reads}, so text alone is not enough to generate from it")
    written, read = (tuple(n.name for n in documents if (sequence in n.shape.dims) is along) for along in (True, False))
    return tokens[0].name, sources[0].name if sources else None, written, read


def check_decoding(graph: DecodingGraph) -> None:
    """Raise UserError if a node of the model cannot go on from one position to the next."""
    for node in graph.nodes:
        for step in _incremental_steps(graph, node):
            v = step.value
            decoding = v.op.decoding(v, graph.sequence.name)
            reason = decoding.refusal
            if not reason and (decoding.state or decoding.position):
                check_next_position(v.op, state=decoding.state)
                reason = "mixes positions inside the copies of a layer" if step.outer else ""
            if reason:
                raise UserError(
                    f"{node.name} of {graph.graph.name} {reason}, so the model cannot write one token after the other\n"
                    "give the run of a causal decoder, or of an encoder-decoder"
                )


def first_after_mixing(graph: DecodingGraph) -> int:
    """Return the index of the first node after all that mix positions. From there on, positions are independent."""
    mixing = (
        i
        for i, node in enumerate(graph.nodes)
        if any(mixes_positions(step.value, graph.sequence) for step in _incremental_steps(graph, node))
    )
    return max(mixing, default=-1) + 1


def mixes_positions(v: Value, sequence: Dim) -> bool:
    """Return whether a primitive needs earlier positions, or its own, to go on at the next one."""
    decoding = v.op.decoding(v, sequence.name)
    return decoding.state or decoding.position


def _incremental_steps(graph: DecodingGraph, node: Node) -> Iterator[Step]:
    """Yield the primitives of a node that depend on the written tokens."""
    p = program(node)
    values = incremental_values(p, tuple(name in graph.incremental for name in node.inputs))
    return (step for step in p.steps if id(step.value) in values)


def incremental_values(p: Program, reads: tuple[bool, ...]) -> frozenset[int]:
    """Return the primitives of a program that depend on incremental inputs, by the identity of their values.

    reads: for each input of the program, True if it is incremental.
    """
    known = {id(v): incremental for v, incremental in zip(p.inputs, reads, strict=True)}

    def depends(v: Value) -> bool:
        if id(v) not in known:
            known[id(v)] = any(depends(a) for a in v.args) if v.body is None else depends(v.body)
        return known[id(v)]

    return frozenset(id(s.value) for s in p.steps if depends(s.value))


def _by_position_ids(node: Node, sequence: Dim) -> Node:
    """Return a node whose learned positions along the sequence are looked up by position ids."""
    ids: dict[int, Value] = {}  # by offset

    def change(v: Value, copy: Value) -> Value:
        if isinstance(v.op, PositionLookup) and v.shape.dims[0] == sequence:
            name, shape = f"{POSITIONS}{v.op.offset}", Shape((BATCH, sequence))
            given = ids.setdefault(v.op.offset, Value(Input(name), (), shape, dtype=DType.INDEX))
            return apply(Lookup(v.op.key), given, copy.args[1])
        return copy if copy is v else evolve(copy, shape=_shape_of(copy))

    (value,) = rewritten([node.value], change, {id(a) for a in node.value.args})
    if not ids:
        return node
    before, after = ([v for v, *_ in primitives(x) if isinstance(v.op, Weight)] for x in (node.value, value))
    assert before == after, f"{node.name} uses its weights in another order with position ids"
    value = evolve(value, args=(*value.args, *ids.values()))
    names = (f"{POSITIONS}{offset}" for offset in ids)
    return evolve(node, op=ByPositionIds(node.op), value=value, inputs=(*node.inputs, *names))


def _shape_of(v: Value) -> Shape:
    """Return the shape of a value by those of its body or its arguments, which may have a batch dim now."""
    if v.body is None:
        return v.op.shape(*(a.shape for a in v.args))
    return Shape((v.shape.dims[0], *v.body.shape)) if isinstance(v.op, Each) else v.body.shape
