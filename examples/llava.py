"""LLaVA 1.5 (Liu et al., arXiv:2310.03744): CLIP's image encoder, a projector, and Llama 2."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Activation,
    Attention,
    Dim,
    Embed,
    Layer,
    LayerNorm,
    Linear,
    MaskedScatter,
    Model,
    NextToken,
    PatchEmbed,
    Positions,
    RMSNorm,
    Slice,
    SwiGLU,
    Unembed,
    Value,
    apply,
    ids,
    image,
    mask,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rope
from megaloom.dsl.hf.tensor_names import (
    Names,
    Square,
    Stored,
    columns,
    flat,
    rows,
)

from . import llama3
from .vit import Prepend


@frozen
class Rest(Layer):
    """All patches but the first, the class token."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Slice("patches", 1, x["patches"].known), x)


@frozen
class Insert(Layer):
    """x with the vectors at positions of `token` (in the side input `tokens`) replaced by the image's, in order."""

    token: int

    def body(self, x: Value, /, image: Value, tokens: Value, **side: Value) -> Value:
        return apply(MaskedScatter(self.token), x, image, tokens)


def clip(layers: int, heads: int, embed: int, ff: int, *, patch: int, pixels: int) -> Value:
    """Return the hidden states of CLIP's image encoder after `layers` layers (Radford et al., arXiv:2103.00020)."""
    d = Dim("embed", embed)
    cls = weight("cls", Dim("patches", 1), d)
    wpe = weight("wpe", Dim("position", (pixels // patch) ** 2 + 1), d)
    block = residual(LayerNorm(), Attention(heads=heads, causal=False, bias=True)) >> residual(
        LayerNorm(), MLP(ff, "quick_gelu", bias=True)
    )
    x = image(height=pixels, width=pixels) >> PatchEmbed(patch, d, bias=False) >> Prepend(cls) >> Positions(wpe)
    return x >> LayerNorm() >> repeat(layers, block) >> Rest()


def llava(
    name: str, vision: Value, layers: int, heads: int, embed: int, ff: int, *, vocab: int = 32064, token: int = 32000
) -> Model:
    """A LLaVA of any size. The vectors of `vision` replace the tokens `token`, of which there is one per patch."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    seen = vision >> Linear(d, bias=True) >> Activation("gelu") >> Linear(d, bias=True)
    block = residual(RMSNorm(), Attention(heads=heads, rope=10_000)) >> residual(RMSNorm(), SwiGLU(ff))
    tokens = ids()
    x = tokens >> Embed(weight("wte", v, d)) >> Insert(token).given(image=seen, tokens=tokens) >> repeat(layers, block)
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)) >> NextToken(mask=mask()))


def llava_7b() -> Model:
    """LLaVA 1.5 7B: the output of layer 23 of 24 of CLIP ViT-L/14 at 336 pixels, and Vicuna 7B."""
    return llava("llava-7b", clip(23, 16, 1024, 4096, patch=14, pixels=336), 32, 32, 4096, 11008)


def llava_13b() -> Model:
    return llava("llava-13b", clip(23, 16, 1024, 4096, patch=14, pixels=336), 40, 40, 5120, 13824)


SIGHT, PROJECTOR, TEXT = "vision_tower.", "multi_modal_projector.", "language_model."
IMAGE_LAYER = {
    "layer_norm1.weight": flat("layer_norm.0.scale"),
    "layer_norm1.bias": flat("layer_norm.0.shift"),
    **{f"self_attn.{n}_proj.weight": columns(f"attention.0.{n}") for n in "qkv"},
    **{f"self_attn.{n}_proj.bias": flat(f"attention.0.{n}_bias") for n in "qkv"},
    "self_attn.out_proj.weight": rows("attention.0.o"),
    "self_attn.out_proj.bias": flat("attention.0.o_bias"),
    "layer_norm2.weight": flat("layer_norm.1.scale"),
    "layer_norm2.bias": flat("layer_norm.1.shift"),
    "mlp.fc1.weight": columns("mlp.0.up"),
    "mlp.fc1.bias": flat("mlp.0.up_bias"),
    "mlp.fc2.weight": rows("mlp.0.down"),
    "mlp.fc2.bias": flat("mlp.0.down_bias"),
}
NAMES = Names(
    {
        f"{SIGHT}embeddings.class_embedding": flat("cls"),
        f"{SIGHT}embeddings.patch_embedding.weight": Stored(("patch_embed.0.patch",), ("embed", Square("pixels", 3))),
        f"{SIGHT}embeddings.position_embedding.weight": columns("wpe"),
        f"{SIGHT}pre_layrnorm.weight": flat("layer_norm.0.scale"),
        f"{SIGHT}pre_layrnorm.bias": flat("layer_norm.0.shift"),
        f"{PROJECTOR}linear_1.weight": columns("linear.0.weight"),
        f"{PROJECTOR}linear_1.bias": flat("linear.0.bias"),
        f"{PROJECTOR}linear_2.weight": columns("linear.1.weight"),
        f"{PROJECTOR}linear_2.bias": flat("linear.1.bias"),
        **{f"{TEXT}{name}": stored for name, stored in llama3.WHOLE.items()},
    },
    {
        f"{SIGHT}encoder.layers.{{layer}}.": IMAGE_LAYER,
        f"{TEXT}model.layers.{{layer}}.": llama3.NORMS | llama3.ATTENTION | llama3.SWIGLU,
    },
    unused=(
        f"{SIGHT}encoder.layers.{{beyond}}.",
        f"{SIGHT}post_layernorm.",
    ),  # layers after the one that is used
    older={f"{SIGHT}vision_model.": SIGHT},
)


@reads("LlavaForConditionalGeneration", names=NAMES)
def config(c: Config, name: str) -> Model:
    """Return the model without the unused last layers of the image encoder. Missing sizes are those of Llama 7B."""
    see, text = c.inner("vision_config"), c.inner("text_config")
    c.only("projector_hidden_act", "gelu", default="gelu")
    c.only("vision_feature_select_strategy", "default", default="default")
    c.only("multimodal_projector_bias", True, default=True)
    c.only("tie_word_embeddings", False, default=False)
    c.ignore("image_seq_length", "ignore_index", "vocab_size")  # follow from other fields, or are training settings
    layers = see.layers("num_hidden_layers")
    last = c.whole("vision_feature_layer", -2, least=-layers)
    see.only("model_type", "clip_vision_model")
    see.only("hidden_act", "quick_gelu", default="quick_gelu")
    see.only("layer_norm_eps", 1e-5, default=1e-5)
    see.only("num_channels", 3, default=3)
    see.ignore("projection_dim", "vocab_size")  # for CLIP's training
    heads, embed = text.whole("num_attention_heads", 32), text.whole("hidden_size", 4096)
    text.only("model_type", "llama")
    text.only("num_key_value_heads", heads, default=heads)
    text.only("head_dim", embed // heads, default=embed // heads)
    text.only("hidden_act", "silu", default="silu")
    text.only("rms_norm_eps", 1e-5)
    for part in (see, text):
        part.only("attention_dropout", 0.0, default=0.0)
    text.only("tie_word_embeddings", False, default=False)
    for bias in ("attention_bias", "mlp_bias"):
        text.only(bias, False, default=False)
    if rope(text, 10_000.0) != 10_000:
        raise text.unsupported("rope_parameters", "LLaVA's positions turn with a base of 10,000")
    patch, pixels = see.whole("patch_size"), see.whole("image_size")
    vision = clip(
        last + 1 + layers if last < 0 else last,
        see.whole("num_attention_heads"),
        see.whole("hidden_size"),
        see.whole("intermediate_size"),
        patch=patch,
        pixels=pixels,
    )
    return llava(
        name,
        vision,
        text.layers("num_hidden_layers", 32),
        heads,
        embed,
        text.whole("intermediate_size", 11008),
        vocab=text.whole("vocab_size", 32000),
        token=c.whole(c.first_present("image_token_index", "image_token_id"), 32000),
    )
