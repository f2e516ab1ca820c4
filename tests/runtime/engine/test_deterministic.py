"""With `deterministic`, a run that is stopped and continued computes what an uninterrupted one computes, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from benchmarks.deterministic import restart_is_bitwise_equal
from megaloom.planner.contract.layout import Layout
from tests.support.paths import TEST_MODELS

TP2 = Layout(tp=2, sequence_parallel=True)
CASES = {
    "dropout, TP2 SP PP2": ("tiny_gpt_dropout", evolve(TP2, pp=2), "fp32"),
    "sharded weights in bf16": ("tiny_llama", Layout(dp=2, shard="weights"), "bf16"),
    "distributed optimizer in bf16": ("tiny_llama", Layout(dp=2, shard="optimizer"), "bf16"),
    "experts with corrections, EP2": ("tiny_deepseek_v3", Layout(dp=2, ep=2), "fp32"),
    "own bodies, CP2": (f"{TEST_MODELS / 'own_layers.py'}:some_experts", Layout(cp=2), "fp32"),
    "loss scale of fp16": ("tiny_gpt", Layout(), "fp16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_restart_is_bitwise_equal(case: str, plan_of: Any, tmp_path: Path) -> None:
    name, layout, precision = CASES[case]
    assert restart_is_bitwise_equal(plan_of(name, layout, precision=precision), tmp_path, vocab=61)
