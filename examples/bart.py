"""BART (Lewis et al., arXiv:1910.13461): an encoder and a decoder with learned positions, norms after the layers."""

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    Embed,
    LayerNorm,
    Model,
    Positions,
    Unembed,
    Value,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = LayerNorm()
OFFSET = 2  # rows of the tables of positions that no position reads: those of fairseq's padding


def bart(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 50265,
    seq: int = 1024,
    dropout: float = 0.0,
) -> Model:
    """A BART of any size. The encoder reads `source_tokens` [batch source], the decoder `tokens` [batch seq]."""
    d = Dim("embed", embed)
    wte = weight("wte", Dim("vocab", vocab), d)
    drop = (Dropout(dropout),) if dropout else ()

    def embedded(tokens: Value, side: str) -> Value:
        wpe = weight(f"{side}_wpe", Dim("position", seq + OFFSET), d)
        return tokens >> Embed(wte) >> Positions(wpe, OFFSET) >> NORM

    whole, causal = (Attention(heads=heads, causal=c, bias=True, dropout=dropout) for c in (False, True))
    cross = CrossAttention(heads=heads, bias=True, dropout=dropout)
    mlp = residual(MLP(ff, "gelu", bias=True), *drop) >> NORM
    encoder = residual(whole, *drop) >> NORM >> mlp
    decoder = residual(causal, *drop) >> NORM >> residual(cross, *drop) >> NORM >> mlp
    memory = embedded(ids("source_tokens", Dim("source")), "encoder") >> repeat(layers, encoder)
    x = embedded(ids(), "decoder") >> repeat(layers, decoder).given(memory=memory)
    return model(name, x >> Unembed(wte))


def bart_base() -> Model:
    return bart("bart-base", 6, 12, 768, 3072)


def bart_large() -> Model:
    return bart("bart-large", 12, 16, 1024, 4096)
