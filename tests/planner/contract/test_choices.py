"""Enumerations of layout fields: they name what the dsl knows, and nothing else."""

from __future__ import annotations

from megaloom.dsl.facts.recompute import CORE, RECOMPUTE_MODES, RECOMPUTE_MODULES
from megaloom.planner.contract.choices import DEFAULT_MODULES, Module, Recompute


def test_recompute_modes_and_modules_are_those_of_the_dsl() -> None:
    assert tuple(str(mode) for mode in Recompute) == RECOMPUTE_MODES
    assert tuple(str(module) for module in Module) == RECOMPUTE_MODULES
    assert tuple(DEFAULT_MODULES) == CORE
