"""LLaVA 1.5 (Liu et al., arXiv:2310.03744): CLIP's image encoder, a projector, and a Llama 2 that reads its vectors."""

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
    Model,
    PatchEmbed,
    Place,
    Positions,
    RMSNorm,
    Slice,
    SwiGLU,
    Unembed,
    Value,
    apply,
    ids,
    image,
    model,
    repeat,
    residual,
    weight,
)

from .vit import Prepend


@frozen
class Rest(Layer):
    """All patches but the first, which stands for the whole image."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Slice("patches", 1, x["patches"].known), x)


@frozen
class Insert(Layer):
    """x with its vectors replaced by those of the image, in order, where the side input `tokens` says `token`."""

    token: int

    def body(self, x: Value, /, image: Value, tokens: Value, **side: Value) -> Value:
        return apply(Place(self.token), x, image, tokens)


def clip(layers: int, heads: int, embed: int, ff: int, *, patch: int, pixels: int) -> Value:
    """The patches of an image as CLIP's encoder sees them after `layers` layers (Radford et al., arXiv:2103.00020)."""
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
    """A LLaVA of any size; tokens `token` stand where the vectors of `vision` go, as many as it has patches."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    seen = vision >> Linear(d, bias=True) >> Activation("gelu") >> Linear(d, bias=True)
    block = residual(RMSNorm(), Attention(heads=heads, rope=10_000)) >> residual(RMSNorm(), SwiGLU(ff))
    tokens = ids()
    x = tokens >> Embed(weight("wte", v, d)) >> Insert(token).given(image=seen, tokens=tokens) >> repeat(layers, block)
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)))


def llava_7b() -> Model:
    """LLaVA 1.5 7B: the last but one of the 24 layers of CLIP ViT-L/14 at 336 pixels, and Vicuna 7B."""
    return llava("llava-7b", clip(23, 16, 1024, 4096, patch=14, pixels=336), 32, 32, 4096, 11008)


def llava_13b() -> Model:
    return llava("llava-13b", clip(23, 16, 1024, 4096, patch=14, pixels=336), 40, 40, 5120, 13824)
