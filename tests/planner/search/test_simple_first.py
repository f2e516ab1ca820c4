"""The order in which layouts of nearly one step time are recommended."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.planner.contract.choices import ModuleSet, Recompute, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.pricing import price
from megaloom.planner.search.simple_first import (
    SimplestLayouts,
    best_of_each_mesh,
    contrast,
    preference,
    preferred,
    simplicity_order,
)

MODULES = ModuleSet(["layernorm", "mlp"])
ORDERED = {
    "axes": [
        Layout(dp=64),
        Layout(dp=8, tp=8, vpp=1),
        Layout(dp=4, pp=16, vpp=16),
        Layout(dp=8, tp=4, pp=2),
        Layout(dp=4, tp=4, pp=2, cp=2),
        Layout(dp=8, tp=4, pp=2, ep=2, etp=2),
    ],
    "sharded weights": [
        Layout(dp=64, shard=Shard.OPTIMIZER, recompute=Recompute.FULL),
        Layout(dp=64, shard=Shard.GRADIENTS),
        Layout(dp=8, tp=8, shard=Shard.WEIGHTS),
    ],
    "tp across nodes": [Layout(dp=8, tp=8, cp=64), Layout(dp=4, tp=16, cp=2), Layout(dp=2, tp=16, cp=4)],
    "chunks": [Layout(pp=4, vpp=1, cp=4), Layout(pp=4, vpp=7, cp=2), Layout(pp=2, vpp=14, cp=2)],
    "cp": [Layout(pp=4, cp=2, recompute=Recompute.FULL), Layout(pp=4, cp=4)],
    "recompute": [
        Layout(pp=3),
        Layout(pp=2, recompute=Recompute.SELECTIVE),
        Layout(pp=2, recompute=Recompute.SELECTIVE, recompute_modules=MODULES),
        Layout(pp=2, recompute=Recompute.FULL, recompute_layers=3),
        Layout(pp=2, recompute=Recompute.FULL, recompute_layers=4),
        Layout(pp=2, recompute=Recompute.FULL),
    ],
    "powers of two": [Layout(tp=8, pp=16), Layout(tp=8, pp=12), Layout(tp=8, pp=12, micro_batch=3)],
}


@pytest.mark.parametrize("reason", ORDERED)
def test_layouts_are_ordered_by(reason: str) -> None:
    machine = cluster("1024xH100")
    for simple, other in pairwise(ORDERED[reason]):
        assert simplicity_order(simple, machine) < simplicity_order(other, machine), (simple, other)


def test_tp_within_a_large_node_is_not_across_nodes() -> None:
    rack, boxes = cluster("144xGB200"), cluster("64xH100")
    assert [simplicity_order(Layout(tp=8, pp=2), machine)[1] for machine in (rack, boxes)] == [0, 0]
    assert [simplicity_order(x, boxes)[1] for x in (Layout(tp=16, pp=2), Layout(ep=4, etp=16))] == [1, 1]


def test_equally_simple_layouts_are_ordered_by_memory() -> None:
    machine, work, g = cluster("8xH100"), Workload(seq=8192, batch=8), graph(llama3_8b())
    lean, full = (price(g, Layout(dp=8 // tp, tp=tp, sequence_parallel=True), machine, work) for tp in (8, 4))
    assert simplicity_order(lean.layout, machine) == simplicity_order(full.layout, machine)
    assert max(lean.partition.peaks) < max(full.partition.peaks)
    assert preference(lean) < preference(full)


CONTRASTS = [
    (Layout(dp=64), Layout(dp=32, tp=2), "dp alone instead of tp 2"),
    (Layout(tp=4, pp=8), Layout(tp=4, pp=4, cp=2), "tp 4, pp 8 instead of tp 4, pp 4, cp 2"),
    (Layout(tp=8, pp=2), Layout(tp=16, pp=2), "tp 8 within a node instead of tp 16 across nodes"),
    (Layout(pp=2, vpp=7), Layout(pp=4, vpp=14), "vpp 7 instead of 14"),
    (Layout(pp=2, cp=8), Layout(pp=2, cp=2), "cp 8 instead of 2"),
    (
        Layout(tp=2),
        Layout(tp=2, recompute=Recompute.FULL, recompute_layers=3),
        "recompute none instead of full, first 3 blocks of each stage",
    ),
    (Layout(tp=2), Layout(tp=2, micro_batch=3), "powers of two instead of mbs 3"),
    (Layout(tp=2), Layout(tp=4), ""),
]


@pytest.mark.parametrize(("one", "other", "text"), CONTRASTS)
def test_the_first_difference_is_told(one: Layout, other: Layout, text: str) -> None:
    assert contrast(one, other, cluster("64xH100")) == text


def test_the_fastest_is_shown_beside_the_simplest_of_each_mesh() -> None:
    machine, work, g = cluster("8xH100"), Workload(seq=8192, batch=8), graph(llama3_8b())
    layouts = [Layout(dp=8 // n, tp=n, sequence_parallel=n > 1, micro_batch=b) for n in (1, 2, 4, 8) for b in (1, n)]
    every = sorted({x: price(g, x, machine, work) for x in layouts}.values(), key=lambda priced: priced.seconds)
    for ratio in (1.0, 1.05, 1.5, 100.0):
        shown = best_of_each_mesh(every, ratio)
        near = [p for p in every if p.seconds <= ratio * every[0].seconds]
        assert len({p.layout.tp for p in shown}) == len(shown) == 4
        assert shown[0] is min(near, key=preference) is preferred(every, ratio)
        assert every[0] in shown[:2] or every[0].layout.tp == shown[0].layout.tp
        rest = [p for p in shown if p.seconds > ratio * every[0].seconds]
        assert rest == shown[4 - len(rest) :] == sorted(rest, key=lambda p: p.seconds)


def test_only_simpler_layouts_of_the_simplest_meshes_are_of_interest() -> None:
    known = SimplestLayouts(cluster("64xH100"), count=2)
    assert known.improved_by(Layout(dp=2, tp=2, pp=2, cp=8))
    known.add([Layout(dp=32, pp=2, vpp=4), Layout(dp=32, tp=2)])
    assert known.improved_by(Layout(dp=32, pp=2, vpp=2)) and known.improved_by(Layout(dp=16, pp=4))
    assert not known.improved_by(Layout(dp=32, pp=2, vpp=4, micro_batch=3))
    assert not known.improved_by(Layout(dp=16, tp=2, pp=2))
