"""A model written to a file is the model that is read from it, and reading runs no code."""

import json
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
    with pytest.raises(UserError, match=f"m.json .*{says}"):
        model_from_json(damaged(raw, *path, value=value), "m.json")


def test_the_fingerprint_stays(tmp_path: Path) -> None:
    declared, _ = find("gpt2")
    assert fingerprint(model_from_json(model_to_json(declared), "m.json")) == fingerprint(declared)
