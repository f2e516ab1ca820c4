"""Mistral (Jiang et al., arXiv:2310.06825): Llama's block, with sliding-window attention in the first version."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    NextToken,
    RMSNorm,
    Rope,
    SwiGLU,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rope

from .llama3 import (
    ATTENTION,
    NORMS,
    SWIGLU,
    decoder,
)


def mistral(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int,
    rope: float | Rope,
    head_dim: int | None = None,
    window: int | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    attention_dropout: float = 0.0,
) -> Model:
    """A Mistral of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    attention = Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, window=window, dropout=attention_dropout
    )
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    block = residual(RMSNorm(eps), attention) >> residual(RMSNorm(eps), SwiGLU(ff))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(eps) >> Unembed(head) >> NextToken())


def mistral_7b() -> Model:
    """Mistral 7B v0.1, with its window of 4,096 tokens."""
    return mistral("mistral-7b", 32, 32, 8, 4096, 14336, vocab=32000, rope=1e4, window=4096)


def mistral_7b_v3() -> Model:
    """Mistral 7B v0.3, without a window."""
    return mistral("mistral-7b-v3", 32, 32, 8, 4096, 14336, vocab=32768, rope=1e6)


def mistral_24b() -> Model:
    """Mistral Small 24B (2501)."""
    return mistral("mistral-24b", 40, 32, 8, 5120, 32768, vocab=131072, rope=1e8, head_dim=128)


@reads("MistralForCausalLM", names=decoder(NORMS | ATTENTION | SWIGLU))
def config(c: Config, name: str) -> Model:
    c.only("hidden_act", "silu", default="silu")
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    return mistral(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", 8),
        embed=embed,
        ff=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        rope=rope(c, 10_000.0),
        head_dim=c.head_dim(embed, heads),
        window=None if c.is_null("sliding_window") else c.whole("sliding_window", 4096),
        eps=c.number("rms_norm_eps", 1e-6),
        tied=c.flag("tie_word_embeddings", False),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
