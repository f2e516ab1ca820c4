"""`shard` is a closed enumeration: each place that reads it raises an error for a value that it does not know."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from megaloom.dsl import graph
from megaloom.planner.bounds.base_costs import price_base_layouts
from megaloom.planner.bounds.end_of_step import end_of_step_bound
from megaloom.planner.contract.choices import Overlap, OverlapSet, Shard, default_overlaps
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.model.structure import model_structure
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.neighbours import neighbours
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.variant_choices import shard_choices
from megaloom.planner.simulate.price import end_of_step
from tests.support.exported import case, plan_with

COLUMN = np.zeros(1, dtype=np.int64)
MODEL = case("llama3-8b")[1]
PLAN = plan_with(MODEL, Layout(dp=8, vocab_multiple=1), gpus="8xH100", seq=8192)
GPT2 = case("gpt2")
CACHE = CostCache(model_structure(graph(MODEL)), PLAN.workload, PLAN.cluster, OWN)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Return a layout with a value of `shard` that no place knows."""
    value = int.__new__(Shard, 4)
    value._name_, value._value_ = "REPLICAS", 4
    for known, key in ((Shard._member_map_, "REPLICAS"), (Shard._value2member_map_, 4)):
        monkeypatch.setitem(known, key, value)  # type: ignore[misc]
    monkeypatch.setattr(Shard, "_member_names_", [*Shard._member_names_, "REPLICAS"])
    assert [*Shard][-1] == Shard("replicas")
    return evolve(PLAN.layout, shard=value, overlaps=())


def columns(x: Layout) -> Layouts:
    return Layouts.of([x])


PLACES: dict[str, Callable[[Layout], object]] = {
    "default overlaps": lambda x: default_overlaps(x.shard),
    "default overlaps of columns": lambda x: default_overlaps(columns(x).shard),
    "shards of a dense weight": lambda x: x.dense_shards,
    "shards of an expert weight": lambda x: columns(x).expert_shards,
    "Megatron's distributed optimizer": lambda x: x.distributed_optimizer,
    "layout as text": str,
    "bytes of state": lambda x: state_bytes(1, 1, x, Precision.BF16),
    "end of step": lambda x: end_of_step(1.0, 0.0, 0.0, x, CACHE.job),
    "bound of the end of step": lambda x: end_of_step_bound(columns(x), COLUMN, COLUMN + 1, COLUMN, CACHE, {}),
    "bounds of a search": lambda x: price_base_layouts(columns(x), CACHE),
    "choices of a search": lambda x: shard_choices(True, {"overlaps": OverlapSet([Overlap.WEIGHTS])}),
    "neighbours of a layout": lambda x: [*neighbours(x, Pricer(graph(MODEL), PLAN.cluster, PLAN.workload, OWN), {})],
    "rules": lambda x: violations(evolve(x, overlaps=3), graph(MODEL), PLAN.workload, PLAN.cluster),
    **{f"export to {t}": lambda x, t=t: exported(x, t) for t in Target},
}


def exported(x: Layout, target: Target) -> str:
    """Return the export of a plan with a layout; Accelerate's plugin trains a GPT-2 only."""
    plan, model = GPT2 if target is Target.ACCELERATE else (PLAN, MODEL)
    return export_plan(evolve(plan, layout=evolve(plan.layout, shard=x.shard, overlaps=())), model, target)


@pytest.mark.parametrize("place", PLACES)
def test_a_place_refuses_a_value_that_it_does_not_know(place: str, unknown: Layout) -> None:
    with pytest.raises(KeyError, match=r"replicas|REPLICAS"):
        PLACES[place](unknown)
