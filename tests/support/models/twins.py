"""Small models with layers and losses of their own, for which `tests.support.parity.torch_twins` has plain torch.

A vocabulary of 97 tokens is padded on every layout but those with `--vocab-multiple 1`.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from megaloom.dsl import (
    MLP,
    Attention,
    CrossEntropy,
    Dim,
    Embed,
    Layer,
    LogSumExp,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Shift,
    Sum,
    SwiGLU,
    Unembed,
    Value,
    WeightedSum,
    apply,
    dot,
    fn,
    ids,
    labels,
    loss_sums,
    mask,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.examples.scripts.key_tokens import KeyTokenLoss

VOCAB, EMBED, SEQ = Dim("vocab", 97), Dim("embed", 32), 32
SMOOTHING, Z_FACTOR, KEYS, KEY_FACTOR = 0.1, 1e-2, (5, 17, 60), 0.25


@frozen
class LabelSmoothing(Layer):
    """Cross-entropy with a part of all tokens alike."""

    labels: Value = field(factory=labels, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        uniform = apply(LogSumExp("vocab"), x) - apply(Sum(("vocab",)), x) / x["vocab"].known
        token = apply(CrossEntropy("vocab"), x, self.labels)
        return loss_sums((1 - SMOOTHING) * token + SMOOTHING * uniform)


@frozen
class ZLoss(Layer):
    """The square of the log-sum-exp of the logits."""

    def body(self, x: Value, /, **side: Value) -> Value:
        z = apply(LogSumExp("vocab"), x)
        return loss_sums(z * z)


@frozen
class SoftLookup(Layer):
    """The rows of a table, weighted by sigmoids of quotients; those of padding are not 0."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        h = dot(x, self.table, "embed") / fn("log", weight("temperature", self.table["vocab"], mean=3.0, std=0.1))
        return dot(1.0 / (1.0 + fn("exp", -h)), self.table, "vocab") * 0.1


@frozen
class PooledGate(Layer):
    """A gate from a sum over the sequence, in fp32, times a weight."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e, r = x["embed"], Dim("rank", 5)
        pooled = apply(Sum(("seq",)), fn("tanh", dot(x, weight("p", e, r, std=0.2), "embed")))
        return x * fn("sigmoid", dot(pooled, weight("q", r, e, std=0.05), "rank"))


@frozen
class SoftMaximum(Layer):
    """A gate from the log-sum-exp over the sequence of each channel."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e, r = x["embed"], Dim("rank", 6)
        largest = apply(LogSumExp("seq"), dot(x, weight("p", e, r, std=0.3), "embed"))
        return x * fn("sigmoid", dot(largest, weight("q", r, e, std=0.1), "rank"))


@frozen
class Mix(Layer):
    """A gated feed-forward layer of a token and the token two positions before it."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", self.channels)
        y = x + apply(Shift("seq", -2), x) * weight("m", e, mean=0.3, std=0.1)
        hidden = fn("silu", dot(y, weight("a", e, c), "embed")) * fn("sigmoid", dot(x, weight("b", e, c), "embed"))
        return dot(hidden, weight("o", c, e), "channels")


def decoder(*layers: Layer, table: Value | None = None) -> Value:
    """Return the logits of a decoder with one block for each of these layers."""
    x = ids() >> Embed(weight("wte", VOCAB, EMBED) if table is None else table)
    for layer in layers:
        attention = residual(RMSNorm(), Attention(heads=4, kv_heads=2))
        x = x >> repeat(1, attention >> residual(RMSNorm(), layer))  # a block, which full recompute needs
    return x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED))


FF, FF_2 = SwiGLU(40), MLP(24, "gelu", bias=True)
SIGMOID = MoE(SwiGLU(16), 4, 2, score="sigmoid", corrected=True)
BIASED = MoE(MLP(16, "gelu", bias=True), 4, 2, score="sigmoid", corrected=True)  # by its body where etp > 1


def smoothed() -> Model:
    return model("smoothed", decoder(FF, FF_2, FF, FF_2) >> LabelSmoothing(), std=0.1)


def z_loss() -> Model:
    return model("z-loss", decoder(FF, FF_2, FF, FF) >> WeightedSum((1.0, NextToken()), (Z_FACTOR, ZLoss())), std=0.1)


def key_tokens() -> Model:
    return model("key-tokens", decoder(FF, FF_2, FF, FF) >> KeyTokenLoss(KEYS, KEY_FACTOR), std=0.1)


def masked() -> Model:
    return model("masked", decoder(FF, FF_2, FF, FF) >> NextToken(mask=mask()), std=0.1)


def soft_lookup() -> Model:
    table = weight("wte", VOCAB, EMBED)
    x = decoder(FF, SoftLookup(table), FF_2, SoftLookup(table), table=table)
    return model("soft-lookup", x >> NextToken(), std=0.1)


def pooled_gate() -> Model:
    return model("pooled-gate", decoder(PooledGate(), FF, PooledGate(), FF_2) >> NextToken(), std=0.1)


def soft_maximum() -> Model:
    return model("soft-maximum", decoder(SoftMaximum(), FF, SoftMaximum(), FF) >> NextToken(), std=0.1)


def mix() -> Model:
    return model("mix", decoder(Mix(20), FF, Mix(24), FF) >> NextToken(), std=0.1)


def two_mixtures() -> Model:
    """Two kinds of experts, one with corrected scores, and a dense layer."""
    plain = MoE(SwiGLU(24), 8, 3, shared=SwiGLU(8))
    return model("two-mixtures", decoder(SIGMOID, plain, FF, SIGMOID) >> NextToken(), std=0.1)


def corrected_sizes() -> Model:
    """Corrected scores of four and of eight experts, some with biases."""
    eight = MoE(SwiGLU(16), 8, 2, score="sigmoid", corrected=True, scale=1.5)
    return model("corrected-sizes", decoder(SIGMOID, BIASED, eight, BIASED) >> NextToken(), std=0.1)
