"""Parity: from the same seed, every layout computes what one process and the oracle compute, gradient by gradient.

The rows are printed at the end of the tests.
"""

from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

import pytest
from attrs import evolve
from rich.console import Console

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.cli.report import comparison_report
from megaloom.runtime.megatron import device
from megaloom.runtime.training import verify
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.parity.broken_collectives import BROKEN
from tests.support.parity.families import trained_families
from tests.support.parity.family_table import SMALL_LOAD, mixed_case_of
from tests.support.parity.rank_pool import Case, check, run_cases
from tests.support.parity.shard_table import legal_layouts, sharded_case_of
from tests.support.paths import TEST_MODELS

PARTS = 4  # of the layouts, each in one set of processes


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
    "PP2 VPP2": ("tiny_llama_4", Layout(pp=2, vpp=2)),
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
        "tiny_llama_4",
        Layout(pp=2, recompute=Recompute.FULL, recompute_layers=1),
    ),
    "PP2 VPP2, groups of 4": ("tiny_llama_4", Layout(pp=2, vpp=2, microbatch_group=4)),
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
    "two hidden states, of two widths and lengths, PP4": ("tiny_pair", Layout(pp=4)),
    "two hidden states, of two widths and lengths, TP2 SP PP2 VPP2": (
        "tiny_pair",
        Layout(tp=2, sequence_parallel=True, pp=2, vpp=2),
    ),
    "two hidden states, of two widths and lengths, CP2 PP2, recompute full": (
        "tiny_pair",
        Layout(cp=2, pp=2, recompute=Recompute.FULL),
    ),
    "image and text, PP2 VPP2": ("tiny_llava", Layout(pp=2, vpp=2)),
    "adapters, TP2 SP PP2": ("tiny_llama_lora", Layout(tp=2, sequence_parallel=True, pp=2)),
    "adapters, TP4, fewer KV heads than TP": ("tiny_llama_lora", Layout(tp=4)),
    "adapters, PP2 VPP2 DP2 distributed optimizer, recompute full": (
        "tiny_gpt_lora",
        Layout(pp=2, vpp=2, dp=2, shard="optimizer", recompute=Recompute.FULL),
    ),
    "adapters, CP2 DP2": ("tiny_llama_lora", Layout(cp=2, dp=2)),
    "adapters beside experts, EP2 TP2 SP": (
        "tiny_experts_lora",
        Layout(dp=2, ep=2, tp=2, sequence_parallel=True),
    ),
}


def sequences(layout: Layout) -> int:
    """Return the sequences of a step: four micro-batches of one pipeline, else at least two of each replica."""
    return 4 if layout.pp > 1 else 2 * layout.dp * layout.micro_batch


TWINS = TEST_MODELS / "twins.py"
OWN = {  # model, layout, sequences, precision
    "PP2 VPP2, groups of 3 and one of 2": ("tiny_llama_4", Layout(pp=2, vpp=2, microbatch_group=3), 5, "fp32"),
    "PP2 VPP2 DP2, groups of 4 and one of 2": (
        "tiny_llama_4",
        Layout(pp=2, vpp=2, dp=2, microbatch_group=4),
        12,
        "fp32",
    ),
    "own loss over a padded vocabulary": (f"{TWINS}:smoothed", Layout(), 4, "fp32"),
    "own loss over a padded vocabulary, DP2": (f"{TWINS}:z_loss", Layout(dp=2), 4, "fp32"),
    "own product over a padded vocabulary": (f"{TWINS}:soft_lookup", Layout(cp=2), 4, "fp32"),
    "sums in 32 bits, then a product, bf16": (f"{TWINS}:pooled_gate", Layout(tp=2, sequence_parallel=True), 4, "bf16"),
    "log-sum-exp over a sequence": (f"{TWINS}:soft_maximum", Layout(), 4, "fp32"),
    "log-sum-exp over a sequence, CP2 TP2 SP": (
        f"{TWINS}:soft_maximum",
        Layout(cp=2, tp=2, sequence_parallel=True),
        4,
        "fp32",
    ),
    "a loss of each sample, CP2": (f"{TWINS}:key_tokens", Layout(cp=2), 4, "fp32"),
    "two kinds of experts, EP2": (f"{TWINS}:two_mixtures", Layout(dp=2, ep=2), 4, "fp32"),
    "corrected experts of two sizes, ETP2": (f"{TWINS}:corrected_sizes", Layout(dp=2, etp=2), 4, "fp32"),
    "corrected experts of two sizes, TP2 SP PP2": (
        f"{TWINS}:corrected_sizes",
        Layout(tp=2, sequence_parallel=True, pp=2, recompute=Recompute.FULL),
        4,
        "fp32",
    ),
}


@pytest.fixture
def measured(record_property: Callable[..., None], plan_of: Any) -> Callable[..., None]:
    """A comparison of rows in one set of processes, their differences recorded for the table."""

    def measure(rows: Mapping[str, tuple[str, Plan]]) -> None:
        cases = [Case(row, plan.model, plan) for row, (_, plan) in rows.items()]
        results = run_cases(cases, 4, timeout=LIMIT)
        for (name, _), r in zip(rows.values(), results, strict=True):
            record_property("parity", (name, r.name, r.loss_error, r.norm_error, r.gradient_error))
        check(results)

    return measure


@pytest.mark.parametrize("part", range(PARTS))
def test_layouts_compute_what_one_process_and_the_oracle_compute(part: int, plan_of: Any, measured: Any) -> None:
    by_model = sorted(LAYOUTS.items(), key=lambda row: row[1][0])  # each set of processes computes few references
    size = -(-len(LAYOUTS) // PARTS)
    rows = dict(by_model[part * size :][:size])
    # 127 tokens: with multiples of 8 each rank has some, with the default of 128 one of two ranks has only padding
    multiples = {row: layout.vocab_multiple if "padded" in row else 8 for row, (_, layout) in rows.items()}
    measured(
        {
            row: (name, plan_of(name, evolve(layout, vocab_multiple=multiples[row]), batch=sequences(layout)))
            for row, (name, layout) in rows.items()
        }
    )


def test_own_layers_and_uneven_groups_compute_what_one_process_and_the_oracle_compute(
    plan_of: Any, measured: Any
) -> None:
    measured(
        {
            row: (name, plan_of(name, layout, batch=batch, precision=precision))
            for row, (name, layout, batch, precision) in OWN.items()
        }
    )


def test_bf16_computes_the_same_but_for_rounding(plan_of: Any, measured: Any) -> None:
    rows = ["DP2 distributed optimizer", "TP2 SP PP2 tied", "CP2", "EP2"]
    named = {f"{row}, bf16": LAYOUTS[row] for row in rows}
    measured({row: (name, plan_of(name, layout, precision="bf16")) for row, (name, layout) in named.items()})


def test_uneven_stages_compute_what_one_process_computes(plan_of: Any, measured: Any) -> None:
    """One stage holds the embedding alone, another cuts a block between attention and MLP."""
    plan = plan_of("deep_llama", Layout(pp=4))
    cuts = graph(model_named(plan.model)).cut_points
    uneven = plan_of("deep_llama", Layout(pp=4), cuts=(cuts[0], cuts[5], cuts[11]))
    sizes = [s.stop - s.start for s in uneven.stages]
    assert len(set(sizes)) == 4
    measured({f"PP4 uneven {sizes}": ("deep_llama", uneven)})


def test_stages_without_adapters_compute_what_one_process_computes(plan_of: Any, measured: Any) -> None:
    """One stage holds the embedding alone, one the logits; both are frozen."""
    cuts = graph(find(plan_of("tiny_gpt_lora", Layout(pp=4)).model)[0]).cut_points
    plan = plan_of("tiny_gpt_lora", Layout(pp=4), cuts=(cuts[0], cuts[5], cuts[-1]))
    measured({"adapters, PP4, frozen stages": ("tiny_gpt_lora", plan)})


@pytest.mark.parametrize("part", range(3))
def test_two_layouts_of_each_family_compute_what_one_process_and_the_oracle_compute(
    part: int, record_property: Callable[..., None]
) -> None:
    """One of them shards gradients or weights. `make parity` runs all layouts of both tables."""
    families = list(enumerate(trained_families()))[part::3]
    cases = [case for i, family in families for case in (mixed_case_of(i, family), sharded_case_of(i, family))]
    results = run_cases(cases, 4, timeout=LIMIT)
    for r in results:
        record_property("parity", (r.model, r.name, r.loss_error, r.norm_error, r.gradient_error))
    check(results)


def test_families_have_most_sharded_layouts() -> None:
    layouts = [legal_layouts(family, SMALL_LOAD) for family in trained_families()]
    assert len({names[i % len(names)] for i, names in enumerate(layouts)}) > 7


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_recompute_with_dropout_changes_nothing(recompute: Recompute, plan_of: Any) -> None:
    """The second forward pass draws the dropout of the first: to the last bit on one layout."""
    saving = plan_of("tiny_gpt_dropout", Layout(tp=2, sequence_parallel=True))
    again = evolve(saving, layout=evolve(saving.layout, recompute=recompute))
    comparison = verify.compare(again, reference=saving, within=0.0, timeout=LIMIT)
    assert comparison.loss_error == 0.0
    assert comparison.norm_error == 0.0


def test_verify_names_the_weights_that_a_broken_collective_breaks(plan_of: Any) -> None:
    """The comparison can fail. The processes are forked, so they inherit what is broken here."""
    plan = plan_of("tiny_llama", Layout(tp=2, sequence_parallel=True))
    device.prepare()
    with BROKEN["gradients of replicated parameters under sequence parallelism"].breaks():
        comparison = verify.compare(plan, timeout=LIMIT)
    assert not comparison.agrees
    assert {d.layer.split()[1] for d in comparison.differing} == {"(RMSNorm)"}
    assert len(comparison.differing) == 5
    console = Console(width=200, file=StringIO())
    console.print(comparison_report(comparison, plan))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "gradients of step 1 that differ (5 of" in text
    assert "in rms_norm.3 (RMSNorm)" in text
    assert "the last layer of the model among them is rms_norm.4 (RMSNorm)" in text
    assert "FAILED" in text
