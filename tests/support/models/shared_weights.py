"""Small models in which several layers share a weight."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Layer,
    LayerNorm,
    Model,
    MoE,
    NextToken,
    Positions,
    RMSNorm,
    SwiGLU,
    Unembed,
    Value,
    apply,
    dot,
    fn,
    ids,
    labels,
    model,
    repeat,
    residual,
    weight,
    weighted_sum,
)
from megaloom.dsl.ops.weight import PositionLookup
from megaloom.examples.bart import bart
from megaloom.examples.deepseek import deepseek
from megaloom.examples.t5 import t5
from tests.support.models.small import LATENT

VOCAB, EMBED = Dim("vocab", 127), Dim("embed", 32)


@frozen
class Lookups(Layer):
    """x plus the rows of a table, weighted by their products with x."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(dot(x, self.table, "embed"), self.table, "vocab")


@frozen
class SharedMlp(Layer):
    """A feed-forward layer of two matrices and a bias that other layers may have too."""

    up: Value
    bias: Value
    down: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(fn("relu", dot(x, self.up, "embed") + self.bias), self.down, "ff")


def albert() -> Model:
    """Six blocks that share the weights of their feed-forward layers, and a table by columns that three kinds use."""
    table = weight("table", EMBED, VOCAB, std=0.1)
    f = Dim("ff", 48)
    mlp = SharedMlp(weight("up", EMBED, f), weight("up_bias", f, std=0.0), weight("down", f, EMBED))
    block = residual(LayerNorm(), Attention(heads=4, kv_heads=2)) >> residual(LayerNorm(), mlp)
    x = ids() >> Embed(table) >> repeat(3, block) >> residual(LayerNorm(), Lookups(table)) >> repeat(3, block)
    return model("albert", x >> LayerNorm() >> Unembed(table, bias=True) >> NextToken(), std=0.1)


def albert_blocks() -> Model:
    """Four blocks of built-in layers that share all weights, between a block with weights of its own and the logits."""
    block = residual(LayerNorm(), Attention(heads=4, kv_heads=2)) >> residual(LayerNorm(), MLP(48, bias=True))
    table = weight("table", VOCAB, EMBED, std=0.1)
    x = ids() >> Embed(table) >> repeat(1, block) >> repeat(4, block, shared="block")
    return model("albert-blocks", x >> LayerNorm() >> Unembed(table) >> NextToken(), std=0.1)


def scattered() -> Model:
    """Six blocks, of which pairs that are not neighbours share a feed-forward layer."""
    f = Dim("ff", 48)
    first, second, third = (
        SharedMlp(weight(f"up{k}", EMBED, f), weight(f"up_bias{k}", f, std=0.0), weight(f"down{k}", f, EMBED))
        for k in range(3)
    )
    x = ids() >> Embed(weight("wte", VOCAB, EMBED, std=0.1))
    for mlp in (first, second, first, third, second, third):
        x = x >> residual(LayerNorm(), Attention(heads=4, kv_heads=2)) >> residual(LayerNorm(), mlp)
    return model("scattered", x >> LayerNorm() >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken(), std=0.1)


def two_heads() -> Model:
    """Two heads on the table of the embedding: one predicts the next token, one the token after it."""
    table = weight("table", VOCAB, EMBED, std=0.1)
    x = ids() >> Embed(table) >> repeat(4, residual(RMSNorm(), Attention(heads=4)) >> residual(RMSNorm(), SwiGLU(48)))
    y = labels()
    near, far = (x >> RMSNorm() >> Unembed(table) >> NextToken(y, offset=k) for k in (0, 1))
    return model("two-heads", weighted_sum((1.0, near), (0.5, far)), std=0.1)


@frozen
class PlusPositions(Layer):
    """x plus the positive part of a learned vector for each position, times a given buffer."""

    table: Value
    scales: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return x + fn("relu", apply(PositionLookup("position"), x, self.table)) * self.scales


def positions_again() -> Model:
    """Learned positions that blocks add once more, times a buffer that they share."""
    wte, wpe = weight("wte", VOCAB, EMBED), weight("wpe", Dim("position", 32), EMBED)
    block = PlusPositions(wpe, weight("scales", EMBED, trained=False, std=1.0)) >> residual(LayerNorm(), MLP(48))
    x = ids() >> Embed(wte) >> Positions(wpe) >> repeat(3, block) >> Positions(wpe)
    return model("positions-again", x >> LayerNorm() >> Unembed(wte) >> NextToken(), std=0.1)


def tiny_t5() -> Model:
    return t5("tiny-t5", 2, 4, 32, SwiGLU(48), head_dim=8, vocab=301, buckets=8, distance=16)


def tiny_bart() -> Model:
    return bart("tiny-bart", 2, 4, 32, 48, vocab=301, seq=32)


def tiny_mtp() -> Model:
    """DeepSeek-V3 with two layers of multi-token prediction."""
    moe = MoE(SwiGLU(16), 4, 2, shared=SwiGLU(16), score="sigmoid", corrected=True)
    return deepseek("tiny-mtp", LATENT, 32, ff=48, moe=moe, dense=1, sparse=1, vocab=127, mtp_layers=2)


@frozen
class SharingExpert(Layer):
    """An expert with an own matrix and one that all experts of all layers have."""

    down: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        f = self.down["ff"]
        return dot(fn("relu", dot(x, weight("up", x["embed"], f), "embed")), self.down, "ff")


def sharing_experts() -> Model:
    """Experts of several layers that share a matrix."""
    wte = weight("wte", VOCAB, EMBED, std=0.1)
    moe = MoE(SharingExpert(weight("down", Dim("ff", 48), EMBED)), 4, 2)
    block = residual(RMSNorm(), Attention(heads=4)) >> residual(RMSNorm(), moe)
    return model("sharing-experts", ids() >> Embed(wte) >> repeat(2, block) >> Unembed(wte) >> NextToken(), std=0.1)
