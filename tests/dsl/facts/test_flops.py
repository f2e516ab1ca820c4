"""FLOPs of the forward pass and of each backward pass, against published formulas and tables.

All of them count 2 for a multiply and an add. They differ in three ways, which each test accounts for: causal attention
is counted whole or by half (as here: what is masked need not be computed), logits and the embedding are counted or not,
and so is what recompute does again.
"""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Attention,
    Dim,
    Embed,
    Input,
    Linear,
    Mamba2,
    Model,
    MoE,
    RMSNorm,
    Shape,
    Split,
    SwiGLU,
    Unembed,
    Value,
    costs,
    flops,
    graph,
    ids,
    model,
    params,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral


def matrices(m: Model) -> int:
    """The elements of the weights that tokens are multiplied with: not of tables that are only looked up."""
    used = {s.name: s for n in graph(m).nodes if not isinstance(n.op, Embed) for s in n.weights}
    return sum(prod(d.size for d in s.dims) for s in used.values() if len(s.dims) > 1)


# The law

sizes = {"embed": st.sampled_from([32, 64, 96]), "ff": st.integers(1, 90), "vocab": st.integers(2, 300)}
sizes |= {"layers": st.integers(1, 3), "heads": st.sampled_from([4, 8]), "kv_heads": st.sampled_from([1, 2, 4])}


@given(**sizes, batch=st.integers(1, 4), seq=st.integers(2, 50).map(lambda n: 2 * n), tied=st.booleans())
def test_flops_are_two_for_each_weight_and_token_plus_attention(batch, seq, **kw):
    m = llama("any", **kw)
    attention = kw["layers"] * 4 * batch * seq**2 * kw["embed"] // 2
    result = flops(m, batch=batch, seq=seq)
    assert result.forward == 2 * matrices(m) * batch * seq + attention
    assert result.wgrad == result.forward - attention
    assert result.dgrad == result.forward + attention


@given(experts=st.sampled_from([4, 8, 64]), top_k=st.integers(1, 4), batch=st.integers(1, 3), seq=st.integers(1, 40))
def test_a_token_pays_for_its_own_experts_only(experts, top_k, batch, seq):
    m = mixtral("any", 1, 4, 2, 64, 128, experts, top_k, vocab=100)
    attention, router, head = 2 * 64 * 64 + 2 * 64 * 32, 64 * experts, 100 * 64
    active = attention + router + top_k * 3 * 64 * 128 + head
    assert flops(m, batch=batch, seq=seq).forward == 2 * active * batch * seq + 4 * batch * seq**2 * 64 // 2


@given(seq=st.integers(1, 64), window=st.integers(1, 64))
def test_a_window_counts_what_it_leaves_in(seq, window):
    """Position i, counted from the half as the causal half is, sees i others or as many as the window."""
    x = Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", 64))))
    seen, whole = (
        flops(model("m", x >> Attention(heads=4, window=w)), batch=3, seq=seq).forward - 2 * 3 * seq * 4 * 64 * 64
        for w in (window, None)
    )
    w = min(window, seq)
    assert whole == 4 * 3 * 64 * seq * seq // 2
    assert seen == 4 * 3 * 64 * (w * w // 2 + (seq - w) * w + (w * w % 2) / 2)


def test_data_has_no_gradient():
    """So a product of data and weights has two passes, not three."""
    m = find("vit-base")[0]
    result, (patch,) = flops(m, batch=1, seq=1), (n for n in graph(m).nodes if "patch_embed" in n.name)
    (work,) = (w for w in costs(patch, batch=1, seq=1).work if w.flops)
    assert (work.dgrad, work.wgrad) == (0, work.flops)
    assert result.total == 3 * result.forward - work.flops


# Formulas


def bert(layers: int, heads: int, embed: int, vocab: int, seq: int) -> Model:
    """A GPT whose attention is not causal: the FLOPs of those who count all of it."""
    d = Dim("embed", embed)
    wte = weight("wte", Dim("vocab", vocab), d)
    block = residual(RMSNorm(), Attention(heads=heads, causal=False)) >> residual(RMSNorm(), MLP(4 * embed))
    return model("all", ids() >> Embed(wte) >> repeat(layers, block) >> Unembed(wte))


SIZES = pytest.mark.parametrize(
    ("layers", "heads", "embed", "vocab", "seq"),
    [(24, 24, 2304, 51200, 2048), (96, 96, 12288, 51200, 2048), (128, 160, 25600, 51200, 2048)],
)


@SIZES
def test_narayanan(layers, heads, embed, vocab, seq):
    """96 B s l h² (1 + s/6h + V/16lh) with full recompute and all of attention. Source: arXiv:2104.04473, section 5.1.

    A quarter of it, less the logits, is the forward pass that is done again.
    """
    batch = 4
    published = 96 * layers * embed**2 + 16 * layers * embed * seq + 6 * vocab * embed  # multiplied out
    assert flops(bert(layers, heads, embed, vocab, seq), batch=batch, seq=seq, recompute="full").hardware == (
        batch * seq * published
    )
    masked = 4 * layers * 4 * embed * seq // 2  # in four passes, half of what is counted of attention
    causal = flops(gpt("g", layers, heads, embed, vocab=vocab, seq=seq), batch=batch, seq=seq, recompute="full")
    assert causal.hardware == batch * seq * (published - masked)


@SIZES
def test_korthikanti(layers, heads, embed, vocab, seq):
    """72 B L s h² (1 + s/6h + v/12hL): model FLOPs. Source: arXiv:2205.05198, appendix A.

    Selective recompute does the two products of attention's core again, 4 B L s² h.
    """
    result = flops(bert(layers, heads, embed, vocab, seq), batch=4, seq=seq, recompute="selective")
    assert result.total == 4 * seq * (72 * layers * embed**2 + 12 * layers * embed * seq + 6 * vocab * embed)
    assert result.recompute == 4 * seq * 4 * layers * embed * seq


@pytest.mark.parametrize("seq", [2048, 8192])
def test_palm(seq):
    """6 N + 12 L H Q T for each token, all of attention. Source: PaLM, arXiv:2204.02311, appendix B.

    N is all parameters, one table being both embedding and logits. Here norms, which are no products, do not count.
    """
    m = find("llama3-1b")[0]
    layers, heads, head_dim, embed = 16, 32, 64, 2048
    published = 6 * params(m) + 12 * layers * heads * head_dim * seq
    norms, masked = 6 * (2 * layers + 1) * embed, 12 * layers * heads * head_dim * seq // 2
    assert flops(m, batch=1, seq=seq).total == seq * (published - norms - masked)


@pytest.mark.parametrize(("layers", "embed", "seq"), [(12, 768, 1024), (48, 1600, 1024)])
def test_kaplan(layers, embed, seq):
    """2 N + 2 n_layer n_ctx d_attn for each token, forward, where N = 12 n_layer d². Source: arXiv:2001.08361, table 1.

    They leave the logits out, and count attention's mask by half.
    """
    m = gpt("g", layers, embed // 64, embed, vocab=50257, seq=seq)
    logits = 2 * 50257 * embed
    assert flops(m, batch=1, seq=seq).forward == seq * (24 * layers * embed**2 + 2 * layers * seq * embed + logits)


@pytest.mark.parametrize(
    ("layers", "embed", "ff", "heads", "channels", "ratio"),
    [
        (10, 640, 2560, 10, 64, 1.03),
        (20, 1024, 4096, 16, 64, 1.10),
        (24, 1280, 5120, 10, 128, 1.08),
        (26, 1792, 7168, 14, 128, 1.04),
        (28, 2048, 8192, 16, 128, 1.03),
        (40, 3584, 14336, 28, 128, 0.99),
    ],
)
def test_chinchilla(layers, embed, ff, heads, channels, ratio):
    """FLOPs over 6 N D of models of 74 million to 6.8 billion parameters. Source: arXiv:2203.15556, table A4.

    Their formula (appendix F) counts all of attention, and 3 for each score of the softmax, of which we count none. The
    ratio is without embedding and logits, but their N is with the embedding (32,000 tokens), and with a fifth matrix of
    attention, that of Transformer-XL's relative positions.
    """
    seq = 2048
    attention = Attention(heads=heads, head_dim=channels, causal=False)
    x = ids() >> Embed(weight("wte", Dim("vocab", 32000), Dim("embed", embed)))
    m = model("m", x >> repeat(layers, residual(attention) >> residual(MLP(ff))))
    softmax = 3 * layers * 3 * heads * seq * seq
    n = params(m) + layers * embed * heads * channels
    assert round((flops(m, batch=1, seq=seq).total + softmax) / (6 * n * seq), 2) == ratio


@pytest.mark.parametrize(("groups", "state", "heads"), [(1, 16, 128), (8, 128, 128), (8, 256, 64)])
def test_megatron_counts_a_mamba_layer(groups, state, heads):
    """2 h (2 d + 2 g n + H) + 7 d n + 2 d h for each token, three times for training. Source: Megatron-LM, training.py,
    `mamba_layer_flops`. It leaves out the convolution, 2 · width · (d + 2 g n).
    """
    hidden, head_dim, width, tokens = 4096, 8192 // heads, 4, 2 * 512
    x = ids() >> Embed(weight("wte", Dim("vocab", 100), Dim("embed", hidden)))
    layer = Mamba2(heads=heads, head_dim=head_dim, state=state, groups=groups, conv=width)
    result, d = flops(model("m", x >> layer), batch=2, seq=512), heads * head_dim
    published = 2 * hidden * (2 * d + 2 * groups * state + heads) + 7 * d * state + 2 * d * hidden
    assert result.forward == tokens * (published + 2 * width * (d + 2 * groups * state))
    assert result.total == 3 * result.forward


# Tables


@pytest.mark.parametrize(("ref", "billions"), [("vit-base", 17.564), ("vit-large", 61.555), ("vit-huge", 167.295)])
def test_torchvision_counts_a_vision_transformer(ref, billions):
    """Multiply-adds, in billions, of one image. Source: torchvision, models/vision_transformer.py, `_ops`."""
    assert round(flops(find(ref)[0], batch=1, seq=1).forward / 2e9, 3) == billions


@pytest.mark.parametrize(("ref", "billions"), [("deepseek-v2", 155), ("deepseek-v3", 250)])
def test_deepseek_counts_a_token(ref, billions):
    """Billions of FLOPs to train on a token in sequences of 4,096. Source: arXiv:2505.09343, table 2."""
    assert round(flops(find(ref)[0], batch=1, seq=4096).total / 4096e9) == billions


@pytest.mark.parametrize(
    ("ref", "total", "activated", "looked"),
    [
        ("mixtral-8x7b", 46.7, 12.9, True),  # arXiv:2401.04088: 47 and 13 billion; 12.9 in the announcement
        ("mixtral-8x22b", 141, 39, True),  # Mistral's announcement
        ("deepseek-v2", 236, 21, True),  # arXiv:2405.04434
        ("deepseek-v3", 671, 37, False),  # arXiv:2412.19437
        ("qwen3-235b-a22b", 235, 22, True),  # arXiv:2505.09388
        ("gpt-oss-20b", 20.9, 3.6, False),  # arXiv:2508.10925, table 1, which leaves the embedding out
        ("gpt-oss-120b", 116.8, 5.1, False),
    ],
)
def test_activated_parameters(ref, total, activated, looked):
    """Billions of parameters, and of those that a token meets; `looked`: the embedding's among them."""
    m = find(ref)[0]
    nodes = graph(m).nodes
    experts = sum(costs(n, batch=1, seq=8).expert_params for n in nodes)
    (moe,) = {n.op for n in nodes if isinstance(n.op, MoE)}
    (embed,) = (params(n) for n in nodes if isinstance(n.op, Embed))
    met = params(m) - experts * (moe.experts - moe.top_k) // moe.experts - (0 if looked else embed)
    digits = 1 if isinstance(total, float) else 0
    assert (round(params(m) / 1e9, digits), round(met / 1e9, digits)) == (total, activated)


@pytest.mark.parametrize("ref", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_weight_gradients_cost_what_is_activated(ref):
    """2 for each token and activated parameter that is multiplied with it."""
    m = find(ref)[0]
    nodes = graph(m).nodes
    experts = sum(costs(n, batch=1, seq=8).expert_params for n in nodes)
    (moe,) = {n.op for n in nodes if isinstance(n.op, MoE)}
    active = matrices(m) - experts * (moe.experts - moe.top_k) // moe.experts
    assert flops(m, batch=2, seq=4096).wgrad == 2 * active * 2 * 4096


# Splits

degrees = st.sampled_from([1, 2, 4])


@given(tp=degrees, cp=degrees, ep=degrees, etp=degrees, top_k=st.integers(1, 8))
def test_no_slot_is_lost(tp, cp, ep, etp, top_k):
    """Over all devices, the experts get top_k slots of every token, once for each device of etp."""
    x = Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", 64))))
    *_, n = graph(model("m", x >> MoE(SwiGLU(16), experts=8, top_k=top_k))).nodes
    split = Split(tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=True)
    work = {w.path: w for w in costs(n, batch=2, seq=64, split=split).work}
    for path in ("experts.gate", "experts.up", "experts.down"):
        assert work[path].count == 8 // ep
        assert tp * cp * work[path].count * work[path].m == 2 * 64 * top_k * etp


@given(tp=degrees, cp=degrees, ep=degrees, etp=degrees, batch=st.integers(1, 3))
def test_products_are_as_large_as_their_flops(tp, cp, ep, etp, batch):
    """Causal attention: half of two products."""
    m = mixtral("any", 1, 8, 4, 64, 32, 8, 2, vocab=128)
    split = Split(tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=True)
    for n in graph(m).nodes:
        for w in costs(n, batch=batch, seq=64, split=split).work:
            assert w.flops == 2 * w.count * w.m * w.n * w.k, (n.name, w.path)


def test_a_matrix_of_another_embed():
    x = Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", 64))))
    m = model("m", x >> RMSNorm() >> Linear(Dim("embed", 32)))
    assert flops(m, batch=2, seq=8).forward == 2 * 2 * 8 * 64 * 32
