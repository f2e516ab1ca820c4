"""A decoder with capped logits and a score of each position, whose losses are steps of the user's own."""

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Softcap,
    SwiGLU,
    Unembed,
    Value,
    dot,
    ids,
    loss_sums,
    mask,
    model,
    repeat,
    residual,
    weight,
    weighted_sum,
)


@frozen
class Score(Layer):
    """A number for each position."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(x, weight("value", x["embed"]), "embed")


@frozen
class Square(Layer):
    """The square of each score."""

    mask: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(x * x, self.mask)


def scored() -> Model:
    """127 tokens, which are padded; the cap hides nothing of the padding."""
    d, v, counted = Dim("embed", 64), Dim("vocab", 127), mask()
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(96))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(1, block) >> RMSNorm()
    tokens = x >> Unembed(weight("head", v, d)) >> Softcap(30.0) >> NextToken(mask=counted)
    return model("scored", weighted_sum((1.0, tokens), (0.5, x >> Score() >> Square(counted))))
