"""The backend of a run: chosen, refused, recorded in its plan, and named in its first lines."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.capability import TRANSFORMER_ENGINE, Environment
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Backend, Precision
from megaloom.runtime.megatron import environment
from megaloom.runtime.training import chosen_backend
from megaloom.runtime.training.chosen_backend import backend_note, engine_refusal, precision_note, with_backend
from megaloom.runtime.training.run_options import RunOptions


@pytest.fixture
def with_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and Transformer Engine."""
    here = Environment(device="H100", torch="2.11", backends=(TRANSFORMER_ENGINE,))
    monkeypatch.setattr(chosen_backend.device, "gpu_count", lambda: 1)
    monkeypatch.setattr(chosen_backend, "engine_is_installed", lambda: True)
    monkeypatch.setattr(chosen_backend, "current_environment", lambda: here)
    monkeypatch.setattr(chosen_backend, "version", lambda name: "2.12.0")
    monkeypatch.setattr(environment, "current_environment", lambda: here)


def bf16(plan: Plan) -> Plan:
    return evolve(plan, workload=evolve(plan.workload, precision=Precision.BF16))


def uses_engine(plan: Plan) -> bool:
    return TRANSFORMER_ENGINE in plan.environment.backends


@pytest.mark.usefixtures("with_engine")
def test_auto_takes_the_engine_where_it_computes(plan_of: Any) -> None:
    plan = bf16(plan_of("tiny_mixtral", Layout()))
    assert not uses_engine(plan)
    found = {backend: with_backend(plan, backend) for backend in Backend}
    assert {b: uses_engine(p) for b, p in found.items()} == {
        Backend.AUTO: True,
        Backend.TE: True,
        Backend.TORCH: False,
    }
    assert with_backend(found[Backend.TE], Backend.TORCH) == plan
    assert TRANSFORMER_ENGINE in environment.building_environment(found[Backend.AUTO].environment).backends
    assert TRANSFORMER_ENGINE not in environment.building_environment(plan.environment).backends
    model = graph(planned_model(plan))
    assert backend_note(found[Backend.AUTO], model) == (
        "backend: Transformer Engine 2.12.0 for experts; torch for the rest; the plan's step time is that of torch"
    )
    assert backend_note(plan, model) == "backend: torch"


@pytest.mark.usefixtures("with_engine")
@pytest.mark.parametrize(("precision", "reason"), [("fp32", "TF32"), ("fp16", "not been tried in fp16")])
def test_other_precisions_are_torchs(precision: str, reason: str, plan_of: Any) -> None:
    plan = evolve(plan_of("tiny_gpt", Layout()))
    plan = evolve(plan, workload=evolve(plan.workload, precision=Precision(precision)))
    assert not uses_engine(with_backend(plan, Backend.AUTO))
    with pytest.raises(UserError, match=reason):
        with_backend(plan, Backend.TE)


@pytest.mark.usefixtures("with_engine")
def test_fp8_needs_the_engine(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = evolve(plan_of("tiny_gpt", Layout()))
    plan = evolve(plan, workload=evolve(plan.workload, precision=Precision.FP8))
    monkeypatch.setattr(chosen_backend, "multiplies_fp8", lambda: False)
    with pytest.raises(UserError, match=r"--precision fp8: .* has no products in fp8"):
        with_backend(plan, Backend.AUTO)
    monkeypatch.setattr(chosen_backend, "multiplies_fp8", lambda: True)
    assert uses_engine(with_backend(plan, Backend.AUTO))
    assert "linear layers in fp8" in backend_note(with_backend(plan, Backend.TE), graph(planned_model(plan)))
    with pytest.raises(UserError, match="torch has no linear layers in fp8"):
        with_backend(plan, Backend.TORCH)


@pytest.mark.usefixtures("with_engine")
def test_sharded_weights_are_torchs(plan_of: Any) -> None:
    plan = bf16(plan_of("tiny_mixtral", Layout(dp=2, shard="weights")))
    assert not uses_engine(with_backend(plan, Backend.AUTO))
    with pytest.raises(UserError, match="not been tried with --shard weights"):
        with_backend(plan, Backend.TE)


def test_the_engine_is_refused_where_it_is_missing(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bf16(plan_of("tiny_gpt", Layout()))
    assert not uses_engine(with_backend(plan, Backend.AUTO))
    with pytest.raises(UserError, match=r"--backend te: Transformer Engine needs a CUDA device"):
        with_backend(plan, Backend.TE)
    old = Environment(device="V100", torch="2.11", backends=())
    monkeypatch.setattr(chosen_backend, "current_environment", lambda: old)
    monkeypatch.setattr(chosen_backend.device, "gpu_count", lambda: 1)
    assert engine_refusal(Precision.BF16, plan.layout) == "Transformer Engine is not installed"
    monkeypatch.setattr(chosen_backend, "engine_is_installed", lambda: True)
    assert "newer device" in engine_refusal(Precision.BF16, plan.layout)


def test_a_run_keeps_its_backend() -> None:
    options = RunOptions().changed(backend="te")
    assert options.kernels.backend is Backend.TE
    assert list(options.words()) == ["--backend", "te"]
    assert options.compared()["--backend"] == "te"


def test_an_evaluation_says_that_it_is_not_in_fp8(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("tiny_gpt", Layout())
    narrow = evolve(plan, workload=evolve(plan.workload, precision=Precision.FP8))
    assert precision_note(narrow).startswith("the run is in fp8, and this evaluation in bf16: Transformer Engine needs")
    assert precision_note(plan) == ""
    monkeypatch.setattr(chosen_backend, "engine_refusal", lambda precision, layout: "")
    assert precision_note(narrow) == ""
