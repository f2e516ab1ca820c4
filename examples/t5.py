"""T5 (Raffel et al., arXiv:1910.10683) and its version 1.1: an encoder and a decoder, biases by distance."""

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Embed,
    GeGLU,
    Layer,
    Model,
    Relative,
    RMSNorm,
    Scale,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = RMSNorm(1e-6)


def t5(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: Layer,
    *,
    head_dim: int = 64,
    vocab: int = 32128,
    tied: bool = True,
    buckets: int = 32,
    distance: int = 128,
    decoder_layers: int | None = None,
) -> Model:
    """A T5 of any size: as many layers in the decoder as in the encoder if not said otherwise.

    The encoder reads `source_tokens` [batch source], the decoder `tokens` [batch seq]. The layers of each share a table
    of biases by distance. Tied logits are of hidden states times embed^-0.5.
    """
    d, h = Dim("embed", embed), Dim("heads", heads)
    wte = weight("wte", Dim("vocab", vocab), d, std=1.0)

    def attention(side: str, causal: bool) -> Attention:
        table = weight(f"{side}_biases", Dim("buckets", buckets), h)
        relative = Relative(buckets, distance, both_ways=not causal)
        return Attention(heads=heads, head_dim=head_dim, causal=causal, scale=1.0, relative=relative, table=table)

    cross = CrossAttention(heads=heads, head_dim=head_dim, scale=1.0)
    encoder = residual(NORM, attention("encoder", causal=False)) >> residual(NORM, ff)
    decoder = residual(NORM, attention("decoder", causal=True)) >> residual(NORM, cross) >> residual(NORM, ff)
    memory = ids("source_tokens", Dim("source")) >> Embed(wte) >> repeat(layers, encoder) >> NORM
    x = ids() >> Embed(wte) >> repeat(decoder_layers or layers, decoder).given(memory=memory) >> NORM
    if tied:
        return model(name, x >> Scale(embed**-0.5) >> Unembed(wte))
    return model(name, x >> Unembed(weight("head", Dim("vocab", vocab), d)))


def t5_small() -> Model:
    return t5("t5-small", 6, 8, 512, MLP(2048, "relu"))


def t5_base() -> Model:
    return t5("t5-base", 12, 12, 768, MLP(3072, "relu"))


def t5_large() -> Model:
    return t5("t5-large", 24, 16, 1024, MLP(4096, "relu"))


def t5_3b() -> Model:
    return t5("t5-3b", 24, 32, 1024, MLP(16384, "relu"), head_dim=128)


def t5_11b() -> Model:
    return t5("t5-11b", 24, 128, 1024, MLP(65536, "relu"), head_dim=128)


def t5_v1_1_base() -> Model:
    return t5("t5-v1.1-base", 12, 12, 768, GeGLU(2048), tied=False)


def t5_v1_1_large() -> Model:
    return t5("t5-v1.1-large", 24, 16, 1024, GeGLU(2816), tied=False)


def t5_v1_1_xl() -> Model:
    return t5("t5-v1.1-xl", 24, 32, 2048, GeGLU(5120), tied=False)


def t5_v1_1_xxl() -> Model:
    return t5("t5-v1.1-xxl", 24, 64, 4096, GeGLU(10240), tied=False)
