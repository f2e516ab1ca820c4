"""Scans and convolutions under context parallelism: all-to-alls where cp divides the channels, gathers elsewhere."""

import pytest

from megaloom.dsl import Split, graph
from megaloom.dsl.facts.costs import costs
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from tests.support.limits import LIMIT
from tests.support.parity.drawn import priced
from tests.support.parity.families import FAMILIES, SEQ
from tests.support.parity.rank_pool import Case, check, run_cases

LOAD = Workload(seq=SEQ, batch=4, precision=Precision.FP32)
CASES = {
    "fewer groups than cp": ("mamba2", Layout(cp=4), False),
    "heads of tp and of cp": ("mamba2", Layout(cp=2, tp=2, sequence_parallel=True), False),
    "a recomputed block": ("mamba2", Layout(cp=2, recompute="full", recompute_layers=1), False),
    "heads that cp does not divide": ("nemotron-h", Layout(cp=4), True),
}


def test_layouts_compute_what_one_process_does() -> None:
    cases = []
    for name, (family, layout, _) in CASES.items():
        cases.append(Case(name, family, priced(FAMILIES[family].make(0.0), layout, LOAD)))
    check(run_cases(cases, 4, timeout=LIMIT))


@pytest.mark.parametrize("name", CASES)
def test_facts_count_the_collectives_that_run(name: str) -> None:
    family, layout, gathers = CASES[name]
    node = next(n for n in graph(FAMILIES[family].make(0.0)).nodes if "mamba2" in n.name)
    facts = costs(node, batch=1, seq=SEQ, split=layout.split, separate=True)
    assert facts.gathers_sequence is gathers
    kinds = {c.kind for c in facts.collectives if c.axis == "cp"}
    assert kinds == ({"all_gather", "reduce_scatter"} if gathers else {"all_to_all"})
    assert not costs(node, batch=1, seq=SEQ, split=Split(tp=layout.tp), separate=True).gathers_sequence
