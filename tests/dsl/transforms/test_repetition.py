"""Iterations of a repeat that share their weights."""

from __future__ import annotations

import pytest
import torch

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Layer,
    Linear,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    ShapeError,
    SwiGLU,
    Unembed,
    Weight,
    graph,
    ids,
    model,
    params,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.files.json_form import fingerprint, graph_to_json
from megaloom.runtime.reference.interpret import interpret

VOCAB, EMBED = Dim("vocab", 31), Dim("embed", 16)
BLOCK = residual(RMSNorm(), Attention(heads=2)) >> residual(RMSNorm(), MLP(24, bias=True))


def lm(*layers: Layer) -> Model:
    wte, x = weight("wte", VOCAB, EMBED), ids()
    x = x >> Embed(wte)
    for layer in layers:
        x = x >> layer
    return model("lm", x >> Unembed(wte) >> NextToken())


def test_shared_iterations_have_the_weights_of_one() -> None:
    once, thrice = lm(repeat(1, BLOCK)), lm(repeat(3, BLOCK, shared="block"))
    assert params(thrice) == params(once)
    assert params(lm(repeat(3, BLOCK))) == params(once) + 2 * (params(once) - 31 * 16)
    g = graph(thrice)
    assert [n.name for n in g.nodes] == [n.name for n in graph(lm(repeat(3, BLOCK))).nodes]
    assert [n.block for n in g.nodes] == [n.block for n in graph(lm(repeat(3, BLOCK))).nodes]
    assert list(g.weights)[:5] == [
        "wte",
        "block.rms_norm.0.scale",
        "block.attention.0.q",
        "block.attention.0.k",
        "block.attention.0.v",
    ]
    assert "block.rms_norm.1.scale" in g.weights


def test_shared_iterations_compute_what_equal_weights_compute() -> None:
    shared, apart = lm(repeat(3, BLOCK, shared="block")), lm(repeat(3, BLOCK))
    source = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn([d.known for d in s.dims], generator=source) for name, s in graph(shared).weights.items()
    }
    pairs = zip(graph(apart).nodes, graph(shared).nodes, strict=True)
    copies = {a.name: weights[b.name] for one, other in pairs for a, b in zip(one.weights, other.weights, strict=True)}
    tokens = torch.randint(31, (2, 8), generator=source)
    batch = {"tokens": tokens, "labels": tokens}
    (ours,), (theirs,) = interpret(shared, weights, batch), interpret(apart, copies, batch)
    assert torch.equal(ours, theirs)


def test_weights_given_to_a_shared_repeat_keep_their_names() -> None:
    table = weight("table", VOCAB, EMBED)
    m = model("m", ids() >> Embed(table) >> repeat(2, Linear(EMBED), shared="block") >> Unembed(table))
    assert list(graph(m).weights) == ["table", "block.linear.0.weight"]


def test_two_shared_repeats_have_weights_of_their_own() -> None:
    m = lm(repeat(2, BLOCK, shared="first"), repeat(2, BLOCK, shared="second"))
    assert params(m) - 31 * 16 == 2 * (params(lm(repeat(1, BLOCK))) - 31 * 16)
    with pytest.raises(ShapeError, match=r"two weights are named 'same\.rms_norm\.0\.scale'"):
        graph(lm(repeat(2, BLOCK, shared="same"), repeat(2, BLOCK, shared="same")))


def test_sharing_is_part_of_the_fingerprint() -> None:
    shared = lm(repeat(2, BLOCK, shared="block"))
    assert fingerprint(shared) == fingerprint(lm(repeat(2, BLOCK, shared="block")))
    assert fingerprint(shared) != fingerprint(lm(repeat(2, BLOCK)))
    assert all(isinstance(s.value.op, Weight) for s in graph(shared).weights.values())
    assert "block.mlp.0.up" in graph_to_json(graph(shared))["weights"]


def test_experts_cannot_be_shared_by_iterations() -> None:
    with pytest.raises(ShapeError, match="it has weights for each of experts=4"):
        lm(repeat(2, residual(MoE(SwiGLU(8), 4, 2)), shared="block"))
