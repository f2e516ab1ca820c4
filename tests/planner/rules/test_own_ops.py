"""An op that is not built in is believed in nothing: no axis shards its model, and no figure counts its FLOPs."""

from __future__ import annotations

import pytest
from attrs import evolve, frozen

from megaloom.dsl import (
    Dim,
    Embed,
    Layer,
    Model,
    NextToken,
    Op,
    RMSNorm,
    Shape,
    Unembed,
    Value,
    apply,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import plan_from_json, plan_to_json
from megaloom.planner.contract.plans import PlanError, speed_of
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.search.search import plan

WORK = Workload(seq=64, batch=16)


@frozen
class RunningSum(Op):
    """The sum of all positions so far, which reads along the sequence and does not say so."""

    def shape(self, *args: Shape) -> Shape:
        return args[0]


@frozen
class Summed(Layer):
    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(RunningSum(), x * weight("w", x["embed"]))


def summed() -> Model:
    table = weight("table", Dim("vocab", 256), Dim("embed", 64))
    blocks = repeat(4, residual(RMSNorm(), Summed()))
    return model("summed", ids() >> Embed(table) >> blocks >> Unembed(table) >> NextToken())


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_no_axis_shards_its_model(axis: str) -> None:
    with pytest.raises(UserError, match=rf"RunningSum of summed.0 .* {axis} 2 cannot .*\[own-ops\]\nuse --{axis} 1"):
        plan(summed(), cluster("4xH100"), WORK, ref="", fixed={axis: 2})


def test_dp_and_pp_are_planned_without_figures_of_its_flops() -> None:
    found = plan(summed(), cluster("4xH100"), WORK, ref="", fixed={"pp": 2})
    layouts = [it.layout for it in (found.best, *found.others, *found.variants)]
    assert {(x.tp, x.cp, x.ep, x.etp) for x in layouts} == {(1, 1, 1, 1)}
    best = found.best
    assert (best.predicted.mfu, best.predicted.flops_per_second_per_device, speed_of(best, 1.0).mfu) == (None,) * 3
    assert any("FLOPs of RunningSum (summed.0) are not known" in reason for reason in best.reasons)
    assert plan_from_json(plan_to_json(best), "plan.json") == best


def test_a_plan_that_shards_it_is_not_run() -> None:
    made = plan(summed(), cluster("4xH100"), WORK, ref="", fixed={"dp": 4}).best
    check_plan(made, summed())
    with pytest.raises(PlanError, match=r"cannot shard them.*\[own-ops\]"):
        check_plan(evolve(made, layout=Layout(dp=2, cp=2)), summed())
