"""A layer of one's own: a class with one method. It is planned, trained and verified like any other."""

from typing import ClassVar

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    RMSNorm,
    Unembed,
    Value,
    dot,
    ids,
    model,
    repeat,
    residual,
    weight,
)


@frozen
class Bilinear(Layer):
    """down(left(x) * right(x)): a gated feed-forward without an activation. Source: Shazeer, arXiv:2002.05202."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}  # the dim may be divided over tensor-parallel devices

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", self.channels)
        h = dot(x, weight("left", e, c), "embed") * dot(x, weight("right", e, c), "embed")
        return dot(h >> RMSNorm(over="channels").named("norm"), weight("down", c, e), "channels")


def own_layer() -> Model:
    """A small GPT of bytes."""
    vocab, d = Dim("vocab", 256), Dim("embed", 128)
    wte = weight("wte", vocab, d)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), Bilinear(320))
    return model("own-layer", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte))
