"""The search finds the best layout, gives reasons, and explains why there is none."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from megaloom.dsl import Dim, Embed, NextToken, Unembed, ids, model, weight
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Model, graph
from megaloom.examples.gpt2 import gpt, gpt2_xl
from megaloom.examples.llama3 import (
    llama,
    llama3_8b,
    llama3_70b,
    llama3_405b,
)
from megaloom.examples.mixtral import mixtral, mixtral_8x7b
from megaloom.examples.nemotron import nemotron4_15b
from megaloom.examples.stdlib_gpt import stdlib_gpt
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.branch_and_bound import PROVEN_MESHES, SIMULATED, search
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import TIE_RATIO, device_mesh
from megaloom.planner.search.pricing import Pricer, price
from megaloom.planner.search.search import Found, Progress, plan
from megaloom.planner.search.simple_first import NEAR_RATIO, simplicity_order

DENSE = llama("tiny-llama", layers=4, heads=6, kv_heads=3, embed=96, ff=192, vocab=512)
TIED = gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=512, seq=64)
SPARSE = mixtral("tiny-mixtral", layers=2, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512)
WORK = Workload(seq=48, batch=24)


def small(name: str, mib: int) -> Cluster:
    """Devices with just so much memory for tensors."""
    machine = cluster(name)
    device = evolve(machine.device, name="small", nbytes=mib * 2**20, context_nbytes=0, library_nbytes=0)
    links = {side: evolve(getattr(machine, side), group_nbytes=0, peer_nbytes=0) for side in ("intra", "inter")}
    return evolve(machine, device=device, **links)


def planned(model: Model, machine: str | Cluster, work: Workload = WORK, **fixed: Any) -> Found:
    where = cluster(machine) if isinstance(machine, str) else machine
    return plan(model, where, work, ref="tests:model", fixed=fixed)


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        (DENSE, small("4xH100", 8)),
        (SPARSE, small("4xH100", 40)),
        (DENSE, cluster("2xCPU")),
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)
def test_nothing_legal_that_fits_is_quicker(model: Model, machine: Cluster) -> None:
    pricer = Pricer(graph(model), machine, WORK)
    candidates = Candidates(pricer, {})
    lower_bounds = LowerBounds(candidates.base_layouts, pricer.cost_cache)
    every_base = np.arange(len(candidates.base_layouts))
    layouts, base = candidates.space.variants(candidates.base_layouts, lower_bounds.module_sets(every_base))
    legal = [layouts[i] for i in range(len(layouts))]
    assert len(legal) == candidates.count
    assert not any(violations(x, pricer.graph, WORK, machine) for x in legal)
    worth = lower_bounds.worth_recomputing(layouts, base)
    fitting = [p for x, w in zip(legal, worth, strict=True) if w and (p := pricer.price(x)).partition.fits]
    every = sorted(p.seconds for p in fitting)
    best = [(p.seconds, device_mesh(p.layout)) for p in search(candidates)]
    assert len(every) > 2
    assert best[0][0] == every[0]
    meshes = {device_mesh(p.layout) for p in fitting}
    quickest = sorted(min(p.seconds for p in fitting if device_mesh(p.layout) == one) for one in meshes)
    assert (
        sorted(min(t for t, other in best if other == one) for one in {one for _, one in best})[:PROVEN_MESHES]
        == quickest[:PROVEN_MESHES]
    )
    assert len(every) < len(legal)  # the memory ruled some out
    found = planned(model, machine)
    assert every[0] <= found.fastest.predicted.step_seconds <= TIE_RATIO * every[0]
    assert found.best is found.recommended
    assert every[0] <= found.best.predicted.step_seconds <= NEAR_RATIO * every[0]
    orders = [simplicity_order(p.layout, machine) for p in fitting if p.seconds <= NEAR_RATIO * every[0]]
    assert simplicity_order(found.best.layout, machine) == min(orders)


LARGE = [llama3_8b(), mixtral("m", 8, 32, 8, 4096, 14336)]
LONG = Workload(seq=4096, batch=48)


@cache
def on_two_nodes(model: Model) -> Found:
    return planned(model, "16xH100", LONG)


@pytest.mark.parametrize("model", LARGE, ids=lambda m: str(m.name))
def test_what_is_found_is_legal_and_fits(model: Model) -> None:
    got = on_two_nodes(model)
    plans = sorted([got.best, *got.others, *got.variants], key=lambda p: p.predicted.step_seconds)
    assert len(plans) == SIMULATED
    for p in plans:
        assert not violations(p.layout, graph(model), LONG, p.cluster)
        assert max(sum(nbytes.values()) for nbytes in p.predicted.nbytes) < p.cluster.device.nbytes
        assert p.fingerprint == fingerprint(model)
        assert p.reasons
    steps = [p.predicted.step_seconds for p in plans]
    assert got.best.predicted.step_seconds <= NEAR_RATIO * min(steps)
    assert got.fastest.predicted.step_seconds <= TIE_RATIO * min(steps)
    assert len({p.layout for p in plans}) == SIMULATED


@pytest.mark.parametrize("model", LARGE, ids=lambda m: str(m.name))
def test_the_next_best_deal_the_devices_in_another_way(model: Model) -> None:
    got = on_two_nodes(model)
    shown = [got.best, *got.others]
    assert len({device_mesh(p.layout) for p in shown}) == len(shown) >= PROVEN_MESHES
    steps = [p.predicted.step_seconds for p in shown]
    slower = [seconds for seconds in steps if seconds > NEAR_RATIO * min(steps)]
    assert slower == sorted(slower) == steps[len(steps) - len(slower) :]
    for p in got.variants:
        best = next(other for other in shown if device_mesh(other.layout) == device_mesh(p.layout))
        assert best.predicted.step_seconds <= NEAR_RATIO * p.predicted.step_seconds


def test_the_simplest_of_nearly_equal_layouts_is_recommended() -> None:
    """Nemotron-4 15B on 32 H100: tp alone is as fast as tp and pp."""
    work = Workload(seq=4096, batch=128)
    simple, fast = (
        plan(nemotron4_15b(), cluster("32xH100"), work, ref="m", fastest=fastest) for fastest in (False, True)
    )
    assert simple.best is simple.recommended and fast.best is fast.fastest
    assert simple.best.layout == fast.recommended.layout != fast.best.layout == simple.fastest.layout
    orders = [simplicity_order(found.best.layout, found.best.cluster) for found in (simple, fast)]
    assert orders[0] < orders[1]
    assert 1 < simple.best.predicted.step_seconds / fast.best.predicted.step_seconds <= NEAR_RATIO
    first, other = simple.best.reasons[0], fast.best.reasons[0]
    assert re.search(r" It is 0\.\d% slower than the fastest of [\d,]+ legal layouts \(", first)
    assert f"legal layouts ({fast.best.layout}), and" in first
    assert ", and simpler: tp 2 instead of tp 2, pp 2. The model cannot tell the two apart" in first
    assert ", the fastest of" in other and "The model cannot tell it apart from" in other
    assert simple.others[0].layout == fast.best.layout
    assert simple.others[0].reasons[0].startswith("The model cannot tell it apart from dp16 tp2")


def test_of_one_way_the_next_best_are_its_variants() -> None:
    got = planned(llama3_8b(), "8xH100", Workload(seq=8192, batch=64), tp=2, pp=2, cp=1, dp=2)
    assert len(got.others) > PROVEN_MESHES
    assert {device_mesh(p.layout) for p in (got.best, *got.others)} == {(2, 2, 2, 1, 1, 1)}
    assert got.variants == ()


def test_of_layouts_as_quick_the_simpler_wins() -> None:
    got = planned(stdlib_gpt(), "1xCPU", Workload(seq=64, batch=1, precision=Precision.FP32))
    assert got.best.layout == Layout()


def test_processes_on_a_cpu() -> None:
    got = planned(stdlib_gpt(), "4xCPU", Workload(seq=256, batch=32, precision=Precision.FP32))
    assert got.best.layout.world == 4
    assert got.best.layout.dp == 4  # links are slow, the model is small
    assert "gradient communication" in got.best.predicted.breakdown


def test_what_is_fixed_stays() -> None:
    fixed = {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": Recompute.FULL, "micro_batch": 3, "vpp": 2}
    got = planned(TIED, "8xH100", WORK, **fixed)
    for p in (got.best, *got.others, *got.variants):
        assert {name: getattr(p.layout, name) for name in fixed} == fixed
        assert p.layout.recompute is Recompute.FULL
    whole = evolve(got.best.layout, dp=1, cp=2)
    only = planned(TIED, "8xH100", WORK, **{name: getattr(whole, name) for name in FIELDS})
    assert only.best.layout == whole
    assert only.others == ()


def test_rules_that_fixed_values_break_are_all_named() -> None:
    with pytest.raises(UserError) as raised:
        planned(DENSE, "8xH100", WORK, tp=4, vpp=2, pp=1)
    text = str(raised.value)
    for rule in ("tp-heads", "tp-kv-heads", "vpp-pp"):
        assert f"[{rule}]" in text
    assert "instead of --tp 4" in text
    assert "--tp 4 --vpp 2 --pp 1" in text


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tpp": 2}, "a layout has no 'tpp'"),
        ({"tp": "2"}, "tp must be a whole number, got '2'"),
        ({"sequence_parallel": 1}, "sequence-parallel must be true or false, got 1"),
        ({"recompute": "some"}, "none, selective, full"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"dp": 5}, "dp 5"),
    ],
)
def test_what_cannot_be_fixed(fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(DENSE, "8xH100", WORK, **fixed)


def test_as_many_are_shown_as_are_asked_for() -> None:
    """Other device meshes come first; on a prime number of devices there are few, so variants of them follow."""
    got = planned(DENSE, "7xH100", Workload(seq=256, batch=14))
    assert len(got.others) < 4 <= len(got.variants)
    for count in range(6):
        shown = got.next(count)
        assert len(shown) == count and [p for p in shown if p in got.others] == [*got.others[:count]]
        assert [*shown] == sorted(shown, key=lambda p: p.predicted.step_seconds)


def test_when_nothing_fits_the_nearest_miss_is_told() -> None:
    with pytest.raises(UserError) as raised:
        planned(llama3_70b(), "8xH100", Workload(seq=4096, batch=64))
    text = str(raised.value)
    assert "no layout of llama3-70b on 8xH100 fits the memory" in text
    assert "each device needs" in text  # its layout has no pipeline
    assert "GiB more than" in text
    assert "\n--gpus 16xH100 fits: " in text
    assert "\n--gpus 8xB200 fits: " in text
    for message in re.findall(r"fits: (.*)", text):  # as one would lay it out: tensor parallelism stays in a node
        assert all(int(tp) <= 8 for tp in re.findall(r"tp(\d+)", message))


def test_however_many_devices_it_takes() -> None:
    with pytest.raises(UserError, match=r"\n--gpus 96xH100 fits: "):
        planned(llama3_405b(), "1xH100", Workload(seq=4096, batch=1))


def test_every_kind_of_change_is_tried() -> None:
    def missed(machine: str, seq: int = 4096, headroom: float = 0.05, **fixed: Any) -> str:
        work = Workload(seq=seq, batch=16)
        with pytest.raises(UserError) as raised:
            plan(llama3_8b(), cluster(machine), work, ref="tests:model", fixed=fixed, headroom=headroom)
        return str(raised.value)

    assert re.search(r"\n--memory-headroom \d+% fits: ", missed("2xH100", headroom=0.8))
    assert re.search(r"\n--gpus 1xB\d00 fits: mbs1", missed("1xH100"))
    assert re.search(r"\n--seq \d+ fits: ", missed("8xH100", seq=2**20))
    both = missed("2xH100", headroom=0.2, tp=1, pp=1)
    assert "on 2xH100 with --tp 1 --pp 1 fits the memory" in both
    assert "\n--gpus 4xH100 fits: dp4 " in both


def test_freeing_what_is_fixed_is_the_smallest_change() -> None:
    with pytest.raises(UserError, match=r"\n--recompute selective instead of --recompute none fits: mbs1 recompute"):
        planned(DENSE, small("1xH100", 17), Workload(seq=768, batch=1), recompute="none")


def test_neighbours_that_cannot_be_had_have_a_cause() -> None:
    got = plan(llama3_8b(), cluster("8xH100"), Workload(seq=8192, batch=64), ref="tests:model", fixed={"pp": 2})
    causes = {str(r.layout): r.cause for r in got.rejected}
    assert any("pipeline rank" in cause and "GiB more" in cause for cause in causes.values())
    assert all("[" in cause or "more than" in cause for cause in causes.values())
    assert not {r.layout for r in got.rejected} & {got.best.layout}


def test_the_reasons_have_numbers() -> None:
    best = planned(llama3_8b(), "8xH100", Workload(seq=8192, batch=64)).best
    assert str(best.layout) in best.reasons[0]
    assert "MFU" in best.reasons[0]
    assert "legal layouts" in best.reasons[0]
    assert "of the step is computation" in best.reasons[1]
    assert "GiB" in best.reasons[2]
    assert len(best.reasons) > 4
    assert all(" slower: " in reason for reason in best.reasons[3:])


def test_a_plan_with_sharded_weights_says_what_they_gain() -> None:
    one = DENSE, small("4xH100", 4), Workload(seq=128, batch=4)
    assert planned(*one).best.reasons[1].startswith("Without sharded gradients and weights the best layout (")
    assert not planned(*one, shard="weights").best.reasons[1].startswith("Without")


def test_what_sharded_weights_gain_is_counted_from_the_best_without() -> None:
    fixed: dict[str, Any] = {"tp": 4, "pp": 1, "ep": 8}
    work, options = Workload(seq=2048, batch=128), {"ref": "tests:model", "runtime": Runtime.MEGATRON}
    reason = plan(mixtral_8x7b(), cluster("16xH100"), work, **options, fixed=fixed).best.reasons[1]
    fixed["shard"] = "optimizer"
    without = plan(mixtral_8x7b(), cluster("16xH100"), work, **options, fixed=fixed).fastest.layout
    assert reason.startswith(f"Without sharded gradients and weights the best layout ({without}) is ")


def test_a_plan_that_needs_sharded_weights_says_what_others_lack() -> None:
    best = planned(DENSE, small("2xH100", 5), Workload(seq=128, batch=4), dp=2).best
    assert "Without sharded gradients and weights no layout fits the memory. Of the nearest" in best.reasons[1]


def test_progress_begins_early_and_ends_with_the_best() -> None:
    reports: list[Progress] = []
    got = plan(
        llama3_8b(), cluster("64xH100"), Workload(seq=8192, batch=256), ref="tests:model", on_progress=reports.append
    )
    steps = [p.seconds for p in reports]
    assert steps == sorted(steps, reverse=True)
    assert reports[0].lower_bound == 0  # before all layouts are known
    assert [p.lower_bound for p in reports] == sorted(p.lower_bound for p in reports)
    assert 0 <= reports[-1].gap <= reports[1].gap < 1
    assert steps[-1] == min(p.predicted.step_seconds for p in (got.best, *got.others, *got.variants))
    assert got.gap is None


def test_a_published_choice_is_near_the_top() -> None:
    """GPT-2 XL on one node trains with data parallelism alone."""
    got = planned(gpt2_xl(), "8xH100", Workload(seq=1024, batch=512))
    assert got.best.layout.dp * got.best.layout.cp == 8


def test_a_model_with_nothing_to_recompute_has_a_plan() -> None:
    table = weight("table", Dim("vocab", 256), Dim("embed", 64))
    bigram = model("bigram", ids() >> Embed(table) >> Unembed(table) >> NextToken())
    assert planned(bigram, "8xH100").best.layout.world == 8
    with pytest.raises(UserError, match="recompute"):
        planned(bigram, "8xH100", recompute="full")


def test_very_long_sequences_are_quicker_over_cp() -> None:
    """Llama 3 8B on 131,072 tokens: cp beside tp, not sequence parallelism over tp alone."""
    g, machine = graph(llama3_8b()), cluster("64xH100")
    work = Workload(seq=131_072, batch=16)
    sequence = Layout(tp=8, sequence_parallel=True, dp=8, shard="optimizer", recompute="full")
    context = evolve(sequence, tp=2, cp=8, dp=4)
    over_tp, over_cp = (price(g, x, machine, work).prediction for x in (sequence, context))
    assert over_cp.step_seconds < over_tp.step_seconds
