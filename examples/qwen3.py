"""Qwen 3 (arXiv:2505.09388): norms on queries and keys instead of biases; dense, or a mixture of 128 experts."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
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


def qwen3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: Layer,
    *,
    vocab: int = 151936,
    head_dim: int = 128,
    rope: float = 1e6,
    tied: bool = False,
) -> Model:
    """A Qwen 3 of any size; `ff` is SwiGLU(...), or a MoE of them."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    norm = RMSNorm(1e-6, over="head_dim")
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, qk_norm=norm)
    block = residual(RMSNorm(1e-6), attention) >> residual(RMSNorm(1e-6), ff)
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(1e-6) >> Unembed(head))


def qwen3_0_6b() -> Model:
    return qwen3("qwen3-0.6b", 28, 16, 8, 1024, SwiGLU(3072), tied=True)


def qwen3_1_7b() -> Model:
    return qwen3("qwen3-1.7b", 28, 16, 8, 2048, SwiGLU(6144), tied=True)


def qwen3_4b() -> Model:
    return qwen3("qwen3-4b", 36, 32, 8, 2560, SwiGLU(9728), tied=True)


def qwen3_8b() -> Model:
    return qwen3("qwen3-8b", 36, 32, 8, 4096, SwiGLU(12288))


def qwen3_14b() -> Model:
    return qwen3("qwen3-14b", 40, 40, 8, 5120, SwiGLU(17408))


def qwen3_32b() -> Model:
    return qwen3("qwen3-32b", 64, 64, 8, 5120, SwiGLU(25600))


def qwen3_30b_a3b() -> Model:
    return qwen3("qwen3-30b-a3b", 48, 32, 4, 2048, MoE(SwiGLU(768), 128, 8, balance=0.001))


def qwen3_235b_a22b() -> Model:
    return qwen3("qwen3-235b-a22b", 94, 64, 4, 4096, MoE(SwiGLU(1536), 128, 8, balance=0.001))
