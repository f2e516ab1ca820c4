"""BLOOM (arXiv:2211.05100): no positions but a slope for each head (ALiBi), a norm right after the embedding."""

from megaloom.dsl import MLP, Attention, Dim, Embed, LayerNorm, Model, Unembed, ids, model, repeat, residual, weight


def bloom(name: str, layers: int, heads: int, embed: int, *, vocab: int = 250880) -> Model:
    """A BLOOM of any size."""
    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    block = residual(LayerNorm(), Attention(heads=heads, alibi=True, bias=True)) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True)
    )
    return model(name, ids() >> Embed(wte) >> LayerNorm() >> repeat(layers, block) >> LayerNorm() >> Unembed(wte))


def bloom_560m() -> Model:
    return bloom("bloom-560m", 24, 16, 1024)


def bloom_7b() -> Model:
    return bloom("bloom-7b", 30, 32, 4096)


def bloom_176b() -> Model:
    return bloom("bloom-176b", 70, 112, 14336)
