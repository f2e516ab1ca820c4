"""Small models with layers for which no torch module is registered, so that the runtime runs their bodies.

Each has something that is difficult to shard: dims that are sharded, renamed, sliced or concatenated, replicated
weights in sharded work, sums over the sequence, ops that depend on the position.
"""

from typing import ClassVar

from attrs import frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    ClampedGLU,
    Concat,
    Conv,
    Dim,
    Each,
    Embed,
    GeGLU,
    Layer,
    LayerNorm,
    Llama3Scaling,
    Lookup,
    Mamba2,
    MaskedToken,
    Model,
    MoE,
    NextToken,
    Normalize,
    PositionLookup,
    Positions,
    Rename,
    RMSNorm,
    Rope,
    Scale,
    Select,
    Shift,
    Slice,
    Softcap,
    SwiGLU,
    Unembed,
    Value,
    YarnScaling,
    apply,
    dot,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)

VOCAB, EMBED = Dim("vocab", 127), Dim("embed", 64)  # 127 tokens: tables are padded
FF, HEADS, CHANNELS = Dim("ff", 32), Dim("heads", 4), Dim("head_dim", 16)


def lm(name: str, *layers: Layer, loss: Layer | None = None) -> Model:
    """Return a language model of two blocks, each with these layers in residuals."""
    block = [residual(RMSNorm(), layer) for layer in layers]
    x = ids() >> Embed(weight("wte", VOCAB, EMBED)) >> repeat(2, *block)
    return model(name, x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED)) >> (loss or NextToken()))


@frozen
class Gated(Layer):
    """A dim of its own on tp, norms over it and before it, and a Partial value that a product reads."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c, w = x["embed"], Dim("channels", self.channels), Dim("width", 4)
        x = apply(Normalize(("embed",), True, 1e-5), x, 1.0 + weight("scale", e, std=0.0))
        h = dot(x, weight("up", c, e), "embed") * fn("sigmoid", dot(x, weight("gate", e, c), "embed"))
        h = apply(Normalize(("channels",), False, 1e-5), h, weight("inner", c, mean=1.0, std=0.0))
        h = dot(h, weight("wide", c, w), "channels") * weight("each", w, mean=1.0, std=0.5)
        return dot(h, weight("down", w, e, std=0.3), "width") + weight("shift", e, std=0.0)


@frozen
class Squared(Layer):
    """A feed-forward layer with a dim of its own, of policy `whole`: not sharded if tp does not divide it."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", self.channels)
        h = fn("relu2", dot(x, weight("up", e, c, std=0.1), "embed"))
        return dot(h, weight("down", c, e, std=0.1), "channels")


@frozen
class Squeeze(Layer):
    """A gate computed from a weighted sum over the sequence, by weights that every cp rank applies alike."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e, r = x["embed"], Dim("rank", 8)
        s = dot(x, fn("sigmoid", dot(x, weight("score", e, std=0.1), "embed")), "seq")
        s = dot(fn("tanh", dot(s, weight("into", e, r, std=0.1), "embed")), weight("back", r, e, std=0.1), "rank")
        return x * fn("sigmoid", s)


@frozen
class Summary(Layer):
    """A gate computed from a sum over the sequence of a sharded dim: Partial over two axes."""

    def body(self, x: Value, /, **side: Value) -> Value:
        h = fn("relu", dot(x, weight("up", x["embed"], FF), "embed"))
        s = fn("tanh", dot(h, fn("tanh", x), "seq"))
        return x * fn("sigmoid", dot(s, weight("mix", FF, std=0.3), "ff"))


@frozen
class ByHand(Layer):
    """Attention without a softmax, to the keys of a renamed sequence dim."""

    def body(self, x: Value, /, **side: Value) -> Value:
        q = dot(x, weight("q", x["embed"], HEADS, CHANNELS), "embed")
        k = dot(apply(Rename("seq", "keys"), x), weight("k", x["embed"], HEADS, CHANNELS), "embed")
        o = dot(fn("sigmoid", dot(q, k, "head_dim")), k, "keys")
        return dot(o, weight("o", HEADS, CHANNELS, x["embed"]), "heads", "head_dim")


@frozen
class Near(Layer):
    """A convolution, a shift and learned positions, on channels that no axis shards."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x["embed"]
        y = apply(Conv(), x, weight("kernel", e, Dim("width", 3), std=0.3))
        y = y + apply(Shift("seq", -1), x) * weight("before", e, std=0.3)
        return y + apply(PositionLookup("position", 2), x, weight("positions", Dim("position", 64), e))


@frozen
class Cuts(Layer):
    """Slice, Concat, Select and Rename of a sharded dim, and a Rename to a sharded dim."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x["embed"]
        h = dot(x, weight("up", e, FF), "embed")
        h = apply(Concat("ff"), fn("tanh", apply(Slice("ff", 4, 20), h)), apply(Slice("ff", 16, 32), h))
        y = dot(apply(Rename("ff", "whole"), h), weight("down", Dim("whole", 32), e), "whole")
        z = dot(apply(Rename("embed", "heads"), fn("tanh", x)), weight("on", Dim("heads", 64), e, std=0.1), "heads")
        return fn("add", y, z, x * apply(Select("ff", 3), h))


@frozen
class Copies(Layer):
    """A layer for each head, with own weights."""

    def body(self, x: Value, /, **side: Value) -> Value:
        q = fn("tanh", dot(x, weight("q", x["embed"], HEADS, CHANNELS), "embed")) >> Each("heads", Head())
        return dot(q, weight("o", HEADS, CHANNELS, x["embed"]), "heads", "head_dim")


@frozen
class Head(Layer):
    def body(self, x: Value, /, **side: Value) -> Value:
        x = x >> LayerNorm(over="head_dim")
        return apply(Rename("out", "head_dim"), dot(x, weight("m", CHANNELS, Dim("out", 16), std=0.2), "head_dim"))


@frozen
class LowRank(Layer):
    """A matrix that is a product of two over a sharded dim, and a sum of Partial values that is read twice."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e, out = x["embed"], Dim("out", 64)
        w = dot(weight("a", e, FF, std=0.2), weight("b", FF, out, std=0.2), "ff")
        y = apply(Rename("out", "embed"), dot(x, w, "embed"))
        h = dot(x, weight("up", e, FF, std=0.2), "embed")
        z = dot(fn("relu2", h), weight("one", FF, e, std=0.2), "ff") + dot(h, weight("two", FF, e, std=0.2), "ff")
        return y + z * fn("sigmoid", z)


@frozen
class Grouped(Layer):
    """A norm in groups of heads and their channels."""

    groups: int

    def body(self, x: Value, /, **side: Value) -> Value:
        q = dot(x, weight("q", x["embed"], HEADS, CHANNELS, std=0.2), "embed")
        scale, shift = weight("scale", HEADS, CHANNELS, mean=1.0, std=0.0), weight("shift", HEADS, CHANNELS, std=0.0)
        q = apply(Normalize(("heads", "head_dim"), True, 1e-5, self.groups), q, scale, shift)
        return dot(fn("tanh", q), weight("o", HEADS, CHANNELS, x["embed"]), "heads", "head_dim")


@frozen
class OverTime(Layer):
    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Normalize(("seq",), True, 1e-3), x)


@frozen
class Halved(SwiGLU):
    """A subclass of SwiGLU with another body, for which the module of SwiGLU must not run."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return 0.5 * (x >> SwiGLU(self.ff).named("whole"))


@frozen
class Hashed(Layer):
    """Embeddings of tokens and of previous tokens, in tables of the layer; the token ids are a field."""

    tokens: Value
    rows: int

    def body(self, x: Value, /, **side: Value) -> Value:
        own = weight("own", Dim("vocab", self.rows), x["embed"], std=0.1)
        before = weight("before", Dim("bigram", self.rows), x["embed"], std=0.1)
        return fn(
            "add",
            x,
            apply(Lookup("vocab"), self.tokens, own),
            apply(Lookup("bigram"), apply(Shift("seq", -1), self.tokens), before),
        )


@frozen
class Random(Layer):
    """Random features: untrained weights, one sharded over tp, one padded."""

    tokens: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        e, rows = x["embed"], Dim("vocab", 127)
        features = fn("tanh", dot(x, weight("up", e, FF, std=0.3, trained=False), "embed"))
        x = x + dot(features * weight("scale", FF, mean=1.0, std=0.1), weight("down", FF, e, std=0.1), "ff")
        return x + apply(Lookup("vocab"), self.tokens, weight("table", rows, e, std=0.5, trained=False))


@frozen
class RandomExpert(Layer):
    """A feed-forward layer whose first matrix is not trained."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x["embed"]
        h = fn("tanh", dot(x, weight("up", e, FF, std=0.3, trained=False), "embed"))
        return dot(h, weight("down", FF, e, std=0.1), "ff")


def buffers() -> Model:
    """Return a model with sharded untrained weights, which are part of checkpoints."""
    tokens = ids()
    x = tokens >> Embed(weight("wte", VOCAB, EMBED)) >> Random(tokens) >> residual(RMSNorm(), MoE(RandomExpert(), 4, 2))
    return model("buffers", x >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken())


def own_tables(name: str, rows: int) -> Model:
    tokens = ids()
    x = tokens >> Embed(weight("wte", VOCAB, EMBED)) >> Hashed(tokens, rows) >> MLP(64)
    return model(name, x >> Unembed(weight("head", VOCAB, EMBED)) >> NextToken())


def attention(**options: object) -> Attention:
    return Attention(heads=4, **options)  # type: ignore[arg-type]


def gated() -> Model:
    return lm("gated", attention(rope=1e4), Gated(96))


def windowed() -> Model:
    return lm("windowed", attention(kv_heads=2, rope=Rope(1e4, channels=8), window=8, softcap=3.0), MLP(96, "relu2"))


def alibi() -> Model:
    return lm("alibi", attention(kv_heads=2, alibi=True, scale=0.3), GeGLU(96))


def one_kv_head() -> Model:
    norm = RMSNorm(over="head_dim", plus_one=True)
    return lm("one-kv-head", attention(kv_heads=1, softcap=5.0, qk_norm=norm), SwiGLU(96))


def two_kv_heads() -> Model:
    return lm("two-kv-heads", attention(kv_heads=2, softcap=5.0, bias=True, rope=1e4), SwiGLU(96))


def sinks() -> Model:
    return lm("sinks", attention(sink=True, rope=Rope(1e4, 8, True), window=5, qkv_bias=True), SwiGLU(96))


def not_causal() -> Model:
    return lm("not-causal", attention(causal=False, softcap=4.0, bias=True), SwiGLU(96), loss=MaskedToken())


def latent() -> Model:
    return lm("latent", MLA(heads=4, q_rank=24, kv_rank=16, nope=8, rope=8, v=12, positions=Rope(1e4)))


def stretched() -> Model:
    """Return a model with scaled rotary positions; megatron-core's attention runs one of its two layers."""
    yarn = Rope(1e4, scaling=YarnScaling(factor=4.0, original=16))
    mla = MLA(heads=4, q_rank=None, kv_rank=16, nope=8, rope=8, v=12, positions=yarn)
    return lm(
        "stretched", mla, attention(rope=Rope(5e5, scaling=Llama3Scaling(factor=8.0, original=32)), qkv_bias=True)
    )


def scan() -> Model:
    return lm("scan", Mamba2(heads=8, head_dim=16, state=8, groups=2))


def scan_one_group() -> Model:
    return lm("scan-one-group", Mamba2(heads=8, head_dim=16, state=8, groups=1, norm_groups=4, bias=True))


def scan_all_groups() -> Model:
    return lm("scan-all-groups", Mamba2(heads=8, head_dim=16, state=8, groups=4, norm_groups=2, dt=(0.01, 1.0)))


def experts() -> Model:
    shared = MoE(SwiGLU(32), 4, 2, shared=SwiGLU(48), score="sigmoid", corrected=True, scale=1.5, groups=2)
    return lm(
        "experts",
        MLP(32, "relu", bias=True),
        shared,
        MoE(MLP(32, "relu", True) >> Scale(0.5), 4, 2, normalize=False, bias=True),
    )


def some_experts() -> Model:
    """Return a model with sharded, replicated and expert weights, a buffer, and a tied table with a bias."""
    wte = weight("wte", VOCAB, EMBED)
    moe = MoE(Gated(32), 4, 2, shared=SwiGLU(48), score="sigmoid", corrected=True, groups=2)
    block = residual(RMSNorm(), attention(sink=True)) >> residual(RMSNorm(plus_one=True), moe)
    return model(
        "some-experts", ids() >> Embed(wte) >> repeat(2, block) >> RMSNorm() >> Unembed(wte, bias=True) >> NextToken()
    )


def balanced() -> Model:
    """Return a model with a balancing loss, a shared expert, and attention with biases."""
    moe = MoE(MLP(32, "silu", True) >> Scale(0.5), 4, 2, balance=0.05, shared=SwiGLU(48))
    return lm("balanced", attention(window=8, bias=True), moe)


def squared_510() -> Model:
    """Return a model whose channels 2 devices divide and 4 do not, in a dense layer and in experts."""
    return lm("squared-510", Squared(510), MoE(Squared(510), 8, 2))


def squared_512() -> Model:
    return lm("squared-512", Squared(512), MoE(Squared(512), 8, 2))


def biased_experts() -> Model:
    return lm("biased-experts", MoE(ClampedGLU(32), 4, 2), MoE(MLP(32, bias=True), 4, 1))


def squeeze() -> Model:
    return lm("squeeze", Squeeze(), MLP(64))


def summary() -> Model:
    return lm("summary", Summary(), MLP(64))


def by_hand() -> Model:
    return lm("by-hand", ByHand())


def near() -> Model:
    return lm("near", Near(), OverTime(), Halved(64))


def cuts() -> Model:
    return lm("cuts", Cuts())


def copies() -> Model:
    return lm("copies", Copies())


def low_rank() -> Model:
    return lm("low-rank", LowRank())


def one_group() -> Model:
    return lm("one-group", Grouped(1))


def two_groups() -> Model:
    return lm("two-groups", Grouped(2))


def hashed() -> Model:
    return own_tables("hashed", 128)


def hashed_odd() -> Model:
    """Return a model with tables of 127 rows: under tp 2 one is padded, the other is not sharded."""
    return own_tables("hashed-odd", 127)


def around() -> Model:
    """Return a model with sums, products and small layers between layers, a tied table, and biased logits."""
    wte = weight("wte", VOCAB, EMBED)
    block = residual(RMSNorm(plus_one=True), SwiGLU(64), RMSNorm(plus_one=True)) >> Softcap(2.0)
    x = ids() >> Embed(wte) >> Scale(3.0) >> Positions(weight("wpe", Dim("position", 40), EMBED, std=0.1), 2)
    x = x >> repeat(2, block)
    return model("around", x * (x >> LayerNorm(bias=False)) + 2.0 * x >> Unembed(wte, bias=True) >> NextToken())
