"""GPT-OSS (arXiv:2508.10925): windows in every other layer, a sink in each head, experts with biases and clamps."""

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Clamp,
    Dim,
    Embed,
    Layer,
    Model,
    MoE,
    RMSNorm,
    Rope,
    Unembed,
    Value,
    YarnScaling,
    apply,
    dot,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.layers import project


@frozen
class ClampedGLU(Layer):
    """down(g sigmoid(1.702 g) (u + 1)) of a gate g and a product u, clamped to `limit`, all with biases."""

    ff: int
    limit: float = 7.0

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        g = apply(Clamp(None, self.limit), project("gate", x, f, bias=True))
        u = apply(Clamp(-self.limit, self.limit), project("up", x, f, bias=True))
        h = g * fn("sigmoid", 1.702 * g) * (u + 1.0)
        return dot(h, weight("down", f, e), "ff") + weight("down_bias", e, std=0.0)


def gpt_oss(
    name: str,
    layers: int,
    experts: int,
    *,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 64,
    embed: int = 2880,
    ff: int = 2880,
    top_k: int = 4,
    window: int = 128,
    vocab: int = 201088,
    rope: Rope = Rope(150_000, scaling=YarnScaling(factor=32, original=4096, truncate=False)),  # noqa: B008 (frozen)
) -> Model:
    """A GPT-OSS of any size, of an even number of layers."""

    def block(window: int | None) -> Layer:
        attention = Attention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, bias=True, sink=True, window=window
        )
        moe = MoE(ClampedGLU(ff), experts, top_k, balance=0.9, bias=True)
        return residual(RMSNorm(), attention) >> residual(RMSNorm(), moe)

    v, d = Dim("vocab", vocab), Dim("embed", embed)
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(layers // 2, block(window), block(None))
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)))


def gpt_oss_20b() -> Model:
    return gpt_oss("gpt-oss-20b", 24, 32)


def gpt_oss_120b() -> Model:
    return gpt_oss("gpt-oss-120b", 36, 128)
