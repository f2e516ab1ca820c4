"""Saved activations byte by byte against published figures: 2 bytes an element, 1 byte an element of a mask.

Here the core of attention never stores its scores, but the logarithm of a sum for each head and query, in fp32.
"""

from collections import Counter

import pytest

from megaloom.dsl import (
    MLP,
    Dim,
    DType,
    Embed,
    MoE,
    Node,
    Saved,
    Split,
    SwiGLU,
    UserError,
    costs,
    flops,
    graph,
    ids,
    model,
    saved,
    weight,
    without_loss,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.facts.recompute import RECOMPUTE_MODULES
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.t5 import t5

NBYTES = {DType.COMPUTE: 2, DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}
B, S, A, H = 4, 128, 8, 64
SBH, LSE = S * B * H, 4 * A * S * B


def nbytes(tensors):
    return sum(s.elements * NBYTES[s.dtype] for s in tensors)


def block(nodes) -> list[Node]:
    """Return the nodes of the last block."""
    last = max(n.block for n in nodes if n.block is not None)
    return [n for n in nodes if n.block == last]


def of(m, **how) -> tuple[Saved, ...]:
    """Return the saved tensors of the last block of a model."""
    return saved(block(graph(m).nodes), batch=B, seq=S, **how)


def dropping(layers=1):
    return gpt("g", layers, A, H, vocab=100, seq=S, dropout=0.1)


# Korthikanti et al., arXiv:2205.05198


def test_each_tensor_of_korthikanti():
    """Section 4.1, in their order, s b h times so much. Together 34, and 5 a s² b that are not stored:

    the softmax (2 a s² b), its dropout's mask (a s² b; flash attention draws it again from its seed) and the dropped
    softmax (2 a s² b) are made again from Q, K and the logarithms of sums (4 a s b).
    """
    names = ["layer_norm", "attention", "dropout", "layer_norm", "mlp", "dropout"]
    nodes = [n for n in block(graph(dropping()).nodes) if not n.name.startswith("add")]
    assert [n.name.split(".")[0] for n in nodes] == names
    first, attention, mask, second, mlp, last = (
        {s.what: s.elements * NBYTES[s.dtype] / SBH for s in costs(n, batch=B, seq=S).saved} for n in nodes
    )
    assert attention.pop("log-sum-exp") * SBH == LSE
    assert attention == {
        "input": 2,  # of the products that make Q, K and V
        "q_bias": 2,  # Q and K, of Q Kᵀ
        "k_bias": 2,
        "v_bias": 2,  # V, of attention over values
        "attend": 2,  # what enters the linear projection
    }
    assert mask == last == {"dropout mask": 1}
    assert mlp == {"input": 2, "up": 8, "gelu_tanh": 8}  # the second product's input is the GeLU's output
    assert first == second == {"input": 2}
    assert nbytes(of(dropping())) == 34 * SBH + LSE


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_table_2_of_korthikanti(t, layers):
    """Bytes of a layer: s b h (10 + 24/t + 5as/ht), with sequence parallel s b h (34/t + 5as/ht), where the third term
    is the one that is not stored; with selective recompute the same without it; with full recompute 2 s b h.

    With both full recompute and sequence parallel a device keeps its part of the layer's input, 2/t.
    """
    m, tp, sp = dropping(layers), Split(tp=t), Split(tp=t, sequence_parallel=True)
    assert nbytes(of(m, split=tp)) * t == SBH * (10 * t + 24) + LSE
    assert nbytes(of(m, split=sp)) * t == SBH * 34 + LSE
    assert nbytes(of(m, split=tp, recompute="selective")) * t == SBH * (10 * t + 24)
    assert nbytes(of(m, split=sp, recompute="selective")) * t == SBH * 34
    assert nbytes(of(m, split=tp, recompute="full")) == SBH * 2
    assert nbytes(of(m, split=sp, recompute="full")) * t == SBH * 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_keeps_its_blocks_and_what_is_around_them(recompute):
    """Section 4.3: after the last layer 4 s b h, the inputs of the last norm and of the logits.

    Their 4 s b v of the fp32 logits is the loss's, which the dsl does not know. Ours keeps the token ids, 8 s b.
    """
    tensors = saved(graph(without_loss(dropping(5))).nodes, batch=B, seq=S, recompute=recompute)
    each = {"none": 34 * SBH + LSE, "selective": 34 * SBH, "full": 2 * SBH}[recompute]
    assert nbytes(tensors) == 5 * each + 4 * SBH + 8 * S * B


def test_without_dropout_there_are_no_masks():
    assert nbytes(of(gpt("g", 1, A, H, vocab=100, seq=S))) == 32 * SBH + LSE


# Other families, by the same reckoning


@pytest.mark.parametrize(("kv_heads", "ff", "t"), [(8, 192, 1), (2, 96, 2), (4, 160, 4)])
def test_a_llama_keeps(kv_heads, ff, t):
    """s b (12 h + 4 k + 6 f): Q and O as above, K and V of k channels, and of SwiGLU what enters it (2 h), both of its
    factors and their product; RMSNorm as LayerNorm.
    """
    m = llama("l", 2, A, kv_heads, H, ff, vocab=100)
    k = H * kv_heads // A
    whole = S * B * (12 * H + 4 * k + 6 * ff)
    assert nbytes(of(m)) == whole + LSE
    split = Split(tp=t, sequence_parallel=True)
    assert nbytes(of(m, split=split)) * t == whole + LSE
    assert nbytes(of(m, split=Split(tp=t), recompute="selective")) * t == whole + (t - 1) * S * B * 8 * H


def test_what_a_deepseek_keeps():
    """Elements of a token: latent attention's vectors before and after their norms, the heads' own; of experts what
    each of the eight that it goes to reads and makes.
    """
    elements = Counter()
    for n in block(graph(find("deepseek-v3")[0]).nodes):
        for s in costs(n, batch=B, seq=S).saved:
            elements[n.name.split(".")[0], s.what] += s.elements
    heads, q, kv, d, f, k = 128, 1536, 512, 7168, 2048, 8
    a_token = {
        ("rms_norm", "input"): 2 * d,
        ("mla", "input"): d,
        ("mla", "q_down"): q,
        ("mla", "q_norm.scale"): q,
        ("mla", "kv_down"): kv,
        ("mla", "kv_norm.scale"): kv,
        ("mla", "concat"): 2 * heads * (128 + 64),  # queries and keys
        ("mla", "v"): heads * 128,
        ("mla", "attend"): heads * 128,
        ("mla", "log-sum-exp"): heads,
        ("moe", "input"): d,
        ("moe", "gate"): 256,
        ("moe", "experts.select"): k * d,
        ("moe", "experts.gate"): k * f,
        ("moe", "experts.up"): k * f,
        ("moe", "experts.mul"): k * f,
        ("moe", "shared.gate"): f,
        ("moe", "shared.up"): f,
        ("moe", "shared.mul"): f,
    }
    assert elements == {name: B * S * n for name, n in a_token.items()}


@pytest.mark.parametrize(("expert", "each"), [(SwiGLU(192), 3), (MLP(192, "gelu"), 3)])
def test_experts_keep_what_their_last_product_reads_weighted(expert, each):
    """Of a SwiGLU both factors and what the second product reads; of an MLP before, after its activation, and that
    weighted: of four experts, two for each token. What they give is not kept.
    """
    x = ids() >> Embed(weight("wte", Dim("vocab", 64), Dim("embed", H)))
    node = graph(model("m", x >> MoE(expert, experts=4, top_k=2))).nodes[-1]
    elements = sum(s.elements for s in costs(node, batch=B, seq=S).saved if s.what.startswith("experts"))
    assert elements == 2 * B * S * (H + each * 192)
    less = sum(s.elements for s in costs(node, batch=B, seq=S).saved if "moe_act" in s.recomputed_by)
    assert less == 2 * B * S * 192 * (each - (2 if isinstance(expert, SwiGLU) else 1))


GIB = 2**30


def test_what_a_deepseek_keeps_in_all():
    """Activations of a DeepSeek-V3 (PP4 VPP4 EP64, bf16, sequences of 4096): 131.0 GiB, of which weighting what enters
    the experts' last product rather than what leaves it frees 26.3, and computing the up projection of latent attention
    again 30.4 (arXiv:2603.07685, Table 3). Those are of one micro-batch in every layer: 16 model chunks of 16.

    Two more of its figures are not met. Of LayerNorm it says 8.2: ours are the norms in front of layers, as in
    megatron-core (6.67); with the two inside of latent attention there would be 7.62. Of SwiGLU 3.8: that is to the
    digit half of what the inputs of the second products have in bf16 (eight experts of 2048 channels in 61 layers).
    """
    nodes = graph(without_loss(find("deepseek-v3")[0])).nodes

    def gib(*modules: str) -> float:
        return nbytes(saved(nodes, batch=1, seq=4096, recompute="selective", modules=modules)) / GIB

    assert gib() == pytest.approx(131.0 - 26.3, rel=0.01)
    assert gib() - gib("mla_up_proj") == pytest.approx(30.4, rel=0.01)
    assert gib() - gib("layernorm") == 61 * 2 * 7168 * 2 * 4096 / GIB
    assert gib() - gib("moe_act") == 58 * 8 * 2048 * 2 * 4096 / GIB
    assert 61 * 8 * 2048 * 2 * 4096 / GIB / 2 == pytest.approx(3.8, abs=0.05)


def test_modules_free_what_they_make_again():
    """Of a Llama: two norms' outputs, and of its feed-forward all but what enters it. Together they free both."""
    m, ff = llama("l", 2, A, A, H, 192, vocab=100), 192
    whole, norms, mlp, both = (
        nbytes(of(m, recompute="selective", modules=names))
        for names in ((), ("layernorm",), ("mlp",), ("mlp", "layernorm"))
    )
    assert whole - norms == 2 * 2 * SBH // 2 * 2
    assert whole - mlp == 3 * S * B * ff * 2
    assert whole - both == (whole - norms) + (whole - mlp)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "t5-base", "gpt-oss-20b", "mamba2-130m"])
def test_more_modules_keep_less_and_compute_more(name):
    m = find(name)[0]
    nodes, several = graph(m).nodes, []
    most = nbytes(saved(nodes, batch=1, seq=64))
    recomputed = 0
    for module in RECOMPUTE_MODULES:
        several.append(module)
        less = nbytes(saved(nodes, batch=1, seq=64, recompute="selective", modules=several))
        more = flops(m, batch=1, seq=64, recompute="selective", modules=several).recompute
        assert less <= most
        assert recomputed <= more <= flops(m, batch=1, seq=64).forward
        most, recomputed = less, more


def test_an_unknown_module_is_refused():
    with pytest.raises(UserError, match="no module 'layer_norm' to recompute: did you mean layernorm"):
        of(dropping(), recompute="selective", modules=["layer_norm"])


def test_what_a_state_space_keeps():
    """Elements of a token, in d inner channels, groups of n states, H heads: what enters each convolution and what it
    makes, what the scan reads and makes, the gate, and the norm's input and output. Its decays A have no token.
    """
    m = find("mamba2-370m")[0]
    norm, mamba, _ = block(graph(m).nodes)
    d, n, heads, embed = 2048, 128, 32, 1024
    assert nbytes(costs(norm, batch=B, seq=S).saved) == 2 * B * S * embed
    a_token = embed + 2 * (d + 2 * n) + (d + 2 * n) + 2 * heads + d + d + 2 * d
    assert nbytes(costs(mamba, batch=B, seq=S).saved) == 2 * (B * S * a_token + heads)


def test_an_encoder_and_its_decoder():
    """The output of the encoder, which every block of the decoder reads, is saved once."""
    m = without_loss(find("t5-base")[0])
    nodes, memory = graph(m).nodes, 2 * B * S * 768
    each = sum(nbytes(costs(n, batch=B, seq=S).saved) for n in nodes)
    assert each - nbytes(saved(nodes, batch=B, seq=S)) == (12 - 1) * memory
    ends = 2 * 8 * B * S + 2 * memory + memory  # both inputs' ids, the inputs of two norms, and of the logits
    assert nbytes(saved(nodes, batch=B, seq=S, recompute="full")) == 24 * memory + memory + ends


def test_an_encoder_of_another_length():
    m = t5("t", 2, A, H, MLP(96, "relu"))
    keys = [
        s
        for n in graph(m).nodes
        if n.name.startswith("cross")
        for s in costs(n, batch=B, seq=S, source=3 * S).saved
        if s.what in ("k", "v") or s.port == 1
    ]
    assert {s.elements for s in keys} == {B * 3 * S * 8 * 64, B * 3 * S * H}


# Splits


def test_context_parallel_divides_all_but_keys_and_values():
    one, four = (of(dropping(), split=Split(cp=cp)) for cp in (1, 4))
    assert nbytes(one) == 4 * nbytes(s for s in four if s.what != "keys and values of other devices")
    assert nbytes(four) - nbytes(one) // 4 == 3 * (2 * 2 * SBH) // 4
    assert nbytes(of(dropping(), split=Split(cp=4), recompute="selective")) == 34 * SBH // 4


def test_ids_are_whole_on_every_device_of_tp():
    (embed,) = (n for n in graph(dropping()).nodes if isinstance(n.op, Embed))
    tensors = costs(embed, batch=B, seq=S, split=Split(tp=4, cp=2, sequence_parallel=True)).saved
    assert tensors == (Saved(B * S // 2, DType.INDEX, "input", port=0),)


def test_an_unknown_recompute_is_refused():
    with pytest.raises(UserError, match="no recompute mode 'ful': did you mean full"):
        of(dropping(), recompute="ful")
