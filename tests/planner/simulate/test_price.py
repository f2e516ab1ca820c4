"""Pricing one layout is a short pipeline of pure functions; caches around it change nothing."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest

from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama, llama3_8b
from megaloom.examples.mixtral import mixtral
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.profiles.frameworks import OWN, PROFILES
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.structure import model_structure
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import price_layout
from tests.support.paths import ROOT

FILES = 8  # of planner that pricing one layout visits
FUNCTIONS = 70  # public and private functions in them
LINES = 300  # of each file

MODELS = {
    "dense": llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512),
    "tied": gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=512, seq=64),
    "sparse": mixtral("tiny-mixtral", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512),
}
LAYOUTS = (
    Layout(dp=8, shard="optimizer"),
    Layout(dp=2, pp=4, recompute="selective"),
    Layout(dp=2, tp=2, pp=2, sequence_parallel=True, shard="optimizer", recompute="full", recompute_layers=1),
    Layout(dp=4, pp=2, vpp=2, micro_batch=2, recompute="full"),
    Layout(dp=4, pp=2, vpp=2, ep=1, overlaps=OverlapSet([Overlap.GRADIENTS])),
)


def visited(call: Any) -> dict[str, set[str]]:
    """Return the functions that a call enters, by file of planner.

    Not counted are the facts of dsl (`megaloom.dsl`, a count of the declaration), the properties of values that are
    arguments (planner/contract: Layout, Workload, Device, Cluster; planner/model: ModelStructure), the properties and
    operators of the values in the pipeline, and comprehensions.
    """
    found = defaultdict(set)

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        folder, _, path = code.co_filename.rpartition("/planner/")
        if event == "call" and folder.endswith("megaloom") and path.partition("/")[0] not in ("contract", "model"):
            found[f"planner/{path}"].add(code.co_qualname)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {path: {name for name in names if "." not in name} for path, names in found.items()}


def test_pricing_one_layout_visits_few_files_and_functions() -> None:
    job = Job(model_structure(graph(llama3_8b())), Workload(seq=8192, batch=64), cluster("8xH100"), OWN)
    assert job.flops and job.spread  # equal for all layouts
    layout = Layout(dp=2, tp=2, pp=2, sequence_parallel=True, shard="optimizer")
    found = visited(lambda: price_layout(job, layout, 76 * 10**9))
    assert len(found) <= FILES, sorted(found)
    assert sum(map(len, found.values())) <= FUNCTIONS, found
    assert {path: n for path in found if (n := len((ROOT / path).read_text().splitlines())) > LINES} == {}


@pytest.mark.parametrize("runtime", Runtime)
@pytest.mark.parametrize("name", MODELS)
def test_caches_change_no_price(name: str, runtime: Runtime) -> None:
    g, work, machine = graph(MODELS[name]), Workload(seq=64, batch=32), cluster("8xH100")
    pricer = Pricer(g, machine, work, PROFILES[runtime])
    job = Job(model_structure(g), work, machine, PROFILES[runtime])
    for layout in LAYOUTS:
        cached, pure = pricer.price(layout), price_layout(job, layout, pricer.capacity)
        assert pure.stages == cached.stages
        assert pure.prediction.breakdown == pytest.approx(cached.prediction.breakdown, rel=1e-12)
        assert pure.prediction.nbytes == cached.prediction.nbytes
