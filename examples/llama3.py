"""Llama 3 (Dubey et al., arXiv:2407.21783): grouped attention, rotary positions, RMSNorm, SwiGLU."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)


def llama(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 128256,
    rope: float = 500_000,
    tied: bool = False,
) -> Model:
    """A Llama 3 of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    block = residual(RMSNorm(), Attention(heads=heads, kv_heads=kv_heads, rope=rope)) >> residual(RMSNorm(), SwiGLU(ff))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm() >> Unembed(head))


def llama3_1b() -> Model:
    """Llama 3.2 1B."""
    return llama("llama3-1b", layers=16, heads=32, kv_heads=8, embed=2048, ff=8192, tied=True)


def llama3_8b() -> Model:
    return llama("llama3-8b", layers=32, heads=32, kv_heads=8, embed=4096, ff=14336)


def llama3_70b() -> Model:
    return llama("llama3-70b", layers=80, heads=64, kv_heads=8, embed=8192, ff=28672)


def llama3_405b() -> Model:
    return llama("llama3-405b", layers=126, heads=128, kv_heads=8, embed=16384, ff=53248)
