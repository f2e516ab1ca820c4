"""The pages of docs/accuracy have the tables that `python -m benchmarks.accuracy` writes."""

from __future__ import annotations

import re

import pytest

from benchmarks.accuracy import DEVICE_FIGURES, PAGES, SECTION, TABLES, feature_table, written
from megaloom.planner.cost.profiles.features import FEATURES

QUICK = ("gpu-runs", "devices", "profiles", "features", "published-profiles", "other-sources")
TEXT = {page.stem: page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")}


@pytest.mark.parametrize("name", QUICK)
def test_a_table_is_up_to_date(name: str) -> None:
    (table,) = (m[3] for text in TEXT.values() for m in SECTION.finditer(text) if m[2] == name)
    assert table == TABLES[name]() + "\n", "run python -m benchmarks.accuracy"


def test_every_table_has_a_place_and_none_is_empty() -> None:
    found = {m[2]: m[3] for text in TEXT.values() for m in SECTION.finditer(text)}
    assert {*found, "summary"} == {*TABLES}
    assert all(table.count("\n") >= 5 for table in found.values())


def test_the_summary_has_five_rows_of_the_table_of_classes() -> None:
    summary = [re.split(r" \| ", line) for line in TEXT["summary"].splitlines()[2:]]
    classes = next(m[3] for m in SECTION.finditer(TEXT["scores"]) if m[2] == "classes").splitlines()[2:]
    assert len(summary) == 5
    for row, line in zip(summary, classes, strict=True):
        assert line.startswith(" | ".join(row).rstrip(" |"))


def test_text_without_tables_stays() -> None:
    assert written("# Title\n") == "# Title\n"
    assert written("a\n<!-- table features -->\nold\n<!-- end of features -->\nb\n") == (
        f"a\n<!-- table features -->\n{feature_table()}\n<!-- end of features -->\nb\n"
    )


def test_every_figure_has_a_kind() -> None:
    kinds = {"datasheet", "measured", "fitted", "measured or fitted", "source code"}
    assert {kind for _, _, kind, _ in DEVICE_FIGURES} <= kinds
    assert all(f"| {name} | " in feature_table() for name in FEATURES)
