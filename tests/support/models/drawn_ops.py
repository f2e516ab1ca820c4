"""Models of layers that apply drawn ops of a user's own: `drawn(seed=3)`, and as experts `experts(seed=3)`."""

from __future__ import annotations

from random import Random

from attrs import field, frozen

from megaloom.dsl import (
    Dim,
    Embed,
    Layer,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Sum,
    Unembed,
    Value,
    apply,
    dot,
    fn,
    ids,
    model,
    residual,
    weight,
)
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
        h = dot(x, weight("up", e, *self.channels, std=0.3), "embed")
        second = second_shape(self.op, h.shape)
        if self.op.join == "take":
            y = apply(self.op, h, self.tokens)
        elif second is None:
            y = apply(self.op, h)
        else:
            own = [d for d in second if d.name not in TOKENS]
            positions = tuple(d.name for d in x.shape if d.name in TOKENS and d.name not in second)
            w = weight("second", *([] if len(own) == len(second.dims) else [e]), *own, std=0.3)
            z = w if len(own) == len(second.dims) else dot(fn("tanh", x), w, "embed")
            z = 0.1 * apply(Sum(positions), z) if positions and z is not w else z
            y = apply(self.op, h, z)
        channels = [d for d in y.shape if d.name not in TOKENS]
        out = dot(y, weight("down", *channels, e, std=0.3), *(d.name for d in channels)) if channels else y
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
