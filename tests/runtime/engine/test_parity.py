"""Parity: from the same seed, every layout computes what one process computes, losses and gradient norms to 1e-5.

The rows are printed at the end of the tests.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner import violations
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.training import verify
from tests.support.paths import SUPPORT


def selective(*modules: str, **axes: Any) -> Layout:
    """A layout that computes these modules again."""
    return Layout(recompute=Recompute.SELECTIVE, recompute_modules=modules, **axes)


LAYOUTS = {
    "DP2": ("tiny_llama", Layout(dp=2)),
    "DP2 distributed optimizer": ("tiny_llama", Layout(dp=2, shard="optimizer")),
    "DP2 micro-batch 2": ("tiny_gpt", Layout(dp=2, micro_batch=2)),
    "TP2": ("tiny_llama", Layout(tp=2)),
    "TP2 SP": ("tiny_llama", Layout(tp=2, sequence_parallel=True)),
    "TP2 SP tied, padded vocabulary": ("tiny_gpt", Layout(tp=2, sequence_parallel=True)),
    "TP4 SP, fewer KV heads than TP": ("tiny_llama", Layout(tp=4, sequence_parallel=True)),
    "PP2": ("tiny_llama", Layout(pp=2)),
    "PP2 tied embeddings": ("tiny_gpt", Layout(pp=2)),
    "PP2 DP2 tied, distributed optimizer": ("tiny_gpt", Layout(pp=2, dp=2, shard="optimizer")),
    "PP2 VPP2": ("deep_llama", Layout(pp=2, vpp=2)),
    "PP4 VPP2": ("deep_llama", Layout(pp=4, vpp=2)),
    "TP2 PP2 VPP2": ("deep_llama", Layout(tp=2, pp=2, vpp=2)),
    "TP2 SP PP2 tied": ("tiny_gpt", Layout(tp=2, sequence_parallel=True, pp=2)),
    "CP2": ("tiny_llama", Layout(cp=2)),
    "CP2 TP2 SP": ("tiny_gpt", Layout(cp=2, tp=2, sequence_parallel=True)),
    "CP2 PP2": ("tiny_llama", Layout(cp=2, pp=2)),
    "experts DP2": ("tiny_mixtral", Layout(dp=2)),
    "EP2": ("tiny_mixtral", Layout(dp=2, ep=2)),
    "EP2 distributed optimizer": ("tiny_mixtral", Layout(dp=2, ep=2, shard="optimizer")),
    "EP2 CP2": ("tiny_mixtral", Layout(cp=2, ep=2)),
    "EP2 PP2": ("tiny_mixtral", Layout(dp=2, ep=2, pp=2)),
    "EP2 TP2 SP ETP1": ("tiny_mixtral", Layout(dp=2, ep=2, tp=2, sequence_parallel=True)),
    "EP2 TP2 SP ETP2": ("tiny_mixtral", Layout(dp=2, ep=2, tp=2, sequence_parallel=True, etp=2)),
    "experts DP2 ETP2": ("tiny_mixtral", Layout(dp=2, etp=2)),
    "experts TP2 SP ETP1": ("tiny_mixtral", Layout(tp=2, sequence_parallel=True)),
    "groups of experts, shared ones, EP4 TP2 SP": (
        "tiny_deepseek_v2",
        Layout(dp=2, ep=4, tp=2, sequence_parallel=True),
    ),
    "corrected sigmoids, EP2 PP2": ("tiny_deepseek_v3", Layout(dp=2, ep=2, pp=2)),
    "corrected sigmoids, EP2 TP2 SP ETP2": (
        "tiny_deepseek_v3",
        Layout(dp=2, ep=2, tp=2, sequence_parallel=True, etp=2),
    ),
    "norms of queries and keys, TP4 SP, fewer KV heads than TP": (
        "tiny_qwen3",
        Layout(tp=4, sequence_parallel=True),
    ),
    "norms of queries and keys, EP2 TP2 SP PP2": ("tiny_qwen3", Layout(tp=2, ep=2, pp=2, sequence_parallel=True)),
    "experts with biases and clamps, EP2 TP2 SP": (
        "tiny_gpt_oss",
        Layout(dp=2, ep=2, tp=2, sequence_parallel=True),
    ),
    "one expert and a shared one, EP2 TP2 SP ETP2": (
        "tiny_llama4",
        Layout(dp=2, ep=2, tp=2, sequence_parallel=True, etp=2),
    ),
    "recompute full, TP2 SP PP2": (
        "tiny_gpt",
        Layout(tp=2, sequence_parallel=True, pp=2, recompute=Recompute.FULL),
    ),
    "recompute full of the first block of each stage, PP2": (
        "deep_llama",
        Layout(pp=2, recompute=Recompute.FULL, recompute_layers=1),
    ),
    "PP2 VPP2, groups of 4": ("deep_llama", Layout(pp=2, vpp=2, microbatch_group=4)),
    "recompute selective, CP2": ("tiny_llama", Layout(cp=2, recompute=Recompute.SELECTIVE)),
    "recompute of norms that two layers read, TP2 SP": (
        "tiny_parallel",
        selective("layernorm", tp=2, sequence_parallel=True),
    ),
    "recompute of norms, MLPs and the core, TP2 SP": (
        "tiny_llama",
        selective("core_attn", "layernorm", "mlp", tp=2, sequence_parallel=True),
    ),
    "recompute of norms and the experts, EP2": ("tiny_mixtral", selective("layernorm", "moe", dp=2, ep=2)),
    "recompute of norms and the experts' activations, TP2 SP ETP2": (
        "tiny_mixtral",
        selective("layernorm", "moe_act", tp=2, sequence_parallel=True, etp=2),
    ),
    "recompute of biased experts' activations": ("tiny_gpt_oss", selective("moe_act")),
    "recompute of all modules but whole ones, EP2 TP2 SP": (
        "tiny_deepseek_v3",
        selective(
            *("core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts"),
            dp=1,
            ep=2,
            tp=2,
            sequence_parallel=True,
        ),
    ),
    "recompute of whole modules": ("tiny_deepseek_v3", selective("mlp", "moe")),
}


@pytest.fixture
def measured(record_property: Callable[..., None]) -> Callable[..., verify.Comparison]:
    """A comparison, its differences recorded for the table."""

    def measure(name: str, row: str, plan: Plan, **options: Any) -> verify.Comparison:
        comparison = verify.compare(plan, timeout=90, **options)
        record_property("parity", (name, row, comparison.loss_error, comparison.norm_error))
        return comparison

    return measure


@pytest.mark.parametrize("row", LAYOUTS)
def test_a_layout_computes_what_one_process_computes(row: str, plan_of: Any, measured: Any) -> None:
    name, layout = LAYOUTS[row]
    comparison = measured(name, row, plan_of(name, layout))
    assert comparison.tolerance == 1e-5
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"
    assert len(set(comparison.planned.losses)) == 3  # the three steps trained: a constant would compare equal to itself


@pytest.mark.parametrize("row", ["DP2 distributed optimizer", "TP2 SP PP2 tied", "CP2", "EP2"])
def test_bf16_computes_the_same_but_for_rounding(row: str, plan_of: Any, measured: Any) -> None:
    name, layout = LAYOUTS[row]
    comparison = measured(name, f"{row}, bf16", plan_of(name, layout, precision="bf16"))
    assert comparison.tolerance == 1e-2
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"


def drawn(seed: int) -> tuple[str, Layout]:
    """A legal layout of 4 or 8 processes for one of the models, any axes mixed."""
    source = random.Random(seed)
    while True:
        name = source.choice(["tiny_gpt", "deep_llama", "tiny_mixtral"])
        layout = Layout(
            dp=source.choice([1, 2]),
            tp=source.choice([1, 2, 4]),
            pp=source.choice([1, 2, 4]),
            vpp=source.choice([1, 2]),
            cp=source.choice([1, 2]),
            ep=source.choice([1, 2]),
            etp=source.choice([1, 2]),
            sequence_parallel=source.choice([False, True]),
            micro_batch=source.choice([1, 2]),
            recompute=source.choice(list(Recompute)),
            shard=source.choice(["none", "optimizer"]),
        )
        model, _ = find(f"{SUPPORT / 'models.py'}:{name}")
        load = Workload(seq=32, batch=8, precision=Precision.FP32)
        if layout.world in (4, 8) and not violations(layout, graph(model), load, cluster(f"{layout.world}xCPU")):
            return name, layout


@pytest.mark.parametrize("seed", range(8))
def test_axes_mix(seed: int, plan_of: Any, measured: Any) -> None:
    name, layout = drawn(seed)
    comparison = measured(name, f"{layout}", plan_of(name, layout, batch=8))
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"


def test_uneven_stages_compute_what_one_process_computes(plan_of: Any, measured: Any) -> None:
    """One stage holds the embedding alone, another cuts a block between attention and MLP."""
    plan = plan_of("deep_llama", Layout(pp=4))
    cuts = graph(find(plan.model)[0]).cut_points
    uneven = plan_of("deep_llama", Layout(pp=4), cuts=(cuts[0], cuts[5], cuts[11]))
    sizes = [s.stop - s.start for s in uneven.stages]
    assert len(set(sizes)) == 4
    assert measured("deep_llama", f"PP4 uneven {sizes}", uneven).agrees


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_recompute_with_dropout_changes_nothing(recompute: Recompute, plan_of: Any, measured: Any) -> None:
    """The second forward pass draws the dropout of the first: to the last bit on one layout."""
    saving = plan_of("tiny_gpt_dropout", Layout(tp=2, sequence_parallel=True))
    again = evolve(saving, layout=evolve(saving.layout, recompute=recompute))
    row = f"recompute {recompute}, TP2 SP, dropout on"
    comparison = measured("tiny_gpt_dropout", row, again, reference=saving, within=0.0)
    assert comparison.loss_error == 0.0
    assert comparison.norm_error == 0.0


def test_a_wrong_layout_would_be_seen(plan_of: Any) -> None:
    """The comparison can fail: another seed gives other losses."""
    plan = plan_of("tiny_llama", Layout(dp=2))
    ours, theirs = verify.compare(plan, seed=1, timeout=90), verify.compare(plan, seed=2, timeout=90)
    mixed = verify.Comparison(ours.planned, theirs.reference, ours.tolerance)
    assert not mixed.agrees
