"""The order in which layouts of nearly one step time are recommended."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.planner.contract.choices import ModuleSet, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.pricing import price
from megaloom.planner.search.simple_first import preference, simplicity_order

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
