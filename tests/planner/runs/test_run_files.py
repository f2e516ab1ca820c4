"""Each reader reads its small file as before: a change of a flag's table that breaks one is seen here."""

from __future__ import annotations

import pytest

from tests.support.paths import TESTS
from tests.support.run_files import FOLDER, RUN_FILES, what_is_read

GOLDEN = TESTS / "golden" / "run_files.txt"


def test_all_that_is_read_of_each_file(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("yaml")
    text = "\n".join(map(what_is_read, RUN_FILES))
    if request.config.getoption("--update"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "refused" not in text


@pytest.mark.parametrize("name", RUN_FILES)
def test_no_file_is_of_another_project(name: str) -> None:
    """They are short: what people publish is longer, and is not copied here."""
    assert len((FOLDER / name).read_text().splitlines()) <= 26
