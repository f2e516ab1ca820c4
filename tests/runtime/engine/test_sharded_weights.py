"""Gradients and weights that are sharded over data-parallel ranks, where parity of the families has no case of it."""

from typing import Any

from megaloom.planner.contract.layout import Layout
from tests.support.limits import LIMIT
from tests.support.parity.drawn import priced
from tests.support.parity.family_table import SMALL_LOAD, SP
from tests.support.parity.rank_pool import Case, check, model_of, run_cases
from tests.support.paths import TEST_MODELS

WEIGHTS: dict[str, Any] = {"dp": 2, "shard": "weights"}
MIXTRAL = "small.py:tiny_mixtral"
MORE = {  # weights that blocks share, frozen weights, gradients that are reduced once a step, experts' own values
    "shared experts, recomputed": ("shared_weights.py:sharing_experts", Layout(recompute="full", **WEIGHTS)),
    "shared blocks": ("shared_weights.py:albert_blocks", Layout(dp=4, shard="gradients")),
    "adapters, recomputed": ("small.py:tiny_gpt_lora", Layout(recompute="full", **WEIGHTS)),
    "each step, with pipeline ranks": ("small.py:deep_llama", Layout(pp=2, vpp=2, reshard="step", **WEIGHTS)),
    "each step, with biased experts": (
        "small.py:tiny_gpt_oss",
        Layout(**SP, **WEIGHTS, ep=2, reshard="step", recompute="selective", recompute_modules=("moe_act",)),
    ),
    "experts alone": (MIXTRAL, Layout(dp=4, ep=2, shard="optimizer", expert_shard="weights")),
    "all but experts": (MIXTRAL, Layout(dp=4, ep=2, shard="weights", expert_shard="optimizer")),
    "gradients, weights of experts": (MIXTRAL, Layout(dp=4, ep=2, shard="gradients", expert_shard="weights")),
    "experts alone, with pipeline ranks": (MIXTRAL, Layout(dp=2, pp=2, shard="optimizer", expert_shard="weights")),
}


def test_sharded_weights_compute_what_one_process_and_the_oracle_compute() -> None:
    cases = []
    for name, (model, layout) in MORE.items():
        ref = f"{TEST_MODELS / model}"
        cases.append(Case(name, ref, priced(model_of(ref, 0.0), layout, SMALL_LOAD)))
    check(run_cases(cases, 4, timeout=LIMIT))
