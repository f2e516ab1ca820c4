"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral's attention, and eight experts of which two serve each token."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    MoE,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)


def mixtral(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    experts: int = 8,
    top_k: int = 2,
    *,
    vocab: int = 32000,
    head_dim: int | None = None,
    balance: float = 0.02,
) -> Model:
    """A Mixtral of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=1e6)
    block = residual(RMSNorm(), attention) >> residual(
        RMSNorm(), MoE(SwiGLU(ff), experts=experts, top_k=top_k, balance=balance)
    )
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(layers, block)
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)))


def mixtral_8x7b() -> Model:
    return mixtral("mixtral-8x7b", layers=32, heads=32, kv_heads=8, embed=4096, ff=14336)


def mixtral_8x22b() -> Model:
    """Mixtral 8x22B v0.1 (the vocabulary of the instructed model is 32,768)."""
    return mixtral("mixtral-8x22b", layers=56, heads=48, kv_heads=8, embed=6144, ff=16384, balance=0.001)
