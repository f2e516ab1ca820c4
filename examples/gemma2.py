"""Gemma 2 (arXiv:2408.00118): local and global layers in turn, norms before and after, capped scores and logits."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    GeGLU,
    Layer,
    Model,
    RMSNorm,
    Scale,
    Softcap,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = RMSNorm(1e-6, plus_one=True)


def gemma2(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    head_dim: int = 256,
    query_scale: float = 256,
    window: int = 4096,
    vocab: int = 256000,
) -> Model:
    """A Gemma 2 of any size, of an even number of layers. query_scale: scores are divided by its square root."""

    def block(window: int | None) -> Layer:
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=10_000,
            scale=query_scale**-0.5,
            softcap=50.0,
            window=window,
        )
        return residual(NORM, attention, NORM) >> residual(NORM, GeGLU(ff), NORM)

    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    x = ids() >> Embed(wte) >> Scale(embed**0.5) >> repeat(layers // 2, block(window), block(None))
    return model(name, x >> NORM >> Unembed(wte) >> Softcap(30.0))


def gemma2_2b() -> Model:
    return gemma2("gemma2-2b", 26, 8, 4, 2304, 9216)


def gemma2_9b() -> Model:
    return gemma2("gemma2-9b", 42, 16, 8, 3584, 14336)


def gemma2_27b() -> Model:
    return gemma2("gemma2-27b", 46, 32, 16, 4608, 36864, head_dim=128, query_scale=144)
