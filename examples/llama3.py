"""Llama 3 (Dubey et al., arXiv:2407.21783): grouped attention, rotary positions, RMSNorm, SwiGLU."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Llama3Scaling,
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
from megaloom.dsl.hf.tensor_names import (
    Names,
    Tensors,
    columns,
    flat,
    rows,
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
    rope: float | Rope = 500_000,
    head_dim: int | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    attention_dropout: float = 0.0,
) -> Model:
    """A Llama of any size. attention_bias, mlp_bias: of all projections of attention, or of the feed-forward."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        bias=attention_bias,
        dropout=attention_dropout,
    )
    block = residual(RMSNorm(eps), attention) >> residual(RMSNorm(eps), SwiGLU(ff, bias=mlp_bias))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(eps) >> Unembed(head) >> NextToken())


def llama3_1b() -> Model:
    """Llama 3.2 1B."""
    stretched = Rope(500_000, scaling=Llama3Scaling(factor=32))
    return llama("llama3-1b", layers=16, heads=32, kv_heads=8, embed=2048, ff=8192, rope=stretched, tied=True)


def llama3_3b() -> Model:
    """Llama 3.2 3B."""
    stretched = Rope(500_000, scaling=Llama3Scaling(factor=32))
    return llama("llama3-3b", layers=28, heads=24, kv_heads=8, embed=3072, ff=8192, rope=stretched, tied=True)


def llama3_8b() -> Model:
    return llama("llama3-8b", layers=32, heads=32, kv_heads=8, embed=4096, ff=14336)


def llama3_70b() -> Model:
    return llama("llama3-70b", layers=80, heads=64, kv_heads=8, embed=8192, ff=28672)


# RoPE scaled from 8,192 tokens, the first training length, to 131,072.
LONG = Rope(500_000, scaling=Llama3Scaling(factor=8))


def llama3_1_8b() -> Model:
    return llama("llama3.1-8b", layers=32, heads=32, kv_heads=8, embed=4096, ff=14336, rope=LONG)


def llama3_1_70b() -> Model:
    return llama("llama3.1-70b", layers=80, heads=64, kv_heads=8, embed=8192, ff=28672, rope=LONG)


def llama3_405b() -> Model:
    """Llama 3.1 405B."""
    return llama("llama3-405b", layers=126, heads=128, kv_heads=8, embed=16384, ff=53248, rope=LONG)


# The tensor names of most families since Llama: attention, gated feed-forward, whole model.
WHOLE = {
    "model.embed_tokens.weight": columns("wte"),
    "model.norm.weight": flat("rms_norm.0.scale"),
    "lm_head.weight": columns("head"),
}
ATTENTION = {
    "self_attn.q_proj.weight": columns("attention.0.q"),
    "self_attn.k_proj.weight": columns("attention.0.k"),
    "self_attn.v_proj.weight": columns("attention.0.v"),
    "self_attn.o_proj.weight": rows("attention.0.o"),
}
SWIGLU = {
    "mlp.gate_proj.weight": columns("swiglu.0.gate"),
    "mlp.up_proj.weight": columns("swiglu.0.up"),
    "mlp.down_proj.weight": rows("swiglu.0.down"),
}
NORMS = {
    "input_layernorm.weight": flat("rms_norm.0.scale"),
    "post_attention_layernorm.weight": flat("rms_norm.1.scale"),
}


def decoder(layer: Tensors, unused: tuple[str, ...] = ()) -> Names:
    """Return the tensor names of a decoder whose layers have these. Checkpoints may repeat a tied table."""
    angles = "model.layers.{layer}.self_attn.rotary_emb.inv_freq"
    copies = {"lm_head.weight": "model.embed_tokens.weight"}
    return Names(WHOLE, {"model.layers.{layer}.": layer}, unused=(*unused, angles), copies=copies)


BIASES = {f"self_attn.{n}_proj.bias": flat(f"attention.0.{n}_bias") for n in "qkvo"} | {
    f"mlp.{n}_proj.bias": flat(f"swiglu.0.{n}_bias") for n in ("gate", "up", "down")
}


@reads("LlamaForCausalLM", names=decoder(NORMS | ATTENTION | BIASES | SWIGLU))
def config(c: Config, name: str) -> Model:
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    c.only("hidden_act", "silu", default="silu")
    return llama(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", heads),
        embed=embed,
        ff=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        rope=rope(c, 10_000.0),
        head_dim=c.head_dim(embed, heads),
        eps=c.number("rms_norm_eps", 1e-6),
        tied=c.flag("tie_word_embeddings", False),
        attention_bias=c.flag("attention_bias", False),
        mlp_bias=c.flag("mlp_bias", False),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
