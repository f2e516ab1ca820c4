"""Hugging Face folders that are refused: wrong tensors, files that cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaloom.dsl import UserError
from megaloom.dsl.hf.architectures import read
from megaloom.runtime.weights.hugging_face_weights import open_folder
from tests.support.models.hugging_face import built


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small Llama in one file."""
    built("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def refusal(folder: Path) -> str:
    """Return the message with which the weights of a folder are refused."""
    with pytest.raises(UserError) as raised:
        open_folder(folder).check(read(folder))
    return str(raised.value)


def test_wrong_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.upproj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    assert refusal(folder).splitlines() == [
        f"--from {folder}: the tensors of the checkpoint are not those of model 'llama'",
        "missing: model.layers.0.mlp.up_proj.weight [48, 32], which holds swiglu.0.up; "
        "the nearest is model.layers.0.mlp.upproj.weight",
        "model.norm.weight has shape [7], not [32]",
        "unknown: model.layers.0.mlp.upproj.weight [48, 32]; the nearest is model.layers.0.mlp.up_proj.weight",
    ]


def test_a_second_table_must_equal_the_first(tmp_path: Path) -> None:
    built("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    open_folder(tmp_path).check(read(tmp_path))
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight differs from its model.embed_tokens.weight" in refusal(tmp_path)


def test_files_that_cannot_be_read(folder: Path) -> None:
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert refusal(folder).startswith(f"cannot read {file}: ")
    file.rename(folder / "pytorch_model.bin")
    assert "pickled weights are not read" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).startswith(f"{folder} has no model.safetensors\n")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert refusal(folder).startswith(f"{folder} has no one.safetensors and 1 more files\n")
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    assert "names '../one.safetensors', which is not a file of its folder" in refusal(folder)
    index.write_text("[]")
    assert refusal(folder).startswith(f"{index} is not an index of safetensors files")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="no such folder"):
        open_folder(folder)


def test_options_that_shapes_do_not_show_are_compared(folder: Path) -> None:
    """Another epsilon is refused, another base of positions is noted; dropout does not count."""
    given, fields = open_folder(folder), json.loads((folder / "config.json").read_text())
    given.check(read({**fields, "attention_dropout": 0.5}))
    assert given.notes(read(fields)) == []
    with pytest.raises(UserError) as raised:
        given.check(read({**fields, "rms_norm_eps": 0.5}))
    assert "is not the model of its config.json" in str(raised.value)
    assert "eps of rms_norm.0 is 0.5, not " in str(raised.value)
    longer = read({**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})
    given.check(longer)
    (note,) = given.notes(longer)
    assert note.startswith("MODEL has other positions than")
    assert "rope of attention.0 is 77" in note


def test_a_config_that_is_not_read_is_not_compared(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    m = read(folder)
    (folder / "config.json").write_text(json.dumps({**fields, "strange_option": 3}))
    given = open_folder(folder)
    given.check(m)
    (note,) = given.notes(m)
    assert note.startswith("the options of MODEL are not compared with those of --from: ")
    assert "strange_option" in note


def test_a_checkpoint_of_megatron_lm_is_converted_first(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(UserError, match=r"is a checkpoint of Megatron-LM\nconvert it first: megaloom convert"):
        open_folder(tmp_path)


def test_tensors_with_nan_are_known_once_they_are_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    given = open_folder(folder)
    table = given.files.tensors["model.embed_tokens.weight"]
    table.narrow(0, 0, 5).read()
    assert not given.files.not_finite
    table.read()
    assert given.files.not_finite == {"model.embed_tokens.weight"}
