"""A layer of your own: a class with one method. It is planned, trained and verified like a built-in layer."""

from typing import ClassVar

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Shift,
    Unembed,
    Value,
    apply,
    dot,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)


@frozen
class TokenShift(Layer):
    """A gated feed-forward layer that also reads the previous token, as in RWKV (Peng et al., arXiv:2305.13048)."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}  # tensor parallelism shards this dim

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", self.channels)
        mixed = x + apply(Shift("seq", -1), x) * weight("mix", e, mean=0.5, std=0.0)
        h = fn("relu2", dot(mixed, weight("up", e, c), "embed"))
        return dot(h, weight("down", c, e), "channels") * fn("sigmoid", dot(x, weight("gate", e), "embed"))


def own_layer() -> Model:
    """Return a small byte-level GPT."""
    vocab, d = Dim("vocab", 256), Dim("embed", 128)
    wte = weight("wte", vocab, d)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), TokenShift(512))
    return model("own-layer", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte) >> NextToken())
