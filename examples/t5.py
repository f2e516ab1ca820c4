"""T5 (Raffel et al., arXiv:1910.10683) and its version 1.1: an encoder and a decoder with relative position biases."""

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    Embed,
    GeGLU,
    Layer,
    Model,
    RelativeBuckets,
    RMSNorm,
    Scale,
    SequenceToSequence,
    Unembed,
    chain,
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

NORM = RMSNorm(1e-6)


def t5(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: Layer,
    *,
    head_dim: int = 64,
    vocab: int = 32128,
    tied: bool = True,
    scaled: bool | None = None,
    buckets: int = 32,
    distance: int = 128,
    decoder_layers: int | None = None,
    dropout: float = 0.0,
    start: int = 0,
    padding: int = 0,
) -> Model:
    """A T5 of any size: by default the decoder has as many layers as the encoder.

    The encoder reads `source_tokens` [batch source], the decoder `tokens` [batch seq]. The layers of each share a table
    of biases by distance. scaled: logits are of hidden states times embed^-0.5, by default if they are tied. dropout:
    of embeddings, attention probabilities and the outputs of layers and stacks; `ff` has its own. start: the token that
    the decoder reads first. padding: the token after the end of a target.
    """
    d, h = Dim("embed", embed), Dim("heads", heads)
    wte = weight("wte", Dim("vocab", vocab), d, std=1.0)

    def attention(side: str, causal: bool) -> Attention:
        table = weight(f"{side}_biases", Dim("buckets", buckets), h)
        relative = RelativeBuckets(buckets, distance, bidirectional=not causal)
        return Attention(
            heads=heads,
            head_dim=head_dim,
            causal=causal,
            scale=1.0,
            relative=relative,
            table=table,
            dropout=dropout,
        )

    drop = (Dropout(dropout),) if dropout else ()
    cross = CrossAttention(heads=heads, head_dim=head_dim, scale=1.0, dropout=dropout)
    feed_forward = residual(NORM, ff, *drop)
    encoder = residual(NORM, attention("encoder", causal=False), *drop) >> feed_forward
    decoder = residual(NORM, attention("decoder", causal=True), *drop) >> residual(NORM, cross, *drop) >> feed_forward
    embedded, after = chain(Embed(wte), *drop), chain(NORM, *drop)
    memory = ids("source_tokens", Dim("source")) >> embedded >> repeat(layers, encoder) >> after
    x = ids() >> embedded >> repeat(decoder_layers or layers, decoder).given(memory=memory) >> after
    loss = SequenceToSequence(start=start, padding=padding)
    x = x >> Scale(embed**-0.5) if scaled or (scaled is None and tied) else x
    return model(name, x >> Unembed(wte if tied else weight("head", Dim("vocab", vocab), d)) >> loss)


def t5_small() -> Model:
    return t5("t5-small", 6, 8, 512, MLP(2048, "relu"))


def t5_base() -> Model:
    return t5("t5-base", 12, 12, 768, MLP(3072, "relu"))


def t5_large() -> Model:
    return t5("t5-large", 24, 16, 1024, MLP(4096, "relu"))


def t5_3b() -> Model:
    return t5("t5-3b", 24, 32, 1024, MLP(16384, "relu"), head_dim=128)


def t5_11b() -> Model:
    return t5("t5-11b", 24, 128, 1024, MLP(65536, "relu"), head_dim=128)


def t5_v1_1_base() -> Model:
    return t5("t5-v1.1-base", 12, 12, 768, GeGLU(2048), tied=False)


def t5_v1_1_large() -> Model:
    return t5("t5-v1.1-large", 24, 16, 1024, GeGLU(2816), tied=False)


def t5_v1_1_xl() -> Model:
    return t5("t5-v1.1-xl", 24, 32, 2048, GeGLU(5120), tied=False)


def t5_v1_1_xxl() -> Model:
    return t5("t5-v1.1-xxl", 24, 64, 4096, GeGLU(10240), tied=False)


SELF = {f"layer.0.SelfAttention.{n}.weight": columns(f"attention.0.{n}") for n in "qkv"} | {
    "layer.0.SelfAttention.o.weight": rows("attention.0.o"),
    "layer.0.layer_norm.weight": flat("rms_norm.0.scale"),
}
CROSS = {f"layer.1.EncDecAttention.{n}.weight": columns(f"cross_attention.0.{n}") for n in "qkv"} | {
    "layer.1.EncDecAttention.o.weight": rows("cross_attention.0.o"),
    "layer.1.layer_norm.weight": flat("rms_norm.1.scale"),
}


def feed_forward(number: int) -> Tensors:
    """Return the tensor names of a feed-forward layer, gated or not, with this number in its block."""
    dense = f"layer.{number}.DenseReluDense."
    return {
        f"layer.{number}.layer_norm.weight": flat(f"rms_norm.{number}.scale"),
        f"{dense}wi.weight": columns("mlp.0.up"),
        f"{dense}wi_0.weight": columns("geglu.0.gate"),
        f"{dense}wi_1.weight": columns("geglu.0.up"),
        f"{dense}wo.weight": (rows("mlp.0.down"), rows("geglu.0.down")),
    }


NAMES = Names(
    {
        "shared.weight": columns("wte"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": columns("encoder_biases", dim="heads"),
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": columns("decoder_biases", dim="heads"),
        "encoder.final_layer_norm.weight": flat("rms_norm.0.scale"),
        "decoder.final_layer_norm.weight": flat("rms_norm.1.scale"),
        "lm_head.weight": columns("head"),
    },
    {
        "encoder.block.{layer}.": {**SELF, **feed_forward(1)},
        "decoder.block.{layer}.": {**SELF, **CROSS, **feed_forward(2)},
    },
    copies={f"{name}.weight": "shared.weight" for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens")},
)


@reads("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel", names=NAMES)
def config(c: Config, name: str) -> Model:
    """Return the model.

    Transformers 5 writes `tie_word_embeddings: true` for every model. Where hidden states are not scaled (1.1), it ties
    the logits unless a table of their own is beside the config.
    """
    c.only("is_encoder_decoder", True, default=True)
    c.only("layer_norm_epsilon", 1e-6, default=1e-6)
    gated = c.text("feed_forward_proj", "relu").startswith("gated-")
    c.only("is_gated_act", gated, default=gated)
    c.only("dense_act_fn", "gelu_new" if gated else "relu", default="gelu_new" if gated else "relu")
    c.ignore("n_positions")  # there is no table of positions
    tied, scaled = c.flag("tie_word_embeddings", True), _is_scaled(c)
    ff, layers = c.whole("d_ff"), c.layers("num_layers")
    dropout, padding = c.rate("dropout_rate", 0.1), c.whole("pad_token_id", 0, least=0)
    kinds = {"relu": MLP(ff, "relu", dropout=dropout), "gated-gelu": GeGLU(ff, dropout=dropout)}
    return t5(
        name,
        layers=layers,
        heads=c.whole("num_heads"),
        embed=c.whole("d_model"),
        ff=c.choice("feed_forward_proj", kinds, "relu"),
        head_dim=c.whole("d_kv", 64),
        vocab=c.whole("vocab_size"),
        tied=tied and (scaled or not c.has_tensor("lm_head.weight")),
        scaled=scaled,
        buckets=c.whole("relative_attention_num_buckets", 32),
        distance=c.whole("relative_attention_max_distance", 128),
        decoder_layers=c.layers("num_decoder_layers", layers),
        dropout=dropout,
        start=c.whole("decoder_start_token_id", padding, least=0),
        padding=padding,
    )


def _is_scaled(c: Config) -> bool:
    """Return whether hidden states are scaled before the logits: in T5, and if the config says so; not in mT5."""
    kind = c.text("model_type", "") or "".join(c.array("architectures", []))
    if kind.lower().startswith("mt5"):
        c.only("scale_decoder_outputs", False, default=False)
        return False
    return c.flag("scale_decoder_outputs", c.flag("tie_word_embeddings", True))
