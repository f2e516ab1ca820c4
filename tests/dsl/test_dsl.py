"""Declarations as users write them, and the messages for wrong ones."""

from __future__ import annotations

import inspect
import pickle
import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom import dsl
from megaloom.dsl import (
    BATCH,
    MLP,
    SEQ,
    Affine,
    Attention,
    Dim,
    DType,
    Embed,
    Layer,
    LayerNorm,
    MoE,
    Positions,
    RMSNorm,
    Shape,
    ShapeError,
    Sizes,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    dot,
    fn,
    graph,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.errors import full_message
from tests.support.paths import TESTS

WRONG = TESTS / "golden" / "wrong_programs.txt"
VOCAB, EMBED = Dim("vocab", 11), Dim("embed", 8)
WTE = weight("wte", VOCAB, EMBED)
DIMS = st.lists(st.sampled_from([BATCH, SEQ, EMBED, VOCAB, Dim("ff", 3)]), unique=True)


def hidden() -> Value:
    return ids() >> Embed(WTE)


# Wrong programs: each with its message, as a user reads it


def programs() -> dict[str, str]:
    """The programs of the golden file by their titles; a program's lines are numbered there."""
    parts = re.split(r"^# (.*)\n", WRONG.read_text(), flags=re.MULTILINE)[1:]
    lines = [re.findall(r"^ {0,2}\d+ ?(?: (.*))?$", text, re.MULTILINE) for text in parts[1::2]]
    return {title: "\n".join(them) for title, them in zip(parts[::2], lines, strict=True)}


def message(program: str) -> str:
    scope = {"__name__": "wrong", "frozen": attrs.frozen, **{name: getattr(dsl, name) for name in dsl.__all__}}
    with pytest.raises(UserError) as error:
        exec(compile(program, "wrong.py", "exec", dont_inherit=True), scope)
    text = full_message(error.value)
    assert full_message(pickle.loads(pickle.dumps(error.value))) == text  # a rank sends it whole
    return f"{type(error.value).__name__}: {text}"


def section(title: str, program: str) -> str:
    numbered = "".join(f"{i:3}  {line}".rstrip() + "\n" for i, line in enumerate(program.split("\n"), 1))
    return f"# {title}\n{numbered}{message(program)}\n"


def test_messages_of_wrong_programs(request: pytest.FixtureRequest) -> None:
    """--update writes the messages down; add a program with its lines numbered and run that."""
    text = "\n".join(section(*it) for it in programs().items())
    if request.config.getoption("--update"):
        WRONG.write_text(text)
    assert text == WRONG.read_text()


def test_every_message_says_where() -> None:
    for title, program in programs().items():
        assert re.search(r"^  (at|in .*) +wrong\.py:\d+$", message(program), re.MULTILINE), title


# Dims and shapes


@given(DIMS, st.integers(1, 9), st.integers(1, 9))
def test_sizes_count_elements(dims: list[Dim], batch: int, seq: int) -> None:
    size = Sizes(batch=batch, seq=seq)
    want = 1
    for d in dims:
        want *= {"batch": batch, "seq": seq}.get(d.name) or d.known
    assert size(dims) == size(Shape(tuple(dims))) == want


@given(DIMS, st.sampled_from(["batch", "embed", "absent"]))
def test_a_shape_is_an_ordered_set_of_dims(dims: list[Dim], name: str) -> None:
    shape = Shape(tuple(dims))
    assert list(shape) == dims
    assert (name in shape) == (name in [d.name for d in dims])
    assert list(shape.without(name)) == [d for d in dims if d.name != name]
    assert all(shape[d.name] is d for d in dims)


def test_shapes_as_text() -> None:
    assert str(hidden().shape) == "[batch seq embed=8]"
    assert repr(hidden()) == "<Embed(table=<wte [vocab=11 embed=8]>) [batch seq embed=8]>"


def test_what_the_workload_leaves_open() -> None:
    with pytest.raises(ShapeError, match="seq has no size: the workload gives batch"):
        Sizes(batch=2)((BATCH, SEQ))


# Values


def test_a_dot_keeps_what_it_does_not_contract() -> None:
    x, w = hidden(), weight("w", EMBED, Dim("heads", 2), Dim("head_dim", 4))
    y = dot(x, w, "embed")
    assert str(y.shape) == "[batch seq heads=2 head_dim=4]"
    assert str(dot(y, weight("o", *w.shape), "heads", "head_dim").shape) == "[batch seq embed=8]"
    assert str(dot(x, WTE, "embed").shape) == "[batch seq vocab=11]"
    assert str(dot(x, weight("scale", EMBED, VOCAB)).shape) == "[batch seq embed=8 vocab=11]"  # a dim of both stays


def test_arguments_are_broadcast_over_the_dims_that_they_lack() -> None:
    x, scale = hidden(), weight("scale", EMBED)
    assert (x * scale).shape == (scale * x).shape == (x + x).shape == x.shape
    turned = weight("turned", VOCAB, EMBED) + weight("other", EMBED, VOCAB)
    assert str(turned.shape) == "[vocab=11 embed=8]"


@pytest.mark.parametrize(
    ("make", "computed"),
    [
        (lambda x, y: x - y, lambda a, b: a - b),
        (lambda x, y: 3 - x * y, lambda a, b: 3 - a * b),
        (lambda x, y: -x / 4 + 1.5, lambda a, b: -a / 4 + 1.5),
        (lambda x, y: 2 * x + y * 0.5 - 1, lambda a, b: 2 * a + b * 0.5 - 1),
    ],
)
def test_arithmetic_is_that_of_numbers(make, computed) -> None:
    """Each operator is made of sums, products, and numbers times a value plus a number."""

    def number(v: Value) -> float:
        known = {"x": 7.0, "y": -2.0}
        if not v.args:
            return known[str(v.op)]
        first, *rest = map(number, v.args)
        if isinstance(v.op, Affine):
            return v.op.scale * first + v.op.shift
        return first + rest[0] if v.op.fn == "add" else first * rest[0]

    x, y = weight("x", EMBED), weight("y", EMBED)
    assert number(make(x, y)) == computed(7.0, -2.0)


def test_a_value_is_itself_alone() -> None:
    """Two uses of one value are one computation; two like values are two."""
    assert fn("relu", hidden()) != fn("relu", hidden())
    assert weight("w", EMBED) != weight("w", EMBED)
    x = hidden()
    assert (x == x, x != hidden()) == (True, True)


def test_tokens_are_indices_and_what_is_computed_is_not() -> None:
    assert ids().dtype is DType.INDEX
    assert hidden().dtype is (hidden() >> Unembed(WTE)).dtype is DType.COMPUTE


# Layers


@pytest.mark.parametrize(
    ("layer", "weights"),
    [
        (RMSNorm(), {"scale": "[embed=8]"}),
        (LayerNorm(), {"scale": "[embed=8]", "shift": "[embed=8]"}),
        (SwiGLU(3), {"gate": "[embed=8 ff=3]", "up": "[embed=8 ff=3]", "down": "[ff=3 embed=8]"}),
        (MLP(3), {"up": "[embed=8 ff=3]", "down": "[ff=3 embed=8]"}),
        (
            MLP(3, bias=True),
            {"up": "[embed=8 ff=3]", "up_bias": "[ff=3]", "down": "[ff=3 embed=8]", "down_bias": "[embed=8]"},
        ),
        (
            Attention(heads=4, kv_heads=2),
            {
                "q": "[embed=8 heads=4 head_dim=2]",
                "k": "[embed=8 kv_heads=2 head_dim=2]",
                "v": "[embed=8 kv_heads=2 head_dim=2]",
                "o": "[heads=4 head_dim=2 embed=8]",
            },
        ),
        (
            MoE(MLP(3), experts=5, top_k=2),
            {
                "router": "[embed=8 experts=5]",
                "experts.up": "[experts=5 embed=8 ff=3]",
                "experts.down": "[experts=5 ff=3 embed=8]",
            },
        ),
    ],
    ids=lambda it: str(it) if isinstance(it, Layer) else "",
)
def test_layers_keep_the_shape_and_have_these_weights(layer: Layer, weights: dict[str, str]) -> None:
    y = hidden() >> layer
    assert y.shape == hidden().shape
    node = graph(model("m", y)).nodes[-1]
    assert {s.name.removeprefix(f"{node.name}."): str(Shape(s.dims)) for s in node.weights} == weights


def test_a_layer_says_what_is_not_its_default() -> None:
    assert str(Attention(heads=4, kv_heads=2)) == "Attention(heads=4, kv_heads=2)"
    assert str(RMSNorm(1e-5)) == "RMSNorm()"
    assert str(MoE(SwiGLU(4), experts=8, top_k=2)) == "MoE(expert=SwiGLU(ff=4), experts=8, top_k=2)"


def test_a_layer_remembers_where_it_was_written() -> None:
    line = inspect.currentframe().f_lineno
    built = [RMSNorm(), residual(RMSNorm()), repeat(2, RMSNorm())]
    assert [layer.at for layer in built] == [f"{__file__}:{line + 1}"] * 3


def test_a_weight_used_twice_is_one() -> None:
    tied = graph(model("m", hidden() >> Unembed(WTE)))
    assert list(tied.weights) == ["wte"]
    assert tied.weights["wte"].value is WTE
    untied = graph(model("m", hidden() >> Unembed(weight("head", VOCAB, EMBED))))
    assert list(untied.weights) == ["wte", "head"]


def test_a_weight_given_to_a_repeated_layer_is_shared_by_all_of_them() -> None:
    table = weight("wpe", Dim("position", 4), EMBED)
    g = graph(model("m", hidden() >> repeat(3, Positions(table), RMSNorm())))
    assert list(g.weights) == ["wte", "wpe", *(f"rms_norm.{i}.scale" for i in range(3))]


def test_a_transparent_layer_is_its_layers() -> None:
    """A layer of layers of one's own, which the graph looks through as it does through residual."""

    @attrs.frozen
    class Sandwich(Layer):
        inner: Layer
        transparent = True

        def body(self, x: Value, /, **side: Value) -> Value:
            return x >> RMSNorm() >> self.inner >> RMSNorm()

    names = [n.name for n in graph(model("m", hidden() >> Sandwich(SwiGLU(3)))).nodes]
    assert names == ["tokens", "embed.0", "rms_norm.0", "swiglu.0", "rms_norm.1"]


# The package


def test_everything_exported_is_there_and_described() -> None:
    for name in dsl.__all__:
        it = getattr(dsl, name)
        assert (not inspect.isroutine(it) and not inspect.isclass(it)) or it.__doc__, name
