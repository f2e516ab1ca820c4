"""Nemotron-4 (arXiv:2402.16819, arXiv:2406.11704): squared ReLU, half of the channels turn, no biases."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    Rope,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)

NORM = LayerNorm(plus_one=True)


def nemotron(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 256000,
    head_dim: int | None = None,
    turned: float = 0.5,
) -> Model:
    """A Nemotron-4 of any size. turned: the share of each head's channels with rotary positions."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    rope = Rope(10_000, int(turned * (head_dim or embed // heads)))
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope)
    block = residual(NORM, attention) >> residual(NORM, MLP(ff, "relu2"))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(layers, block)
    return model(name, x >> NORM >> Unembed(weight("head", v, d)))


def nemotron4_15b() -> Model:
    return nemotron("nemotron4-15b", 32, 48, 8, 6144, 24576)


def nemotron4_340b() -> Model:
    return nemotron("nemotron4-340b", 96, 96, 8, 18432, 73728)


def minitron_8b() -> Model:
    """Nemotron-4 15B pruned to 8B (arXiv:2407.14679)."""
    return nemotron("minitron-8b", 32, 48, 8, 4096, 16384, head_dim=128)
