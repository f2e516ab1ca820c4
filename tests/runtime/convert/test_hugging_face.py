"""A folder of results is absent until it is whole, and no other folder is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.convert.hugging_face import published


def fail(folder: Path) -> None:
    with published(folder) as unfinished:
        (unfinished / "half").touch()
        raise OSError(28, "No space left on device")


def test_a_folder_is_published_whole(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "mine").touch()
    with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
        fail(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "out.tmp"]
    with published(tmp_path / "out") as unfinished:
        (unfinished / "whole").touch()
        assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "out", "out.tmp", "whole"]
