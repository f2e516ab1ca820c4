"""Law: a plan that is exported is read back as that plan, for all that the target expresses."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, fields

from megaloom.dsl import Attention, Model, UserError, fingerprint, graph
from megaloom.dsl.catalog import find
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.export.decoder import DecoderModel, read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.expressed import NOT_EXPRESSED, as_told
from megaloom.planner.export.megatron_lm import model_options
from megaloom.planner.export.option import option
from megaloom.planner.export.target import TORCHTITANS, Target
from megaloom.planner.export.torchtitan_flavors import find_flavor
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from megaloom.planner.runs.words import Origin, Word
from tests.support.export_matrix import MATRIX, planned
from tests.support.exported import CASES, case, plan_with

FILES = {
    Target.MEGATRON_LM: "run.sh",
    Target.SLURM: "run.slurm",
    Target.MEGATRON_BRIDGE: "run.py",
    Target.TORCHTITAN: "run.toml",
    Target.TORCHTITAN_0_3: "run.py",
    Target.ACCELERATE: "run.yaml",
}

TORCHTITAN = """llama3-8b;deepseek-v3;layout one device;layout sharded weights;layout sharded weights in fp8;
layout replicas;own replicated;
own one micro-batch;own optimizer of one micro-batch;own tensors;own context;own stages;own chunks;own recompute;
own fp32;own experts;own experts divided;own experts whole;own tied"""
TORCHTITAN_0_3 = TORCHTITAN.replace("llama3-8b;", "").replace("own context;", "").replace("own experts divided;", "")
TORCHTITAN_0_3 += ";own stages of qwen3;own tensors alone;own tensors whole;own small;own wide experts"
ACCELERATE = """gpt2;family gpt2;family gpt3;layout sharded weights;layout replicas;own one micro-batch;own recompute;
own fp32;own tied;own small;own gpt2;own gpt2 recompute;own gpt2 first;own gpt2 in fp16;own gpt2 in bf16"""
NOT_IN_MEGATRON = frozenset({"own stages", "own stages of qwen3", "own fp32"})  # Megatron-FSDP has neither
REFUSED = {
    Target.MEGATRON_LM: NOT_IN_MEGATRON,
    Target.SLURM: NOT_IN_MEGATRON,
    Target.MEGATRON_BRIDGE: NOT_IN_MEGATRON | {"layout sharded weights in mxfp8"},
    Target.TORCHTITAN: frozenset(MATRIX) - {*TORCHTITAN.replace("\n", "").split(";"), "own wide experts"},
    Target.TORCHTITAN_0_3: frozenset(MATRIX) - {*TORCHTITAN_0_3.replace("\n", "").split(";")},
    Target.ACCELERATE: frozenset(MATRIX) - {*ACCELERATE.replace("\n", "").split(";")},
}
"""Plans of the matrix that a target cannot express; every other one is exported."""


def beside(target: Target, plan: Plan, model: Model) -> tuple[Word, ...]:
    """Return the flags that a user gives with a file of Accelerate: the model's, and those of the batch."""
    if target is not Target.ACCELERATE:
        return ()
    x, read = plan.layout, read_decoder(graph(model), Target.MEGATRON_LM)
    options = [
        *model_options(read, plan.workload.seq, x.vocab_multiple, Target.MEGATRON_LM),
        option("vocab-size", read.vocab),
        option("micro-batch-size", x.micro_batch),
        *([option("global-batch-size", plan.workload.batch)] if x.fsdp else []),
    ]
    return tuple(Word("=".join(one.words), Origin("--set", n)) for n, one in enumerate(options, 1))


def read_back(target: Target, plan: Plan, model: Model) -> TrainingRun:
    """Return the run that the export's file is read as."""
    if target is Target.SLURM:
        plan = evolve(plan, runtime=Runtime.MEGATRON)  # else the job runs `megaloom train`
    devices = plan.cluster.count if "devices" in NOT_EXPRESSED[target] else None
    text = export_plan(plan, model, target)
    return read_text(text, FILES[target], RunInputs(devices=devices, flags=beside(target, plan, model)))


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


def same_flavor(target: Target, read: Model, model: Model) -> bool:
    """Return whether two models are one of torchtitan's."""
    one, other = (find_flavor(read_decoder(graph(m), target), target) for m in (read, model))
    return one is not None and one is other


def fields_said(target: Target, value: Layout | Workload) -> dict[str, Any]:
    """Return the fields of a layout or workload that the target's file says."""
    silent = NOT_EXPRESSED[target].keys() - {"seq", "batch", "micro_batch"}  # which a user gives beside the file
    return {f.name: getattr(value, f.name) for f in fields(type(value)) if f.name not in silent}


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("target", FILES)
def test_an_export_is_read_back_as_its_plan_or_refused_by_name(target: Target, name: str) -> None:
    plan, model = planned(name)
    if name in REFUSED[target]:
        program = Target.MEGATRON_LM.program if target is Target.SLURM else target.program
        with pytest.raises(UserError, match=f"{program} cannot express"):
            read_back(target, plan, model)
        return
    run, told = read_back(target, plan, model), as_told(target, plan)
    if target in TORCHTITANS:
        assert same_flavor(target, run.model, model)
    else:
        assert_same_model(run.model, model)
    assert fields_said(target, run.layout) == fields_said(target, told.layout)
    assert fields_said(target, run.workload) == fields_said(target, plan.workload)
    assert run.devices.count == plan.cluster.count
    assert run.stages == tuple(stage.start for stage in plan.stages)


@pytest.mark.parametrize("name", CASES)
def test_bridge_runs_the_kernels_that_megatron_lm_runs(name: str) -> None:
    plan, model = case(name)
    theirs, ours = (read_back(target, plan, model) for target in (Target.MEGATRON_LM, Target.MEGATRON_BRIDGE))
    assert ours.profile == theirs.profile
    assert {note.text for note in ours.notes} <= {note.text for note in theirs.notes}


# For each field that some target does not say, two plans that differ in it alone.
SILENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vocab_multiple": ({"vocab_multiple": 1}, {"vocab_multiple": 64}),
    "overlaps": ({"overlaps": ()}, {"overlaps": ("gradients",)}),
    "grad_reduce": ({}, {"grad_reduce": "bf16"}),
    "micro_batch": ({}, {"micro_batch": 2, "batch": 128}),
    "batch": ({}, {"micro_batch": 2, "batch": 128}),
    "seq": ({"seq": 1024}, {"seq": 512}),
}


@pytest.mark.parametrize("target", Target)
def test_what_a_target_is_said_not_to_say_is_not_in_its_file(target: Target) -> None:
    """Two plans that differ only in such a field have one file, without its comments."""
    silent = NOT_EXPRESSED[target].keys() - {"model", "stages", "devices"}
    assert silent <= SILENT.keys()
    for name in sorted(silent):
        one, other = (_uncommented(target, more) for more in SILENT[name])
        assert one == other, name


def _uncommented(target: Target, more: dict[str, Any]) -> list[str]:
    """Return the lines of an export of a model that the target has, without comments."""
    model, ref = find("llama3-8b" if target in TORCHTITANS else "gpt2")
    work = {"batch": 64, **{name: more[name] for name in ("seq", "batch") if name in more}}
    shard = {"shard": "weights"} if target in TORCHTITANS else {}
    layout = Layout(dp=2, **shard, **{name: value for name, value in more.items() if name not in work})
    text = export_plan(plan_with(model, layout, ref=ref, **work), model, target)
    return [line for line in text.splitlines() if not line.startswith("#")]
