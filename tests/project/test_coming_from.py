"""The page for people who come from other programs: each option on it exists, there and here."""

import re

import pytest

from tests.support.docs import _help
from tests.support.exported import FLAGS
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "coming-from.md"
TABLES = re.compile(r"<!-- options -->\n(.*?)<!-- end of options -->", re.DOTALL)


def options(text: str) -> set[str]:
    """Return the options in a text, without their values."""
    return set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", text))


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str]]:
    """The rows of both tables of options: theirs, ours."""
    lines = [line for table in TABLES.findall(PAGE.read_text()) for line in table.splitlines()[2:]]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert len(cells) > 30 and all(len(row) == 2 for row in cells)
    return [(theirs, ours) for theirs, ours in cells]


def test_megatron_lm_has_these_options(rows: list[tuple[str, str]]) -> None:
    known = options(FLAGS.read_text())
    for theirs, _ in rows:
        assert options(theirs) and options(theirs) <= known, theirs


def test_we_have_these_options(rows: list[tuple[str, str]]) -> None:
    train = set(re.findall(r"--[a-z0-9-]+", _help("train")))
    for _, ours in rows:
        assert options(ours) <= train, ours
    for line in PAGE.read_text().splitlines():
        for command, rest in re.findall(r"`megaloom (train|generate|convert|pack|export)([^`]*)`", line):
            assert options(rest) <= set(re.findall(r"--[a-z0-9-]+", _help(command))), line
