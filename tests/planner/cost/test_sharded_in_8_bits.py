"""Sharded weights beside products in 8 bits: who gathers them in 8 bits, what that holds and takes, who reads it."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama
from megaloom.planner.contract.choices import GradReduce, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.cost.cost_table import cost_table
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.cost.profiles.flag_features import GATHERS_16
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN, PROFILES
from megaloom.planner.cost.profiles.groups import compose
from megaloom.planner.cost.weight_units import pass_seconds
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import runtime_violations
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.rules import violations
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.pricing import Pricer
from tests.support.exported import plan_with

MODEL = llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512)
WEIGHTS = Layout(dp=8, shard="weights")
EIGHT_BITS = (Precision.FP8, Precision.MXFP8)


def pricer(precision: Precision, runtime: Runtime, gpus: str = "8xH100") -> Pricer:
    work = Workload(seq=128, batch=16, precision=precision)
    return Pricer(graph(MODEL), cluster(gpus), work, PROFILES[runtime])


@pytest.mark.parametrize("runtime", Runtime)
def test_which_formats_are_trained_beside_sharded_weights(runtime: Runtime) -> None:
    """Megatron-FSDP trains in bf16, fp8 and mxfp8; in fp8 our own runtime trains nothing at all."""
    machine, g = cluster("8xB200"), graph(MODEL)
    check = export_violations if runtime is Runtime.MEGATRON else runtime_violations
    free = set[Precision]()
    for precision in Precision:
        case = WEIGHTS, g, Workload(seq=128, batch=16, precision=precision), machine
        free |= {precision} if not violations(*case) + check(*case) else set()
    trained = {Runtime.MEGALOOM: {Precision.FP32, Precision.BF16}, Runtime.MEGATRON: {Precision.BF16, *EIGHT_BITS}}
    assert free == trained[runtime]


def test_gradients_in_bf16_are_left_to_megatron_fsdp() -> None:
    case = evolve(WEIGHTS, grad_reduce="bf16"), graph(MODEL), Workload(seq=128, batch=16), cluster("8xH100")
    assert violations(*case) == export_violations(*case) == ()
    (refused,) = runtime_violations(*case)
    assert str(refused) == (
        "the runtime does not run `--shard weights` with `--grad-reduce bf16` [fsdp-grad-reduce]\n"
        "use --grad-reduce fp32, --shard optimizer, or --runtime megatron"
    )
    experts = Layout(dp=4, shard="optimizer", expert_shard="weights", grad_reduce="bf16")
    g = graph(find("mixtral-8x7b")[0])
    (refused,) = runtime_violations(experts, g, Workload(seq=128, batch=16), cluster("4xH100"))
    assert "`--expert-shard weights`" in refused.message and "--expert-shard same" in refused.fix
    for runtime, shards in (
        (Runtime.MEGALOOM, {Shard.OPTIMIZER}),
        (Runtime.MEGATRON, {Shard.OPTIMIZER, Shard.WEIGHTS}),
    ):
        candidates = Candidates(pricer(Precision.BF16, runtime), {"grad_reduce": GradReduce.BF16, "dp": 8})
        candidates.bound_all()
        found = candidates.variants(np.arange(len(candidates.base_layouts))).layouts
        assert shards <= {Shard(x) for x in found.shard.tolist()}
        assert runtime is Runtime.MEGATRON or not found.fsdp.any()


@given(st.integers(0, 10**12), st.integers(2, 4096))
def test_bytes_of_a_parameter(n: int, dp: int) -> None:
    """A shard of one byte, or of two in MXFP8, beside fp32 weight, gradient and moments; scales are whole."""
    due = {Precision.BF16: 18, Precision.FP8: 17, Precision.MXFP8: 18}
    for precision, each in due.items():
        state = state_bytes(n, 0, Layout(dp=dp, shard="weights"), precision, MEGATRON)
        scales = n / 16 if precision is Precision.MXFP8 else 0
        assert 0 <= state.total - each * n / dp - scales < 5
        narrow = state_bytes(n, 0, Layout(dp=dp, shard="weights", grad_reduce="bf16"), precision, MEGATRON)
        assert 0 <= narrow.total - (each - 2) * n / dp - scales < 5
        own = [state_bytes(n, 0, Layout(dp=dp, shard="weights"), p, OWN) for p in (precision, Precision.BF16)]
        assert own[0] == own[1]


def test_weights_of_blocks_are_gathered_in_half_the_bytes() -> None:
    """The rest stays in bf16: of the gathers of whole blocks half the seconds are left, of reductions all."""
    jobs = {p: pricer(p, Runtime.MEGATRON, "8xB200").cost_cache.job for p in Precision}
    took = {p: pass_seconds(10**9, 0, WEIGHTS, job) for p, job in jobs.items()}
    reduced = pass_seconds(10**9, 0, Layout(dp=8, shard="gradients"), jobs[Precision.BF16])
    for precision in EIGHT_BITS:
        assert took[precision] - reduced == pytest.approx((took[Precision.BF16] - reduced) / 2, rel=2e-2)  # and latency
        units = cost_table(jobs[precision], WEIGHTS).units
        assert units is not None and units.widths(jobs[precision]).tolist() == [2 - x for x in units.in_blocks]
        wide = evolve(jobs[precision], profile=compose("wide", [GATHERS_16], MEGATRON))
        assert pass_seconds(10**9, 0, WEIGHTS, wide) == took[Precision.BF16]
        own = pricer(precision, Runtime.MEGALOOM, "8xB200").cost_cache.job
        assert {*units.widths(own).tolist()} == {2}
    halves = pass_seconds(10**9, 0, evolve(WEIGHTS, grad_reduce="bf16"), jobs[Precision.BF16])
    assert took[Precision.BF16] - halves == pytest.approx(reduced / 2, rel=1e-2)


@pytest.mark.parametrize(("gpus", "copies"), [("8xH100", 2), ("8xB200", 1)])
def test_only_before_blackwell_a_gathered_weight_has_a_transposed_copy(gpus: str, copies: int) -> None:
    job = pricer(Precision.FP8, Runtime.MEGATRON, gpus).cost_cache.job
    units = cost_table(job, WEIGHTS).units
    assert units is not None
    sizes = units.sizes @ [1, 0, 1]
    largest = max((copies if inside else 2) * size for inside, size in zip(units.in_blocks, sizes, strict=True))
    assert units.gathered_nbytes(WEIGHTS, job) == largest
    narrow = evolve(WEIGHTS, grad_reduce="bf16")
    more = units.transient_nbytes(WEIGHTS, job) - units.transient_nbytes(narrow, job)
    assert more == 2 * sizes.max()  # the buffer that is reduced


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_bounds_hold(precision: Precision) -> None:
    priced = pricer(precision, Runtime.MEGATRON, "8xB200")
    candidates = Candidates(priced, {"shard": Shard.WEIGHTS, "cp": 1})
    candidates.bound_all()
    bounded = candidates.variants(np.arange(len(candidates.base_layouts)))
    some = range(0, len(bounded), max(1, len(bounded) // 30))
    assert len(some) > 10
    for i in some:
        one = priced.price(bounded.layouts[i])
        assert bounded.seconds[i] <= one.seconds * (1 + 1e-9)
        peak = max(sum(held.values()) for held in one.prediction.nbytes)
        assert bounded.nbytes[i] <= peak + len(one.prediction.nbytes[0])


def of_megatron(target: Target, precision: str, runtime: Runtime) -> str:
    model, ref = find("llama3-8b")
    made = plan_with(model, evolve(WEIGHTS, vocab_multiple=1), ref=ref, precision=precision, seq=8192, gpus="8xB200")
    return export_plan(evolve(made, runtime=runtime), model, target)


def test_an_export_says_how_weights_are_gathered_and_a_reader_hears_it() -> None:
    """torchtitan 0.2.2 has both; 0.3 gathers in bf16; Megatron-FSDP needs weights in 8 bits."""
    for runtime in Runtime:
        text = of_megatron(Target.TORCHTITAN, "fp8", runtime)
        float8 = tomllib.loads(text)["quantize"]["linear"]["float8"]
        narrow = runtime is Runtime.MEGATRON
        assert float8.get("enable_fsdp_float8_all_gather", False) is narrow and float8["filter_fqns"] == ["output"]
        run = read_text(text, "run.toml", RunInputs(devices=8))
        assert run.workload.precision is Precision.FP8 and run.layout.shard is Shard.WEIGHTS
        assert run.profile.narrow.gathers_8_bits is narrow
    assert 'filter_fqns=["lm_head"]' in of_megatron(Target.TORCHTITAN_0_3, "fp8", Runtime.MEGALOOM)
    with pytest.raises(UserError, match="gathered in 8 bits: this release gathers them in bf16"):
        of_megatron(Target.TORCHTITAN_0_3, "fp8", Runtime.MEGATRON)
    with pytest.raises(UserError, match="precision mxfp8"):
        of_megatron(Target.TORCHTITAN, "mxfp8", Runtime.MEGALOOM)
    with pytest.raises(UserError, match="into buffers of gradients\nplan with --precision fp8"):
        of_megatron(Target.MEGATRON_BRIDGE, "mxfp8", Runtime.MEGATRON)


def test_a_run_that_keeps_whole_copies_in_8_bits_is_refused() -> None:
    text = of_megatron(Target.MEGATRON_LM, "fp8", Runtime.MEGATRON)
    run = read_text(text, "run.sh", RunInputs())
    assert run.profile.narrow.gathers_8_bits and run.profile.optimizer.weight_nbytes == 1
    for old, new, message in (
        ("  --fp8-param-gather\n", "", "Transformer Engine keeps 8-bit copies of all weights on each device"),
        ("optim_grads_params", "optim_grads", "weights in 8 bits only with optim_grads_params"),
    ):
        with pytest.raises(UserError, match=message):
            read_text(text.replace(old, new), "run.sh", RunInputs())


def test_torchtitan_refuses_gathers_in_8_bits_beside_a_recipe() -> None:
    text = of_megatron(Target.TORCHTITAN, "fp8", Runtime.MEGATRON)
    rows = text.replace("enable_fsdp", 'recipe_name = "rowwise"\nenable_fsdp')
    with pytest.raises(UserError, match="torchtitan refuses gathers in 8 bits beside recipe_name rowwise"):
        read_text(rows, "run.toml", RunInputs(devices=8))
    lines = [line for line in rows.splitlines() if "fsdp_float8" not in line and "scale_for_fsdp" not in line]
    run = read_text("\n".join(lines), "run.toml", RunInputs(devices=8))
    assert not run.profile.narrow.gathers_8_bits
    assert any("scales of rows instead of tensors" in note.text for note in run.notes)
