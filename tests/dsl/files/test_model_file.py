"""A model written to a file is the model that is read from it, and reading runs no code."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaloom.dsl import costs, fingerprint, graph
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import graph_to_json
from megaloom.dsl.files.model_file import load_model, model_from_json, model_to_json, save_model
from megaloom.dsl.sharding_table import Split
from tests.support.paths import TEST_MODELS

OWN = TEST_MODELS / "own_layers.py"
MODELS = ["gpt2", "own-module", "own-layer", "deepseek-v3-mtp", "mamba2-130m", "t5-small", "bert-base", "llava-7b"]
OWN_MODELS = [f"{OWN}:{name}" for name in ("squared_510", "hashed_odd", "some_experts")]


@pytest.mark.parametrize("name", [*MODELS, *OWN_MODELS], ids=lambda name: name.rpartition(":")[2])
def test_a_model_that_was_read_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    declared, _ = find(name)
    save_model(declared, tmp_path / "model.json")
    loaded, ref = find(str(tmp_path / "model.json"))
    assert ref == str(tmp_path / "model.json")
    assert graph_to_json(graph(loaded)) == graph_to_json(graph(declared))
    split = Split(tp=2, ep=2 if "deepseek" in name else 1, vocab_multiple=128)
    for ours, theirs in zip(graph(loaded).nodes, graph(declared).nodes, strict=True):
        if not ours.is_input:
            assert costs(ours, batch=2, seq=32, split=split) == costs(theirs, batch=2, seq=32, split=split)


def test_a_layer_of_ones_own_is_known_by_name_body_and_sharding(tmp_path: Path) -> None:
    declared, _ = find("own-module")
    save_model(declared, tmp_path / "model.json")
    loaded = load_model(tmp_path / "model.json")
    (layer,) = {type(n.op) for n in graph(loaded).nodes if "squared_re_lu" in n.name or "squared_relu" in n.name}
    assert (layer.__name__, layer.splits) == ("SquaredReLU", {"channels": "tp"})
    node = next(n for n in graph(loaded).nodes if type(n.op) is layer)
    with pytest.raises(UserError, match=r"torch module of its own .*own_module\.py.*\n.*--out FOLDER"):
        node.op.module(None)  # type: ignore[attr-defined]


def damaged(raw: dict, *path: object, value: object) -> dict:
    out = json.loads(json.dumps(raw))
    place = out
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return out


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 9, "of another version of megaloom"),
        (("fingerprint",), "0-dead", "of another version of megaloom"),
        (("fingerprint",), "1-0000000000000000", "is damaged: its model has another fingerprint"),
        (("outputs",), [], "is damaged"),
        (("outputs",), [10**6], "is damaged"),
        (("ops", 0, "kind"), "Popen", "is damaged"),
        (("ops", 0, "kind"), "Dim", "is damaged"),
        (("values", 3, "args"), [-1], "is damaged"),
        (("values", 3, "dims"), [["embed", -4]], "is damaged"),
        (("values",), None, "is damaged"),
    ],
)
def test_a_damaged_file_is_refused(path: tuple, value: object, says: str) -> None:
    raw = model_to_json(find("gpt2")[0])
    with pytest.raises(UserError, match=f"m.json .*({says}|was changed after it was written)"):
        model_from_json(damaged(raw, *path, value=value), "m.json")
    del raw["seal"]
    if path != ("version",):
        with pytest.raises(UserError, match=f"m.json .*{says}"):  # in a file from before the seal
            model_from_json(damaged({**raw, "version": 2}, *path, value=value), "m.json")


def test_the_fingerprint_stays(tmp_path: Path) -> None:
    declared, _ = find("gpt2")
    assert fingerprint(model_from_json(model_to_json(declared), "m.json")) == fingerprint(declared)


def leaves(it: object, path: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """Yield each value in JSON that is neither a list nor an object, with its path."""
    inner = it.items() if isinstance(it, dict) else enumerate(it) if isinstance(it, list) else None
    if inner is None:
        yield path, it
    for key, part in inner or ():
        yield from leaves(part, (*path, key))


def test_no_changed_value_is_read_as_another_model() -> None:
    """The seal covers everything, bodies of built-in layers too, on which `evaluate` and `generate` depend."""
    raw = model_to_json(find("stdlib-gpt")[0])
    assert any(form.get("kind") == "Normalize" and "eps" in form["fields"] for form in raw["ops"])
    for path, value in list(leaves(raw)):
        other = not value if isinstance(value, bool) else value * 2 + 1 if isinstance(value, int | float) else "x"
        with pytest.raises(UserError, match=r"m\.json "):
            model_from_json(damaged(raw, *path, value=other), "m.json")
    with pytest.raises(UserError, match="its seal is another"):
        model_from_json({name: value for name, value in raw.items() if name != "seal"}, "m.json")


def test_a_file_from_before_the_seal_is_read() -> None:
    declared, _ = find("stdlib-gpt")
    raw = {name: value for name, value in model_to_json(declared).items() if name != "seal"}
    assert fingerprint(model_from_json({**raw, "version": 2}, "m.json")) == fingerprint(declared)
