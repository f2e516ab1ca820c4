"""Overlapped communication: the seconds that it saves, its memory, and its options on the command line."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.examples.mixtral import mixtral
from megaloom.planner.cli.main import main
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.memory_limit import HEADROOM
from megaloom.planner.rules.capabilities import runtime_violations
from megaloom.planner.search.branch_and_bound import search
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.pricing import Pricer
from tests.support.profiles import changed

WORK = Workload(seq=256, batch=16)
TENSOR = Layout(tp=2, etp=2, sequence_parallel=True, micro_batch=4, overlaps=("gradients", "tensor"))
EXPERTS = Layout(dp=2, ep=2, micro_batch=4, overlaps=("gradients", "experts"))
FREED = [(TENSOR, Overlap.TENSOR, 10 * 4 * 256 * 64 * 2), (EXPERTS, Overlap.EXPERTS, 0)]


def small(kib: int, count: int = 2) -> Cluster:
    """Devices with just so much memory for tensors."""
    named = cluster(f"{count}xH100")
    device = evolve(named.device, name="small", nbytes=kib * 2**10, context_nbytes=0, library_nbytes=0)
    return evolve(named, device=device, intra=evolve(named.intra, group_nbytes=0))


def pricer(kib: int) -> Pricer:
    g = graph(mixtral("sparse", layers=4, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=512))
    return Pricer(g, small(kib), WORK, changed(PROFILES[Runtime.MEGATRON], buffers={"grouped_streams": 0}))


@pytest.mark.parametrize(("layout", "overlap", "nbytes"), FREED, ids=["tensor", "experts"])
def test_overlap_takes_memory_and_saves_time(layout: Layout, overlap: Overlap, nbytes: int) -> None:
    less = evolve(layout, overlaps=("gradients",))
    on, off = (pricer(10**9).price(x) for x in (layout, less))
    assert on.seconds < off.seconds
    more = on.partition.stages[0].workspace + on.partition.stages[0].library
    more -= off.partition.stages[0].workspace + off.partition.stages[0].library
    assert more >= max(nbytes, 1)
    cause = {Overlap.TENSOR: "tensor-parallel communication", Overlap.EXPERTS: "expert-parallel communication"}[overlap]
    assert on.prediction.breakdown[cause] < off.prediction.breakdown[cause]
    same = {*on.prediction.breakdown} - {cause}
    assert {c: on.prediction.breakdown[c] for c in same} == {c: off.prediction.breakdown[c] for c in same}


@pytest.mark.parametrize("layout", [TENSOR, EXPERTS], ids=["tensor", "experts"])
def test_where_there_is_no_room_for_it_nothing_overlaps(layout: Layout) -> None:
    less = evolve(layout, overlaps=("gradients",))
    on, off = (max(pricer(10**9).price(x).partition.peaks) for x in (layout, less))
    names = ("dp", "tp", "ep", "etp", "micro_batch", "sequence_parallel", "recompute", "shard")
    fixed = {name: getattr(layout, name) for name in names}
    for most, expected in ((1.01 * on, layout), ((on + off) / 2, less)):
        candidates = Candidates(pricer(int(most / (1 - HEADROOM)) >> 10), fixed)
        assert search(candidates, 1, 1)[0].layout == expected


ASKED = "llama3-8b --gpus 8xH100 --runtime megatron --tp 2 --sequence-parallel --json --top 1 --overlap"


@pytest.mark.parametrize(
    ("message", "result"), [("none", []), ("tensor,gradients", ["gradients", "tensor"]), ("gradients", ["gradients"])]
)
def test_a_command_line_says_what_overlaps(message: str, result: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.split(), message]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["layout"]["overlaps"] == result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("grads", "--overlap must be some of gradients, weights, tensor, experts, or none; got 'grads'"),
        ("grads --lint", "got 'grads'"),
        ("weights --no-distributed-optimizer", "[overlap-weights]"),
    ],
)
def test_what_cannot_overlap_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{ASKED} {arguments}".split()) == 2
    assert message in capsys.readouterr().err


def test_the_runtime_does_not_run_what_overlaps_inside() -> None:
    g, machine = graph(find("llama3-8b")[0]), cluster("8xH100")
    x = Layout(tp=8, sequence_parallel=True, overlaps=("gradients", "tensor"))
    assert [v.rule for v in runtime_violations(x, g, WORK, machine)] == ["runtime-overlap"]
    assert runtime_violations(evolve(x, overlaps=("gradients",)), g, WORK, machine) == ()
