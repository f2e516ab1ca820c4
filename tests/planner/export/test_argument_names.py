"""Every name that an export writes is an argument of the target, in each release that the export is for.

`tests/data/argument_names.tsv` has the names of all arguments with their releases, and `megatron_lm_flags.txt` those of
Megatron-LM's command line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from megaloom.dsl import UserError
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.megatron_bridge import VERSIONS
from megaloom.planner.export.target import Target
from tests.support.export_matrix import MATRIX, planned
from tests.support.exported import bridge_fields, parsed, titan_fields
from tests.support.paths import TESTS

RELEASES = {
    Target.MEGATRON_BRIDGE: ("0.3.1", "0.4.2", "0.5.1", "0.6.0"),
    Target.TORCHTITAN: ("0.2.2",),
    Target.TORCHTITAN_0_3: ("0.3.0",),
    Target.ACCELERATE: ("1.15.0",),
}
CLAIMED = {
    Target.MEGATRON_BRIDGE: VERSIONS.replace(" to ", "|"),
    Target.TORCHTITAN: r"torchtitan 0\.2\.2",
    Target.TORCHTITAN_0_3: r"torchtitan 0\.3\.0",
    Target.ACCELERATE: r"Accelerate 1\.15\.0",
}
"""The releases that an export says it is for."""


@cache
def releases() -> Mapping[tuple[str, str], frozenset[str]]:
    """Return the releases that have a name: (target, name) → releases."""
    lines = (TESTS / "data" / "argument_names.tsv").read_text().splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {(target, name): frozenset(versions.split()) for target, name, versions, _ in rows}


def names(target: Target, text: str) -> Iterator[str]:
    """Yield the names of the arguments in an export."""
    if target is Target.MEGATRON_BRIDGE:
        yield from bridge_fields(text)
    elif target is Target.TORCHTITAN_0_3:
        yield from titan_fields(text)
    else:
        yield from _leaves(tomllib.loads(text) if target is Target.TORCHTITAN else yaml.safe_load(text))


def _leaves(tree: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield section + key


@pytest.mark.parametrize("target", RELEASES)
def test_every_name_that_is_written_exists(target: Target) -> None:
    written: set[str] = set()
    for name in MATRIX:
        plan, model = planned(name)
        try:
            text = export_plan(plan, model, target)
        except UserError:
            continue
        assert re.search(CLAIMED[target], text)
        written |= {*names(target, text)}
    assert len(written) > 15
    needed = frozenset(RELEASES[target])
    assert {name: releases().get((target, name)) for name in written if not needed <= releases()[target, name]} == {}


def test_every_option_that_is_written_exists() -> None:
    for name in MATRIX:
        plan, model = planned(name)
        try:
            text = export_plan(plan, model, Target.MEGATRON_LM)
        except UserError:
            continue
        assert parsed(text)


def test_a_name_of_another_release_is_missed() -> None:
    assert releases()["megatron-bridge", "dist.lazy_init"] < frozenset(RELEASES[Target.MEGATRON_BRIDGE])
    assert ("torchtitan", "training.num_tokens_per_train_step") not in releases()
