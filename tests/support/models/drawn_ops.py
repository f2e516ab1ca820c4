"""Models of layers that apply drawn ops of a user's own: `drawn(seed=3)`, and as experts `experts(seed=3)`."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from attrs import field, frozen
from torch import Tensor

from megaloom.dsl import (
    Contraction,
    Dim,
    Elementwise,
    Embed,
    Layer,
    Model,
    MoE,
    NextToken,
    Normalize,
    Reads,
    RMSNorm,
    Shape,
    Sharded,
    Sum,
    Unembed,
    Value,
    WorkKind,
    apply,
    dot,
    fn,
    ids,
    model,
    residual,
    weight,
)
from megaloom.runtime.ops import whole
from tests.support.parity.own_ops import DrawnOp, drawn_op, second_shape

VOCAB, EMBED = Dim("vocab", 64), Dim("embed", 16)
CHANNELS = Dim("ff", 16), Dim("rank", 8), Dim("heads", 4)
TOKENS = ("batch", "seq", "slots")


@frozen
class Drawn(Layer):
    """A drawn op between two products; a gate if its result has no positions."""

    op: DrawnOp
    channels: tuple[Dim, ...]
    tokens: Value = field(factory=ids, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x["embed"]
        h = dot(x, weight("up", e, *self.channels, std=0.2), "embed")
        second = second_shape(self.op, h.shape)
        if self.op.join == "take":
            y = apply(self.op, h, self.tokens)
        elif second is None:
            y = apply(self.op, h)
        else:
            own = [d for d in second if d.name not in TOKENS]
            positions = tuple(d.name for d in x.shape if d.name in TOKENS and d.name not in second)
            w = weight("second", *([] if len(own) == len(second.dims) else [e]), *own, std=0.2)
            z = w if len(own) == len(second.dims) else dot(fn("tanh", x), w, "embed")
            z = 0.1 * apply(Sum(positions), z) if positions and z is not w else z
            y = apply(self.op, h, z)
        channels = [d for d in y.shape if d.name not in TOKENS]
        out = dot(y, weight("down", *channels, e, std=0.2), *(d.name for d in channels)) if channels else y
        return out if out.shape == x.shape else x * fn("sigmoid", out)


def drawn_layer(draw: Random, *tokens: str) -> Drawn:
    """Return a layer with a drawn op that reads along the channels and these dims of the tokens."""
    channels = tuple(draw.sample(CHANNELS, draw.randint(1, len(CHANNELS))))
    while True:
        op = drawn_op(draw, (*tokens, *(d.name for d in channels)))
        if tokens or op.join != "take":
            return Drawn(op, channels)


def drawn(seed: int = 0, layers: int = 6) -> Model:
    """Return a decoder with this many drawn layers."""
    draw, x = Random(seed), ids() >> Embed(weight("wte", VOCAB, EMBED))
    for _ in range(layers):
        x = x >> residual(RMSNorm(), drawn_layer(draw, "seq"))
    return model(f"drawn-{seed}", x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken(), std=0.1)


def experts(seed: int = 0, layers: int = 3) -> Model:
    """Return a decoder with this many mixtures of drawn experts."""
    draw, x = Random(seed), ids() >> Embed(weight("wte", VOCAB, EMBED))
    for _ in range(layers):
        x = x >> residual(RMSNorm(), MoE(drawn_layer(draw), 4, 2))
    return model(f"experts-{seed}", x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken(), std=0.1)


@frozen
class Weighted(Contraction):
    """The sum of x times a table over a dim: an own op that a layout may run on a padded dim."""

    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def shape(self, *args: Shape) -> Shape:
        return Shape((*args[0].without(*self.over), *args[1].without(*self.over)))

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


@frozen
class Inverse(Elementwise):
    """1 / x, which is infinite where padding is 0."""

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out,)


@frozen
class SquareShare(Normalize):
    """The square of x over one and its mean: an own function in place of the norm's."""

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(frozenset(self.over)),)


@whole.register
def _(op: Weighted, out: Value, *args: Tensor) -> Tensor:
    return args[0] @ args[1]


@whole.register
def _(op: Inverse, out: Value, *args: Tensor) -> Tensor:
    return args[0].reciprocal()


@whole.register
def _(op: SquareShare, out: Value, *args: Tensor) -> Tensor:
    return args[0].square() / (1 + args[0].square().mean(-1, keepdim=True))


@frozen
class Padded(Layer):
    """Own ops on a dim of 10 channels, which is padded, and after them one derived from a norm."""

    splits: ClassVar[dict[str, str | Sharded]] = {"channels": Sharded("tp", "pad", multiple=4)}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", 10)
        h = apply(Inverse(), 1.5 + fn("sigmoid", dot(x, weight("up", e, c, std=0.3), "embed")))
        y = apply(Weighted(("channels",)), fn("exp", h), weight("down", c, e, std=0.3))
        return apply(SquareShare(("embed",), False, 1e-5), y)


def padded(seed: int = 0) -> Model:
    """Return a decoder with own ops on padded dims. There is only one, of any seed."""
    x = ids() >> Embed(weight("wte", VOCAB, EMBED)) >> residual(RMSNorm(), Padded()) >> residual(RMSNorm(), Padded())
    return model("padded", x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken(), std=0.1)
