"""Qwen 2.5 (arXiv:2412.15115): Llama's block, with biases on queries, keys and values."""

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
from megaloom.dsl.hf.tensor_names import flat

from .llama3 import (
    ATTENTION,
    NORMS,
    SWIGLU,
    decoder,
)


def qwen2(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 152064,
    rope: float | Rope = 1e6,
    tied: bool = False,
    eps: float = 1e-6,
    attention_dropout: float = 0.0,
) -> Model:
    """A Qwen 2.5 of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    attention = Attention(heads=heads, kv_heads=kv_heads, rope=rope, qkv_bias=True, dropout=attention_dropout)
    block = residual(RMSNorm(eps), attention) >> residual(RMSNorm(eps), SwiGLU(ff))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(eps) >> Unembed(head) >> NextToken())


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


BIASES = {f"self_attn.{n}_proj.bias": flat(f"attention.0.{n}_bias") for n in "qkv"}


def windowless(c: Config) -> None:
    """Raise UserError if a layer has a window. Qwen's configs have fields for it, but the published models use none."""
    c.only("use_sliding_window", False, default=False)
    c.ignore("sliding_window", "max_window_layers")
    full = ["full_attention"] * c.layers("num_hidden_layers")
    c.only("layer_types", full, default=full)


@reads("Qwen2ForCausalLM", names=decoder(NORMS | ATTENTION | BIASES | SWIGLU))
def config(c: Config, name: str) -> Model:
    windowless(c)
    c.only("hidden_act", "silu", default="silu")
    c.only("use_mrope", False, default=False)
    heads = c.whole("num_attention_heads")
    return qwen2(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", heads),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        rope=rope(c, 10_000.0),
        tied=c.flag("tie_word_embeddings", False),
        attention_dropout=c.rate("attention_dropout", 0.0),
        eps=c.number("rms_norm_eps", 1e-6),
    )
