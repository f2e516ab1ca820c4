"""The price by hand of examples/scripts equals the planner's, without its cost model."""

from __future__ import annotations

import ast

import pytest

from megaloom.dsl.catalog import examples
from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.examples.scripts import price_by_hand as by_hand
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.search.pricing import price
from tests.support.paths import ROOT


def test_the_price_by_hand_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(dp=by_hand.DP, tp=by_hand.TP, pp=by_hand.PP, sequence_parallel=True, shard="optimizer")
    priced = price(graph(llama3_8b()), layout, by_hand.MACHINE, Workload(seq=by_hand.SEQ, batch=by_hand.BATCH))
    seconds, peaks = by_hand.price()
    assert seconds == pytest.approx(priced.seconds, rel=1e-9)
    assert peaks == pytest.approx(priced.partition.peaks, rel=1e-9)
    by_hand.main()
    assert f"{seconds:.3f} s a step" in capsys.readouterr().out


def test_it_does_without_the_cost_model() -> None:
    tree = ast.parse((ROOT / "examples/scripts/price_by_hand.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name and name.split(".")[2:3] and name.split(".")[2] != "hardware"]


def test_scripts_are_no_models() -> None:
    assert not [ref for ref in examples().values() if ".scripts" in ref]
