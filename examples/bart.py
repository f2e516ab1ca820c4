"""BART (Lewis et al., arXiv:1910.13461): an encoder and a decoder with learned positions, norms after the layers."""

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    Embed,
    LayerNorm,
    Model,
    Positions,
    SequenceToSequence,
    Unembed,
    Value,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    Names,
    Tensors,
    columns,
    flat,
    rows,
)

NORM = LayerNorm()
OFFSET = 2  # the first rows of the position tables are unused: fairseq reserved them for padding


def bart(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 50265,
    seq: int = 1024,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
    start: int = 2,
    padding: int = 1,
) -> Model:
    """A BART of any size. The encoder reads `source_tokens` [batch source], the decoder `tokens` [batch seq].

    start: the token that the decoder reads first. padding: the token after the end of a target.

    dropout: after the embeddings and each layer. attention_dropout: of the probabilities. activation_dropout: inside
    the MLPs.
    """
    d = Dim("embed", embed)
    wte = weight("wte", Dim("vocab", vocab), d)
    drop = (Dropout(dropout),) if dropout else ()

    def embedded(tokens: Value, side: str) -> Value:
        wpe = weight(f"{side}_wpe", Dim("position", seq + OFFSET), d)
        x = tokens >> Embed(wte) >> Positions(wpe, OFFSET) >> NORM
        return x >> Dropout(dropout) if dropout else x

    whole, causal = (Attention(heads=heads, causal=c, bias=True, dropout=attention_dropout) for c in (False, True))
    cross = CrossAttention(heads=heads, bias=True, dropout=attention_dropout)
    mlp = residual(MLP(ff, "gelu", bias=True, dropout=activation_dropout), *drop) >> NORM
    encoder = residual(whole, *drop) >> NORM >> mlp
    decoder = residual(causal, *drop) >> NORM >> residual(cross, *drop) >> NORM >> mlp
    memory = embedded(ids("source_tokens", Dim("source")), "encoder") >> repeat(layers, encoder)
    x = embedded(ids(), "decoder") >> repeat(layers, decoder).given(memory=memory)
    return model(name, x >> Unembed(wte) >> SequenceToSequence(start=start, padding=padding, infilling=True))


def bart_base() -> Model:
    return bart("bart-base", 6, 12, 768, 3072)


def bart_large() -> Model:
    return bart("bart-large", 12, 16, 1024, 4096)


def attention(kind: str, theirs: str) -> Tensors:
    """Return the tensor names of an attention and of the norm after it."""
    projections = {f"{theirs}.{n}_proj.weight": columns(f"{kind}.0.{n}") for n in "qkv"}
    biases = {f"{theirs}.{n}_proj.bias": flat(f"{kind}.0.{n}_bias") for n in "qkv"}
    out = {f"{theirs}.out_proj.weight": rows(f"{kind}.0.o"), f"{theirs}.out_proj.bias": flat(f"{kind}.0.o_bias")}
    return projections | biases | out


def norm(theirs: str, number: int) -> Tensors:
    """Return the tensor names of the norm with this number in its layer."""
    return {
        f"{theirs}.weight": flat(f"layer_norm.{number}.scale"),
        f"{theirs}.bias": flat(f"layer_norm.{number}.shift"),
    }


SELF = {**attention("attention", "self_attn"), **norm("self_attn_layer_norm", 0)}
CROSS = {**attention("cross_attention", "encoder_attn"), **norm("encoder_attn_layer_norm", 1)}
FEED_FORWARD = {
    "fc1.weight": columns("mlp.0.up"),
    "fc1.bias": flat("mlp.0.up_bias"),
    "fc2.weight": rows("mlp.0.down"),
    "fc2.bias": flat("mlp.0.down_bias"),
}
NAMES = Names(
    {
        "model.shared.weight": columns("wte"),
        "model.encoder.embed_positions.weight": columns("encoder_wpe"),
        "model.decoder.embed_positions.weight": columns("decoder_wpe"),
        **norm("model.encoder.layernorm_embedding", 0),
        **norm("model.decoder.layernorm_embedding", 1),
    },
    {
        "model.encoder.layers.{layer}.": {**SELF, **FEED_FORWARD, **norm("final_layer_norm", 1)},
        "model.decoder.layers.{layer}.": {**SELF, **CROSS, **FEED_FORWARD, **norm("final_layer_norm", 2)},
    },
    copies={
        f"{name}.weight": "model.shared.weight"
        for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens")
    },
    zero=("final_logits_bias",),
    older={name: f"model.{name}" for name in ("shared.", "encoder.", "decoder.")},
)


@reads("BartForConditionalGeneration", "BartModel", names=NAMES, std_field="init_std")
def config(c: Config, name: str) -> Model:
    """Return the model of BartForConditionalGeneration, with tied logits, also for configs that name BartModel."""
    layers, heads, ff = (c.whole(f"encoder_{n}") for n in ("layers", "attention_heads", "ffn_dim"))
    c.only("decoder_layers", layers)
    c.only("decoder_attention_heads", heads)
    c.only("decoder_ffn_dim", ff)
    c.only("num_hidden_layers", layers, default=layers)
    c.only("activation_function", "gelu", default="gelu")
    c.only("scale_embedding", False, default=False)
    c.only("normalize_before", False, default=False)
    c.only("normalize_embedding", True, default=True)
    c.only("add_final_layer_norm", False, default=False)
    c.only("add_bias_logits", False, default=False)
    c.only("is_encoder_decoder", True, default=True)
    c.only("tie_word_embeddings", True, default=True)
    seq = c.whole("max_position_embeddings", 1024)
    return bart(
        name,
        layers,
        heads,
        c.whole("d_model"),
        ff,
        vocab=c.whole("vocab_size"),
        seq=seq,
        dropout=c.rate("dropout", 0.1),
        attention_dropout=c.rate("attention_dropout", 0.0),
        activation_dropout=c.rate("activation_dropout", 0.0),
        start=c.whole("decoder_start_token_id", 2, least=0),
        padding=c.whole("pad_token_id", 1, least=0),
    )
