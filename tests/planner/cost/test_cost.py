"""Cost of kernels, collectives and steps: laws of every cost model, and published measurements."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.facts.flops import flops
from megaloom.dsl.facts.work import Work
from megaloom.dsl.graph import graph
from megaloom.dsl.work_kinds import WorkKind
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama, llama3_1b
from megaloom.examples.mixtral import mixtral
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost import communication, kernels
from megaloom.planner.cost.communication import ProcessGroup
from megaloom.planner.cost.profiles.frameworks import EAGER, OWN
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.search.pricing import Pricer, price
from megaloom.planner.simulate.price import Priced
from megaloom.runtime.megatron.device import prepare
from tests.support.profiles import changed

GPT = graph(gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=512, seq=64))
LLAMA = graph(llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512))
SPARSE = graph(mixtral("tiny-mixtral", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512))
SHAPE = st.integers(1, 1 << 14)
KIND = st.sampled_from(list(communication.PASSES))


def dot(m: int, n: int, k: int, count: int = 1) -> Work:
    size = 2 * m * n * k * count
    return Work(WorkKind.PRODUCT, "x", size, size, size, count * (m * n + m * k + n * k), count=count, m=m, n=n, k=k)


def pointwise(elements: int) -> Work:
    return Work("pointwise", "add", 0, 0, 0, elements)


@given(SHAPE, SHAPE, SHAPE, st.sampled_from([p for p in PRESETS.values() if "bf16" in p.device.flops]))
def test_no_product_beats_the_device(m: int, n: int, k: int, preset: Any) -> None:
    device, work = preset.device, dot(m, n, k)
    took = kernels.kernel_seconds(work, device, Precision.BF16)
    assert took.forward >= work.flops / (device.flops["bf16"] * device.flops_efficiency)
    assert took.forward >= 2 * work.elements / (device.bandwidth * device.bandwidth_efficiency)
    assert min(took.forward_kernels, took.backward_kernels) >= (device.units > 1)
    assert OWN.host.launches >= 1
    assert changed(OWN, host={"cuda_graphs": True}).host.launches == 0
    assert took.backward >= 2 * work.flops / (device.flops["bf16"] * device.flops_efficiency)


@given(SHAPE, st.floats(1, 4))
def test_a_faster_device_is_never_slower(n: int, times: float) -> None:
    device = PRESETS["H100"].device
    wider = evolve(device, bandwidth=device.bandwidth * times)
    faster = evolve(device, flops={name: peak * times for name, peak in device.flops.items()})
    for work in (dot(n, 4096, 512), dot(8, n, 64), pointwise(n * 1000)):
        before = kernels.kernel_seconds(work, device, Precision.BF16)
        for better in (wider, faster):
            after = kernels.kernel_seconds(work, better, Precision.BF16)
            assert after.forward <= before.forward
            assert after.backward <= before.backward


@given(KIND, st.integers(1, 1 << 32), st.sampled_from([2, 4, 8, 16, 32, 64]), st.sampled_from([1, 2, 4, 8]))
def test_a_collective_costs_what_its_bytes_need(kind: str, nbytes: int, size: int, stride: int) -> None:
    machine = cluster("512xH100")
    took = communication.collective_seconds(kind, machine, (nbytes, ProcessGroup(size, stride)))
    assert took >= communication.PASSES[kind] * nbytes * (size - 1) / size / machine.intra.bandwidth
    assert took <= communication.collective_seconds(kind, machine, (2 * nbytes, ProcessGroup(size, stride)))
    slower = evolve(machine, inter=evolve(machine.inter, bandwidth=machine.inter.bandwidth / 2))
    assert communication.collective_seconds(kind, slower, (nbytes, ProcessGroup(size, stride))) >= took
    # no collective of more devices is cheaper for the same bytes
    assert took <= communication.collective_seconds(kind, machine, (nbytes, ProcessGroup(2 * size, stride)))
    assert communication.collective_seconds(kind, machine, (nbytes, ProcessGroup(1, stride))) == 0


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, (1, 8)),
        (4, 2, (1, 4)),
        (16, 1, (2, 8)),
        (8, 4, (4, 2)),
        (4, 8, (4, 1)),
        (3, 1, (2, 1)),  # ranks 6 and 7, and 8 in the next node
        (12, 1, (2, 4)),
    ],
)
def test_how_groups_lie_over_nodes(size: int, stride: int, expected: tuple[int, int]) -> None:
    assert communication.group_nodes(size, stride, 8, 96) == expected


@given(st.data())
def test_groups_are_megatron_cores(data: st.DataObject) -> None:
    prepare()  # once imported without, megatron-core could not be made ready for the tests that run after
    from megatron.core import parallel_state as state

    tp, cp, dp, pp = (data.draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp)
    ranks = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis, token in (("tp", "tp"), ("cp", "cp"), ("dp", "dp-cp"), ("pp", "pp")):
        group = communication.process_group(axis, layout)
        first = ranks.get_ranks(token)[0]
        assert first == [i * group.stride for i in range(group.size)]
    inside = tp * cp * dp
    etp = data.draw(st.sampled_from([d for d in range(1, inside + 1) if inside % d == 0]))
    ep = data.draw(st.sampled_from([d for d in range(1, inside // etp + 1) if inside // etp % d == 0]))
    layout = evolve(layout, etp=etp, ep=ep)
    experts = state.RankGenerator(tp=etp, ep=ep, dp=layout.edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for axis, token in (("etp", "tp"), ("ep", "ep"), ("edp", "dp")):
        group = communication.process_group(axis, layout)
        assert experts.get_ranks(token)[0] == [i * group.stride for i in range(group.size)]


# Four H200 over NVLink (NCCL, torch 2.11), bus bandwidth in GB/s by MiB of the whole tensor, measured for this project.
MEASURED = {
    "all_reduce": {16: 264, 64: 313, 256: 340, 1024: 354},
    "all_gather": {16: 193, 64: 266, 256: 306, 1024: 326},
    "reduce_scatter": {16: 215, 64: 265, 256: 279, 1024: 322},
    "all_to_all": {16: 191, 64: 272, 256: 304, 1024: 337},
}


@pytest.mark.parametrize("kind", MEASURED)
def test_collectives_as_measured(kind: str) -> None:
    for mib, bus in MEASURED[kind].items():
        nbytes = mib * 2**20
        took = communication.collective_seconds(kind, cluster("4xH200"), (nbytes, ProcessGroup(4, 1)))
        predicted = communication.PASSES[kind] * nbytes * 3 / 4 / took / 1e9
        assert abs(predicted / bus - 1) < 0.3


@pytest.mark.parametrize(("seq", "micro_batch", "teraflops"), [(4096, 1, 466), (4096, 4, 514), (8192, 1, 473)])
def test_a_training_step_as_measured(seq: int, micro_batch: int, teraflops: float) -> None:
    """Llama-3-8B's layer four times, vocabulary 32000, torch's kernels one by one on an H200: measured here."""
    g = graph(llama("four", layers=4, heads=32, kv_heads=8, embed=4096, ff=14336, vocab=32000))
    layout = Layout(micro_batch=micro_batch, shard="optimizer")
    load = Workload(seq=seq, batch=8 * micro_batch)
    priced = Pricer(g, cluster("1xH200"), load, EAGER).price(layout)
    assert abs(priced.prediction.flops_per_second_per_device / (teraflops * 1e12) - 1) < 0.07


@pytest.mark.parametrize(
    ("gpus", "batch", "micro_batch", "seconds"), [(1, 4, 1, 0.313), (1, 16, 8, 1.017), (2, 32, 8, 1.031)]
)
def test_our_own_training_step_as_measured(gpus: int, batch: int, micro_batch: int, seconds: float) -> None:
    """Llama 3.2 1B in bf16, sequences of 4096, on H200s: this runtime, torch 2.11, without Transformer Engine."""
    g = graph(llama3_1b())
    layout = Layout(dp=gpus, micro_batch=micro_batch, shard="optimizer" if gpus > 1 else "none")
    priced = price(g, layout, cluster(f"{gpus}xH200"), Workload(seq=4096, batch=batch))
    assert abs(priced.prediction.step_seconds / seconds - 1) < 0.07


def cases() -> list[tuple[Any, Layout]]:
    on = {"shard": "optimizer"}
    return [
        (LLAMA, Layout(dp=8)),
        (LLAMA, Layout(dp=8, **on)),
        (LLAMA, Layout(dp=2, tp=4, sequence_parallel=True, **on)),
        (LLAMA, Layout(dp=2, pp=4, recompute=Recompute.FULL)),
        (LLAMA, Layout(dp=4, pp=2, vpp=2, micro_batch=2)),
        (LLAMA, Layout(dp=2, cp=2, tp=2, recompute=Recompute.SELECTIVE)),
        (GPT, Layout(dp=4, pp=2)),
        (SPARSE, Layout(dp=4, ep=4, pp=2, **on)),
        (SPARSE, Layout(dp=4, tp=2, ep=4, etp=2, sequence_parallel=True)),
    ]


def priced(g: Any, layout: Layout, machine: Cluster | None = None) -> Priced:
    return price(g, layout, machine or cluster("8xH100"), Workload(seq=64, batch=32))


@pytest.mark.parametrize(("g", "layout"), cases(), ids=lambda x: getattr(x, "name", None) or str(x))
def test_the_breakdown_adds_up(g: Any, layout: Layout) -> None:
    p = priced(g, layout).prediction
    assert sum(p.breakdown.values()) == p.step_seconds
    assert all(seconds > 0 for seconds in p.breakdown.values())
    assert 0 <= p.bubble < 1
    assert ("pipeline bubble" in p.breakdown) == (layout.pp > 1)
    assert ("recompute" in p.breakdown) == (layout.recompute is not Recompute.NONE)
    for axis, cause in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        assert (f"{cause}-parallel communication" in p.breakdown) == (getattr(layout, axis) > 1)
    assert math.isclose(p.tokens_per_second_per_device, 64 * 32 / 8 / p.step_seconds)
    assert math.isclose(p.mfu, p.flops_per_second_per_device / 989.4e12)


@pytest.mark.parametrize(("g", "layout"), cases(), ids=lambda x: getattr(x, "name", None) or str(x))
def test_the_step_ends_after_the_last_rank(g: Any, layout: Layout) -> None:
    result = priced(g, layout)
    assert result.seconds >= result.timeline.makespan * (1 - 1e-12)
    assert result.stages[0].start == 0
    assert all(a.stop == b.start and b.start in g.cut_points for a, b in pairwise(result.stages))
    assert result.stages[-1].stop == len(g.nodes)
    assert all((s.rank, s.chunk) == (i % layout.pp, i // layout.pp) for i, s in enumerate(result.stages))


def test_tied_weights_are_added_up_over_the_pipeline_only() -> None:
    assert "tied-weight communication" in priced(GPT, Layout(dp=4, pp=2)).prediction.breakdown
    assert "tied-weight communication" not in priced(GPT, Layout(dp=8)).prediction.breakdown
    assert "tied-weight communication" not in priced(LLAMA, Layout(dp=4, pp=2)).prediction.breakdown


@pytest.mark.parametrize(("g", "layout"), cases()[:3], ids=lambda x: getattr(x, "name", None) or str(x))
def test_more_bandwidth_is_never_slower(g: Any, layout: Layout) -> None:
    machine = cluster("8xH100")
    slower = evolve(machine, intra=evolve(machine.intra, bandwidth=machine.intra.bandwidth / 2))
    assert priced(g, layout, slower).seconds >= priced(g, layout, machine).seconds


def test_model_flops_are_the_facts() -> None:
    m = llama("x", layers=2, heads=4, kv_heads=2, embed=64, ff=128, vocab=128)
    p = price(graph(m), Layout(recompute=Recompute.FULL), cluster("1xH100"), Workload(seq=64, batch=4)).prediction
    assert math.isclose(p.flops_per_second_per_device * p.step_seconds, flops(m, batch=4, seq=64).total)
