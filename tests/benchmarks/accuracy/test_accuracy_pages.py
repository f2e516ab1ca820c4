"""The pages of docs/accuracy have the tables that `python -m benchmarks.accuracy` writes."""

from __future__ import annotations

import re

import pytest

from benchmarks.accuracy.features import FEATURES
from benchmarks.accuracy.pages import PAGES, SECTION, TABLES, feature_table, written
from megaloom.planner.contract.known_devices import MEMORY
from megaloom.planner.hardware.presets import LINK_FIGURES, OTHER_SOURCES, PRESETS

QUICK = ("gpu-runs", "devices", "links", "profiles", "features", "published-profiles", "other-sources")
TEXT = {page.stem: page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")}


@pytest.mark.parametrize("name", QUICK)
def test_a_table_is_up_to_date(name: str) -> None:
    (table,) = (m[3] for text in TEXT.values() for m in SECTION.finditer(text) if m[2] == name)
    assert table == TABLES[name]() + "\n", "run python -m benchmarks.accuracy"


def test_every_table_has_a_place_and_none_is_empty() -> None:
    results = {m[2]: m[3] for text in TEXT.values() for m in SECTION.finditer(text)}
    assert {*results, "summary"} == {*TABLES}
    assert all(table.count("\n") >= 5 for table in results.values())


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


def test_every_preset_has_a_memory_and_every_other_source_a_preset() -> None:
    assert list(PRESETS) == list(MEMORY)
    names = {name for it in PRESETS.values() for name in (it.device.name, it.intra.name, it.inter.name)}
    assert OTHER_SOURCES.keys() <= names


def test_a_figure_without_a_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LINK_FIGURES, "hop")
    with pytest.raises(ValueError, match="Link: no unit and source for hop"):
        TABLES["links"]()


def test_every_feature_is_in_the_table() -> None:
    assert all(f"| {name} | " in feature_table() for name in FEATURES)
