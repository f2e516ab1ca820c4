"""The JSON form of a graph, and the fingerprint, which is its hash."""

from __future__ import annotations

import json
import subprocess
import sys
from cProfile import Profile
from fractions import Fraction
from pstats import Stats
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Elementwise,
    Embed,
    Layer,
    Model,
    MoE,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    apply,
    dot,
    fingerprint,
    fn,
    graph,
    graph_to_json,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import examples
from megaloom.dsl.files.json_form import FORM_VERSION, is_current
from megaloom.examples.deepseek import deepseek_v3
from tests.dsl.test_graph import programs
from tests.support.limits import LIMIT
from tests.support.models.examples import example
from tests.support.paths import TESTS

GOLDEN = TESTS / "golden" / "graph_tiny.json"
VOCAB, EMBED = Dim("vocab", 11), Dim("embed", 8)


@frozen
class SquaredMLP(Layer):
    ff: int

    def body(self, x: Value, /, **side: Value) -> Value:
        h = dot(x, weight("up", x["embed"], Dim("ff", self.ff)), "embed")
        return dot(fn("mul", h, h), weight("down", Dim("ff", self.ff), x["embed"]), "ff")


def tiny(middle: Layer | None = None) -> Model:
    own = middle or SquaredMLP(5)
    table = weight("wte", VOCAB, EMBED)
    block = residual(RMSNorm(), Attention(heads=2, kv_heads=1, rope=1e4)) >> residual(RMSNorm(1e-6), own)
    experts = residual(MoE(SwiGLU(4), experts=2, top_k=1))
    return model("tiny", ids() >> Embed(table) >> repeat(2, block) >> experts >> RMSNorm() >> Unembed(table))


def test_the_form_of_a_tiny_graph(request: pytest.FixtureRequest) -> None:
    """A change here needs a new FORM_VERSION: plans and checkpoints of the former version no longer match."""
    text = json.dumps({"fingerprint": fingerprint(tiny()), **graph_to_json(graph(tiny()))}, indent=1) + "\n"
    if request.config.getoption("--update"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("name", examples())
def test_every_example_has_a_form_that_json_keeps(name: str) -> None:
    form = graph_to_json(graph(example(name)))
    assert json.loads(json.dumps(form, allow_nan=False)) == form
    assert form["version"] == FORM_VERSION
    assert all("body" not in node for node in form["nodes"] if node["kind"] in ("Attention", "MLA", "MoE", "MLP"))


@given(programs())
def test_the_form_names_every_node_weight_and_input(m: Model) -> None:
    g = graph(m)
    form = graph_to_json(g)
    assert [n["name"] for n in form["nodes"]] == [n.name for n in g.nodes]
    assert {*form["weights"]} == {*g.weights} == {w for n in form["nodes"] for w in n.get("weights", ())}
    for written, node in zip(form["nodes"], g.nodes, strict=True):
        assert [i["node"] for i in written.get("inputs", ()) if "node" in i] == list(node.inputs)


def test_a_model_that_is_built_twice_has_one_fingerprint() -> None:
    assert fingerprint(tiny()) == fingerprint(tiny())
    assert is_current(fingerprint(tiny()))
    assert not is_current("a743fbab00f785e3")  # of the first form, which was no JSON


PROGRAM = """
{comment}
from attrs import frozen
from megaloom.dsl import *
@frozen
class Own(Layer):
    {comment}
    def body(self, x, /, **side):
        return {mathematics}
VOCAB, EMBED = Dim("vocab", 11), Dim("embed", 8)
m = model("m", ids() >> Embed(weight("wte", VOCAB, EMBED)) >> Own())
"""


def identity(mathematics: str = "x * x + 1.0", comment: str = "") -> str:
    scope: dict[str, Any] = {"__name__": "own"}
    exec(compile(PROGRAM.format(mathematics=mathematics, comment=comment), f"{len(comment)}.py", "exec"), scope)
    return fingerprint(scope["m"])


def test_comments_and_files_do_not_change_a_fingerprint() -> None:
    assert identity(comment="# another line, and another file") == identity() == identity("1.0 + x * x")


@pytest.mark.parametrize(
    "mathematics",
    ["x * x + 2.0", "x + x * 1.0", "x * x", "x * x * x + 1.0", "fn('gelu', x * x) + 1.0", "x + weight('w', EMBED)"],
)
def test_the_mathematics_of_an_own_layer_changes_the_fingerprint(mathematics: str) -> None:
    assert identity(mathematics) != identity()


def test_an_own_layer_inside_a_built_in_one_is_written_by_its_ops() -> None:
    @frozen
    class Expert(Layer):
        act: str

        def body(self, x: Value, /, **side: Value) -> Value:
            return fn(self.act, x)

    relu, gelu = (tiny(MoE(Expert(act), experts=2, top_k=1)) for act in ("relu", "gelu"))
    assert fingerprint(relu) != fingerprint(gelu)
    body = next(n["body"] for n in graph_to_json(graph(relu))["nodes"] if n["name"] == "moe.0")
    assert {"kind": "Pointwise", "fields": {"fn": "relu"}}.items() <= body[-2].items()


def test_equal_numbers_are_written_alike() -> None:
    bases = [tiny(Attention(heads=2, rope=base)) for base in (1_000_000, 1e6)]
    assert fingerprint(bases[0]) == fingerprint(bases[1])
    assert fingerprint(tiny(MoE(MLP(4), 2, 1, balance=0))) == fingerprint(tiny(MoE(MLP(4), 2, 1, balance=0.0)))


def test_a_field_without_a_form_is_refused() -> None:
    @frozen
    class Odd(Elementwise):
        what: object

        def saved_values(self, out: Value) -> tuple[Value, ...]:
            return ()

    def built(what: object) -> Model:
        return model("m", apply(Odd(what), ids() >> Embed(weight("wte", VOCAB, EMBED))))

    assert fingerprint(built(Fraction(1, 2))) != fingerprint(built(Fraction(1, 3)))
    assert fingerprint(built(len(str(1)))) == fingerprint(built(1.0))
    with pytest.raises(UserError, match="has no JSON form"):
        fingerprint(built(object()))


def test_the_form_of_a_large_model_takes_few_calls() -> None:
    m = deepseek_v3()
    g = graph(m)
    with Profile() as profile:
        graph_to_json(g)
        fingerprint(m)
    assert Stats(profile).total_calls < 500_000  # type: ignore[attr-defined]
    assert graph_to_json(evolve(g, name="other")) == graph_to_json(g) | {"name": "other"}


def test_the_fingerprint_is_not_on_the_way_to_plan_help() -> None:
    code = "import sys, megaloom.dsl; assert not {'cattrs', 'networkx', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
