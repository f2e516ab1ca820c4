"""Parameters, FLOPs and saved activations, against published numbers and the laws that they must meet."""

from collections import Counter

import pytest

from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Attention,
    Dim,
    DType,
    Gate,
    Input,
    MoE,
    RMSNorm,
    Shape,
    Split,
    SwiGLU,
    Value,
    apply,
    costs,
    dot,
    graph,
    model,
    saved,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.examples.gpt2 import gpt

BYTES = {DType.COMPUTE: 2, DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}  # with bf16


def hidden():
    """A residual stream from nowhere."""
    return Value(Input("x"), (), Shape((BATCH, SEQ, Dim("embed", 64))))


def nodes(value):
    return [n for n in graph(model("test", value)).nodes if not n.is_input]


def node(layer):
    (n,) = nodes(hidden() >> layer)
    return n


def nbytes(saved_tensors):
    return sum(s.elements * BYTES[s.dtype] for s in saved_tensors)


# Parameters


def test_the_parameters_of_a_device_are_its_share():
    n = node(MoE(SwiGLU(32), experts=8, top_k=2))
    whole = costs(n, batch=1, seq=16)
    part = costs(n, batch=1, seq=16, split=Split(tp=4, ep=4, etp=2, sequence_parallel=True))
    assert whole.params == part.params == 64 * 8  # the router, which every device has
    assert whole.expert_params == 8 * 3 * 64 * 32 == 8 * part.expert_params
    few = node(Attention(heads=8, kv_heads=2))
    assert costs(few, batch=1, seq=16, split=Split(tp=4)).params == 64 * (2 * 8 + 2 * 2 * 8 // 4 + 2 * 8)
    every = {c for c in costs(few, batch=1, seq=16, split=Split(tp=4)).collectives if c.kind != "all_reduce"}
    assert {(c.kind, c.axis, c.elements, c.backward) for c in every} == {
        ("all_gather", "tp", 16 * (8 + 2 * 2) * 8, False),  # megatron-core puts the columns of all together again
        ("reduce_scatter", "tp", 16 * (8 + 2 * 2) * 8, True),
    }
    assert all(c.kind == "all_reduce" for c in costs(few, batch=1, seq=16, split=Split(tp=2)).collectives)
    odd = graph(gpt("odd", 1, 4, 64, vocab=101)).nodes[1]
    assert costs(odd, batch=1, seq=16, split=Split(tp=4)).params == 26 * 64


# Saved activations

B, S, A, H = 4, 128, 8, 64


@pytest.mark.parametrize("ref", ["gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "mamba2-370m"])
def test_a_node_owns_what_it_keeps(ref):
    """Each value of a chain of blocks is saved by one node, so that the sum over nodes is exact."""
    result = graph(find(ref)[0]).nodes
    each = sum(s.elements for n in result for s in costs(n, batch=1, seq=128).saved)
    assert each == sum(s.elements for s in saved(result, batch=1, seq=128)) > 0


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
    attend = next(
        w for w in costs(node(Attention(heads=8, kv_heads=2)), batch=B, seq=S).work if "core_attn" in w.recomputed_by
    )
    assert attend.elements == B * S * (64 + 2 * 16 + 64)
    split = costs(node(Attention(heads=8, kv_heads=2)), batch=B, seq=S, split=Split(cp=4, tp=2)).work
    assert (
        next(w for w in split if "core_attn" in w.recomputed_by).elements == B * S * (64 // 4 + 2 * 16 + 64 // 4) // 2
    )
    embed = graph(gpt("g", 1, A, H, vocab=1000, seq=S)).nodes[1]
    assert [w.elements for w in costs(embed, batch=B, seq=S).work] == [2 * B * S * H]  # its rows, not the table
