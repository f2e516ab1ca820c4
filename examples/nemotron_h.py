"""Nemotron-H (arXiv:2504.03624): mostly Mamba-2 and feed-forward layers, and attention without positions in a few."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Mamba2,
    Model,
    RMSNorm,
    Unembed,
    chain,
    ids,
    model,
    repeat,
    residual,
    weight,
)


def nemotron_h(
    name: str, pattern: str, embed: int, *, mamba: Mamba2, attention: Attention, mlp: MLP, vocab: int = 131072
) -> Model:
    """A Nemotron-H of any size. pattern: a letter a layer, M for Mamba-2, * for attention, - for feed-forward."""
    kinds = {"M": mamba, "*": attention, "-": mlp}
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    layers = chain(*(repeat(1, residual(RMSNorm(), kinds[letter])) for letter in pattern))
    x = ids() >> Embed(weight("wte", v, d)) >> layers
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)))


def nemotron_h_8b() -> Model:
    return nemotron_h(
        "nemotron-h-8b",
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        4096,
        mamba=Mamba2(heads=128, head_dim=64, state=128, groups=8, norm_groups=8),
        attention=Attention(heads=32, kv_heads=8, head_dim=128),
        mlp=MLP(21504, "relu2"),
    )
