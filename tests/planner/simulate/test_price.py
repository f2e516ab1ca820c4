"""Pricing one layout is a short pipeline of pure functions; caches around it change nothing."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama, llama3_8b
from megaloom.examples.mixtral import mixtral
from megaloom.planner.bounds.lower_bounds import large_batch_seconds
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost import communication
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.profiles.frameworks import OWN, PROFILES
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.structure import model_structure
from megaloom.planner.pipeline import schedules
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import price_layout
from tests.support.paths import ROOT

FILES = 8  # of planner that pricing one layout visits
FUNCTIONS = 40  # functions and methods in them
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
    """Return the functions and methods that a call enters, by file of planner.

    Not counted: what the facts of dsl compute, the values of planner/contract, code that attrs generates,
    comprehensions and lambdas, and properties that are one `return`.
    """
    entered = defaultdict[Path, set[tuple[int, str]]](set)

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        folder, _, path = code.co_filename.rpartition("/planner/")
        planner = event == "call" and folder.endswith("megaloom") and not path.startswith("contract/")
        if planner and not code.co_name.startswith("<"):
            entered[ROOT / "planner" / path].add((code.co_firstlineno, code.co_qualname))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    counted = {path: {name for line, name in results if line not in trivial(path)} for path, results in entered.items()}
    return {str(path.relative_to(ROOT)): names for path, names in counted.items() if names}


def trivial(path: Path) -> set[int]:
    """Return the first lines of the properties in a file that are one `return`, beside a docstring."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            names = {ast.unparse(decorator) for decorator in node.decorator_list}
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if names <= {"property", "cached_property"} and len(body) == 1 and isinstance(body[0], ast.Return):
                results.add(node.decorator_list[0].lineno)
    return results


def test_pricing_one_layout_visits_few_files_and_functions() -> None:
    """Values that all layouts of a job share, attributes of `Job` and `ModelStructure`, are computed beforehand."""
    job = Job(model_structure(graph(llama3_8b())), Workload(seq=8192, batch=64), cluster("8xH100"), OWN)
    layout = Layout(dp=2, tp=2, pp=2, sequence_parallel=True, shard="optimizer")
    price_layout(job, Layout(dp=8), 76 * 10**9)
    for module in (communication, schedules):  # other layouts may have filled them
        for function in vars(module).values():
            getattr(function, "cache_clear", int)()
    result = visited(lambda: price_layout(job, layout, 76 * 10**9))
    assert len(result) <= FILES, sorted(result)
    assert sum(map(len, result.values())) <= FUNCTIONS, result
    assert {path: n for path in result if (n := len((ROOT / path).read_text().splitlines())) > LINES} == {}


@pytest.mark.parametrize("runtime", Runtime)
@pytest.mark.parametrize("name", MODELS)
def test_caches_change_no_price(name: str, runtime: Runtime) -> None:
    g, work, machine = graph(MODELS[name]), Workload(seq=64, batch=32), cluster("8xH100")
    pricer = Pricer(g, machine, work, PROFILES[runtime])
    job = Job(model_structure(g), work, machine, PROFILES[runtime])
    large_batch_seconds(Layouts.of(LAYOUTS), pricer.cost_cache)  # as a search does first
    for layout in LAYOUTS:
        cached, pure = pricer.price(layout), price_layout(job, layout, pricer.capacity)
        assert pure.stages == cached.stages
        assert pure.prediction.breakdown == pytest.approx(cached.prediction.breakdown, rel=1e-12)
        assert pure.prediction.nbytes == cached.prediction.nbytes
