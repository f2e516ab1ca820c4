"""Laws of layers and of the graph, on programs that hypothesis writes."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import networkx as nx
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    Graph,
    Layer,
    LayerNorm,
    Model,
    MoE,
    Positions,
    Repeat,
    RMSNorm,
    SwiGLU,
    Unembed,
    Value,
    chain,
    dot,
    fingerprint,
    fn,
    graph,
    ids,
    model,
    parallel,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.node import primitives
from megaloom.examples.deepseek import deepseek_v3
from tests.support.limits import LIMIT

VOCAB, EMBED = Dim("vocab", 11), Dim("embed", 8)

PLAIN = st.one_of(
    st.builds(RMSNorm, st.sampled_from([1e-5, 1e-6])),
    st.just(LayerNorm()),
    st.builds(Dropout, st.sampled_from([0.0, 0.1])),
    st.builds(MLP, st.integers(1, 4), st.sampled_from(["gelu", "relu"]), st.booleans()),
    st.builds(SwiGLU, st.integers(1, 4)),
    st.builds(
        Attention, heads=st.sampled_from([2, 4]), kv_heads=st.sampled_from([1, 2]), rope=st.sampled_from([None, 9.0])
    ),
    st.builds(MoE, st.builds(SwiGLU, st.integers(1, 4)), st.integers(2, 3), st.integers(1, 2)),
)
LAYERS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda them: chain(*them)),
        st.lists(inner, min_size=1, max_size=3).map(lambda them: residual(*them)),
        st.lists(inner, min_size=1, max_size=3).map(lambda them: parallel(*them)),
        st.tuples(st.integers(1, 3), inner).map(lambda it: repeat(*it)),
    ),
    max_leaves=6,
)


def embedded() -> Value:
    return ids() >> Embed(weight("wte", VOCAB, EMBED))


def lm(*layers: Layer) -> Model:
    x = embedded()
    for layer in layers:
        x = x >> layer
    return model("m", x >> Unembed(weight("head", VOCAB, EMBED)))


@st.composite
def programs(draw: st.DrawFn) -> Model:
    """Programs that are no chain: each step reads any values made before it."""
    values = [embedded()]
    for _ in range(draw(st.integers(0, 7))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        step = draw(st.one_of(LAYERS, st.sampled_from(["add", "mul"])))
        values.append(fn(step, x, y) if isinstance(step, str) else x >> step)
    out = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique_by=id))
    return model("m", *out)


# Layers


@given(LAYERS, LAYERS, LAYERS)
def test_composition_is_associative(a: Layer, b: Layer, c: Layer) -> None:
    assert (a >> b) >> c == a >> (b >> c) == chain(a, b, c)
    assert hash((a >> b) >> c) == hash(a >> (b >> c))


@given(LAYERS, LAYERS)
def test_applying_a_composition_is_applying_one_after_the_other(a: Layer, b: Layer) -> None:
    assert named(lm(a >> b)) == named(lm(a, b))
    assert fingerprint(lm(a >> b)) == fingerprint(lm(a, b))


@given(LAYERS)
def test_layers_are_values(layer: Layer) -> None:
    """Two layers with equal fields are equal, whatever line declared them."""
    moved = evolve(layer, at="elsewhere.py:7")
    assert moved == layer
    assert hash(moved) == hash(layer)
    assert repr(moved) == repr(layer)
    assert layer >> RMSNorm(1e-3) != layer


@given(LAYERS, st.integers(1, 4))
def test_a_repeat_is_a_chain(layer: Layer, times: int) -> None:
    assert fingerprint(lm(repeat(times, layer))) == fingerprint(lm(chain(*[layer] * times)))


# Names


def named(m: Model) -> list[tuple[str, tuple[str, ...], list[str]]]:
    return [(n.name, n.inputs, [s.name for s in n.weights]) for n in graph(m).nodes]


@given(LAYERS, LAYERS, LAYERS)
def test_names_do_not_know_how_the_program_was_grouped(a: Layer, b: Layer, c: Layer) -> None:
    models = [lm(a, b, c), lm(a >> b, c), lm(a, b >> c), lm((a >> b) >> c), lm(a >> (b >> c)), lm(repeat(1, a), b >> c)]
    assert len({repr(named(m)) for m in models}) == 1
    assert len({fingerprint(m) for m in models}) == 1


@given(programs())
def test_names_count_each_kind_in_program_order(m: Model) -> None:
    count: Counter[str] = Counter()
    results = [n.name.partition(".") for n in graph(m).nodes if not n.is_input]
    for kind, _, number in results if len(m.outputs) == 1 else sorted(results, key=lambda it: int(it[2])):
        assert int(number) == count[kind]
        count[kind] += 1


def test_names_of_a_gpt() -> None:
    """Names of nodes and weights are part of checkpoints, so they must not change."""
    block = residual(LayerNorm(), Attention(heads=2, bias=True)) >> residual(LayerNorm(), MLP(4, bias=True))
    sparse = residual(RMSNorm(), MoE(SwiGLU(4), experts=2, top_k=1))
    wte, wpe = weight("wte", VOCAB, EMBED), weight("wpe", Dim("position", 4), EMBED)
    m = model("m", ids() >> Embed(wte) >> Positions(wpe) >> block >> sparse >> LayerNorm() >> Unembed(wte))
    norm = ["scale", "shift"]
    projections = ["q", "q_bias", "k", "k_bias", "v", "v_bias", "o", "o_bias"]
    assert named(m) == [
        ("tokens", (), []),
        ("embed.0", ("tokens",), ["wte"]),
        ("positions.0", ("embed.0",), ["wpe"]),
        ("layer_norm.0", ("positions.0",), [f"layer_norm.0.{w}" for w in norm]),
        ("attention.0", ("layer_norm.0",), [f"attention.0.{w}" for w in projections]),
        ("add.0", ("positions.0", "attention.0"), []),
        ("layer_norm.1", ("add.0",), [f"layer_norm.1.{w}" for w in norm]),
        ("mlp.0", ("layer_norm.1",), [f"mlp.0.{w}" for w in ("up", "up_bias", "down", "down_bias")]),
        ("add.1", ("add.0", "mlp.0"), []),
        ("rms_norm.0", ("add.1",), ["rms_norm.0.scale"]),
        ("moe.0", ("rms_norm.0",), ["moe.0.router", *(f"moe.0.experts.{w}" for w in ("gate", "up", "down"))]),
        ("add.2", ("add.1", "moe.0"), []),
        ("layer_norm.2", ("add.2",), [f"layer_norm.2.{w}" for w in norm]),
        ("unembed.0", ("layer_norm.2",), ["wte"]),
    ]
    assert list(graph(m).weights) == list(dict.fromkeys(w for *_, ws in named(m) for w in ws))
    assert [str(d) for d in graph(m).weights["moe.0.experts.down"].dims] == ["experts=2", "ff=4", "embed=8"]


# The graph


@given(programs())
def test_a_node_comes_after_those_it_reads(m: Model) -> None:
    g = graph(m)
    seen: set[str] = set()
    for n in g.nodes:
        assert set(n.inputs) <= seen
        seen.add(n.name)
    assert set(g.outputs) <= seen
    net = g.networkx()
    assert nx.is_directed_acyclic_graph(net)
    assert set(net) == set.union(*(nx.ancestors(net, o) | {o} for o in g.outputs))  # and nothing that is not needed


@given(programs())
def test_cuts_are_where_one_hidden_value_crosses_or_one_for_each_output(m: Model) -> None:
    """By brute force: the readers of each node, and the outputs as readers after the end."""
    g = graph(m)
    net, want = g.networkx(), []
    for i in range(1, len(g.nodes)):
        read_later = {name for n in g.nodes[i:] for name in n.inputs} | set(g.outputs)
        crossing = [n for n in g.nodes[:i] if n.name in read_later and not n.is_input]
        if any([d.name for d in n.shape] != ["batch", "seq", "embed"] for n in crossing):
            continue
        behind = g.nodes[i - 1].block is not None and all(n.block is None for n in g.nodes[i:])
        rest = net.subgraph([n.name for n in (*crossing, *g.nodes[i:])])
        rest = nx.restricted_view(rest, [], [(a, b) for a, b in rest.edges if g.index[b] < i])
        leads = [[o for o in g.outputs if o == n.name or nx.has_path(rest, n.name, o)] for n in crossing]
        if len(crossing) == 1 or (behind and sorted(leads) == sorted([o] for o in g.outputs)):
            want.append(i)
    assert list(g.cut_points) == want


@given(programs())
def test_what_the_last_output_needs_comes_first(m: Model) -> None:
    g = graph(m)
    net = g.networkx()
    last = nx.ancestors(net, g.outputs[-1]) | {g.outputs[-1]}
    assert {n.name for n in g.nodes[: len(last)]} == last


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_heads_are_cut_from_the_blocks_that_predict_further_ahead(ahead: int) -> None:
    """Around the blocks of all tokens ahead together, as megatron-core has them in one stage; nowhere between heads."""
    g = graph(deepseek_v3(ahead))
    first = next(i for i, n in enumerate(g.nodes) if n.name == "join.0")
    heads = next(i for i, n in enumerate(g.nodes) if i > first and n.block is None)
    assert [i for i in g.cut_points if i >= first] == [first, heads]
    assert len(g.live_values[first]) == 1
    assert len(g.live_values[heads]) == len(g.predictions) == 1 + ahead
    rest = {n.name.partition(".")[0] for n in g.nodes[heads:] if n.name not in g.only_for_losses}
    assert rest == {"rms_norm", "unembed"}


@given(st.integers(1, 5))
def test_a_decoder_can_be_cut_around_every_residual(layers: int) -> None:
    g = graph(lm(repeat(layers, residual(RMSNorm(), MLP(2)), residual(RMSNorm(), MLP(2))), RMSNorm()))
    around = [i + 1 for i, n in enumerate(g.nodes) if n.name.split(".")[0] in ("embed", "add", "rms_norm")]
    inside = [i + 1 for i, n in enumerate(g.nodes) if n.block is not None and n.name.startswith("rms_norm")]
    assert list(g.cut_points) == [i for i in around if i not in inside]


@given(st.lists(st.one_of(PLAIN, st.tuples(st.integers(1, 3), LAYERS).map(lambda it: repeat(*it))), max_size=4))
def test_blocks_are_the_iterations_of_the_outermost_repeats(layers: list[Layer]) -> None:
    """Each block is a run of nodes; blocks are counted through the model; the rest is in none."""
    g = graph(lm(*layers))
    want: list[int | None] = [None, None]  # the tokens, the embedding
    for layer in layers:
        one = len(graph(lm(layer.inner)).nodes) - 3 if isinstance(layer, Repeat) else 1
        for _ in range(layer.times if isinstance(layer, Repeat) else 1):
            number = max((b for b in want if b is not None), default=-1) + 1
            want += [number if isinstance(layer, Repeat) else None] * one
    assert [n.block for n in g.nodes] == [*want, None]


@given(programs())
def test_the_graph_keeps_every_primitive(m: Model) -> None:
    """Looking through combinators loses none and doubles none."""
    seen: dict[int, Value] = {}
    todo = list(m.outputs)
    while todo:
        v = todo.pop()
        if id(v) not in seen:
            seen[id(v)] = v
            todo += [*v.args, *([v.body] if v.body is not None else [])]
    once = [id(p) for n in graph(m).nodes for p, *_ in primitives(n.value)]
    assert {i for i, v in seen.items() if v.body is None} == set(once)
    assert len(once) == len(set(once))


# Fingerprints

SMALL = MLP(4)


def gpt(
    middle: Layer = SMALL, *, tied: bool = True, std: float = 0.02, dims: tuple[Dim, Dim] = (VOCAB, EMBED)
) -> Model:
    table = weight("wte", *dims, std=std)
    head = table if tied else weight("head", VOCAB, EMBED)
    return model("m", ids() >> Embed(table) >> residual(RMSNorm(), middle) >> RMSNorm() >> Unembed(head))


def two(first: Callable[[Value], Value], second: Callable[[Value], Value]) -> Model:
    x = embedded()
    y = x >> RMSNorm()
    return model("m", first(y), second(y))


def bilinear(swapped: bool) -> Model:
    """Two models of which only the body knows which input is which."""

    @frozen
    class Bilinear(Layer):
        def body(self, x: Value, /, **side: Value) -> Value:
            left, right = (side["y"], x) if swapped else (x, side["y"])
            return dot(left, weight("w", EMBED, Dim("ff", 8)), "embed") * right

    x = ids() >> Embed(weight("wte", VOCAB, EMBED, Dim("ff", 8)))
    return model("m", Bilinear()(x, y=x >> Dropout(0.0)))


DIFFERENT = {
    "a size": gpt(MLP(5)),
    "a function": gpt(MLP(4, "relu")),
    "a bias": gpt(MLP(4, bias=True)),
    "an epsilon": gpt(MLP(4) >> RMSNorm(1e-6)),
    "a norm": gpt(MLP(4) >> RMSNorm()),
    "an order": gpt(RMSNorm() >> MLP(4)),
    "a layer": gpt(SwiGLU(4)),
    "attention": gpt(Attention(heads=2)),
    "no mask": gpt(Attention(heads=2, causal=False)),
    "heads": gpt(Attention(heads=4)),
    "key heads": gpt(Attention(heads=4, kv_heads=2)),
    "rotation": gpt(Attention(heads=2, rope=1e4)),
    "its base": gpt(Attention(heads=2, rope=1e5)),
    "dropout": gpt(Attention(heads=2, dropout=0.1)),
    "experts": gpt(MoE(MLP(4), experts=2, top_k=1)),
    "more experts": gpt(MoE(MLP(4), experts=3, top_k=1)),
    "more of them": gpt(MoE(MLP(4), experts=3, top_k=2)),
    "a balance": gpt(MoE(MLP(4), experts=3, top_k=2, balance=0.1)),
    "a tie": gpt(tied=False),
    "initial values": gpt(std=0.01),
    "the order of a weight's dims": gpt(dims=(EMBED, VOCAB)),
    "outputs": two(lambda y: y, lambda y: y >> MLP(4)),
    "their order": two(lambda y: y >> MLP(4), lambda y: y),
}


def test_different_models_have_different_fingerprints() -> None:
    prints = {what: fingerprint(m) for what, m in {"nothing": gpt(), **DIFFERENT}.items()}
    assert [pair for pair in combinations(prints, 2) if prints[pair[0]] == prints[pair[1]]] == []


def test_a_fingerprint_knows_which_input_is_which() -> None:
    assert fingerprint(bilinear(False)) != fingerprint(bilinear(True))


@given(programs())
def test_a_name_is_not_what_a_model_is(m: Model) -> None:
    assert fingerprint(model("other", *m.outputs)) == fingerprint(m)


@pytest.mark.parametrize("hashseed", ["1", "2"])
def test_other_processes_see_the_same_fingerprint(hashseed: str) -> None:
    refs = ["gpt2", "llama3-8b", "mixtral-8x7b"]
    code = f"""
from megaloom.dsl.catalog import find
from megaloom.dsl import fingerprint
print(*(fingerprint(find(ref)[0]) for ref in {refs}))"""
    env = {"PYTHONHASHSEED": hashseed, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == [fingerprint(find(ref)[0]) for ref in refs], done.stderr


def test_a_graph_is_made_once() -> None:
    m = gpt()
    assert graph(m) is graph(m)
    assert isinstance(graph(m), Graph)


def test_the_example_of_networkx_runs() -> None:
    """The docstring of `Graph.networkx` shows how to analyse a model with the ecosystem's tools."""
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    tests = finder.find(Graph.networkx, "Graph.networkx", globs={})
    assert tests and tests[0].examples
    assert runner.run(tests[0]).failed == 0
