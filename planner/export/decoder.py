"""A graph read as the decoder that other programs train: numbers of layers, what each is, where each begins.

Protocol: `gpt` walks the graph once, node by node, and refuses by its name the first that has no place in

    tokens → embedding (+ learned positions) (→ dropout) → layers → norm → logits

with layers of two halves, each x + (norm → attention or feed-forward (→ dropout))(x). A layer more may predict the
token after the next: it comes behind the others, and norm and logits of both behind it. What the parts must be beyond
that each target says for itself.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, cast

from attrs import define, field, fields, frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    Concat,
    Dot,
    Dropout,
    Embed,
    GeGLU,
    Graph,
    Layer,
    LayerNorm,
    Lookup,
    MoE,
    Node,
    Normalize,
    Op,
    Pointwise,
    Positions,
    Rename,
    RMSNorm,
    Shift,
    SwiGLU,
    Unembed,
    UserError,
    Weight,
)
from megaloom.dsl.graph import primitives
from megaloom.dsl.show.words import written

Norm = RMSNorm | LayerNorm
Mix = Attention | MLA
FeedForward = MLP | SwiGLU | GeGLU | MoE
T = TypeVar("T", bound=Op)
JOIN = (Shift, Lookup, Normalize, Normalize, Concat, Dot, Rename)  # of the next token's embedding, and both normalized
STAYS = "`megaloom train` runs the plan as it is"


@frozen(kw_only=True)
class GPT:
    """A decoder: attention and norms are the same in all layers, a feed-forward is dense or a mixture of experts."""

    name: str
    vocab: int
    embed: int
    tied: bool  # the logits are over the table of the embedding
    positions: int | None  # that are learned
    dropout: float  # of the embedding and of both halves of each layer
    norm: Norm
    attention: Mix
    layers: tuple[FeedForward, ...]
    starts: tuple[int, ...]  # the node that each layer begins with, then those ahead, and the one after the last
    ahead: int  # layers more, each behind a mix with the next token's embedding, that predict tokens further ahead
    repeated: bool  # each layer is one iteration of a repeat, which is what full recompute computes again

    @property
    def dense(self) -> MLP | SwiGLU | GeGLU | None:
        """The feed-forward of the layers without experts."""
        return next((ff for ff in self.layers if not isinstance(ff, MoE)), None)

    @property
    def moe(self) -> MoE | None:
        """That of the layers with experts."""
        return next((ff for ff in self.layers if isinstance(ff, MoE)), None)


def cannot(target: str, what: str, instead: str = STAYS) -> NoReturn:
    """Refuse what a target has no words for: what, by its name, and what would work."""
    raise UserError(f"{target} cannot express {what}\n{instead}")


def called(node: Node) -> str:
    """A node as a reader finds it again: its name, and how it was written."""
    said = written(node.op)
    return node.name if said == node.name.partition(".")[0] else f"{node.name}, {said}"


def gpt(graph: Graph, target: str) -> GPT:
    """The graph as a decoder. Raises UserError that names what `target` cannot express."""
    inputs = [n for n in graph.nodes if n.input]
    if len(inputs) != 1:
        cannot(target, f"a model of {len(inputs)} inputs ({', '.join(n.name for n in inputs)}): it trains a decoder")
    walk = _Walk(graph, target, 1, inputs[0])
    embed = walk.take(Embed)
    positions = walk.perhaps(Positions)
    if positions and positions.offset:
        walk.refuse("positions that begin elsewhere than at 0", walk.here)
    first = walk.dropout()
    layers, starts, heads = [], [], [walk.here]
    while not walk.ends and not walk.joins(inputs[0], embed):
        starts.append(walk.at)
        layers.append(walk.layer())
        heads = [walk.here]
    if walk.attention is None:
        cannot(target, "a model without layers")
    if walk.joins(inputs[0], embed):
        starts.append(walk.at)
        heads = [walk.ahead(layers[-1]), *heads]
    starts.append(walk.at)
    (norm, head), *others = [walk.head(hidden) for hidden in heads]
    if any(other != head for _, other in others):
        walk.refuse("logits over another table", walk.here)
    if walk.at != len(graph.nodes):
        walk.refuse("what follows the logits", graph.nodes[walk.at])
    if walk.dropped - {first}:
        rates = f"{first:g} after the embedding and {_said(walk.dropped)} in the layers"
        cannot(target, f"dropout of {rates}: it has one rate")
    blocks = [graph.nodes[i].block for i in starts[:-1]]
    return GPT(
        name=graph.name,
        vocab=embed.table["vocab"].known,
        embed=embed.table["embed"].known,
        tied=head.table is embed.table,
        positions=None if positions is None else positions.table["position"].known,
        dropout=first,
        norm=norm,
        attention=walk.attention,
        layers=tuple(layers),
        starts=tuple(starts),
        ahead=len(heads) - 1,
        repeated=None not in blocks and len({*blocks}) == len(blocks),
    )


def _said(rates: set[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(rates))


def differ(one: Any, other: Any) -> str:
    """The fields of two layers that are not the same: window=128 and None."""
    if type(one) is not type(other):
        return f"{type(one).__name__} and {type(other).__name__}"
    pairs = ((f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(type(one)) if f.eq)
    return ", ".join(f"{name}={a} and {b}" for name, a, b in pairs if a != b)


@define
class _Walk:
    """Where the reading of a graph is: the next node, the one whose value flows, and what all layers share."""

    graph: Graph
    target: str
    at: int
    here: Node
    attention: Mix | None = None
    normed: Norm | None = None
    feeds: dict[bool, Layer] = field(factory=dict)  # by whether they have experts
    dropped: set[float] = field(factory=set)  # the rates of dropout in layers

    def refuse(self, what: str, node: Node) -> NoReturn:
        cannot(self.target, f"{what}: {called(node)}")

    def unplaced(self, node: Node) -> NoReturn:
        cannot(self.target, f"{called(node)}, after {self.here.name}")

    @property
    def next(self) -> Node:
        return self.graph.nodes[min(self.at, len(self.graph.nodes) - 1)]

    @property
    def ends(self) -> bool:
        """Whether what comes is the final norm, and not that of a layer."""
        after = self.graph.nodes[self.at + 1 : self.at + 2]
        return self.at >= len(self.graph.nodes) or not after or isinstance(after[0].op, Unembed)

    def take(self, *kinds: type[T]) -> T:
        """The next node's op, if it is of one of these kinds and reads only what flows. Of a subclass it is not: its
        body is its own."""
        node = self.next
        if self.at >= len(self.graph.nodes) or type(node.op) not in kinds or node.inputs != (self.here.name,):
            self.unplaced(node)
        self.at, self.here = self.at + 1, node
        op: Any = node.op
        return op  # type: ignore[no-any-return]

    def perhaps(self, kind: type[T]) -> T | None:
        return self.take(kind) if type(self.next.op) is kind else None

    def dropout(self) -> float:
        drop = self.perhaps(Dropout)
        return drop.rate if drop else 0.0

    def norm(self) -> Norm:
        found = cast(Norm, self.take(RMSNorm, LayerNorm))
        if self.normed not in (None, found):
            self.refuse(f"norms that differ ({differ(self.normed, found)})", self.here)
        if found.over != "embed":
            self.refuse("a norm of something else than embed", self.here)
        self.normed = found
        return found

    def layer(self) -> FeedForward:
        """One layer, both halves."""
        mix: Mix = self.half(Attention, MLA)
        if self.attention not in (None, mix):
            self.refuse(f"attention that differs between layers ({differ(self.attention, mix)})", self.middle)
        self.attention = mix
        feed: FeedForward = self.half(MLP, SwiGLU, GeGLU, MoE)
        known = self.feeds.setdefault(isinstance(feed, MoE), feed)
        if known != feed:
            self.refuse(f"feed-forwards that differ between layers ({differ(known, feed)})", self.middle)
        return feed

    @property
    def middle(self) -> Node:
        """The attention or feed-forward that was read last."""
        back = reversed(self.graph.nodes[: self.at])
        return next(n for n in back if isinstance(n.op, Attention | MLA | MLP | SwiGLU | GeGLU | MoE))

    def joins(self, tokens: Node, embed: Embed) -> bool:
        """Whether the next node mixes hidden states with the embedding of the next token."""
        found = [v for v, *_ in primitives(self.next.value) if not isinstance(v.op, Weight)]
        if self.next.inputs != (self.here.name, tokens.name) or tuple(type(v.op) for v in found) != JOIN:
            return False
        return found[0].op == Shift("seq", 1) and found[1].args[1] is embed.table

    def ahead(self, last: FeedForward) -> Node:
        """What a layer gives that predicts the token after the next: one like the last, behind such a mix."""
        self.at, self.here = self.at + 1, self.next
        if self.layer() != last:
            self.refuse("a layer of tokens ahead that is unlike the last", self.middle)
        return self.here

    def head(self, hidden: Node) -> tuple[Norm, Unembed]:
        """The norm and the logits of these hidden states."""
        self.here = hidden
        norm, head = self.norm(), self.take(Unembed)
        if head.bias:
            self.refuse("logits with a bias", self.here)
        return norm, head

    def half(self, *kinds: Any) -> Any:
        """x + (norm → one of these kinds (→ dropout))(x): the one."""
        x = self.here
        self.norm()
        op = self.take(*kinds)
        self.dropped.add(self.dropout())
        y, node = self.here, self.next
        if not (isinstance(node.op, Pointwise) and node.op.fn == "add" and set(node.inputs) == {x.name, y.name}):
            self.unplaced(node)
        self.at, self.here = self.at + 1, node
        return op
