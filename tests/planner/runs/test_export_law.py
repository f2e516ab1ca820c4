"""Law: a plan that is exported is read back as that plan, for all that the target expresses."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, fields

from megaloom.dsl import Attention, Model, UserError, fingerprint, graph
from megaloom.dsl.catalog import examples, find
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.export.decoder import DecoderModel, read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.expressed import NOT_EXPRESSED
from megaloom.planner.export.target import Target
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from tests.support.exported import CASES, case, plan_with
from tests.support.models.examples import example

FILES = {Target.MEGATRON_LM: "run.sh", Target.SLURM: "run.slurm", Target.MEGATRON_BRIDGE: "run.py"}

# One example of each family that Megatron-LM may express.
FAMILIES = ("deepseek", "gpt2", "gpt3", "llama2", "llama3", "mistral", "mixtral", "nemotron", "qwen2", "qwen3")
EXPORTED = {ref.partition(":")[0].rpartition(".")[2]: name for name, ref in reversed([*examples().items()])}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one device": (Layout(), {}),
    "no overlap": (Layout(dp=8, shard="optimizer", overlaps=()), {}),
    "overlap of the step": (Layout(dp=4, tp=2, sequence_parallel=True, overlaps=("gradients", "tensor")), {}),
    "replicated sequences": (Layout(dp=4, tp=2), {}),
    "first layers": (Layout(dp=4, pp=2, recompute="full", recompute_layers=3), {"counts": (16, 16)}),
    "modules": (Layout(dp=8, recompute="selective", recompute_modules=("layernorm", "mlp")), {}),
    "groups": (Layout(dp=2, pp=4, vpp=2, microbatch_group=5), {"counts": (4,) * 8}),
    "uneven": (Layout(dp=4, pp=2), {"counts": (17, 15)}),
    "first stage without layers": (Layout(dp=4, pp=2), {"counts": (0, 32)}),
    "sharded weights": (Layout(dp=8, shard="weights"), {}),
    "sharded gradients": (Layout(dp=8, shard="gradients"), {}),
    "replicas": (Layout(dp=8, shard="weights", replicas=2), {}),
    "gradients in bf16": (Layout(dp=8, shard="optimizer", grad_reduce="bf16"), {}),
    "vocabulary": (Layout(dp=4, tp=2, vocab_multiple=64), {}),
    "fp32": (Layout(dp=8), {"precision": "fp32"}),
    "fp16": (Layout(dp=8), {"precision": "fp16"}),
    "fp8": (Layout(dp=8), {"precision": "fp8"}),
    "mxfp8": (Layout(dp=8), {"precision": "mxfp8", "gpus": "8xB200"}),
    "nvfp4": (Layout(dp=8), {"precision": "nvfp4", "gpus": "8xB200"}),
}
EXPERTS: dict[str, Layout] = {
    "ep": Layout(dp=8, ep=8, shard="optimizer"),
    "etp as tp": Layout(dp=4, tp=2, ep=2, etp=2, sequence_parallel=True),
    "etp 1": Layout(dp=4, tp=2, ep=4, sequence_parallel=True),
    "experts' overlap": Layout(dp=8, ep=8, overlaps=("gradients", "experts")),
}
MATRIX = (
    *CASES,
    *(f"family {name}" for name in FAMILIES),
    *(f"layout {name}" for name in LAYOUTS),
    *(f"experts {name}" for name in EXPERTS),
)


def planned(name: str) -> tuple[Plan, Model]:
    """Return a plan of the matrix, and its model."""
    kind, _, rest = name.partition(" ")
    if kind == "family":
        model = example(EXPORTED[rest])
        return plan_with(model, Layout(dp=8), seq=read_decoder(graph(model), Target.MEGATRON_LM).positions or 64), model
    if kind == "layout":
        model, ref = find("llama3-8b")
        layout, more = LAYOUTS[rest]
        return plan_with(model, layout, ref=ref, batch=160, **more), model
    if kind == "experts":
        model, ref = find("mixtral-8x7b")
        return plan_with(model, EXPERTS[rest], ref=ref), model
    return case(name)


def read_back(target: Target, plan: Plan, model: Model) -> TrainingRun:
    """Return the run that the export's file is read as."""
    if target is Target.SLURM:
        plan = evolve(plan, runtime=Runtime.MEGATRON)  # else the job runs `megaloom train`
    devices = plan.cluster.count if "devices" in NOT_EXPRESSED[target] else None
    return read_text(export_plan(plan, model, target), FILES[target], RunInputs(devices=devices))


def decoder(model: Model) -> DecoderModel:
    """Return a model as Megatron-LM's decoder, without its name, and with sizes left out that are the usual ones."""
    read = evolve(read_decoder(graph(model), Target.MEGATRON_LM), name="")
    a = read.attention
    if not isinstance(a, Attention):
        return read
    kv_heads = None if a.kv_heads == a.heads else a.kv_heads
    head_dim = None if a.head_dim is not None and a.head_dim * a.heads == read.embed else a.head_dim
    return evolve(read, attention=evolve(a, kv_heads=kv_heads, head_dim=head_dim))


def assert_same_model(read: Model, model: Model) -> None:
    assert decoder(read) == decoder(model)
    assert params(read) == params(model)
    written = read_decoder(graph(model), Target.MEGATRON_LM)
    if written.positions is None and written.attention == decoder(model).attention:
        assert fingerprint(read) == fingerprint(model)  # else equal sizes are written in two ways


def fields_said(target: Target, value: Layout | Workload) -> dict[str, Any]:
    """Return the fields of a layout or workload that the target's file says."""
    names = (f.name for f in fields(type(value)) if f.name not in NOT_EXPRESSED[target])
    return {name: getattr(value, name) for name in names}


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("target", FILES)
def test_an_export_is_read_back_as_its_plan_or_refused_by_name(target: Target, name: str) -> None:
    plan, model = planned(name)
    if (target, name) in REFUSED:
        with pytest.raises(UserError, match=f"{target.program} cannot express"):
            read_back(target, plan, model)
        return
    run = read_back(target, plan, model)
    assert_same_model(run.model, model)
    assert fields_said(target, run.layout) == fields_said(target, plan.layout)
    assert fields_said(target, run.workload) == fields_said(target, plan.workload)
    assert run.devices.count == plan.cluster.count
    assert run.stages == tuple(stage.start for stage in plan.stages)


@pytest.mark.parametrize("name", CASES)
def test_bridge_runs_the_kernels_that_megatron_lm_runs(name: str) -> None:
    plan, model = case(name)
    theirs, ours = (read_back(target, plan, model) for target in (Target.MEGATRON_LM, Target.MEGATRON_BRIDGE))
    assert ours.profile == theirs.profile
    assert {note.text for note in ours.notes} <= {note.text for note in theirs.notes}


REFUSED: frozenset[tuple[Target, str]] = frozenset()
"""Plans of the matrix that a target cannot express; every other one is exported."""


@pytest.mark.parametrize("target", FILES)
def test_what_a_target_does_not_say_is_a_field(target: Target) -> None:
    known = {f.name for kind in (Layout, Workload) for f in fields(kind)} | {"model", "stages", "devices"}
    assert NOT_EXPRESSED[target].keys() <= known
