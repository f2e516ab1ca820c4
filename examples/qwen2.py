"""Qwen 2.5 (arXiv:2412.15115): Llama's block, with biases on queries, keys and values."""

from megaloom.dsl import Attention, Dim, Embed, Model, RMSNorm, SwiGLU, Unembed, ids, model, repeat, residual, weight


def qwen2(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 152064,
    rope: float = 1e6,
    tied: bool = False,
) -> Model:
    """A Qwen 2.5 of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    attention = Attention(heads=heads, kv_heads=kv_heads, rope=rope, qkv_bias=True)
    block = residual(RMSNorm(1e-6), attention) >> residual(RMSNorm(1e-6), SwiGLU(ff))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(1e-6) >> Unembed(head))


def qwen2_5_0_5b() -> Model:
    return qwen2("qwen2.5-0.5b", 24, 14, 2, 896, 4864, vocab=151936, tied=True)


def qwen2_5_1_5b() -> Model:
    return qwen2("qwen2.5-1.5b", 28, 12, 2, 1536, 8960, vocab=151936, tied=True)


def qwen2_5_3b() -> Model:
    return qwen2("qwen2.5-3b", 36, 16, 2, 2048, 11008, vocab=151936, tied=True)


def qwen2_5_7b() -> Model:
    return qwen2("qwen2.5-7b", 28, 28, 4, 3584, 18944)


def qwen2_5_14b() -> Model:
    return qwen2("qwen2.5-14b", 48, 40, 8, 5120, 13824)


def qwen2_5_32b() -> Model:
    return qwen2("qwen2.5-32b", 64, 40, 8, 5120, 27648)


def qwen2_5_72b() -> Model:
    return qwen2("qwen2.5-72b", 80, 64, 8, 8192, 29568)
