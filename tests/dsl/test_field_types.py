"""Fields have the types of their annotations, sizes are in range, and splits name dims of the body."""

from __future__ import annotations

from typing import ClassVar

import pytest
from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    RMSNorm,
    ShapeError,
    Value,
    dot,
    graph,
    ids,
    model,
    repeat,
    weight,
)
from megaloom.dsl.dims import LARGEST_DIM, MAX_LAYERS

WTE = weight("wte", Dim("vocab", 11), Dim("embed", 8))
X = ids() >> Embed(WTE)


@frozen
class Own(Layer):
    channels: int = 4
    share: float = 0.5
    flag: bool = False
    name: str | None = None
    free: tuple[int, ...] = ()
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        c = Dim("channels", self.channels)
        return dot(dot(x, weight("up", x["embed"], c), "embed") * self.share, weight("down", c, x["embed"]), "channels")


@frozen
class Misspelt(Own):
    splits: ClassVar[dict[str, str]] = {"chanels": "tp"}


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Attention(heads=2, causal="no"), "Attention: causal must be True or False, got 'no'"),  # type: ignore[arg-type]
        (Attention(heads=2, causal=2), "causal must be True or False, got 2"),  # type: ignore[arg-type]
        (Attention(heads=2, scale="x"), "scale must be a finite number or None, got 'x'"),  # type: ignore[arg-type]
        (Attention(heads=2, scale=float("inf")), "scale must be a finite number or None, got inf"),
        (Attention(heads=2, bias=None), "bias must be True or False, got None"),  # type: ignore[arg-type]
        (Attention(heads=True), "heads must be a whole number, got True"),
        (RMSNorm(eps="x"), "eps must be a finite number, got 'x'"),  # type: ignore[arg-type]
        (RMSNorm(eps=float("nan")), "eps must be a finite number, got nan"),
        (RMSNorm(eps=-1), "eps must be at least 0, got -1"),
        (Own(4.0), "Own: channels must be a whole number, got 4.0"),  # type: ignore[arg-type]
        (Own(share=10**400), "share must be a finite number, got 1000"),
        (Own(name=3), "name must be a text or None, got 3"),  # type: ignore[arg-type]
        (Misspelt(), "Misspelt.splits: the body has no dim 'chanels': did you mean channels?"),
        (Own(2**31), "the size of dim channels must be at most 2,147,483,647, got 2,147,483,648"),
    ],
)
def test_a_wrong_field_is_named(layer: Layer, says: str) -> None:
    with pytest.raises(ShapeError, match=says.replace("?", r"\?")):
        X >> layer


def test_right_fields_pass() -> None:
    for layer in (Own(), Own(8, 1, True, "x", (1, 2)), Attention(heads=2, scale=1, rope=10_000), RMSNorm(0)):
        assert graph(model("m", X >> layer)).nodes
    assert Dim("d", LARGEST_DIM).known == LARGEST_DIM


@pytest.mark.parametrize(
    "wrong", [{"std": float("nan")}, {"mean": float("inf")}, {"std": "x"}, {"std": -1}, {"trained": 2}]
)
def test_a_wrong_weight_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ShapeError):
        weight("w", Dim("d", 3), **wrong)  # type: ignore[arg-type]


def test_numbers_of_an_expression_are_finite() -> None:
    for number in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ShapeError, match="must be a finite number"):
            X + number
        with pytest.raises(ShapeError, match="must be a finite number"):
            X * number


def test_too_many_layers_are_refused_at_once() -> None:
    with pytest.raises(ShapeError, match=f"at most {MAX_LAYERS:,} times"):
        repeat(10**9, RMSNorm())


@pytest.mark.parametrize("name", ["", " ", "\n", "a\x00", "-rf", "\x1b[31m"])
def test_a_model_has_a_name_of_one_line(name: str) -> None:
    with pytest.raises(ShapeError, match="a model cannot have the name"):
        model(name, X)
