"""Vision transformers (Dosovitskiy et al., arXiv:2010.11929): an image as a sequence of patches, and its class."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Concat,
    Dim,
    Layer,
    LayerNorm,
    Model,
    PatchEmbed,
    Pick,
    Positions,
    Unembed,
    Value,
    apply,
    image,
    model,
    repeat,
    residual,
    weight,
)


@frozen
class Prepend(Layer):
    """A learned vector [patches=1 embed] in front of the patches."""

    vector: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Concat("patches"), self.vector, x)


@frozen
class First(Layer):
    """The first of the patches: [batch patches embed] becomes [batch embed]."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Pick("patches", 0), x)


def vit(
    name: str, layers: int, heads: int, embed: int, ff: int, *, patch: int = 16, pixels: int = 224, classes: int = 1000
) -> Model:
    """A vision transformer of any size, for images [batch channels=3 height width] of `pixels` by `pixels`."""
    d, count = Dim("embed", embed), (pixels // patch) ** 2
    cls = weight("cls", Dim("patches", 1), d)
    wpe = weight("wpe", Dim("position", count + 1), d)
    norm = LayerNorm(1e-12)
    attention = Attention(heads=heads, causal=False, bias=True)
    block = residual(norm, attention) >> residual(norm, MLP(ff, "gelu", bias=True))
    x = image(height=pixels, width=pixels) >> PatchEmbed(patch, d) >> Prepend(cls) >> Positions(wpe)
    head = Unembed(weight("head", Dim("vocab", classes), d), bias=True)
    return model(name, x >> repeat(layers, block) >> norm >> First() >> head)


def vit_base() -> Model:
    return vit("vit-base", 12, 12, 768, 3072)


def vit_large() -> Model:
    return vit("vit-large", 24, 16, 1024, 4096)


def vit_huge() -> Model:
    return vit("vit-huge", 32, 16, 1280, 5120, patch=14)
