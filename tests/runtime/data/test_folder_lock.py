"""The lock of a folder: one process at a time, and a refused command leaves nothing that was not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.folder_lock import locked_folder

WORDS = {"held": "another has it", "choose": "choose another"}


def refuse(folder: Path, *writes: str) -> None:
    """Write files into a locked folder, and refuse. A file `results` is what a user wants."""
    with locked_folder(folder, **WORDS, kept=(folder / "results").exists):
        for name in writes:
            (folder / name).touch()
        raise UserError("no")


def refused(folder: Path, *writes: str) -> None:
    with pytest.raises(UserError, match=r"^no$"):
        refuse(folder, *writes)


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "runs" / "new", "options")
    assert not list(tmp_path.iterdir())


def test_a_refused_command_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    (tmp_path / ".lock").touch()
    before = (tmp_path / ".lock").stat().st_mtime_ns
    refused(tmp_path)
    assert (tmp_path / ".lock").stat().st_mtime_ns == before


def test_results_stay(tmp_path: Path) -> None:
    refused(tmp_path / "new", "results")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"results", ".lock"}


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with locked_folder(folder, **WORDS):
        with pytest.raises(UserError, match=r"^another has it$"), locked_folder(folder, **WORDS, kept=lambda: False):
            pass
        assert (folder / ".lock").exists()
    with locked_folder(folder, **WORDS):
        pass


def test_a_folder_that_cannot_be_written_leaves_none_above(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"(?s)cannot write in .*choose another"),
        locked_folder(tmp_path / "a" / ("x" * 300), **WORDS),
    ):
        pass
    assert not list(tmp_path.iterdir())
