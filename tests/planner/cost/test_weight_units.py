"""Sharded weights: bytes of state, seconds of gathers and reductions, transient bytes, and what a search gains."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.dsl.node import Slot
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.planner import cluster
from megaloom.planner.contract.choices import ExpertShard, Recompute, Reshard, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.plan_json import layout_to_json
from megaloom.planner.contract.structured import StructureError, structured
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.cost.columns import CostColumn
from megaloom.planner.cost.communication import (
    ProcessGroup,
    collective_seconds,
    process_group,
    state_collective_seconds,
)
from megaloom.planner.cost.cost_table import cost_table
from megaloom.planner.cost.measured_memory import held_bytes
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import plan as search
from megaloom.planner.simulate.memory_timeline import memory_tracks
from megaloom.planner.simulate.price import end_of_step
from tests.support.profiles import changed

MODELS = {
    "dense": llama("dense", layers=4, heads=8, kv_heads=4, embed=256, ff=512, vocab=2048),
    "tied": gpt("tied", layers=4, heads=4, embed=64, vocab=512, seq=64),
    "sparse": mixtral("sparse", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512),
}
FULL = [("gradients", "micro-batch"), ("weights", "micro-batch"), ("weights", "step")]
N = st.integers(0, 10**12)


def elements(slot: Slot) -> int:
    return prod(d.known for d in slot.dims)


def pricer(name: str, gpus: str = "8xH100", batch: int = 32) -> Pricer:
    return Pricer(graph(MODELS[name]), cluster(gpus), Workload(seq=64, batch=batch))


@given(N, st.integers(2, 4096))
def test_bytes_of_a_parameter(n: int, dp: int) -> None:
    """The table of ZeRO: arXiv:1910.02054, figure 1, with gradients in fp32. The fp32 shard is the master weight."""
    due = {
        ("none", "micro-batch"): (2 + 4 + 12, 0),
        ("optimizer", "micro-batch"): (2 + 4, 12),
        ("gradients", "micro-batch"): (2, 16),
        ("weights", "micro-batch"): (0, 16),
        ("weights", "step"): (2 + 4, 12),
    }
    for (shard, reshard), (whole, shared) in due.items():
        state = state_bytes(n, 0, Layout(dp=dp, shard=shard, reshard=reshard), Precision.BF16)
        assert 0 <= state.total - whole * n - shared * n / dp < 4
    # Megatron-FSDP keeps a 16-bit shard beside that in fp32.
    state = state_bytes(n, 0, Layout(dp=dp, shard="weights"), Precision.BF16, MEGATRON)
    assert 0 <= state.total - 18 * n / dp < 4


def test_experts_may_have_a_value_of_their_own() -> None:
    """State, gathers and the end of the step are those of one value for dense weights, and of the other for experts."""
    priced, n, q = pricer("sparse"), 10**9 + 7, 10**8 + 1
    dense, experts = (Layout(dp=8, ep=2, shard=shard) for shard in ("optimizer", "weights"))
    both = evolve(dense, expert_shard="weights")
    assert both.fsdp and not both.distributed_optimizer
    state = state_bytes(n, q, both, Precision.BF16).total
    assert state == sum(state_bytes(*x, Precision.BF16).total for x in ((n, 0, dense), (0, q, experts)))
    waits = {x: priced.partition(x).waiting.sum() for x in (dense, both, experts)}
    assert waits[dense] == 0 < waits[both] < waits[experts]
    job = priced.cost_cache.job
    ends = [end_of_step(*x, job) for x in ((n, 0, 0.0, dense), (0, q, 0.0, experts), (n, q, 0.0, both))]
    assert ends[2].gathering == ends[0].gathering + ends[1].gathering
    assert ends[2].reduction == ends[0].reduction + ends[1].reduction
    gathered = [Layout(dp=8, ep=2, shard="weights", expert_shard=shard) for shard in ("optimizer", "weights")]
    units = [(cost_table(job, x).units, x) for x in (both, *gathered)]
    largest = [one.gathered_nbytes(x, job) for one, x in units if one is not None]
    assert largest[0] > 0 and largest[2] >= max(largest[:2])


def test_a_value_of_experts_that_all_weights_have_is_none_of_their_own() -> None:
    alone, own = Layout(dp=2, shard="weights"), Layout(dp=2, shard="weights", expert_shard="weights")
    assert own == alone and str(own) == str(alone)
    other = evolve(own, expert_shard="optimizer")
    assert str(other) == "dp2 mbs1 shard weights, of experts optimizer" and Layouts.of([other])[0] == other
    assert layout_to_json(other) == layout_to_json(own) | {"expert_shard": "optimizer"}
    assert structured(layout_to_json(other), Layout) == other and structured(layout_to_json(own), Layout) == own
    with pytest.raises(StructureError, match="expert_shard must be one of same, none, optimizer"):
        structured({**layout_to_json(own), "expert_shard": 3}, Layout)


@pytest.mark.parametrize(("shard", "reshard"), FULL)
def test_state_of_many_layouts_is_that_of_each(shard: str, reshard: str) -> None:
    layouts = [Layout(dp=dp, ep=ep, shard=shard, reshard=reshard) for dp in (2, 4, 8) for ep in (1, 2)]
    elements = np.full(len(layouts), 10**9 + 7), np.full(len(layouts), 10**8 + 1)
    columns = state_bytes(*elements, Layouts.of(layouts), Precision.BF16, frozen_params=elements[1])
    each = [state_bytes(10**9 + 7, 10**8 + 1, x, Precision.BF16, frozen_params=10**8 + 1) for x in layouts]
    for holder in ("weights", "gradients", "optimizer", "step"):
        assert getattr(columns, holder).tolist() == [getattr(one, holder) for one in each]


@pytest.mark.parametrize("name", MODELS)
def test_passes_wait_for_what_their_computation_does_not_hide(name: str) -> None:
    """Per micro-batch: a gather of each unit for each pass, and a reduction. A pass takes the longer of both."""
    priced, x = pricer(name), Layout(dp=8, micro_batch=1, shard="weights")
    placed, plain = priced.partition(x), priced.partition(evolve(x, shard="optimizer"))
    (forward,), (backward,) = placed.waiting.T
    assert 0 < forward < backward
    job, group = priced.cost_cache.job, process_group("dp", x)
    params = sum(map(elements, graph(MODELS[name]).weights.values()))
    whole = collective_seconds("all_gather", job.cluster, (2 * params, group))
    assert placed.forward_seconds[0] == forward + plain.forward_seconds[0] >= whole
    assert not plain.waiting.any()


def test_weights_that_stay_gathered_for_a_step_cost_what_the_distributed_optimizer_does() -> None:
    priced, x = pricer("dense"), Layout(dp=8, shard="optimizer")
    ours, step = priced.price(x), priced.price(evolve(x, shard="weights", reshard="step"))
    assert step.prediction.breakdown["gradient communication"] == ours.prediction.breakdown["gradient communication"]
    # Only with DDP do products add to main gradients; here a kernel adds each gradient, in 1.7 passes.
    products = priced.cost_table(x).stage_sums([0, len(priced.graph.nodes)])[0, CostColumn.FUSED_PARAMS]
    moved = 4 * products * (1.7 * (2 + 4 + 4) - (4 + 4))
    seconds = step.prediction.breakdown["sharded-weight communication"]
    assert seconds == pytest.approx(moved / priced.cluster.device.moves)


@pytest.mark.parametrize(("batch", "shard"), [(8, "weights"), (32, "weights"), (32, "gradients")])
def test_gradients_that_are_reduced_are_cast_and_freed(batch: int, shard: str) -> None:
    """FSDP reads a bf16 gradient and writes an fp32 one; from the second micro-batch on a shard is added to another."""
    priced, m = pricer("dense", "2xH100", batch), batch // 2
    cast = evolve(priced, profile=changed(OWN, sharded_weights={"frees_gradients": False}))
    x = Layout(dp=2, shard=shard)
    ours, as_ddp = priced.price(x).prediction.breakdown, cast.price(x).prediction.breakdown
    params = graph(MODELS["dense"]).weights.values()
    products = priced.cost_table(x).stage_sums([0, len(priced.graph.nodes)])[0, CostColumn.FUSED_PARAMS]
    moved = m * products * (1.7 * (2 + 4) - (4 + 4)) + (m - 1) * products * 3 * 4 / 2
    name, moves = "sharded-weight communication", priced.cluster.device.moves
    assert ours[name] - as_ddp[name] == pytest.approx(moved / moves)
    zeroed = 4 * sum(map(elements, params)) + (shard == "weights") * 6 * sum(map(elements, params)) / 2
    assert as_ddp["optimizer"] - ours["optimizer"] == pytest.approx(zeroed / moves)


def test_sharded_gradients_gather_weights_once_and_reduce_in_each_micro_batch() -> None:
    priced = pricer("dense")
    (forward,), (backward,) = priced.partition(Layout(dp=8, shard="gradients")).waiting.T
    assert forward == 0 < backward


def test_experts_are_shared_by_their_own_copies() -> None:
    """With ep 8 of 8 devices an expert has no second copy: nothing of it is gathered."""
    x = Layout(dp=8, ep=4, shard="weights")
    assert (x.dense_shards, x.expert_shards) == (8, 2)
    g = graph(find("mixtral-8x7b")[0])
    many, few = (Pricer(g, cluster("8xH100"), Workload(seq=4096, batch=8)).price(evolve(x, ep=ep)) for ep in (8, 1))
    name = "sharded-weight communication"
    assert many.prediction.breakdown[name] < few.prediction.breakdown[name] / 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("shard", "reshard"), FULL)
def test_the_largest_unit_is_held_beside_the_state(name: str, shard: str, reshard: str) -> None:
    """Its weights, those of the next one, its gradients and the fp32 copy that is reduced: 2 + 2 + 2 + 4 bytes."""
    priced = pricer(name)
    x = Layout(dp=8, shard=shard, reshard=reshard)
    layouts = (x, evolve(x, shard="none", reshard="micro-batch"))
    workspace = [cost_table(priced.cost_cache.job, y).workspace for y in layouts]
    nodes = graph(MODELS[name]).nodes
    outside = [sum(map(elements, n.weights)) for n in nodes if n.block is None]
    numbers = {n.block for n in nodes} - {None}
    blocks = [sum(elements(s) for n in nodes if n.block == b for s in n.weights) for b in numbers]
    extra = workspace[0] - workspace[1]
    if name == "dense":
        assert extra == (10 if (shard, reshard) == FULL[1] else 6) * max(*outside, *blocks)
    assert 0 < extra <= 12 * (max(*outside, *blocks) + max(outside))


def test_what_sharding_gains_on_two_nodes() -> None:
    """Llama 3 70B on 16 H100: 18 bytes a parameter are 73.9 GiB of 75.1, 16 are 65.7."""
    x = Layout(dp=4, tp=4, sequence_parallel=True, recompute="full", shard="weights")
    priced = Pricer(graph(find("llama3-70b")[0]), cluster("16xH100"), Workload(seq=8192, batch=64)).price(x)
    held = priced.prediction.nbytes[0]
    state = sum(held[holder] for holder in ("weights", "gradients", "optimizer"))
    assert state / 2**30 == pytest.approx(65.7, abs=0.1)
    assert priced.partition.fits


def test_a_choice_has_the_name_of_the_command_line() -> None:
    assert [str(x) for x in Reshard] == ["micro-batch", "step"]
    assert [str(x) for x in Shard] == ["none", "optimizer", "gradients", "weights"]
    assert str(Layout(dp=2, shard="weights", reshard="step")) == "dp2 mbs1 shard weights, reshard each step"


def test_replicas_share_state_among_fewer_and_add_up_their_parts() -> None:
    """8 ranks in 2 replicas: state of 4 ranks each, their collectives, and an all-reduce of a quarter over 2."""
    one, two = Layout(dp=4, shard="weights"), Layout(dp=8, shard="weights", replicas=2)
    assert state_bytes(1000, 0, one, Precision.BF16) == state_bytes(1000, 0, two, Precision.BF16)
    assert process_group("dp", two) == process_group("dp", one)
    work = pricer("dense").cost_cache.job
    parts = (4e6, process_group("dp", two))
    quarter = (1e6, ProcessGroup(2, 4))
    for kind, more in (
        ("all_gather", 0.0),
        ("reduce_scatter", collective_seconds("all_reduce", work.cluster, quarter)),
    ):
        took = state_collective_seconds(kind, work.cluster, two, parts)
        assert took == pytest.approx(collective_seconds(kind, work.cluster, parts) + more, rel=1e-12)
    slow, fast = (pricer("dense").price(evolve(two, replicas=n)).prediction.step_seconds for n in (2, 1))
    assert slow != fast


def test_a_search_with_replicas_shards_weights() -> None:
    model = MODELS["dense"]
    work, fixed = Workload(seq=64, batch=32), {"replicas": 2}
    made = search(model, cluster("8xH100"), work, ref="", fixed=fixed, runtime=Runtime.MEGATRON, fastest=True)
    x = made.best.layout
    assert x.replicas == 2 and x.shard is Shard.WEIGHTS and x.dense_shards == x.dp * x.cp // 2
    assert made.best.predicted.step_seconds == min(p.predicted.step_seconds for p in (made.best, *made.others))


def test_a_search_with_a_value_of_experts_meets_each_layout_once() -> None:
    """Experts of the plan have the fixed value and several copies; where all weights have it, it is none of its own."""
    work, fixed = Workload(seq=64, batch=32), {"expert_shard": ExpertShard.OPTIMIZER}
    candidates = Candidates(Pricer(graph(MODELS["sparse"]), cluster("8xH100"), work), fixed)
    bounded = candidates.bound_all() and candidates.variants(np.arange(len(candidates.base_layouts)))
    layouts = bounded.layouts.each(np.arange(len(bounded)))
    assert len({*layouts}) == len(layouts) > 0
    assert {(x.shard, x.expert_shard) for x in layouts} == {
        (Shard.OPTIMIZER, ExpertShard.SAME),
        (Shard.GRADIENTS, ExpertShard.OPTIMIZER),
        (Shard.WEIGHTS, ExpertShard.OPTIMIZER),
    }
    assert all(x.edp > 1 and not violations(x, graph(MODELS["sparse"]), work, cluster("8xH100")) for x in layouts)
    for more in ({}, {"shard": "optimizer"}):
        own = {"expert_shard": "weights", **more}
        made = search(MODELS["sparse"], cluster("8xH100"), work, ref="", fixed=own, fastest=True)
        assert made.best.layout.shard_of_experts is Shard.WEIGHTS
        assert made.best.predicted.step_seconds == min(p.predicted.step_seconds for p in (made.best, *made.others))
    with pytest.raises(UserError, match="use --expert-shard same instead of --expert-shard weights"):
        search(MODELS["dense"], cluster("8xH100"), work, ref="", fixed={"expert_shard": "weights"})


def test_with_one_micro_batch_gradients_come_after_the_fullest_moment() -> None:
    """Llama 3 8B on two H200, 2,048 tokens, micro-batch 4, sharded gradients: torch allocated 100.5 GiB."""
    work = Workload(seq=2048, batch=8)
    priced = Pricer(graph(find("llama3-8b")[0]), cluster("2xH200"), work)
    held = priced.price(Layout(dp=2, micro_batch=4, shard="gradients")).prediction.nbytes[0]
    assert held_bytes(held, "allocated") / 2**30 == pytest.approx(100.5, rel=0.03)
    assert held["gradients"] == 0
    assert priced.price(Layout(dp=2, micro_batch=2, shard="gradients")).prediction.nbytes[0]["gradients"] > 0


@pytest.mark.parametrize(("batch", "allocated"), [(8, 62.83), (16, None)])
def test_the_first_units_gradients_are_held_when_the_backward_pass_ends(batch: int, allocated: float | None) -> None:
    """Llama 3 8B on two H100, 2,048 tokens, micro-batch 4, 29 of 32 blocks recomputed: torch allocated 62.83 GiB."""
    work, x = Workload(seq=2048, batch=batch), {"dp": 2, "micro_batch": 4, "shard": "weights"}
    priced = Pricer(graph(find("llama3-8b")[0]), cluster("2xH100"), work).price(
        Layout(**x, recompute=Recompute.FULL, recompute_layers=29)
    )
    table, (peak,) = priced.partition.problem.table, priced.partition.rank_peaks[:1]
    assert table.ending == (0 if allocated is None else 6 * 128256 * 4096)
    if allocated is not None:
        assert peak.moment == "optimizer step"
        assert held_bytes(priced.prediction.nbytes[0], "allocated") / 2**30 == pytest.approx(allocated, rel=0.002)
    cuts = priced.partition.problem.cut_points.searchsorted(priced.partition.bounds)
    assert priced.partition.problem.limits.rank_peaks(cuts[None])[0].max() == pytest.approx(peak.nbytes, rel=1e-9)
    levels = [track.level(0, track.stepping) for track in memory_tracks(priced)]
    assert allocated is None or max(levels) == pytest.approx(peak.nbytes, rel=1e-9)
