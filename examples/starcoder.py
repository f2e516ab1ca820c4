"""StarCoder (Li et al., arXiv:2305.06161): GPT-2's block with one key/value head for all query heads."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    Positions,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)


def starcoder(name: str, layers: int, heads: int, embed: int, *, vocab: int = 49152, seq: int = 8192) -> Model:
    """A StarCoder of any size: multi-query attention (Shazeer, arXiv:1911.02150)."""
    d = Dim("embed", embed)
    wte, wpe = weight("wte", Dim("vocab", vocab), d), weight("wpe", Dim("position", seq), d)
    block = residual(LayerNorm(), Attention(heads=heads, kv_heads=1, bias=True)) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True)
    )
    return model(name, ids() >> Embed(wte) >> Positions(wpe) >> repeat(layers, block) >> LayerNorm() >> Unembed(wte))


def starcoder_1b() -> Model:
    return starcoder("starcoder-1b", 24, 16, 2048)


def starcoder_15b() -> Model:
    return starcoder("starcoder-15b", 40, 48, 6144)
