"""BERT (Devlin et al., arXiv:1810.04805): both directions, token types, and a head that fills masked tokens in."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Positions,
    Unembed,
    Value,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = LayerNorm(1e-12)


@frozen
class Transform(Layer):
    """norm(gelu(dense(x))): what the hidden states go through before the logits of masked tokens."""

    def body(self, x: Value, /, **side: Value) -> Value:
        h = x >> Linear(x["embed"], bias=True).named("dense")
        return fn("gelu", h) >> NORM.named("norm")


def bert(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 30522,
    seq: int = 512,
    types: int = 2,
    dropout: float = 0.0,
    pre_norm: bool = False,
) -> Model:
    """A BERT of any size. pre_norm: the norms come before the layers, as in Megatron-LM's, rather than after."""
    d = Dim("embed", embed)
    wte = weight("wte", Dim("vocab", vocab), d)
    kinds, wpe = weight("types", Dim("vocab", types), d), weight("wpe", Dim("position", seq), d)
    drop = (Dropout(dropout),) if dropout else ()
    attention = Attention(heads=heads, causal=False, bias=True, dropout=dropout)
    mlp = MLP(ff, "gelu", bias=True)
    if pre_norm:
        block = residual(NORM, attention, *drop) >> residual(NORM, mlp, *drop)
    else:
        block = residual(attention, *drop) >> NORM >> residual(mlp, *drop) >> NORM
    x = ((ids() >> Embed(wte)) + (ids("types") >> Embed(kinds))) >> Positions(wpe)
    x = x >> repeat(layers, block) >> NORM if pre_norm else x >> NORM >> repeat(layers, block)
    return model(name, x >> Transform() >> Unembed(wte, bias=True))


def bert_base() -> Model:
    return bert("bert-base", 12, 12, 768, 3072)


def bert_large() -> Model:
    return bert("bert-large", 24, 16, 1024, 4096)


def bert_large_pre_norm() -> Model:
    """BERT large with norms before its layers (Shoeybi et al., arXiv:1909.08053, figure 7)."""
    return bert("bert-large-pre-norm", 24, 16, 1024, 4096, pre_norm=True)
