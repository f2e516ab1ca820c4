"""Enumerations of layout fields: they name what the dsl knows, and equal choices make equal layouts."""

from __future__ import annotations

import pytest

from megaloom.dsl.facts.recompute import CORE, RECOMPUTE_MODES, RECOMPUTE_MODULES
from megaloom.planner.contract.choices import DEFAULT_MODULES, Module, ModuleSet, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.plan_json import layout_to_json


def test_recompute_modes_and_modules_are_those_of_the_dsl() -> None:
    assert tuple(str(mode) for mode in Recompute) == RECOMPUTE_MODES
    assert tuple(str(module) for module in Module) == RECOMPUTE_MODULES
    assert tuple(DEFAULT_MODULES) == CORE


@pytest.mark.parametrize(
    ("given", "same"),
    [(["core_attn"], []), (["moe", "moe_act"], ["moe"]), (["mlp", "layernorm"], ["layernorm", "mlp"])],
)
def test_layouts_that_recompute_equal_modules_are_equal(given: list[str], same: list[str]) -> None:
    plain = Layout(recompute=Recompute.SELECTIVE, recompute_modules=ModuleSet(same))
    for modules in (given, ModuleSet(given)):
        layout = Layout(recompute=Recompute.SELECTIVE, recompute_modules=modules)
        assert layout == plain == Layouts.of([layout])[0]
        assert layout_to_json(layout)["recompute_modules"] == same
