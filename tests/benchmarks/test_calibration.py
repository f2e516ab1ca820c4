"""The page of calibrations of published runs has the rows that its command writes, and the guide the report."""

from __future__ import annotations

import pytest

from benchmarks.calibration import HEAD, LEAST, PAGE, GroupName, groups, row, score
from tests.support.paths import ROOT, TESTS

QUICK: tuple[GroupName, ...] = (("nemo-docs", "B200", "nemo"), ("nanotron", "H100", "nanotron"))


def table() -> list[list[str]]:
    """Return the rows of the table of the page, without its head."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(HEAD)
    return cells[2:]


@pytest.mark.parametrize("name", QUICK)
def test_a_group_is_up_to_date(name: GroupName) -> None:
    fresh = row(score(name, groups(name)[name]))
    assert fresh in table(), "run python -m benchmarks.calibration --update"


def test_every_group_with_enough_runs_has_a_row_also_where_it_does_not_help() -> None:
    rows = table()
    assert len(rows) == 27 and all(int(cells[3]) >= LEAST for cells in rows)
    before, held_out = ([float(cells[n].rstrip("%")) for cells in rows] for n in (5, 7))
    worse = sum(a < b for a, b in zip(before, held_out, strict=True))
    assert 0 < worse < len(rows) / 2


def test_the_guide_has_the_report_of_the_published_logs() -> None:
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text(encoding="utf-8")
    assert (TESTS / "golden" / "calibration.txt").read_text(encoding="utf-8") in guide
