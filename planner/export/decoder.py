"""Read a graph as a decoder: the number of layers, the kind of each, and the graph node that each begins with.

`read_decoder` walks the graph once, node by node. It raises UserError for the first node that has no place in

    tokens → embedding (+ learned positions) (→ dropout) → layers → norm → logits

Each layer has two halves, x + (norm → attention or feed-forward (→ dropout))(x). A last layer may be for multi-token
prediction; its norm and logits follow those of the main output. Each target checks by itself what the parts must be.
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
    NextToken,
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
    Weight,
)
from megaloom.dsl.layers.losses import Stacked
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.weight import INITIAL_STD
from megaloom.dsl.show.formatting import declared
from megaloom.planner.contract.module_kinds import Role, kinds_at
from megaloom.planner.rules.shared_weights import shared_weight_users

from .target import Target, refuse

Norm = RMSNorm | LayerNorm
AttentionLayer = Attention | MLA
FeedForward = MLP | SwiGLU | GeGLU | MoE
_OpT = TypeVar("_OpT", bound=Op)
# The primitives that mix hidden states with the next token's embedding, both normalized, before the MTP layer.
_MTP_INPUT = (Shift, Lookup, Normalize, Normalize, Concat, Dot, Rename)


@frozen(kw_only=True)
class DecoderModel:
    """A decoder-only model: all layers share attention and norms, and each feed-forward is dense or has experts."""

    name: str
    vocab: int
    embed: int
    tied: bool  # the logits use the weight of the embedding
    positions: int | None  # learned positions; None without
    dropout: float  # after the embedding and after both halves of each layer
    norm: Norm
    attention: AttentionLayer
    layers: tuple[FeedForward, ...]
    layer_starts: tuple[int, ...]  # first node of each layer, MTP layers included, and the first node after them
    mtp: int  # layers for multi-token prediction
    layer_per_block: bool  # each layer is one iteration of a `repeat`: the unit of full recompute
    std: float = INITIAL_STD  # of the initial values of weights

    @property
    def dense(self) -> MLP | SwiGLU | GeGLU | None:
        """The feed-forward of the layers without experts; None if all layers have experts."""
        return next((ff for ff in self.layers if not isinstance(ff, MoE)), None)

    @property
    def moe(self) -> MoE | None:
        """The feed-forward of the layers with experts; None if no layer has."""
        return next((ff for ff in self.layers if isinstance(ff, MoE)), None)


def describe(node: Node) -> str:
    """Return a node's name, and its layer as it was written where the name does not say it."""
    layer = declared(node.op)
    return node.name if layer == node.name.partition(".")[0] else f"{node.name}, {layer}"


def read_decoder(graph: Graph, target: Target) -> DecoderModel:
    """Return the graph as a decoder. Raises UserError that names the node that `target` cannot express."""
    inputs = [n for n in graph.nodes if n.is_input and n.name not in graph.only_for_losses]
    if len(inputs) != 1:
        names = ", ".join(n.name for n in inputs)
        refuse(target, f"a model of {len(inputs)} inputs ({names}): its decoder has one input, the tokens")
    for name, users in shared_weight_users(graph).items():
        if not any(isinstance(n.op, Embed | Unembed) for n in users):
            first, other, *_ = (n.name for n in users)
            refuse(target, f"the weight {name!r} that {first} and {other} share: its layers have weights of their own")
    walk = _Walk(graph, target, 1, inputs[0])
    embed = walk.take(Embed)
    positions = walk.optional(Positions)
    if positions and positions.offset:
        walk.refuse("positions that begin elsewhere than at 0", walk.here)
    first_dropout = walk.dropout()
    layers, starts, outputs = [], [], [walk.here]
    while not walk.at_final_norm and not walk.at_mtp_input(inputs[0], embed):
        starts.append(walk.at)
        layers.append(walk.layer())
        outputs = [walk.here]
    if walk.attention is None:
        refuse(target, "a model without layers")
    if walk.at_mtp_input(inputs[0], embed):
        starts.append(walk.at)
        outputs = [walk.mtp_layer(layers[-1]), *outputs]
    starts.append(walk.at)
    (norm, head), *others = [walk.head(hidden) for hidden in outputs]
    if any(other != head for _, other in others):
        walk.refuse("multi-token prediction with its own output weight", walk.here)
    for node in graph.nodes[walk.at :]:
        if node.name not in graph.only_for_losses:
            walk.refuse("a layer after the logits", node)
        if node.is_loss and not _is_next_token(node.op):
            walk.refuse("a loss other than that of the next token", node)
    if walk.dropout_rates - {first_dropout}:
        rates = ", ".join(f"{rate:g}" for rate in sorted(walk.dropout_rates))
        what = f"dropout of {first_dropout:g} after the embedding and {rates} in the layers"
        refuse(target, f"{what}: it has one rate for all")
    blocks = [graph.nodes[i].block for i in starts[:-1]]
    return DecoderModel(
        name=graph.name,
        vocab=embed.table["vocab"].known,
        embed=embed.table["embed"].known,
        tied=head.table is embed.table,
        positions=None if positions is None else positions.table["position"].known,
        dropout=first_dropout,
        norm=norm,
        attention=walk.attention,
        layers=tuple(layers),
        layer_starts=tuple(starts),
        mtp=len(outputs) - 1,
        layer_per_block=None not in blocks and len({*blocks}) == len(blocks),
        std=graph.std,
    )


def _differing_fields(one: Any, other: Any) -> str:
    """Return the fields in which two layers differ, with both values: window=128 and None."""
    if type(one) is not type(other):
        return f"{type(one).__name__} and {type(other).__name__}"
    pairs = ((f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(type(one)) if f.eq)
    return ", ".join(f"{name}={a} and {b}" for name, a, b in pairs if a != b)


@define
class _Walk:
    """The state of reading a graph: the next node, the node whose value flows, and what all layers share."""

    graph: Graph
    target: Target
    at: int
    here: Node
    attention: AttentionLayer | None = None
    shared_norm: Norm | None = None
    feed_forwards: dict[bool, Layer] = field(factory=dict)  # one of each kind, by whether it has experts
    dropout_rates: set[float] = field(factory=set)  # those in layers

    def refuse(self, what: str, node: Node) -> NoReturn:
        refuse(self.target, f"{what}: {describe(node)}")

    def refuse_order(self, node: Node) -> NoReturn:
        refuse(self.target, f"{describe(node)}, after {self.here.name}")

    @property
    def next(self) -> Node:
        return self.graph.nodes[min(self.at, len(self.graph.nodes) - 1)]

    @property
    def at_final_norm(self) -> bool:
        """Return True if the next node is the norm before the logits, or the graph ends."""
        after = self.graph.nodes[self.at + 1 : self.at + 2]
        return self.at >= len(self.graph.nodes) or not after or isinstance(after[0].op, Unembed)

    def take(self, *kinds: type[_OpT]) -> _OpT:
        """Return the next node's op and go on; refuse it unless it is of one of these kinds and reads what flows.

        A subclass of a kind is refused, because it has a body of its own.
        """
        node = self.next
        if self.at >= len(self.graph.nodes) or type(node.op) not in kinds or node.inputs != (self.here.name,):
            self.refuse_order(node)
        self.at, self.here = self.at + 1, node
        op: Any = node.op
        return op  # type: ignore[no-any-return]

    def optional(self, kind: type[_OpT]) -> _OpT | None:
        """Take the next node if it is of this kind."""
        return self.take(kind) if type(self.next.op) is kind else None

    def dropout(self) -> float:
        """Take a dropout, if it comes next; return its rate, or 0."""
        drop = self.optional(Dropout)
        return drop.rate if drop else 0.0

    def norm(self) -> Norm:
        """Take a norm over embed that equals all norms before it."""
        norm = cast(Norm, self.take(*kinds_at(Role.NORM)))
        if self.shared_norm not in (None, norm):
            self.refuse(f"norms that differ ({_differing_fields(self.shared_norm, norm)})", self.here)
        if norm.over != "embed":
            self.refuse(f"a norm over {norm.over}", self.here)
        self.shared_norm = norm
        return norm

    def layer(self) -> FeedForward:
        """Take both halves of a layer; return its feed-forward."""
        attention: AttentionLayer = self.half(Role.ATTENTION)
        if self.attention not in (None, attention):
            difference = _differing_fields(self.attention, attention)
            self.refuse(f"attention that differs between layers ({difference})", self.last_half)
        self.attention = attention
        feed: FeedForward = self.half(Role.FEED_FORWARD)
        if any(isinstance(unit, MLP | GeGLU) and unit.dropout for unit in (feed, getattr(feed, "expert", None))):
            self.refuse("dropout inside a feed-forward", self.last_half)
        known = self.feed_forwards.setdefault(isinstance(feed, MoE), feed)
        if known != feed:
            self.refuse(f"feed-forwards that differ between layers ({_differing_fields(known, feed)})", self.last_half)
        return feed

    @property
    def last_half(self) -> Node:
        """The attention or feed-forward that was read last."""
        read = reversed(self.graph.nodes[: self.at])
        kinds = kinds_at(Role.ATTENTION) + kinds_at(Role.FEED_FORWARD)
        return next(n for n in read if isinstance(n.op, kinds))

    def at_mtp_input(self, tokens: Node, embed: Embed) -> bool:
        """Return whether the next node mixes hidden states with the embedding of the next token."""
        computed = [v for v, *_ in primitives(self.next.value) if not isinstance(v.op, Weight)]
        if self.next.inputs != (self.here.name, tokens.name) or tuple(type(v.op) for v in computed) != _MTP_INPUT:
            return False
        return computed[0].op == Shift("seq", 1) and computed[1].args[1] is embed.table

    def mtp_layer(self, last: FeedForward) -> Node:
        """Take the layer for multi-token prediction, which must equal the last layer; return its output node."""
        self.at, self.here = self.at + 1, self.next
        if self.layer() != last:
            self.refuse("a multi-token prediction layer that differs from the last layer", self.last_half)
        return self.here

    def head(self, hidden: Node) -> tuple[Norm, Unembed]:
        """Take the norm and the logits of these hidden states."""
        self.here = hidden
        norm, head = self.norm(), self.take(Unembed)
        if head.bias:
            self.refuse("logits with a bias", self.here)
        return norm, head

    def half(self, role: Role) -> Any:
        """Take x + (norm → a layer of this role (→ dropout))(x); return that layer."""
        x = self.here
        self.norm()
        op = self.take(*kinds_at(role))
        self.dropout_rates.add(self.dropout())
        y, node = self.here, self.next
        if not (isinstance(node.op, Pointwise) and node.op.fn == "add" and set(node.inputs) == {x.name, y.name}):
            self.refuse_order(node)
        self.at, self.here = self.at + 1, node
        return op


def _is_next_token(op: Any) -> bool:
    """Return whether a loss is the cross-entropy of the next token, every token alike, or a weighted sum of such."""
    plain = isinstance(op, NextToken) and type(op).body is NextToken.body and op.mask is None and op.weights is None
    return plain or isinstance(op, Stacked)
