"""StarCoder (Li et al., arXiv:2305.06161): GPT-2's block with one key/value head for all query heads."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Positions,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    Names,
    columns,
    flat,
    rows,
)


def starcoder(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    *,
    vocab: int = 49152,
    seq: int = 8192,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    embed_dropout: float = 0.0,
) -> Model:
    """A StarCoder of any size: multi-query attention (Shazeer, arXiv:1911.02150)."""
    drop = (Dropout(dropout),) if dropout else ()
    d = Dim("embed", embed)
    wte, wpe = weight("wte", Dim("vocab", vocab), d), weight("wpe", Dim("position", seq), d)
    attention = Attention(heads=heads, kv_heads=1, bias=True, dropout=attention_dropout)
    block = residual(LayerNorm(), attention, *drop) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True), *drop
    )
    x = ids() >> Embed(wte) >> Positions(wpe)
    x = x >> Dropout(embed_dropout) if embed_dropout else x
    return model(name, x >> repeat(layers, block) >> LayerNorm() >> Unembed(wte) >> NextToken())


def starcoder_1b() -> Model:
    return starcoder("starcoder-1b", 24, 16, 2048)


def starcoder_15b() -> Model:
    return starcoder("starcoder-15b", 40, 48, 6144)


NAMES = Names(
    {
        "transformer.wte.weight": columns("wte"),
        "transformer.wpe.weight": columns("wpe"),
        "transformer.ln_f.weight": flat("layer_norm.0.scale"),
        "transformer.ln_f.bias": flat("layer_norm.0.shift"),
    },
    {
        "transformer.h.{layer}.": {
            "ln_1.weight": flat("layer_norm.0.scale"),
            "ln_1.bias": flat("layer_norm.0.shift"),
            "attn.c_attn.weight": columns("attention.0.q", "attention.0.k", "attention.0.v"),
            "attn.c_attn.bias": flat("attention.0.q_bias", "attention.0.k_bias", "attention.0.v_bias"),
            "attn.c_proj.weight": rows("attention.0.o"),
            "attn.c_proj.bias": flat("attention.0.o_bias"),
            "ln_2.weight": flat("layer_norm.1.scale"),
            "ln_2.bias": flat("layer_norm.1.shift"),
            "mlp.c_fc.weight": columns("mlp.0.up"),
            "mlp.c_fc.bias": flat("mlp.0.up_bias"),
            "mlp.c_proj.weight": rows("mlp.0.down"),
            "mlp.c_proj.bias": flat("mlp.0.down_bias"),
        }
    },
    unused=("transformer.h.{layer}.attn.bias",),  # causal masks
    copies={"lm_head.weight": "transformer.wte.weight"},
)


@reads("GPTBigCodeForCausalLM", names=NAMES)
def config(c: Config, name: str) -> Model:
    embed = c.whole("n_embd")
    c.only("multi_query", True, default=True)
    c.only("num_key_value_heads", 1, default=1)
    c.only("n_inner", 4 * embed, None, default=None)
    c.only("activation_function", "gelu_pytorch_tanh", "gelu_new", default="gelu_pytorch_tanh")
    c.only("layer_norm_epsilon", 1e-5, default=1e-5)
    c.only("scale_attn_weights", True, default=True)
    c.only("tie_word_embeddings", True, default=True)
    c.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # numerics only
    c.ignore("summary_activation", "inference_runner", "max_batch_size", "max_sequence_length", "pre_allocate_kv_cache")
    c.ignore("runner_max_sequence_length", "validate_runner_input", "pad_key_length")  # settings for serving
    seq = c.whole("n_positions", 1024)
    return starcoder(
        name,
        c.layers("n_layer"),
        c.whole("n_head"),
        embed,
        vocab=c.whole("vocab_size"),
        seq=seq,
        dropout=c.rate("resid_pdrop", 0.1),
        attention_dropout=c.rate("attn_pdrop", 0.1),
        embed_dropout=c.rate("embd_pdrop", 0.1),
    )
