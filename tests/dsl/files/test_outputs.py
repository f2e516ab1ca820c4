"""Places for output are checked before the work, and the check leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.outputs import check_output_file, check_output_folder

LONG = "/".join(["d" * 200] * 25)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("nowhere")
    return tmp_path


@pytest.mark.parametrize("path", ["new", "file", "a b", "broken", "folder/new", "/dev/null", "-x", "a\nb"])
def test_a_file_can_be_written(folder: Path, path: str) -> None:
    before = sorted(folder.rglob("*"))
    check_output_file(path, "-o")
    check_output_file(Path(path))
    check_output_file(None)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "path",
    ["", "folder", ".", "loop", "file/x", "no/x", "x" * 300, LONG, "/proc/x", "/proc/x/y", "/sys/x", "/dev/full"],
)
def test_a_file_cannot_be_written(folder: Path, path: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"^cannot write --html '.*': .+\ngive another path"):
        check_output_file(path, "--html")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["new", "folder", "no/deeper/x", ".", "broken/x"])
def test_a_folder_can_be_made(folder: Path, path: str) -> None:
    before = sorted(folder.rglob("*"))
    check_output_folder(path, "--out")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "path", ["", "file", "file/x", "loop", "loop/x", "x" * 300, LONG, "/dev/null", "/proc/x", "/sys/x/y"]
)
def test_a_folder_cannot_be_made(folder: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"^cannot write into --out '.*': .+\ngive another folder"):
        check_output_folder(path, "--out")
