"""Vision transformers (Dosovitskiy et al., arXiv:2010.11929): patches of an image, and a class token."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Classification,
    Concat,
    Dim,
    Dropout,
    Layer,
    LayerNorm,
    Model,
    PatchEmbed,
    Positions,
    Select,
    Unembed,
    Value,
    apply,
    image,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    Names,
    Square,
    Stored,
    columns,
    flat,
    rows,
)


@frozen
class Prepend(Layer):
    """The patches after a learned class token [patches=1 embed]."""

    vector: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Concat("patches"), self.vector, x)


@frozen
class First(Layer):
    """The first patch, the class token: [batch patches embed] to [batch embed]."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Select("patches", 0), x)


def vit(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: int,
    *,
    patch: int = 16,
    pixels: int = 224,
    classes: int = 1000,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> Model:
    """A vision transformer of any size, for images [batch channels=3 height width] of `pixels` by `pixels`."""
    d, count = Dim("embed", embed), (pixels // patch) ** 2
    cls = weight("cls", Dim("patches", 1), d)
    wpe = weight("wpe", Dim("position", count + 1), d)
    norm = LayerNorm(1e-12)
    drop = (Dropout(dropout),) if dropout else ()
    attention = Attention(heads=heads, causal=False, bias=True, dropout=attention_dropout)
    block = residual(norm, attention, *drop) >> residual(norm, MLP(ff, "gelu", bias=True), *drop)
    x = image(height=pixels, width=pixels) >> PatchEmbed(patch, d) >> Prepend(cls) >> Positions(wpe)
    x = x >> Dropout(dropout) if dropout else x
    head = Unembed(weight("head", Dim("vocab", classes), d), bias=True)
    return model(name, x >> repeat(layers, block) >> norm >> First() >> head >> Classification())


def vit_base() -> Model:
    return vit("vit-base", 12, 12, 768, 3072)


def vit_large() -> Model:
    return vit("vit-large", 24, 16, 1024, 4096)


def vit_huge() -> Model:
    return vit("vit-huge", 32, 16, 1280, 5120, patch=14)


NAMES = Names(
    {
        "vit.embeddings.cls_token": Stored(("cls",), (1, "patches", "embed")),
        "vit.embeddings.position_embeddings": Stored(("wpe",), (1, "position", "embed")),
        "vit.embeddings.patch_embeddings.projection.weight": Stored(
            ("patch_embed.0.patch",), ("embed", Square("pixels", 3))
        ),
        "vit.embeddings.patch_embeddings.projection.bias": flat("patch_embed.0.patch_bias"),
        "vit.layernorm.weight": flat("layer_norm.0.scale"),
        "vit.layernorm.bias": flat("layer_norm.0.shift"),
        "classifier.weight": columns("head"),
        "classifier.bias": flat("unembed.0.bias"),
    },
    {
        "vit.encoder.layer.{layer}.": {
            "layernorm_before.weight": flat("layer_norm.0.scale"),
            "layernorm_before.bias": flat("layer_norm.0.shift"),
            "attention.attention.query.weight": columns("attention.0.q"),
            "attention.attention.query.bias": flat("attention.0.q_bias"),
            "attention.attention.key.weight": columns("attention.0.k"),
            "attention.attention.key.bias": flat("attention.0.k_bias"),
            "attention.attention.value.weight": columns("attention.0.v"),
            "attention.attention.value.bias": flat("attention.0.v_bias"),
            "attention.output.dense.weight": rows("attention.0.o"),
            "attention.output.dense.bias": flat("attention.0.o_bias"),
            "layernorm_after.weight": flat("layer_norm.1.scale"),
            "layernorm_after.bias": flat("layer_norm.1.shift"),
            "intermediate.dense.weight": columns("mlp.0.up"),
            "intermediate.dense.bias": flat("mlp.0.up_bias"),
            "output.dense.weight": rows("mlp.0.down"),
            "output.dense.bias": flat("mlp.0.down_bias"),
        }
    },
)


@reads("ViTForImageClassification", names=NAMES)
def config(c: Config, name: str) -> Model:
    c.only("hidden_act", "gelu", default="gelu")
    c.only("layer_norm_eps", 1e-12, default=1e-12)
    c.only("num_channels", 3, default=3)
    c.only("qkv_bias", True, default=True)
    c.ignore("encoder_stride", "pooler_act", "pooler_output_size")  # heads for other tasks
    return vit(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=c.whole("num_attention_heads"),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        patch=c.whole("patch_size", 16),
        pixels=c.whole("image_size", 224),
        classes=c.length("id2label", 2),
        dropout=c.rate("hidden_dropout_prob", 0.0),
        attention_dropout=c.rate("attention_probs_dropout_prob", 0.0),
    )
