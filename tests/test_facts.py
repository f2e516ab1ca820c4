"""Facts against published numbers and against the laws that they must meet."""

from collections import Counter
from math import prod
from time import perf_counter
from typing import ClassVar

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Attention,
    Collective,
    Dim,
    Dropout,
    DType,
    Embed,
    Gate,
    Input,
    Layer,
    LayerNorm,
    MoE,
    Normalize,
    Positions,
    Rename,
    RMSNorm,
    Saved,
    Shape,
    Split,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    apply,
    chain,
    costs,
    dot,
    flops,
    fn,
    graph,
    ids,
    model,
    params,
    repeat,
    residual,
    saved,
    weight,
)
from megaloom.dsl.find import examples, find
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral

BYTES = {DType.COMPUTE: 2, DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}  # with bf16


def hidden(embed=64):
    """A residual stream from nowhere."""
    return Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", embed))))


def nodes(value):
    return [n for n in graph(model("test", value)).nodes if not n.input]


def node(layer, embed=64):
    (n,) = nodes(hidden(embed) >> layer)
    return n


def nbytes(kept):
    return sum(s.elements * BYTES[s.dtype] for s in kept)


def exchanged(value, split, batch=1, seq=16):
    """(axis, kind, backward) of every collective, counted."""
    found = (c for n in nodes(value) for c in costs(n, batch=batch, seq=seq, split=split).collectives)
    return Counter((c.axis, c.kind, c.backward) for c in found)


# Parameters


@pytest.mark.parametrize(
    ("ref", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_the_published_counts(ref, published):
    """Sources: the safetensors indices of these models on Hugging Face."""
    assert params(find(ref)[0]) == published


layers = st.recursive(
    st.sampled_from([RMSNorm(), LayerNorm(), Attention(heads=4, kv_heads=2), Dropout(0.1)])
    | st.sampled_from([MLP(8, bias=True), SwiGLU(16), MoE(SwiGLU(8), 4, 2), MoE(MLP(8), 4, 1)]),
    lambda inner: (
        st.builds(residual, inner)
        | st.builds(repeat, st.integers(1, 2), inner)
        | st.builds(lambda a, b: a >> b, inner, inner)
    ),
    max_leaves=4,
)


@given(layer=layers, n=st.integers(1, 4))
def test_a_repeat_multiplies_every_fact(layer, n):
    one, many = hidden() >> layer, hidden() >> repeat(n, layer)
    assert params(many) == n * params(one)
    a, b = (flops(model("m", v), batch=2, seq=8) for v in (one, many))
    assert (b.forward, b.dgrad, b.wgrad) == (n * a.forward, n * a.dgrad, n * a.wgrad)


def everything(value, split):
    return [(n.name, costs(n, batch=2, seq=16, split=split)) for n in nodes(value)]


@given(a=layers, b=layers, c=layers, sequence_parallel=st.booleans())
def test_grouping_changes_no_fact(a, b, c, sequence_parallel):
    split = Split(tp=2, cp=2, ep=2, sequence_parallel=sequence_parallel)
    grouped = [hidden() >> (a >> b) >> c, hidden() >> a >> (b >> c), hidden() >> chain(a, b, c)]
    first, *others = (everything(v, split) for v in grouped)
    assert all(other == first for other in others)


def test_the_parameters_of_a_device_are_its_share():
    n = node(MoE(SwiGLU(32), experts=8, top_k=2))
    whole = costs(n, batch=1, seq=16)
    part = costs(n, batch=1, seq=16, split=Split(tp=4, ep=4, etp=2, sequence_parallel=True))
    assert whole.params == part.params == 64 * 8  # the router, which every device has
    assert whole.expert_params == 8 * 3 * 64 * 32 == 8 * part.expert_params
    few = node(Attention(heads=8, kv_heads=2))
    assert costs(few, batch=1, seq=16, split=Split(tp=4)).params == 64 * (2 * 8 + 2 * 1 * 8 + 2 * 8)
    odd = graph(gpt("odd", 1, 4, 64, vocab=101)).nodes[1]
    assert costs(odd, batch=1, seq=16, split=Split(tp=4)).params == 26 * 64


# FLOPs

sizes = {"embed": st.sampled_from([32, 64, 96]), "ff": st.integers(1, 90), "vocab": st.integers(2, 300)}
sizes |= {"layers": st.integers(1, 3), "heads": st.sampled_from([4, 8]), "kv_heads": st.sampled_from([1, 2, 4])}


@given(**sizes, batch=st.integers(1, 4), seq=st.integers(2, 50).map(lambda n: 2 * n), tied=st.booleans())
def test_flops_are_two_for_each_weight_and_token_plus_attention(batch, seq, **kw):
    m = llama("any", **kw)
    matrices = {n: s for n, s in graph(m).weights.items() if len(s.dims) > 1 and (n != "wte" or kw["tied"])}
    attention = kw["layers"] * 4 * batch * seq**2 * kw["embed"] // 2
    found = flops(m, batch=batch, seq=seq)
    assert found.forward == 2 * sum(prod(d.size for d in s.dims) for s in matrices.values()) * batch * seq + attention
    assert found.wgrad == found.forward - attention
    assert found.dgrad == found.forward + attention


@given(experts=st.sampled_from([4, 8, 64]), top_k=st.integers(1, 4), batch=st.integers(1, 3), seq=st.integers(1, 40))
def test_a_token_pays_for_its_own_experts_only(experts, top_k, batch, seq):
    m = mixtral("any", 1, 4, 2, 64, 128, experts, top_k, vocab=100)
    attention, router, head = 2 * 64 * 64 + 2 * 64 * 32, 64 * experts, 100 * 64
    active = attention + router + top_k * 3 * 64 * 128 + head
    assert flops(m, batch=batch, seq=seq).forward == 2 * active * batch * seq + 4 * batch * seq**2 * 64 // 2


@pytest.mark.parametrize(("layers", "heads", "embed", "seq"), [(24, 24, 2304, 2048), (96, 96, 12288, 512)])
def test_flops_are_those_of_narayanan(layers, heads, embed, seq):
    """72 B s l h² (1 + s/6h + V/12lh), less the half of attention's s/6h that is masked. Source: arXiv:2104.04473."""
    found = flops(gpt("g", layers, heads, embed, vocab=51200, seq=seq), batch=2, seq=seq)
    published = 72 * layers * embed**2 + 72 * layers * embed * seq // 12 + 6 * 51200 * embed
    assert found.total == 2 * seq * published


degrees = st.sampled_from([1, 2, 4])


@given(tp=degrees, cp=degrees, ep=degrees, etp=degrees, batch=st.integers(1, 3))
def test_the_shares_of_all_devices_add_up(tp, cp, ep, etp, batch):
    m = mixtral("any", 1, 8, 4, 64, 32, 8, 2, vocab=128)
    split = Split(tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=True)
    for n in graph(m).nodes:
        whole, part = (costs(n, batch=batch, seq=64, split=s) for s in (Split(), split))
        for one, share in zip(whole.work, part.work, strict=True):
            assert one.flops == tp * cp * share.flops, n.name
            assert (one.dgrad, one.wgrad) == (tp * cp * share.dgrad, tp * cp * share.wgrad)
            assert share.flops == (2 * share.count * share.m * share.n * share.k)  # causal: half of two products
        kept = [s for s in part.saved if s.what != "keys and values of other devices"]
        for one, share in zip(whole.saved, kept, strict=True):
            copies = {"experts.pick": etp, "input": tp if share.dtype is DType.INDEX else 1}.get(share.what, 1)
            assert one.elements * copies == tp * cp * share.elements, (n.name, share.what)


@given(tp=degrees, cp=degrees, ep=degrees, etp=degrees, top_k=st.integers(1, 8))
def test_no_slot_is_lost(tp, cp, ep, etp, top_k):
    """Over all devices, the experts get top_k slots of every token, once for each device of etp."""
    n = node(MoE(SwiGLU(16), experts=8, top_k=top_k))
    split = Split(tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=True)
    work = {w.path: w for w in costs(n, batch=2, seq=64, split=split).work}
    for path in ("experts.gate", "experts.up", "experts.down"):
        assert work[path].count == 8 // ep
        assert tp * cp * work[path].count * work[path].m == 2 * 64 * top_k * etp


# Saved activations

B, S, A, H = 4, 128, 8, 64


def block(dropout=0.1, layers=1):
    """The nodes of the last block of a GPT with dropout."""
    found = graph(gpt("g", layers, A, H, vocab=100, seq=S, dropout=dropout)).nodes
    return [n for n in found if n.block == layers - 1]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activations_are_those_of_korthikanti(tp, layers):
    """s b h (10 + 24/t), and s b h 34/t with sequence parallel. Source: arXiv:2205.05198, equations 2 and 4.

    Their 5 a s² b is not stored: the kernel keeps the logarithm of a sum for each head and query.
    """
    sbh, lse = S * B * H, 4 * A * S * B
    kept = saved(block(layers=layers), batch=B, seq=S, split=Split(tp=tp))
    assert nbytes(kept) * tp == sbh * (10 * tp + 24) + lse
    kept = saved(block(layers=layers), batch=B, seq=S, split=Split(tp=tp, sequence_parallel=True))
    assert nbytes(kept) * tp == sbh * 34 + lse
    assert nbytes(s for s in kept if not s.core) * tp == sbh * 34  # with selective recompute, equation 6


def test_context_parallel_divides_all_but_keys_and_values():
    one, four = (saved(block(), batch=B, seq=S, split=Split(cp=cp)) for cp in (1, 4))
    assert nbytes(one) == 4 * nbytes(s for s in four if s.what != "keys and values of other devices")
    assert nbytes(four) - nbytes(one) // 4 == 3 * (2 * 2 * S * B * H) // 4
    assert nbytes(s for s in four if not s.core) == 34 * S * B * H // 4


@pytest.mark.parametrize("ref", sorted(examples()))
def test_a_node_owns_what_it_keeps(ref):
    """In these models no value is kept by two nodes, so that nodes add up."""
    found = graph(find(ref)[0]).nodes
    each = sum(s.elements for n in found for s in costs(n, batch=1, seq=128).saved)
    assert each == sum(s.elements for s in saved(found, batch=1, seq=128)) > 0


def test_what_two_nodes_keep_is_stored_once():
    x = hidden()
    h = x >> RMSNorm()
    parallel = nodes(x + (h >> Attention(heads=8)) + (h >> SwiGLU(32)))
    each = [s for n in parallel for s in costs(n, batch=B, seq=S).saved]
    once = saved(parallel, batch=B, seq=S)
    assert sum(s.elements for s in each) - sum(s.elements for s in once) == B * S * H
    assert Counter(s.what for s in each)["input"] == Counter(s.what for s in once)["input"] + 1


def test_a_pointwise_chain_is_one_piece_of_work():
    n = node(SwiGLU(32))
    cost = costs(n, batch=B, seq=S)
    (chained,) = (w for w in cost.work if w.kind == "pointwise")
    assert chained.elements == 3 * B * S * 32  # reads gate and up, writes h
    assert {s.what: s.elements for s in cost.saved} == {
        "input": B * S * 64,
        "gate": B * S * 32,
        "up": B * S * 32,
        "mul": B * S * 32,
    }
    (biased,) = (w for w in costs(node(MLP(32, bias=True)), batch=B, seq=S).work if w.path == "gelu")
    assert biased.elements == 2 * B * S * 32 + 32  # with the bias in it


def test_what_a_node_and_the_next_both_keep_is_stored_once():
    scores = dot(hidden(), weight("w", Dim("embed", 64), Dim("experts", 4)), "embed")
    gate = apply(Gate(2), scores)  # keeps its own output, which the square keeps as its input
    last = nodes(gate * gate)[-2:]
    assert [s.port for n in last for s in costs(n, batch=B, seq=S).saved] == [-1, 0]
    assert [s.elements for s in saved(last, batch=B, seq=S)] == [B * S * 4]


def test_a_product_keeps_as_many_tensors_as_it_reads():
    x = hidden()
    y = x >> RMSNorm()
    square, product = (nodes(v)[-1] for v in (x * x, x * y))
    assert [len(costs(n, batch=B, seq=S).saved) for n in (square, product)] == [1, 2]


def test_what_work_reads_and_writes():
    attend = next(w for w in costs(node(Attention(heads=8, kv_heads=2)), batch=B, seq=S).work if w.core)
    assert attend.elements == B * S * (64 + 2 * 16 + 64)
    split = costs(node(Attention(heads=8, kv_heads=2)), batch=B, seq=S, split=Split(cp=4, tp=2)).work
    assert next(w for w in split if w.core).elements == B * S * (64 // 4 + 2 * 16 + 64 // 4) // 2
    embed = graph(gpt("g", 1, A, H, vocab=1000, seq=S)).nodes[1]
    assert [w.elements for w in costs(embed, batch=B, seq=S).work] == [2 * B * S * H]  # its rows, not the table


def test_ids_are_whole_on_every_device_of_tp():
    (embed,) = (n for n in graph(gpt("g", 1, A, H, vocab=100, seq=S)).nodes if isinstance(n.op, Embed))
    kept = costs(embed, batch=B, seq=S, split=Split(tp=4, cp=2, sequence_parallel=True)).saved
    assert kept == (Saved(B * S // 2, DType.INDEX, "input", port=0),)


# Collectives

BLOCK = residual(LayerNorm(), Attention(heads=8, bias=True)) >> residual(LayerNorm(), MLP(32, bias=True))
GROUPED = residual(RMSNorm(), Attention(heads=8, kv_heads=2, rope=1e4)) >> residual(RMSNorm(), SwiGLU(32))
both_blocks = pytest.mark.parametrize("layer", [BLOCK, GROUPED])


@both_blocks
def test_tensor_parallel_takes_two_all_reduces_each_way(layer):
    found = exchanged(hidden() >> layer, Split(tp=2))
    assert found == {("tp", "all_reduce", False): 2, ("tp", "all_reduce", True): 2}


@both_blocks
def test_sequence_parallel_makes_each_a_gather_and_a_scatter(layer):
    found = exchanged(hidden() >> layer, Split(tp=2, sequence_parallel=True))
    assert found == {
        ("tp", "all_gather", False): 2,
        ("tp", "reduce_scatter", False): 2,
        ("tp", "reduce_scatter", True): 2,
        ("tp", "all_gather", True): 2 + 2,  # of the gradients, and of the inputs again for wgrad
    }


def test_nothing_is_exchanged_on_one_device():
    for ref in examples():
        assert not any(costs(n, batch=1, seq=64).collectives for n in graph(find(ref)[0]).nodes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_exchanged_is_the_hidden_state(sequence_parallel):
    split = Split(tp=2, cp=2, sequence_parallel=sequence_parallel)
    found = [c for n in nodes(hidden() >> BLOCK) for c in costs(n, batch=3, seq=16, split=split).collectives]
    assert {c.elements for c in found if c.axis == "tp"} == {3 * 8 * 64}


def test_the_ends_of_the_model():
    vocab, d = Dim("vocab", 100), Dim("embed", 64)
    wte = weight("wte", vocab, d)
    embed, unembed = nodes(ids() >> Embed(wte) >> Unembed(wte))
    split = Split(tp=4)
    n = 2 * 16 * 64
    assert costs(embed, batch=2, seq=16, split=split).collectives == (Collective("all_reduce", "tp", n, False, "wte"),)
    assert costs(unembed, batch=2, seq=16, split=split).collectives == (Collective("all_reduce", "tp", n, True, "wte"),)
    scattered = costs(embed, batch=2, seq=16, split=evolve(split, sequence_parallel=True)).collectives
    assert [c.kind for c in scattered] == ["reduce_scatter", "all_gather"]
    positions = node(Positions(weight("wpe", Dim("position", 16), d)))
    assert costs(positions, batch=2, seq=16, split=evolve(split, sequence_parallel=True)).collectives == ()


def test_context_parallel_gathers_keys_and_values():
    n = node(Attention(heads=8, kv_heads=4))
    found = costs(n, batch=3, seq=16, split=Split(cp=4, tp=2)).collectives
    both = 2 * 3 * 16 * (4 // 2) * 8
    assert [c for c in found if c.axis == "cp"] == [
        Collective("all_gather", "cp", both, False, "keys and values", core=True),
        Collective("reduce_scatter", "cp", both, True, "keys and values"),
    ]
    assert not exchanged(hidden() >> residual(RMSNorm(), SwiGLU(32)), Split(cp=4))


def test_experts_exchange_tokens():
    moe = MoE(SwiGLU(32), experts=8, top_k=2)
    tokens = 3 * 16 // 2 // 2
    found = costs(node(moe), batch=3, seq=16, split=Split(tp=2, cp=2, ep=4, sequence_parallel=True)).collectives
    assert Counter((c.axis, c.kind, c.backward) for c in found) == {
        ("ep", "all_to_all", False): 2,
        ("ep", "all_to_all", True): 2,
    }
    assert {c.elements for c in found} == {tokens * 2 * 64}
    split = Split(tp=2, cp=2, ep=2, etp=2, sequence_parallel=True)
    found = costs(node(moe), batch=3, seq=16, split=split).collectives
    assert Counter((c.kind, c.backward) for c in found if c.axis == "etp") == {
        ("all_gather", False): 1,
        ("reduce_scatter", False): 1,
        ("all_gather", True): 1,
        ("reduce_scatter", True): 1,
    }
    assert {c.elements for c in found if c.axis == "etp"} == {2 * tokens * 2 * 64}


# A user's own layers


@frozen
class Parallel(Layer):
    """The sum of two layers of the same input."""

    one: Layer
    two: Layer

    def body(self, x, /, **side):
        return self.one(x) + self.two(x)


@frozen
class Mixer(Layer):
    """Two products over a dim of its own, which it says may be divided."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x, /, **side):
        e, c = x["embed"], Dim("channels", self.channels)
        return dot(fn("relu", dot(x, weight("in", e, c), "embed")), weight("out", c, e), "channels")


def test_partial_sums_are_added_before_they_are_reduced():
    found = exchanged(hidden() >> Parallel(Attention(heads=8), MLP(32)), Split(tp=2))
    assert found == {("tp", "all_reduce", False): 1, ("tp", "all_reduce", True): 1}
    biased = exchanged(hidden() >> Parallel(Attention(heads=8, bias=True), MLP(32)), Split(tp=2))
    assert biased[("tp", "all_reduce", False)] == 2  # a bias is added once, so after the sum


@frozen
class ByHand(Layer):
    """Attention without its softmax, written with a renamed dim."""

    heads: int

    def body(self, x, /, **side):
        e, h, c = x["embed"], Dim("heads", self.heads), Dim("head_dim", x["embed"].known // self.heads)
        q = dot(x, weight("q", e, h, c), "embed")
        k = dot(apply(Rename("seq", "keys"), x), weight("k", e, h, c), "embed")
        o = dot(dot(q, k, "head_dim"), k, "keys")
        return dot(o, weight("o", h, c, e), "heads", "head_dim")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_renamed_sequence_is_gathered(sequence_parallel):
    split = Split(cp=2, tp=2, sequence_parallel=sequence_parallel)
    found = costs(node(ByHand(4)), batch=3, seq=16, split=split).collectives
    assert [(c.axis, c.elements) for c in found if c.what == "rename"] == [
        *([("tp", 3 * 8 * 64)] if sequence_parallel else []),
        ("cp", 3 * 16 * 64),
    ]
    backward = {(c.kind, c.axis, c.elements) for c in found if c.backward and c.what == "k"}
    assert backward == {("all_reduce", "tp", 3 * 16 * 64)}  # each device of tp has the gradient of its heads
    assert exchanged(hidden() >> ByHand(4), Split(cp=2))[("cp", "all_reduce", True)] == 1  # and of its queries


@frozen
class Inner(Layer):
    """A norm between two products, over what tp divides."""

    ff: int

    def body(self, x, /, **side):
        e, f = x["embed"], Dim("ff", self.ff)
        h = dot(x, weight("up", e, f), "embed")
        h = apply(Normalize("ff", False, 1e-5), h, weight("scale", f, mean=1.0, std=0.0))
        return dot(h, weight("down", f, e), "ff")


def test_a_norm_over_a_divided_dim_exchanges_statistics():
    found = costs(node(Inner(32)), batch=3, seq=16, split=Split(tp=2)).collectives
    assert [(c.kind, c.axis, c.elements, c.backward) for c in found if c.what == "statistics"] == [
        ("all_reduce", "tp", 3 * 16, False),
        ("all_reduce", "tp", 3 * 16, True),
    ]


@frozen
class Summary(Layer):
    """What each channel gathers over the sequence, given back to every token."""

    ff: int

    def body(self, x, /, **side):
        e, f = x["embed"], Dim("ff", self.ff)
        h = fn("relu", dot(x, weight("up", e, f), "embed"))
        return x + dot(h, dot(h, x, "seq"), "ff")


def test_a_sum_over_the_sequence_is_reduced_over_cp():
    found = costs(node(Summary(32)), batch=1, seq=16, split=Split(cp=2, tp=2)).collectives
    ahead = [(c.kind, c.axis, c.elements) for c in found if not c.backward]
    assert ahead == [("all_reduce", "cp", 16 * 64), ("all_reduce", "tp", 8 * 64)]
    assert ("all_reduce", "cp", True) in {(c.kind, c.axis, c.backward) for c in found}  # the sum met every token


@pytest.mark.parametrize("layer", [Mixer(32), Parallel(Mixer(32), MLP(32)), MoE(Mixer(32), experts=4, top_k=1)])
def test_a_layer_names_its_own_splits(layer):
    whole = costs(node(layer), batch=2, seq=16)
    part = costs(node(layer), batch=2, seq=16, split=Split(tp=4, etp=4, sequence_parallel=True))
    share = part.params if not whole.expert_params else part.expert_params
    assert 4 * share == (whole.expert_params or whole.params)
    assert sum(w.flops for w in whole.work) == 4 * sum(w.flops for w in part.work)
    axis = "etp" if whole.expert_params else "tp"
    assert Counter(c.kind for c in part.collectives if not c.backward) == {"all_gather": 1, "reduce_scatter": 1}
    assert {c.axis for c in part.collectives} == {axis}


@pytest.mark.parametrize("degree", [0, -1, 1.5, True])
def test_a_degree_is_a_number_of_devices(degree):
    with pytest.raises(UserError, match=r"tp of .*: a degree is a whole number"):
        Split(tp=degree)


def test_folding_the_largest_model_is_instant():
    m = find("llama3-405b")[0]
    graph(m)
    taken = []
    for tp in (1, 2, 4, 8):
        start = perf_counter()
        for n in graph(m).nodes:
            costs(n, batch=1, seq=8192, split=Split(tp=tp))
        taken.append(perf_counter() - start)
    assert min(taken) < 0.05
