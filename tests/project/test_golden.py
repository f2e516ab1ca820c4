"""Checks that predictions are those recorded in tests/golden/predictions; MEGALOOM_GOLDEN=all checks all of them."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.golden import PLANS, VALIDATION, differences, plans, read, report, updated, validation
from tests.support.golden_cases import CASES, QUICK, Case
from tests.support.paths import ROOT

ALL = os.environ.get("MEGALOOM_GOLDEN") == "all"


@pytest.mark.parametrize("case", CASES if ALL else QUICK, ids=lambda case: case.name)
def test_plans_are_as_recorded(case: Case) -> None:
    recorded = read(PLANS)
    lines = differences({case.name: recorded[case.name]}, plans([case]))
    assert not lines, report(lines)


def test_every_recorded_plan_has_a_case() -> None:
    assert set(read(PLANS)) == {case.name for case in CASES}
    assert len(CASES) == len({case.name for case in CASES})


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/develop/testing.md"])
def test_pages_give_the_numbers_of_recorded_predictions(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert {int(n) for n in re.findall(r"(\d+) plans and", text)} == {len(CASES)}
    assert {int(n) for n in re.findall(r"(\d+) (?:recorded|golden) plans", text)} <= {len(QUICK)}
    rows = len(read(VALIDATION))
    assert {n.replace(",", "") for n in re.findall(r"plans and ([\d,]+) published", text)} == {str(rows)}


@pytest.mark.skipif(not ALL, reason="predicts every published run: set MEGALOOM_GOLDEN=all")
def test_published_runs_are_predicted_as_recorded() -> None:
    lines = differences(read(VALIDATION), validation())
    assert not lines, report(lines)


def test_differences_are_named() -> None:
    before = {"a": {"step_seconds": 1.0, "stages": [[0, 2]], "layout": {"tp": 2}}, "b": {"skipped": True}}
    assert differences(before, before) == []
    close = {**before, "a": {**before["a"], "step_seconds": 1.0 + 1e-12}}
    assert differences(before, close) == []
    now = {"a": {"step_seconds": 1.00001, "stages": [[0, 2]], "layout": {"tp": 4}}}
    assert differences(before, now) == [
        "a: layout.tp: 2 before, 4 now",
        "a: step_seconds: 1.0 before, 1.00001 now",
        "b: skipped: True before, 'absent' now",
    ]


def test_an_update_keeps_recorded_values_within_the_tolerance() -> None:
    before = {"a": {"step_seconds": 1.0, "interval": [1.0, 2.0], "stages": [[0, 2]]}, "b": {"skipped": True}}
    now = {"a": {"step_seconds": 1.0 + 1e-12, "interval": [1.0 - 1e-12, 2.5], "stages": [[0, 1], [1, 2]]}, "c": {}}
    assert updated(before, now) == {
        "a": {"step_seconds": 1.0, "interval": [1.0, 2.5], "stages": [[0, 1], [1, 2]]},
        "c": {},
    }
