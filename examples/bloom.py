"""BLOOM (arXiv:2211.05100): ALiBi instead of position embeddings, a norm after the embedding."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    JOIN,
    Names,
    Stored,
    columns,
    flat,
    rows,
)


def bloom(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    *,
    vocab: int = 250880,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> Model:
    """A BLOOM of any size."""
    drop = (Dropout(dropout),) if dropout else ()
    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    attention = Attention(heads=heads, alibi=True, bias=True, dropout=attention_dropout)
    block = residual(LayerNorm(), attention, *drop) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True), *drop
    )
    x = ids() >> Embed(wte) >> LayerNorm() >> repeat(layers, block) >> LayerNorm()
    return model(name, x >> Unembed(wte) >> NextToken())


def bloom_560m() -> Model:
    return bloom("bloom-560m", 24, 16, 1024)


def bloom_7b() -> Model:
    return bloom("bloom-7b", 30, 32, 4096)


def bloom_176b() -> Model:
    return bloom("bloom-176b", 70, 112, 14336)


# Query, key and value of each head are adjacent.
QKV = ("attention.0.q", "attention.0.k", "attention.0.v")
NAMES = Names(
    {
        "transformer.word_embeddings.weight": columns("wte"),
        "transformer.word_embeddings_layernorm.weight": flat("layer_norm.0.scale"),
        "transformer.word_embeddings_layernorm.bias": flat("layer_norm.0.shift"),
        "transformer.ln_f.weight": flat("layer_norm.1.scale"),
        "transformer.ln_f.bias": flat("layer_norm.1.shift"),
    },
    {
        "transformer.h.{layer}.": {
            "input_layernorm.weight": flat("layer_norm.0.scale"),
            "input_layernorm.bias": flat("layer_norm.0.shift"),
            "self_attention.query_key_value.weight": Stored(QKV, ((..., JOIN, "head_dim"), "embed")),
            "self_attention.query_key_value.bias": Stored(
                tuple(f"{name}_bias" for name in QKV), ((..., JOIN, "head_dim"),)
            ),
            "self_attention.dense.weight": rows("attention.0.o"),
            "self_attention.dense.bias": flat("attention.0.o_bias"),
            "post_attention_layernorm.weight": flat("layer_norm.1.scale"),
            "post_attention_layernorm.bias": flat("layer_norm.1.shift"),
            "mlp.dense_h_to_4h.weight": columns("mlp.0.up"),
            "mlp.dense_h_to_4h.bias": flat("mlp.0.up_bias"),
            "mlp.dense_4h_to_h.weight": rows("mlp.0.down"),
            "mlp.dense_4h_to_h.bias": flat("mlp.0.down_bias"),
        }
    },
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    older={name: f"transformer.{name}" for name in ("h.", "word_embeddings", "ln_f.")},
)


@reads("BloomForCausalLM", names=NAMES)
def config(c: Config, name: str) -> Model:
    embed = c.whole(c.first_present("hidden_size", "n_embed"))
    c.only("n_inner", 4 * embed, None, default=None)
    c.only("layer_norm_epsilon", 1e-5, default=1e-5)
    c.only("apply_residual_connection_post_layernorm", False, default=False)
    c.only("tie_word_embeddings", True, default=True)
    c.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "slow_but_exact")
    c.ignore("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv")  # training settings of BLOOM
    heads = c.whole(c.first_present("n_head", "num_attention_heads"))
    return bloom(
        name,
        c.layers(c.first_present("n_layer", "num_hidden_layers")),
        heads,
        embed,
        vocab=c.whole("vocab_size"),
        dropout=c.rate("hidden_dropout", 0.0),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
