"""The oracle against the mathematics as others wrote it: torch's own layers, complex rotation, loops over tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Attend,
    Attention,
    Combine,
    Dim,
    Dropout,
    DType,
    Each,
    Elementwise,
    Embed,
    Gate,
    Input,
    Layer,
    LayerNorm,
    Model,
    MoE,
    PositionLookup,
    Positions,
    Rename,
    RMSNorm,
    Rope,
    Route,
    Shape,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    apply,
    dot,
    fn,
    graph,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.runtime.reference.interpret import interpret

B, S, D, V = 2, 7, 12, 19
EMBED, VOCAB = Dim("embed", D), Dim("vocab", V)
CHANNEL_WEIGHTS = {
    "channels.0.positions": (S, D),
    "channels.0.router": (D, 4),
    "channels.0.scale": (D,),
}
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def given(name: str, *dims: Dim) -> Value:
    """An input that is no token: any tensor of these dims."""
    return Value(Input(name), (), Shape(dims), dtype=DType.COMPUTE)


def random(m: Model, seed: int = 0) -> dict[str, Tensor]:
    """Weights of which none is zero or one, so that none can be left out unnoticed."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn([d.known for d in s.dims], generator=draw, dtype=torch.float64) * 0.5 + s.value.op.mean
        for name, s in graph(m).weights.items()
    }


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))


def run(layer: Layer, x: Tensor, *dims: Dim, **weights: Tensor) -> Tensor:
    """One layer applied to x [batch seq embed]; its weights by their names inside the layer."""
    m = model("one", given("x", *(dims or (BATCH, SEQ, EMBED))) >> layer)
    (node,) = (n for n in graph(m).nodes if n.weights or not n.is_input)
    return interpret(m, {f"{node.name}.{k}": w for k, w in weights.items()}, {"x": x})[0]


def r(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions of x [batch seq heads head_dim] as multiplication by a complex number of modulus 1."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    for p in range(x.shape[1]):
        for i in range(half):
            z[:, p, :, i] *= torch.exp(torch.tensor(1j * p * theta ** (-2 * i / x.shape[-1]), dtype=torch.complex128))
    return torch.cat((z.real, z.imag), -1)


# Primitives


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu", "relu"])
def test_mlp(act: str) -> None:
    x, up, down, a, b = r(B, S, D), r(D, 5), r(5, D), r(5), r(D)
    inner = F.linear(x, up.T, a)
    inner = F.gelu(inner, approximate="tanh") if act == "gelu_tanh" else getattr(F, act)(inner)
    close(run(MLP(5, act, bias=True), x, up=up, up_bias=a, down=down, down_bias=b), F.linear(inner, down.T, b))


def test_swiglu() -> None:
    x, gate, up, down = r(B, S, D), r(D, 5), r(5, D).T, r(5, D)
    g = x @ gate
    close(run(SwiGLU(5), x, gate=gate, up=up, down=down), (g / (1 + torch.exp(-g)) * (x @ up)) @ down)


def test_norms() -> None:
    x, scale, shift = r(B, S, D) * 3 + 1, r(D), r(D + 1)[1:]
    close(run(LayerNorm(1e-3), x, scale=scale, shift=shift), F.layer_norm(x, (D,), scale, shift, 1e-3))
    close(run(RMSNorm(1e-3), x, scale=scale), F.rms_norm(x, (D,), scale, 1e-3))


def test_rotation_is_complex_multiplication() -> None:
    x = given("x", BATCH, SEQ, Dim("heads", 3), Dim("head_dim", 8))
    at = r(B, S, 3, 8)
    close(interpret(model("m", apply(Rope(100.0), x)), {}, {"x": at})[0], rotate(at, 100.0))


def test_dims_may_come_in_any_order() -> None:
    """Names decide: the same attention and rotation with every dim elsewhere."""
    n, g, c = Dim("heads", 4), Dim("kv_heads", 2), Dim("head_dim", 6)
    q, k, v = r(B, S, 4, 6), r(B, S, 2, 6), r(B, S, 2, 6) + 1

    def attention(q: Value, k: Value, v: Value) -> Value:
        return apply(Attend(causal=True), apply(Rope(10.0), q), apply(Rope(10.0), k), v)

    straight = attention(given("q", BATCH, SEQ, n, c), given("k", BATCH, SEQ, g, c), given("v", BATCH, SEQ, g, c))
    turned = attention(given("q", c, n, SEQ, BATCH), given("k", SEQ, c, BATCH, g), given("v", g, BATCH, c, SEQ))
    assert [d.name for d in turned.shape] == ["heads", "seq", "batch", "head_dim"]
    want = interpret(model("m", straight), {}, {"q": q, "k": k, "v": v})[0]
    permuted = {"q": q.permute(3, 2, 1, 0), "k": k.permute(1, 3, 0, 2), "v": v.permute(2, 0, 3, 1)}
    close(interpret(model("m", turned), {}, permuted)[0], want.permute(2, 1, 0, 3))


def test_attention_is_a_masked_softmax() -> None:
    """Query by query, key by key, as in the definition; grouped heads share keys in order."""
    q, k, v = r(1, S, 4, 6), r(1, S, 2, 6), r(1, S, 2, 6) + 1
    n, g, c = Dim("heads", 4), Dim("kv_heads", 2), Dim("head_dim", 6)
    parts = given("q", BATCH, SEQ, n, c), given("k", BATCH, SEQ, g, c), given("v", BATCH, SEQ, g, c)
    for causal in (True, False):
        got = interpret(model("m", apply(Attend(causal=causal), *parts)), {}, {"q": q, "k": k, "v": v})[0]
        for s in range(S):
            seen = slice(0, s + 1) if causal else slice(0, S)
            for h in range(4):
                p = torch.exp(k[0, seen, h // 2] @ q[0, s, h] / 6**0.5)
                close(got[0, s, h], (p / p.sum()) @ v[0, seen, h // 2])


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs(causal: bool) -> None:
    theirs = nn.MultiheadAttention(D, 3, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    x = r(B, S, D)
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64) if causal else None
    want, _ = theirs(x, x, x, attn_mask=mask)
    close(run(Attention(heads=3, causal=causal, bias=True), x, **attention_weights(theirs)), want)


def attention_weights(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    heads = theirs.num_heads
    w = theirs.in_proj_weight.detach().unflatten(0, (3, heads, -1)).permute(0, 3, 1, 2)
    b = theirs.in_proj_bias.detach().unflatten(0, (3, heads, -1))
    out = {name: w[i] for i, name in enumerate("qkv")} | {f"{name}_bias": b[i] for i, name in enumerate("qkv")}
    o = theirs.out_proj.weight.detach().T.unflatten(0, (heads, -1))
    return {**out, "o": o, "o_bias": theirs.out_proj.bias.detach()}


def test_grouped_rotary_attention_is_sdpa_with_rotation() -> None:
    x, q, k, v, o = r(B, S, D), r(D, 4, 6), r(D, 2, 6), r(D, 2, 6) + 1, r(4, 6, D)
    project = partial(torch.einsum, "bsd,dhc->bshc", x)
    heads = (rotate(project(q), 50.0), rotate(project(k), 50.0), project(v))
    attended = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True, enable_gqa=True)
    want = attended.transpose(1, 2).flatten(2) @ o.flatten(0, 1)
    layer = Attention(heads=4, kv_heads=2, head_dim=6, rope=50.0)
    close(run(layer, x, q=q, k=k, v=v, o=o), want)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_moe_is_a_loop_over_tokens(top_k: int) -> None:
    x = r(B, S, D)
    m = model("m", given("x", BATCH, SEQ, EMBED) >> MoE(MLP(4, "relu", bias=True), experts=5, top_k=top_k))
    w = {name.removeprefix("moe.0.").removeprefix("experts."): t for name, t in random(m).items()}
    want = torch.zeros(B, S, D, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            scores = (x[b, s] @ w["router"]).tolist()
            best = sorted(range(5), key=lambda e: -scores[e])[:top_k]
            gate = F.softmax(torch.tensor([scores[e] for e in best], dtype=torch.float64), 0)
            for e, p in zip(best, gate, strict=True):
                h = F.relu(x[b, s] @ w["up"][e] + w["up_bias"][e])
                want[b, s] += p * (h @ w["down"][e] + w["down_bias"][e])
    close(interpret(m, random(m), {"x": x})[0], want)


def test_each_copy_has_its_weights_and_its_input() -> None:
    """Also one inside another, and beside weights that all copies share."""
    a, b, f = Dim("a", 2), Dim("b", 3), Dim("ff", 4)

    @frozen
    class Inner(Layer):
        scale: Value

        def body(self, x: Value, /, **side: Value) -> Value:
            return dot(x * self.scale, weight("w", EMBED, f), "embed")

    x = r(2, B, 3, D)
    m = model("m", given("x", a, BATCH, b, EMBED) >> Each("a", Each("b", Inner(weight("shared", EMBED)))))
    w = random(m)
    assert {name: tuple(t.shape) for name, t in w.items()} == {"each.0.a.b.w": (2, 3, D, 4), "shared": (D,)}
    want = torch.einsum("aBbd,d,abdf->abBf", x, w["shared"], w["each.0.a.b.w"])
    close(interpret(m, w, {"x": x})[0], want)


# Models


def gpt(layers: int) -> Model:
    wte, wpe = weight("wte", VOCAB, EMBED), weight("wpe", Dim("position", S + 2), EMBED)
    block = residual(LayerNorm(), Attention(heads=3, bias=True, dropout=0.5), Dropout(0.5)) >> residual(
        LayerNorm(), MLP(4 * D, "gelu_tanh", bias=True), Dropout(0.5)
    )
    x = ids() >> Embed(wte) >> Positions(wpe) >> repeat(layers, block)
    return model("gpt", x >> LayerNorm() >> Unembed(wte))


def test_gpt2_is_torchs_transformer() -> None:
    m = gpt(layers=2)
    act = partial(F.gelu, approximate="tanh")
    layer = nn.TransformerEncoderLayer(D, 3, 4 * D, 0.0, act, batch_first=True, norm_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D, dtype=torch.float64), enable_nested_tensor=False)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    w = {name: t for name, t in random(m).items() if name in ("wte", "wpe")}
    for i, block in enumerate(theirs.layers):
        w |= {f"attention.{i}.{name}": t for name, t in attention_weights(block.self_attn).items()}
        w |= {f"mlp.{i}.up": block.linear1.weight.T, f"mlp.{i}.up_bias": block.linear1.bias}
        w |= {f"mlp.{i}.down": block.linear2.weight.T, f"mlp.{i}.down_bias": block.linear2.bias}
    norms = [n for block in theirs.layers for n in (block.norm1, block.norm2)] + [theirs.norm]
    for i, norm in enumerate(norms):
        w |= {f"layer_norm.{i}.scale": norm.weight, f"layer_norm.{i}.shift": norm.bias}
    t = tokens()
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    want = F.linear(theirs(F.embedding(t, w["wte"]) + w["wpe"][:S], causal, is_causal=True), w["wte"])
    close(interpret(m, w, {"tokens": t})[0], want)


def llama(ff: Layer) -> Model:
    attention = Attention(heads=4, kv_heads=2, head_dim=4, rope=1e4)
    block = residual(RMSNorm(), attention) >> residual(RMSNorm(), ff)
    x = ids() >> Embed(weight("wte", VOCAB, EMBED)) >> repeat(2, block)
    return model("llama", x >> RMSNorm() >> Unembed(weight("head", VOCAB, EMBED)))


def test_a_token_does_not_see_later_ones() -> None:
    m = llama(MoE(SwiGLU(4), experts=3, top_k=2))
    w, t = random(m), tokens()
    later = torch.cat((t[:, :4], (t[:, 4:] + 1) % V), 1)
    before, after = (interpret(m, w, {"tokens": x})[0] for x in (t, later))
    close(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).any()


def test_a_sequence_does_not_see_the_others() -> None:
    m = llama(MoE(SwiGLU(4), experts=3, top_k=2))
    w, t = random(m), tokens()
    together = interpret(m, w, {"tokens": t})[0]
    close(together, torch.cat([interpret(m, w, {"tokens": t[i : i + 1]})[0] for i in range(B)]))


def test_gradients_are_finite_differences() -> None:
    m = llama(MoE(SwiGLU(3), experts=3, top_k=2))
    w, t = random(m), tokens()[:1, :4]

    def loss(*values: Tensor) -> Tensor:
        (logits,) = interpret(m, dict(zip(w, values, strict=True)), {"tokens": t})
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), t[:, 1:].flatten())

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in w.values()], fast_mode=True)


def test_a_tied_weight_is_learned_from_both_its_uses() -> None:
    m = gpt(layers=1)
    w = {name: t.requires_grad_() for name, t in random(m).items()}
    interpret(m, w, {"tokens": torch.zeros(1, 3, dtype=torch.long)})[0].sum().backward()
    grad = w["wte"].grad
    close(grad[1:], grad[1].expand(V - 1, D))  # rows that were only unembedded with all get the same
    assert not torch.isclose(grad[0], grad[1]).any()


def test_a_side_input_reaches_layers_by_its_name() -> None:
    """A decoder with cross attention, every layer of it the user's own."""
    n, g, c, source = Dim("heads", 2), Dim("kv_heads", 2), Dim("head_dim", 3), Dim("source")

    @frozen
    class Cross(Layer):
        def body(self, x: Value, /, **side: Value) -> Value:
            memory = side["memory"]
            q = dot(x, weight("q", EMBED, n, c), "embed")
            k, v = (dot(memory, weight(name, EMBED, g, c), "embed") for name in "kv")
            return dot(apply(Attend(causal=False), q, k, v), weight("o", n, c, EMBED), "heads", "head_dim")

    memory = apply(Rename("seq", "source"), given("m", BATCH, SEQ, EMBED))
    assert source in memory.shape.dims
    x = given("x", BATCH, SEQ, EMBED) >> repeat(2, residual(Cross())).given(memory=memory)
    m, at, mem = model("m", x), r(B, S, D), r(B, 4, D)
    w = random(m)
    want = at
    for i in range(2):
        read = zip("qkv", (want, mem, mem), strict=True)
        q, k, v = (torch.einsum("bsd,dhc->bhsc", t, w[f"cross.{i}.{p}"]) for p, t in read)
        o = F.scaled_dot_product_attention(q, k, v)
        want = want + torch.einsum("bhsc,hcd->bsd", o, w[f"cross.{i}.o"])
    close(interpret(m, w, {"x": at, "m": mem})[0], want)


def test_every_output_is_given_in_order() -> None:
    x = given("x", BATCH, EMBED)
    doubled = fn("add", x, x)
    first, second = interpret(model("m", fn("mul", doubled, x), doubled), {}, {"x": r(B, D)})
    close(first, 2 * r(B, D) ** 2)
    close(second, 2 * r(B, D))


def test_a_thousand_layers_are_no_deeper_than_one() -> None:
    m = model("deep", given("x", BATCH, EMBED) >> repeat(1000, RMSNorm()))
    close(
        interpret(m, {f"rms_norm.{i}.scale": torch.ones(D) for i in range(1000)}, {"x": torch.ones(B, D)})[0].mean(),
        torch.tensor(0.995),
        rtol=1e-2,
        atol=0,
    )  # 1 / sqrt(1 + 1000 eps)


# What it cannot do


def test_messages() -> None:
    m = gpt(layers=1)
    w, t = random(m), tokens()
    with pytest.raises(UserError, match=r"no weight 'wpe' \[position=9 embed=12\]; the names given are wte, "):
        interpret(m, {name: x for name, x in w.items() if name != "wpe"}, {"tokens": t})
    with pytest.raises(UserError, match=r"weight 'wpe' has shape \[position=9 embed=12\], .* sizes \[12, 9\]"):
        interpret(m, {**w, "wpe": w["wpe"].T}, {"tokens": t})
    with pytest.raises(UserError, match=r"no input 'tokens' \[batch seq\]; the names given are none"):
        interpret(m, w, {})
    with pytest.raises(UserError, match=r"no rows for 14 positions: seq can be up to 9"):
        interpret(m, w, {"tokens": torch.cat((t, t), 1)})


def test_an_op_of_ones_own_says_how_to_join() -> None:
    class Mystery(Elementwise):
        def saved_values(self, out: Value) -> tuple[Value, ...]:
            return ()

    x = given("x", BATCH, EMBED)
    with pytest.raises(UserError, match=r"the op Mystery has no function `whole`\n(.|\n)*@whole.register"):
        interpret(model("m", apply(Mystery(), x)), {}, {"x": r(B, D)})


@frozen
class Channels(Layer):
    """Learned positions, then experts, on channels of any name; outside the layer they are `embed`."""

    channels: str

    def body(self, x: Value, /, **side: Value) -> Value:
        x, c, n = apply(Rename("embed", self.channels), x), Dim(self.channels, D), Dim("experts", 4)
        x = x + apply(PositionLookup("position"), x, weight("positions", Dim("position", S), c))
        gate = apply(Gate(2), dot(x, weight("router", c, n), self.channels))
        tokens = apply(Route(2), x, gate)
        y = fn("tanh", tokens) * weight("scale", c)
        return apply(Rename(self.channels, "embed"), apply(Combine(), y, gate))


def test_names_of_channels_do_not_matter_to_routing_and_positions() -> None:
    x = torch.randn(B, S, D, dtype=torch.float64)
    weights = {name: torch.randn(*sizes, dtype=torch.float64) for name, sizes in CHANNEL_WEIGHTS.items()}
    one, other = (
        interpret(model("m", given("x", BATCH, SEQ, EMBED) >> Channels(name)), weights, {"x": x})[0]
        for name in ("embed", "wide")
    )
    close(one, other)


def test_tokens_with_two_dims_of_channels_are_not_routed() -> None:
    x, gate = (
        given("x", BATCH, SEQ, Dim("heads", 2), EMBED),
        apply(Gate(2), given("gate", BATCH, SEQ, Dim("experts", 4))),
    )
    with pytest.raises(UserError, match="x must have exactly one dim that the gate lacks"):
        apply(Route(2), x, gate)
