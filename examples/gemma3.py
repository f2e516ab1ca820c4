"""Gemma 3 (arXiv:2503.19786), its text decoder: five local layers for each global one, norms on queries and keys."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    GeGLU,
    Layer,
    LinearScaling,
    Model,
    RMSNorm,
    Rope,
    Scale,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = RMSNorm(1e-6, plus_one=True)
EACH = 6  # layers a pattern, the last of them global


def gemma3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    head_dim: int = 256,
    query_scale: float = 256,
    window: int = 1024,
    stretched: float | None = 8.0,
    vocab: int = 262208,
) -> Model:
    """A Gemma 3 of any size. stretched: how much longer than at first the global layers see."""

    def block(rope: Rope, window: int | None) -> Layer:
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            scale=query_scale**-0.5,
            window=window,
            qk_norm=RMSNorm(1e-6, over="head_dim", plus_one=True),
        )
        return residual(NORM, attention, NORM) >> residual(NORM, GeGLU(ff), NORM)

    local = block(Rope(10_000), window)
    whole = block(Rope(1e6, scaling=LinearScaling(stretched) if stretched else None), None)
    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    x = ids() >> Embed(wte) >> Scale(embed**0.5) >> repeat(layers // EACH, *[local] * (EACH - 1), whole)
    x = x >> repeat(layers % EACH, local) if layers % EACH else x
    return model(name, x >> NORM >> Unembed(wte))


def gemma3_1b() -> Model:
    return gemma3("gemma3-1b", 26, 4, 1, 1152, 6912, window=512, stretched=None, vocab=262144)


def gemma3_4b() -> Model:
    return gemma3("gemma3-4b", 34, 8, 4, 2560, 10240)


def gemma3_12b() -> Model:
    return gemma3("gemma3-12b", 48, 16, 8, 3840, 15360)


def gemma3_27b() -> Model:
    return gemma3("gemma3-27b", 62, 32, 16, 5376, 21504, head_dim=128, query_scale=168)
