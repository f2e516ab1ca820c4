"""GPT-2 (Radford et al., 2019) in its published sizes: learned positions, biases, tied embeddings."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
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


def gpt(
    name: str, layers: int, heads: int, embed: int, *, vocab: int = 50257, seq: int = 1024, dropout: float = 0.0
) -> Model:
    """A GPT-2 of any size."""
    d = Dim("embed", embed)
    wte, wpe = weight("wte", Dim("vocab", vocab), d), weight("wpe", Dim("position", seq), d, std=0.01)
    drop = (Dropout(dropout),) if dropout else ()
    block = residual(LayerNorm(), Attention(heads=heads, bias=True, dropout=dropout), *drop) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True), *drop
    )
    x = ids() >> Embed(wte) >> Positions(wpe)
    return model(name, x >> repeat(layers, block) >> LayerNorm() >> Unembed(wte))  # the same weight, twice: tied


def gpt2() -> Model:
    return gpt("gpt2", layers=12, heads=12, embed=768)


def gpt2_medium() -> Model:
    return gpt("gpt2-medium", layers=24, heads=16, embed=1024)


def gpt2_large() -> Model:
    return gpt("gpt2-large", layers=36, heads=20, embed=1280)


def gpt2_xl() -> Model:
    return gpt("gpt2-xl", layers=48, heads=25, embed=1600)
