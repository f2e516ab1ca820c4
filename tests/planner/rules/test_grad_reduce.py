"""Gradients in bf16: where they may be, what they hold and cost, and that a plan has them only where the user asks."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama
from megaloom.planner.contract.choices import GradReduce, OverlapSet
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import plan_from_json, plan_to_json
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.cost.profiles.flag_features import MOMENTS_16
from megaloom.planner.cost.profiles.frameworks import MEGATRON, PROFILES
from megaloom.planner.cost.profiles.groups import compose
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import plan
from tests.support.exported import plan_with

BF16 = GradReduce.BF16
MODEL = llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512)
LLAMA = find("llama3-8b")[0]
MACHINE, WORK = cluster("8xH100"), Workload(seq=128, batch=16)


def test_only_weights_in_bf16_have_gradients_in_bf16() -> None:
    for precision in Precision:
        work = Workload(seq=128, batch=16, precision=precision)
        broken = [str(v) for v in violations(Layout(dp=8, grad_reduce=BF16), graph(MODEL), work, MACHINE)]
        refused = "`--grad-reduce bf16` needs weights in bf16, and `--precision {} has none [grad-reduce]\n{}"
        due = refused.format(f"{precision}`", "use --grad-reduce fp32, or --precision bf16")
        told = [line for line in broken if "grad-reduce" in line]
        assert told == ([due] if precision in (Precision.FP32, Precision.FP16) else [])


def test_a_gradient_holds_two_bytes_and_the_step_copies_its_shard() -> None:
    layout = Layout(dp=4, shard="optimizer", grad_reduce=BF16)
    state = state_bytes(1000, 0, layout, Precision.BF16)
    assert (state.weights, state.gradients, state.optimizer, state.step) == (2000, 2000, 3000, 1000)
    assert state_bytes(1000, 0, evolve(layout, shard="none"), Precision.BF16).step == 4000
    assert state_bytes(1000, 0, evolve(layout, grad_reduce="fp32"), Precision.BF16).step == 0
    precise = compose("precise", [MOMENTS_16], MEGATRON)
    assert state_bytes(1000, 0, layout, Precision.BF16, precise).step == 0


@pytest.mark.parametrize("runtime", Runtime)
def test_reductions_move_half_the_bytes(runtime: Runtime) -> None:
    pricer = Pricer(graph(LLAMA), MACHINE, Workload(seq=4096, batch=8), PROFILES[runtime])
    layout = Layout(dp=8, shard="optimizer", overlaps=OverlapSet())
    wide, narrow = (pricer.price(evolve(layout, grad_reduce=x)) for x in GradReduce)
    gathering = wide.ends_of_step[0].gathering
    assert narrow.ends_of_step[0].gathering == gathering
    assert narrow.ends_of_step[0].reduction == pytest.approx(wide.ends_of_step[0].reduction / 2, rel=1e-3)
    assert narrow.seconds < wide.seconds
    held = [priced.prediction.nbytes[0]["gradients"] for priced in (wide, narrow)]
    assert held[0] == 2 * held[1]


@pytest.mark.parametrize("runtime", Runtime)
def test_the_search_takes_what_the_user_gives_and_its_bounds_hold(runtime: Runtime) -> None:
    pricer = Pricer(graph(MODEL), MACHINE, WORK, PROFILES[runtime])
    candidates = Candidates(pricer, {"grad_reduce": BF16, "cp": 1})
    candidates.bound_all()
    bounded = candidates.variants(np.arange(len(candidates.base_layouts)))
    some = range(0, len(bounded), max(1, len(bounded) // 40))
    assert (bounded.layouts.grad_reduce == BF16).all()
    for i in some:
        priced = pricer.price(bounded.layouts[i])
        assert bounded.seconds[i] <= priced.seconds * (1 + 1e-9)
        peak = max(sum(held.values()) for held in priced.prediction.nbytes)
        assert bounded.nbytes[i] <= peak + len(priced.prediction.nbytes[0])  # each holder has whole bytes
    found = [plan(MODEL, MACHINE, WORK, ref="m", runtime=runtime, fixed=x) for x in ({}, {"grad_reduce": BF16})]
    assert [result.best.layout.grad_reduce for result in found] == [GradReduce.FP32, BF16]
    best = min(pricer.price(bounded.layouts[i]).seconds for i in some)
    assert found[1].fastest.predicted.step_seconds <= best * (1 + 1e-9)


def test_a_plan_says_so_and_every_export_writes_or_refuses_it() -> None:
    made = plan_with(MODEL, Layout(dp=8, vocab_multiple=1, shard="optimizer", grad_reduce=BF16), gpus="8xH100", seq=128)
    assert plan_from_json(plan_to_json(made), "p.json") == made
    assert str(made.layout) == "dp8 mbs1 dist-opt vocab multiple 1 bf16 gradients"
    assert "  --grad-reduce-in-bf16\n" in export_plan(made, MODEL, Target.MEGATRON_LM)
    assert "grad_reduce_in_fp32=False" in export_plan(made, MODEL, Target.MEGATRON_BRIDGE)
    with pytest.raises(UserError, match=r"bf16 gradients: .*in fp32 only(.|\n)*--grad-reduce fp32"):
        export_plan(made, LLAMA, Target.TORCHTITAN)
    gpt2 = find("gpt2")[0]
    of_gpt2 = plan_with(gpt2, Layout(dp=8, grad_reduce=BF16), gpus="8xH100", seq=1024)
    assert '"grad_reduce_in_bf16": True' in export_plan(of_gpt2, gpt2, Target.ACCELERATE)
