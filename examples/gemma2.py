"""Gemma 2 (arXiv:2408.00118): alternating local and global attention, norms before and after, softcaps."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    GeGLU,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Rope,
    Scale,
    Softcap,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rope
from megaloom.dsl.hf.tensor_names import columns, flat, rows

from .llama3 import ATTENTION, decoder

NORM = RMSNorm(1e-6, plus_one=True)


def gemma2(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    head_dim: int = 256,
    query_scale: float = 256,
    rope: float | Rope = 10_000,
    window: int = 4096,
    vocab: int = 256000,
    attention_dropout: float = 0.0,
) -> Model:
    """A Gemma 2 of any size, with an even number of layers. query_scale: the scores are divided by its square root."""

    def block(window: int | None) -> Layer:
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            scale=query_scale**-0.5,
            softcap=50.0,
            window=window,
            dropout=attention_dropout,
        )
        return residual(NORM, attention, NORM) >> residual(NORM, GeGLU(ff), NORM)

    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    x = ids() >> Embed(wte) >> Scale(embed**0.5) >> repeat(layers // 2, block(window), block(None))
    return model(name, x >> NORM >> Unembed(wte) >> Softcap(30.0) >> NextToken())


def gemma2_2b() -> Model:
    return gemma2("gemma2-2b", 26, 8, 4, 2304, 9216)


def gemma2_9b() -> Model:
    return gemma2("gemma2-9b", 42, 16, 8, 3584, 14336)


def gemma2_27b() -> Model:
    return gemma2("gemma2-27b", 46, 32, 16, 4608, 36864, head_dim=128, query_scale=144)


LAYER = ATTENTION | {
    "input_layernorm.weight": flat("rms_norm.0.scale"),
    "post_attention_layernorm.weight": flat("rms_norm.1.scale"),
    "pre_feedforward_layernorm.weight": flat("rms_norm.2.scale"),
    "post_feedforward_layernorm.weight": flat("rms_norm.3.scale"),
    "mlp.gate_proj.weight": columns("geglu.0.gate"),
    "mlp.up_proj.weight": columns("geglu.0.up"),
    "mlp.down_proj.weight": rows("geglu.0.down"),
}


def checked(c: Config) -> None:
    """Raise UserError if a field has another value than in all Gemma models."""
    c.only("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    c.ignore("hidden_act")  # an older name, which Hugging Face does not read
    c.only("rms_norm_eps", 1e-6, default=1e-6)
    c.only("attention_bias", False, default=False)
    c.only("use_bidirectional_attention", False, None, default=False)
    c.only("tie_word_embeddings", True, default=True)


@reads("Gemma2ForCausalLM", names=decoder(LAYER))
def config(c: Config, name: str) -> Model:
    checked(c)
    layers = c.layers("num_hidden_layers")
    c.only("num_hidden_layers", layers + layers % 2)
    in_turn = ["sliding_attention", "full_attention"] * (layers // 2)
    c.only("layer_types", in_turn, default=in_turn)
    c.only("attn_logit_softcapping", 50.0, default=50.0)
    c.only("final_logit_softcapping", 30.0, default=30.0)
    c.ignore("sliding_window_size")  # an older name
    return gemma2(
        name,
        layers=layers,
        heads=c.whole("num_attention_heads"),
        kv_heads=c.whole("num_key_value_heads"),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        head_dim=c.whole("head_dim", 256),
        query_scale=c.whole("query_pre_attn_scalar", 256),
        rope=rope(c, 10_000.0),
        window=c.whole("sliding_window", 4096),
        vocab=c.whole("vocab_size"),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
