"""Law: a plan that is exported to Megatron-LM is read back as that plan, for all that Megatron-LM expresses."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from megaloom.dsl import Attention, Model, fingerprint, graph
from megaloom.dsl.catalog import examples, find
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.export.decoder import DecoderModel, read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.runs.megatron.parser import Arguments, parse_words
from megaloom.planner.runs.megatron.read import ArgumentSource, read_run
from megaloom.planner.runs.run import Devices, TrainingRun
from megaloom.planner.runs.words import Origin, Word
from tests.support.exported import CASES, case, groups, plan_with
from tests.support.models.examples import example

HERE = Origin("run.sh", 1)


def words_of(text: str) -> tuple[Word, ...]:
    """Return the words of the arrays in an exported script."""
    return tuple(Word(word, HERE) for group in groups(text).values() for word in group)


def arguments(plan: Plan, model: Model) -> Arguments:
    return parse_words(words_of(export_plan(plan, model, Target.MEGATRON_LM)))


def read_back(plan: Plan, model: Model) -> TrainingRun:
    return read_run(arguments(plan, model), ArgumentSource("run.sh", Devices(plan.cluster.count)))


def decoder(model: Model) -> DecoderModel:
    """Return a model as Megatron-LM's decoder, without its name, and with sizes left out that are the usual ones."""
    read = evolve(read_decoder(graph(model), Target.MEGATRON_LM), name="")
    a = read.attention
    if not isinstance(a, Attention):
        return read
    kv_heads = None if a.kv_heads == a.heads else a.kv_heads
    head_dim = None if a.head_dim is not None and a.head_dim * a.heads == read.embed else a.head_dim
    return evolve(read, attention=evolve(a, kv_heads=kv_heads, head_dim=head_dim))


def assert_same(plan: Plan, model: Model) -> None:
    run = read_back(plan, model)
    assert decoder(run.model) == decoder(model)
    assert params(run.model) == params(model)
    written = read_decoder(graph(model), Target.MEGATRON_LM)
    if written.positions is None and written.attention == decoder(model).attention:
        assert fingerprint(run.model) == fingerprint(model)  # else equal sizes are written in two ways
    assert (run.layout, run.workload) == (plan.layout, plan.workload)
    assert run.stages == tuple(stage.start for stage in plan.stages)


@pytest.mark.parametrize("name", CASES)
def test_each_case_of_the_exports_is_read_back(name: str) -> None:
    assert_same(*case(name))


# One example of each family that Megatron-LM may express.
FAMILIES = ("deepseek", "gpt2", "gpt3", "llama2", "llama3", "mistral", "mixtral", "nemotron", "qwen2", "qwen3")
EXPORTED = {ref.partition(":")[0].rpartition(".")[2]: name for name, ref in reversed([*examples().items()])}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_back(family: str) -> None:
    model = example(EXPORTED[family])
    assert_same(plan_with(model, Layout(dp=8)), model)


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_field_of_a_layout_is_read_back(name: str) -> None:
    model, ref = find("llama3-8b")
    layout, more = LAYOUTS[name]
    assert_same(plan_with(model, layout, ref=ref, batch=160, **more), model)


EXPERTS: dict[str, Layout] = {
    "ep": Layout(dp=8, ep=8, shard="optimizer"),
    "etp as tp": Layout(dp=4, tp=2, ep=2, etp=2, sequence_parallel=True),
    "etp 1": Layout(dp=4, tp=2, ep=4, sequence_parallel=True),
    "experts' overlap": Layout(dp=8, ep=8, overlaps=("gradients", "experts")),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_each_field_of_a_layout_of_experts_is_read_back(name: str) -> None:
    model, ref = find("mixtral-8x7b")
    assert_same(plan_with(model, EXPERTS[name], ref=ref), model)
