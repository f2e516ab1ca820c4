"""Arguments of a model's function: by `--set`, by a file, and in the reference that a plan has."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from megaloom.dsl import UserError, fingerprint, params
from megaloom.dsl.catalog import file_name, find
from megaloom.dsl.settings.arguments import Word, as_words, checked_arguments, words_as_arguments
from megaloom.dsl.settings.reference import check_same, split_reference, with_arguments

STDLIB_GPT = "megaloom.examples.stdlib_gpt:stdlib_gpt"


class Norm(StrEnum):
    RMS = "rms"
    LAYER = "layer"


def sized(
    layers: int,
    eps: float = 1e-5,
    name: str = "m",
    tied: bool = False,
    kind: Literal["mlp", "moe"] = "mlp",
    norm: Norm = Norm.RMS,
    widths: tuple[int, ...] = (),
    window: int | None = None,
    pair: tuple[int, float] = (1, 1.0),
    names: Sequence[str] = (),
    bare=4,
    other: object = None,
) -> None: ...


def checked(**given: object) -> dict[str, Any]:
    return checked_arguments(sized, {"layers": 1, **given}, "sized")


def refusal(**given: object) -> str:
    with pytest.raises(UserError) as error:
        checked(**given)
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "value", "wrong", "takes"),
    [
        ("layers=24", 24, "24.5", "a whole number"),
        ("eps=1e-3", 1e-3, "small", "a number"),
        ("eps=1e-3", 1e-3, "inf", "a number"),
        ("name=a, b", "a, b", None, ""),
        ("tied=True", True, "1", "true or false"),
        ("kind=moe", "moe", "rnn", "one of mlp, moe"),
        ("norm=layer", Norm.LAYER, "batch", "one of rms, layer"),
        ("widths=1,2", (1, 2), "1,x", "a whole number"),
        ("window=none", None, "wide", "none or a whole number"),
        ("window=8", 8, "8.5", "none or a whole number"),
        ("pair=2,0.5", (2, 0.5), "2", "a list of 2"),
        ("names=a,b", ("a", "b"), None, ""),
        ("bare=5", 5, "five", "a whole number"),
    ],
)
def test_a_word_becomes_the_type_of_its_parameter(word: str, value: object, wrong: str | None, takes: str) -> None:
    ((name, given),) = words_as_arguments([word]).items()
    result = checked(**{name: given})[name]
    assert (result, type(result)) == (value, type(value))
    if wrong is not None:
        assert refusal(**{name: Word(wrong)}) == f"sized: {name} must be {takes}, got {wrong!r}\ncorrect --set {name}=…"


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", "24"), ("layers", True), ("eps", "1"), ("tied", 1), ("widths", 3), ("name", 4), ("window", 1.5)],
)
def test_a_value_of_a_file_has_the_type_already(name: str, value: object) -> None:
    assert refusal(**{name: value}).startswith(f"sized: {name} must be ")
    assert checked(eps=1)["eps"] == 1.0
    assert checked(widths=[1, 2])["widths"] == (1, 2)


def test_a_field_inside_an_object_is_refused_with_the_object() -> None:
    with pytest.raises(
        UserError, match=r"names a field inside rope_scaling(.|\n)*--set \"rope_scaling=\{'factor': 8, …\}"
    ):
        words_as_arguments(["rope_scaling.factor=8"])


def test_names_are_those_of_the_function() -> None:
    assert refusal(layer=3).startswith("sized has no parameter 'layer': did you mean layers?\nit takes layers, eps,")
    with pytest.raises(UserError, match="sized needs layers: give each argument of this function a default, or"):
        checked_arguments(sized, {}, "sized")
    for word in ("layers", "=3", "a b=3"):
        with pytest.raises(UserError, match=r"has no NAME=VALUE"):
            words_as_arguments([word])


def test_a_reference_has_the_arguments() -> None:
    for arguments in ({"layers": 2}, {"a": "x(1):y", "b": (1, 2), "c": [1.5], "d": None, "e": True}, {"n": Norm.RMS}):
        for base in ("m.py:gpt", "/a (b=1)/m.py:gpt", "pkg.m:gpt", "gpt2"):
            ref = with_arguments(base, arguments)
            assert split_reference(ref) == (base, arguments)
    for plain in ("gpt2", "a(b).py:gpt", "gpt(1)", "gpt(x=y)", "(a=1)", "gpt(**{})", "a.json"):
        assert split_reference(plain) == (plain, {})


def test_a_model_is_found_with_arguments(tmp_path: Path) -> None:
    small, ref = find("stdlib-gpt", words_as_arguments(["layers=2", "layers=1", "embed=64"]))
    assert ref == f"{STDLIB_GPT}(layers=1, embed=64)"
    assert fingerprint(find(ref)[0]) == fingerprint(small) != fingerprint(find("stdlib-gpt")[0])
    assert find("stdlib-gpt(layers=1)", {"embed": 64})[1] == ref
    assert params(small) < params(find("stdlib-gpt")[0])
    assert file_name(ref) == "stdlib-gpt-layers-1-embed-64"
    assert len(file_name(f"m.py:gpt(name={'x' * 300!r})")) < 80
    path = tmp_path / "m.py"
    path.write_text(
        "from megaloom.dsl import *\nfrom megaloom.examples.stdlib_gpt import stdlib_gpt\nfixed = stdlib_gpt()\n"
        "def sized(layers: int) -> Model:\n    return stdlib_gpt(layers)\n"
    )
    assert find(f"{path}:sized", {"layers": 3})[1] == f"{path}:sized(layers=3)"
    with pytest.raises(UserError, match=r"fixed is not a function, so it takes no --set layers"):
        find(f"{path}:fixed", {"layers": 3})


def test_settings_of_a_plan_are_compared() -> None:
    ref = "m.py:gpt(layers=2, widths=(1, 2), tied=True)"
    check_same(ref, words_as_arguments(["layers=2", "widths=1,2", "tied=true"]), "plan.json")
    check_same(ref, {"widths": [1, 2]}, "plan.json")
    for word in ("layers=3", "widths=1", "tied=none", "heads=4", "layers=x"):
        with pytest.raises(UserError, match=rf"plan.json is a plan of .*, which --set {word} would change"):
            check_same(ref, words_as_arguments([word]), "plan.json")


def test_arguments_as_words() -> None:
    arguments = {"a": 1, "b": [1, 2], "c": True, "d": None, "e": "x"}
    assert as_words(arguments) == ("a=1", "b=1,2", "c=true", "d=none", "e=x")
