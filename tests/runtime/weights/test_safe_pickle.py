"""Files from outside run no code: a malicious one of each kind is named, and has no effect."""

from __future__ import annotations

import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaloom.dsl.errors import UserError
from megaloom.runtime.weights.safe_pickle import check_files, load_tensors, only_weights, read_metadata
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "checkpoint-v1" / "step-000002"


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / GOLDEN.name)


def test_a_checkpoint_of_ours_is_safe(checkpoint: Path) -> None:
    check_files(checkpoint)
    assert read_metadata(checkpoint).state_dict_metadata


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_malicious_file_of_a_checkpoint_has_no_effect(checkpoint: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "created"
    if name == ".metadata":
        (checkpoint / name).write_bytes(pickle.dumps(Malicious(target)))
    else:
        torch.save({"done": Malicious(target)}, checkpoint / name)
    with pytest.raises(UserError, match=r"holds \S*touch|holds \S*getattr|holds pathlib") as raised:
        check_files(checkpoint)
    assert "which could run code" in str(raised.value)
    assert str(checkpoint / name) in str(raised.value)
    assert not target.exists()
    pickle.loads(pickle.dumps(Malicious(target)))
    assert target.exists()  # else this test would show nothing


def test_metadata_names_no_file_outside_of_its_folder(checkpoint: Path) -> None:
    metadata = read_metadata(checkpoint)
    for place in metadata.storage_data.values():
        object.__setattr__(place, "relative_path", "../secret")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"names the file '\.\./secret', which is outside of its folder"):
        read_metadata(checkpoint)


def test_objects_that_megatron_unpickles_have_no_effect(tmp_path: Path) -> None:
    """torch's planner asks for whole pickles of objects in a checkpoint, such as the extra state of a layer."""
    target = tmp_path / "created"
    torch.save(Malicious(target), tmp_path / "extra")
    with only_weights(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "extra", weights_only=False)
    assert not target.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_loaded_and_other_classes_named(tmp_path: Path, zipped: bool) -> None:
    path, target = tmp_path / "model_optim_rng.pt", tmp_path / "created"
    values = {"args": Namespace(layers=2), "model": {"weight": torch.ones(3)}}
    torch.save(values, path, _use_new_zipfile_serialization=zipped)
    assert load_tensors(path)["args"].layers == 2
    torch.save({**values, "rng": Malicious(target)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="which no checkpoint needs and which could run code"):
        load_tensors(path)
    assert not target.exists()


def test_classes_that_megatron_core_has_allowed_stay_allowed(tmp_path: Path) -> None:
    torch.save(Namespace(a=1), tmp_path / "args.pt")
    torch.serialization.add_safe_globals([Namespace])  # as the import of megatron.core does
    assert load_tensors(tmp_path / "args.pt") == Namespace(a=1)
    with only_weights():
        pass
    assert torch.load(tmp_path / "args.pt", weights_only=True) == Namespace(a=1)


def test_damaged_files_are_named(checkpoint: Path) -> None:
    whole = (checkpoint / "common.pt").read_bytes()
    (checkpoint / "common.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"common\.pt is damaged"):
        check_files(checkpoint)
    (checkpoint / ".metadata").write_bytes(b"\x80\x04 no pickle")
    with pytest.raises(UserError, match=r"\.metadata is damaged"):
        read_metadata(checkpoint)


def test_a_run_with_malicious_metadata_is_neither_resumed_nor_converted(checkpoint: Path, tmp_path: Path) -> None:
    """Whoever changes the file can correct its checksum too, so that nothing but the allow-list is in the way."""
    from megaloom.runtime.checkpoints.checkpoint import load
    from megaloom.runtime.checkpoints.checkpoint_views import tensor_views

    target = tmp_path / "created"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Malicious(target)))
    found: Any = SimpleNamespace(
        folder=checkpoint, manifest=SimpleNamespace(files={}, has_comparable_fingerprint=True, step=2)
    )
    never: Any = None  # the engine is not asked for its state
    for read in (lambda: load(never, found), lambda: tensor_views(checkpoint)):
        with pytest.raises(UserError, match="which could run code"):
            read()
    assert not target.exists()
