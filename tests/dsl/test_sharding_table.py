"""Collectives of layers under a split, and the entries of own layers in the sharding table."""

from collections import Counter
from typing import ClassVar

import pytest
from attrs import evolve, frozen

from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Attention,
    Collective,
    Dim,
    Embed,
    Input,
    Layer,
    LayerNorm,
    MoE,
    Normalize,
    Positions,
    Rename,
    RMSNorm,
    Shape,
    Split,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    apply,
    costs,
    dot,
    fn,
    graph,
    ids,
    model,
    residual,
    weight,
)
from megaloom.dsl.catalog import examples
from tests.support.models.examples import example


def hidden():
    """A residual stream from nowhere."""
    return Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", 64))))


def nodes(value):
    return [n for n in graph(model("test", value)).nodes if not n.is_input]


def node(layer):
    (n,) = nodes(hidden() >> layer)
    return n


def exchanged(value, split):
    """(axis, kind, backward) of every collective, counted."""
    collectives = (c for n in nodes(value) for c in costs(n, batch=1, seq=16, split=split).collectives)
    return Counter((c.axis, c.kind, c.backward) for c in collectives)


# Collectives

BLOCK = residual(LayerNorm(), Attention(heads=8, bias=True)) >> residual(LayerNorm(), MLP(32, bias=True))
GROUPED = residual(RMSNorm(), Attention(heads=8, kv_heads=2, rope=1e4)) >> residual(RMSNorm(), SwiGLU(32))
both_blocks = pytest.mark.parametrize("layer", [BLOCK, GROUPED])


@both_blocks
def test_tensor_parallel_takes_two_all_reduces_each_way(layer):
    collectives = exchanged(hidden() >> layer, Split(tp=2))
    assert collectives == {("tp", "all_reduce", False): 2, ("tp", "all_reduce", True): 2}


@both_blocks
def test_sequence_parallel_makes_each_a_gather_and_a_scatter(layer):
    collectives = exchanged(hidden() >> layer, Split(tp=2, sequence_parallel=True))
    assert collectives == {
        ("tp", "all_gather", False): 2,
        ("tp", "reduce_scatter", False): 2,
        ("tp", "reduce_scatter", True): 2,
        ("tp", "all_gather", True): 2 + 2,  # of the gradients, and of the inputs again for wgrad
    }


def test_nothing_is_exchanged_on_one_device():
    for name in examples():
        assert not any(costs(n, batch=1, seq=64).collectives for n in graph(example(name)).nodes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_exchanged_is_the_hidden_state(sequence_parallel):
    split = Split(tp=2, cp=2, sequence_parallel=sequence_parallel)
    collectives = [c for n in nodes(hidden() >> BLOCK) for c in costs(n, batch=3, seq=16, split=split).collectives]
    assert {c.elements for c in collectives if c.axis == "tp"} == {3 * 8 * 64}


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
    collectives = costs(n, batch=3, seq=16, split=Split(cp=4, tp=2)).collectives
    both = 2 * 3 * 16 * (4 // 2) * 8
    assert [c for c in collectives if c.axis == "cp"] == [
        Collective("all_gather", "cp", both, False, "keys and values", frozenset({"core_attn"})),
        Collective("reduce_scatter", "cp", both, True, "keys and values"),
    ]
    assert not exchanged(hidden() >> residual(RMSNorm(), SwiGLU(32)), Split(cp=4))


def test_experts_exchange_tokens():
    moe = MoE(SwiGLU(32), experts=8, top_k=2)
    tokens = 3 * 16 // 2 // 2
    collectives = costs(node(moe), batch=3, seq=16, split=Split(tp=2, cp=2, ep=4, sequence_parallel=True)).collectives
    assert Counter((c.axis, c.kind, c.backward) for c in collectives) == {
        ("ep", "all_to_all", False): 2,
        ("ep", "all_to_all", True): 2,
    }
    assert {c.elements for c in collectives} == {tokens * 2 * 64}
    split = Split(tp=2, cp=2, ep=2, etp=2, sequence_parallel=True)
    collectives = costs(node(moe), batch=3, seq=16, split=split).collectives
    assert Counter((c.kind, c.backward) for c in collectives if c.axis == "etp") == {
        ("all_gather", False): 1,
        ("reduce_scatter", False): 1,
        ("all_gather", True): 1,
        ("reduce_scatter", True): 1,
    }
    assert {c.elements for c in collectives if c.axis == "etp"} == {2 * tokens * 2 * 64}


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
    """Two products over a dim of the layer, which its `splits` shards over tp."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x, /, **side):
        e, c = x["embed"], Dim("channels", self.channels)
        return dot(fn("relu", dot(x, weight("in", e, c), "embed")), weight("out", c, e), "channels")


def test_partial_sums_are_added_before_they_are_reduced():
    collectives = exchanged(hidden() >> Parallel(Attention(heads=8), MLP(32)), Split(tp=2))
    assert collectives == {("tp", "all_reduce", False): 1, ("tp", "all_reduce", True): 1}
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
    collectives = costs(node(ByHand(4)), batch=3, seq=16, split=split).collectives
    assert [(c.axis, c.elements) for c in collectives if c.what == "rename"] == [
        *([("tp", 3 * 8 * 64)] if sequence_parallel else []),
        ("cp", 3 * 16 * 64),
    ]
    backward = {(c.kind, c.axis, c.elements) for c in collectives if c.backward and c.what == "k"}
    assert backward == {("all_reduce", "tp", 3 * 16 * 64)}  # each device of tp has the gradient of its heads
    assert exchanged(hidden() >> ByHand(4), Split(cp=2))[("cp", "all_reduce", True)] == 1  # and of its queries


@frozen
class Inner(Layer):
    """A norm between two products, over what tp divides."""

    ff: int

    def body(self, x, /, **side):
        e, f = x["embed"], Dim("ff", self.ff)
        h = dot(x, weight("up", e, f), "embed")
        h = apply(Normalize(("ff",), False, 1e-5), h, weight("scale", f, mean=1.0, std=0.0))
        return dot(h, weight("down", f, e), "ff")


def test_a_norm_over_a_divided_dim_exchanges_statistics():
    collectives = costs(node(Inner(32)), batch=3, seq=16, split=Split(tp=2)).collectives
    assert [(c.kind, c.axis, c.elements, c.backward) for c in collectives if c.what == "statistics"] == [
        ("all_reduce", "tp", 3 * 16, False),
        ("all_reduce", "tp", 3 * 16, True),
    ]


@frozen
class Summary(Layer):
    """A layer that sums each channel over the sequence and gives the sum back to every token."""

    ff: int

    def body(self, x, /, **side):
        e, f = x["embed"], Dim("ff", self.ff)
        h = fn("relu", dot(x, weight("up", e, f), "embed"))
        return x + dot(h, dot(h, x, "seq"), "ff")


def test_a_sum_over_the_sequence_is_reduced_over_cp():
    collectives = costs(node(Summary(32)), batch=1, seq=16, split=Split(cp=2, tp=2)).collectives
    ahead = [(c.kind, c.axis, c.elements) for c in collectives if not c.backward]
    assert ahead == [("all_reduce", "cp", 16 * 64), ("all_reduce", "tp", 8 * 64)]
    assert ("all_reduce", "cp", True) in {(c.kind, c.axis, c.backward) for c in collectives}  # the sum met every token


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
    with pytest.raises(UserError, match=r"tp must be a whole number of devices, at least 1, got "):
        Split(tp=degree)
