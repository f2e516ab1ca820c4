"""Collectives of each family under a split, and the cut points of its graph."""

from collections import Counter
from itertools import groupby

import pytest
from attrs import frozen

from megaloom.dsl import (
    BATCH,
    MLA,
    SEQ,
    Attention,
    Collective,
    Conv,
    CrossAttention,
    Dim,
    Embed,
    Input,
    Layer,
    LayerNorm,
    Mamba2,
    MoE,
    RelativeBuckets,
    RMSNorm,
    Rope,
    Shape,
    Softcap,
    Split,
    SwiGLU,
    Unembed,
    Value,
    apply,
    chain,
    costs,
    graph,
    ids,
    model,
    residual,
    weight,
)
from megaloom.dsl.catalog import find

EMBED, HEADS = Dim("embed", 64), 8
HIDDEN = Value(Input("x"), (), Shape((BATCH, SEQ, EMBED)))
MEMORY = Value(Input("memory"), (), Shape((BATCH, Dim("source"), EMBED)))
B, S = 3, 32


def cost(layer, split, **sizes):
    *_, n = graph(model("m", HIDDEN >> layer)).nodes
    return costs(n, batch=B, seq=S, split=split, **sizes)


def sent(layer, split, **sizes):
    """(axis, kind, backward, elements for each sequence) of every collective, counted."""
    collectives = cost(layer, split, **sizes).collectives
    return Counter((c.axis, c.kind, c.backward, c.elements // B) for c in collectives)


# Latent attention

LATENT = MLA(heads=HEADS, q_rank=24, kv_rank=20, nope=8, rope=4, v=8, positions=Rope(1e4))


def test_latent_attention_divides_its_heads():
    """The short vectors are whole on every device of tp, so their gradients, of its heads each, are added."""
    assert sent(LATENT, Split(tp=2)) == {
        ("tp", "all_reduce", False, S * 64): 1,
        ("tp", "all_reduce", True, S * 24): 1,  # of queries
        ("tp", "all_reduce", True, S * 20): 1,  # of keys and values
        ("tp", "all_reduce", True, S * 4): 1,  # of the rotated keys
    }


def test_latent_attention_gathers_short_vectors():
    """With sequence parallel: not the hidden states, of which each device makes the short vectors of its part.

    megatron-core does the same (0.16.1, transformer/multi_latent_attention.py).
    """
    collectives = sent(LATENT, Split(tp=2, sequence_parallel=True))
    assert collectives == {
        ("tp", "reduce_scatter", False, S * 64): 1,
        ("tp", "all_gather", True, S * 64): 1,
        **{("tp", "all_gather", False, S * n): 1 for n in (24, 20, 4)},
        **{("tp", "all_gather", True, S * n): 1 for n in (24, 20, 4)},  # again, for the gradients of weights
        **{("tp", "reduce_scatter", True, S * n): 1 for n in (24, 20, 4)},
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_products_that_make_short_vectors_are_whole(sequence_parallel):
    one, two = (cost(LATENT, s) for s in (Split(), Split(tp=2, sequence_parallel=sequence_parallel)))
    down = 64 * (24 + 20 + 4) + 24 + 20  # and their norms
    assert 2 * two.params - one.params == down
    shares = {w.path: w.flops for w in two.work}
    for w in one.work:
        alike = w.path in ("q_down", "kv_down", "k_rope") and not sequence_parallel
        assert w.flops == shares[w.path] * (1 if alike else 2), w.path


def test_latent_attention_over_cp_gathers_what_its_heads_read():
    keys, values = HEADS * (8 + 4), HEADS * 8
    assert sent(LATENT, Split(cp=2, tp=2))[("cp", "all_gather", False, S * (keys + values) // 2)] == 1


# Cross attention


@pytest.mark.parametrize("source", [16, 96])
def test_cross_attention_gathers_the_keys_and_values_of_the_source(source):
    layer = CrossAttention(heads=HEADS, kv_heads=4).given(memory=MEMORY)
    collectives = sent(layer, Split(cp=4, tp=2), source=source)
    both = source * 2 * (4 // 2) * 8
    assert collectives == {
        ("cp", "all_gather", False, both): 1,
        ("cp", "reduce_scatter", True, both): 1,
        ("tp", "all_reduce", False, S // 4 * 64): 1,
        ("tp", "all_reduce", True, S // 4 * 64): 1,
        ("tp", "all_reduce", True, source // 4 * 64): 1,  # of the memory, which keys and values read once
    }
    whole, part = (cost(layer, s, source=source) for s in (Split(), Split(cp=4, tp=2)))
    attend = [next(w for w in c.work if "core_attn" in w.recomputed_by) for c in (whole, part)]
    assert attend[0].flops == 8 * attend[1].flops == 4 * B * S * source * 64
    assert [(w.m, w.n) for w in attend] == [(S, source), (S // 4, source)]


# Options of attention that exchange nothing more


@pytest.mark.parametrize(
    "option",
    [
        {"qk_norm": RMSNorm(over="head_dim")},
        {"qk_norm": LayerNorm(over="head_dim")},
        {"sink": True},
        {"alibi": True},
        {"softcap": 50.0},
        {"window": 8},
        {"relative": RelativeBuckets(), "table": weight("biases", Dim("buckets", 32), Dim("heads", HEADS))},
        {"rope": Rope(1e4, channels=4)},
    ],
    ids=lambda option: next(iter(option)),
)
@pytest.mark.parametrize("split", [Split(tp=4), Split(tp=2, sequence_parallel=True), Split(tp=2, cp=2)], ids=str)
def test_what_heads_do_for_themselves_exchanges_nothing(option, split):
    assert sent(Attention(heads=HEADS, **option), split) == sent(Attention(heads=HEADS), split)


def test_capped_logits_stay_divided():
    d = Dim("embed", 64)
    wte = weight("wte", Dim("vocab", 100), d)
    *_, unembed, softcap = graph(model("m", ids() >> Embed(wte) >> Unembed(wte) >> Softcap(30.0))).nodes
    split = Split(tp=4)
    assert costs(softcap, batch=B, seq=S, split=split).collectives == ()
    assert costs(softcap, batch=B, seq=S, split=split).saved[0].elements == B * S * 25
    assert [c.backward for c in costs(unembed, batch=B, seq=S, split=split).collectives] == [True]


# Experts


def test_a_shared_expert_divides_as_any_other_layer():
    """The experts exchange as much as without a shared expert; the shared one is sharded like any dense layer."""
    alone, shared = MoE(SwiGLU(16), 8, 2), MoE(SwiGLU(16), 8, 2, shared=SwiGLU(32))
    for split in (Split(tp=2, ep=4, sequence_parallel=True), Split(tp=2, cp=2, ep=2, etp=2, sequence_parallel=True)):
        assert sent(shared, split) - sent(alone, split) == sent(SwiGLU(32), split)
        assert cost(shared, split).params - cost(alone, split).params == 3 * 64 * 32 // 2
        assert cost(shared, split).expert_params == cost(alone, split).expert_params


@pytest.mark.parametrize("option", [{"score": "sigmoid", "corrected": True}, {"groups": 4, "top_groups": 2}])
def test_how_experts_are_chosen_exchanges_nothing(option):
    split = Split(tp=2, ep=4, sequence_parallel=True)
    assert sent(MoE(SwiGLU(16), 8, 2, **option), split) == sent(MoE(SwiGLU(16), 8, 2), split)


def test_each_device_reads_all_gates():
    whole, part = ({w.path: w for w in cost(MoE(SwiGLU(16), 8, 2), Split(ep=ep)).work} for ep in (1, 4))
    assert whole["route"].elements == part["route"].elements == B * S * (64 + 8 + 2 * 64)
    assert whole["combine"].elements == part["combine"].elements == B * S * (2 * 64 + 8 + 64)


# State spaces

HEAD, STATE = 16, 8


def mamba(groups=4, norm_groups=4):
    return Mamba2(heads=HEADS, head_dim=HEAD, state=STATE, groups=groups, norm_groups=norm_groups)


def test_a_state_space_over_tp_exchanges_as_attention_does():
    for split in (Split(tp=2), Split(tp=4), Split(tp=4, sequence_parallel=True)):
        assert sent(mamba(), split) == sent(Attention(heads=HEADS), split)


def test_a_norm_in_groups_is_of_one_device():
    """Groups that no device has a part of need no other's numbers; fewer groups than devices do."""
    two = Split(tp=2)
    assert sent(mamba(norm_groups=2), two) == sent(mamba(norm_groups=8), two)
    whole = sent(mamba(norm_groups=1), two) - sent(mamba(norm_groups=2), two)
    assert whole == {("tp", "all_reduce", False, S): 1, ("tp", "all_reduce", True, S): 1}


@pytest.mark.parametrize(("tp", "cp", "groups"), [(1, 2, 4), (2, 2, 4), (1, 4, 1), (2, 4, 2)])
def test_a_state_space_over_cp_has_some_heads_of_all_positions(tp, cp, groups):
    """x, b, c and dt are exchanged all to all, and the result back. Groups of which a device has fewer than cp go in
    copies. megatron-core 0.16.1 does so, and sends the gate z there and back: ssm/mamba_context_parallel.py.
    """
    collectives = cost(mamba(groups), Split(tp=tp, cp=cp)).collectives
    there = [HEADS * HEAD, groups * STATE, groups * STATE, HEADS]  # x, b, c, dt
    copies = [1, max(1, cp * tp // groups), max(1, cp * tp // groups), 1]
    want = [n * k // tp * S // cp for n, k in zip(there, copies, strict=True)] + [HEADS * HEAD // tp * S // cp]
    for backward in (False, True):
        exchanged = [c for c in collectives if c.axis == "cp" and c.backward is backward]
        assert {c.kind for c in exchanged} == {"all_to_all"}
        assert sorted(c.elements // B for c in exchanged) == sorted(want)


@frozen
class Mixer(Layer):
    """A convolution of hidden states, and nothing else."""

    def body(self, x, /, **side):
        return apply(Conv(), x, weight("kernel", x["embed"], Dim("width", 4)))


def test_a_convolution_alone_goes_there_and_back():
    split = Split(cp=4)
    assert sent(Mixer(), split) == {("cp", "all_to_all", b, S // 4 * 64): 2 for b in (False, True)}
    twice = sent(chain(Mixer(), Mixer()), split)
    assert twice == sent(Mixer(), split)  # of the last node: each layer gives parts of the sequence back


def test_tokens_ahead_are_gathered():
    """DeepSeek-V3's next token is on another device where the parts of the sequence meet: ids, no hidden states."""
    (join,) = (n for n in graph(find("deepseek-v3-mtp")[0]).nodes if n.name.startswith("join"))
    (collectives,) = costs(join, batch=B, seq=S, split=Split(cp=2)).collectives
    assert collectives == Collective("all_gather", "cp", B * S, False, "shift")


# Cuts


def cut_graph(ref):
    g = graph(find(ref)[0])
    return g, [g.live_values[i] for i in g.cut_points]


@pytest.mark.parametrize("ref", ["gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "gemma2-9b", "mamba2-370m"])
def test_a_chain_is_cut_where_one_value_crosses(ref):
    g, cuts = cut_graph(ref)
    blocks = 1 + max(n.block for n in g.nodes if n.block is not None)
    assert {len(names) for names in cuts} == {1}
    assert len(cuts) > blocks


@pytest.mark.parametrize("ref", ["t5-base", "bart-base"])
def test_a_decoder_carries_the_memory_along(ref):
    """An encoder is cut where its own hidden states cross; a decoder where theirs and the encoder's output do, until
    its last layer has read that.
    """
    g, cuts = cut_graph(ref)
    dims = [tuple(g.nodes[g.index[name]].shape.positions("embed").name for name in names) for names in cuts]
    assert [names for names, _ in groupby(dims)] == [("source",), ("source", "seq"), ("seq",)]
    (memory,) = {names[0] for names in cuts if len(names) == 2}
    assert all(memory in n.inputs for n in g.nodes if isinstance(n.op, CrossAttention))


@pytest.mark.parametrize("ref", ["bert-base", "vit-base"])
def test_an_encoder_is_a_chain(ref):
    _, cuts = cut_graph(ref)
    assert {len(names) for names in cuts} == {1}


def test_a_residual_is_not_cut_inside():
    x = ids() >> Embed(weight("wte", Dim("vocab", 100), EMBED))
    g = graph(model("m", x >> residual(RMSNorm(), SwiGLU(8)) >> residual(RMSNorm(), SwiGLU(8))))
    assert [g.live_values[i] for i in g.cut_points] == [("embed.0",), ("add.0",)]
