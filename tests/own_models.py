"""Small models with layers that no torch module is registered for: their bodies run."""

from typing import ClassVar

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    Normalize,
    RMSNorm,
    Rope,
    SwiGLU,
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


def lm(name: str, *layers: Layer, embed: int = 64, times: int = 2) -> Model:
    """A small language model whose blocks are these layers, each in a residual of its own."""
    v, d = Dim("vocab", 127), Dim("embed", embed)
    block = [residual(RMSNorm(), layer) for layer in layers]
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(times, *block)
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)))


@frozen
class Gated(Layer):
    """A dim of its own that tp divides, a norm over it, a norm and a scale that divided work reads whole."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c, g = x["embed"], Dim("channels", self.channels), Dim("width", 4)
        x = apply(Normalize(("embed",), True, 1e-5), x, 1.0 + weight("scale", e, std=0.0))
        h = dot(x, weight("up", c, e), "embed") * fn("sigmoid", dot(x, weight("gate", e, c), "embed"))
        h = apply(Normalize(("channels",), False, 1e-5), h, weight("inner", c, mean=1.0, std=0.0))
        h = dot(h, weight("wide", c, g), "channels")  # partial sums, over a small dim
        h = fn("mul", h, weight("each", g, mean=1.0, std=0.5))
        y = dot(h, weight("down", g, e, std=0.3), "width")
        return y + weight("shift", e, std=0.0)


def gated() -> Model:
    return lm("gated", Attention(heads=4, rope=1e4), Gated(96))


def windowed() -> Model:
    """Attention with options that megatron-core's has not, and norms of each head's channels."""
    a = Attention(
        heads=4,
        kv_heads=2,
        rope=Rope(1e4, channels=8),
        window=8,
        softcap=3.0,
        qk_norm=RMSNorm(over="head_dim", plus_one=True),
    )
    return lm("windowed", a, SwiGLU(96))
