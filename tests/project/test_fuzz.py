"""A few cases of `make fuzz`: no traceback, no hang, no illegal input accepted, no file of a refused command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fuzz.accepted_damage import silent_acceptances
from tests.support.fuzz.bases import make_light_bases
from tests.support.fuzz.campaign import draw, verdict
from tests.support.fuzz.child import call, emptied

READINGS = 250
KINDS = ("config", "cluster", "settings", "model", "run file")  # those that need no plan, data or run
CASES = 6


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_and_odd_inputs(kind: str, tmp_path: Path) -> None:
    make_light_bases(emptied(bases := tmp_path / "bases"))
    for number in range(CASES):
        drawn = draw(kind, number, emptied(folder := tmp_path / str(number)), bases)
        ended = call(drawn.words, folder, 300)
        assert not verdict(drawn, ended), f"{kind} {number}, {drawn.what}: {verdict(drawn, ended)}\n{ended.text}"


def test_no_damage_of_a_run_file_is_accepted_in_silence() -> None:
    pytest.importorskip("yaml")
    silent, kinds = silent_acceptances(READINGS)
    assert not silent, "\n".join(silent)
    assert len(kinds) > 10
