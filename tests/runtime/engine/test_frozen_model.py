"""A frozen model beside an engine: what it computes goes with the batch to the student's step, under every layout."""

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import Model, graph
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.runtime import FrozenModel, Recipe, shard, shard_frozen, token_log_probs
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron.weight_shards import own_values
from megaloom.runtime.modules.initial_weights import initial_weight
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.parity.layouts import Results, under_layouts
from tests.support.paths import TEST_MODELS

STUDENT, TEACHER = f"{TEST_MODELS / 'scored.py'}:scored", "frozen_llama"
BATCH, SEQ, VOCAB = 4, 32, 127
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
LAYOUTS = {
    "DP1": Layout(micro_batch=2),
    "TP2 SP": Layout(tp=2, sequence_parallel=True, micro_batch=2, vocab_multiple=128),
    "PP2": Layout(pp=2, micro_batch=2),
    "PP2 VPP2": Layout(pp=2, vpp=2, micro_batch=2),
    "CP2": Layout(cp=2, micro_batch=2),
    "DP2": Layout(dp=2, micro_batch=2),
    "DP2 sharded weights": Layout(dp=2, micro_batch=2, shard="weights"),
}


@frozen
class Plans:
    """The plans of both models, and one of the teacher in bf16."""

    student: Plan
    teacher: Plan
    half: Plan

    @property
    def layout(self) -> Layout:
        return self.student.layout


def rows(step: int) -> dict[str, Tensor]:
    """Return a global batch. `reward` is no input."""
    g = torch.Generator().manual_seed(step)
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=g)
    counted = torch.rand(BATCH, SEQ, generator=g) > 0.3
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": counted, "reward": torch.rand(BATCH, generator=g)}


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: initial_weight(slot, seed=3).read() for name, slot in graph(model).weights.items()}


def from_reference(outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"reference": token_log_probs(outputs, batch["labels"])}


def from_teacher(outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    (name,) = (name for name in outputs.values if name.startswith("unembed"))
    best = torch.log_softmax(outputs.gathered(name).float(), -1).topk(5)
    return {"teacher": best.values, "ids": best.indices}


class Student:
    """Distils the best tokens of the teacher, weighted by a reward, and stays near the reference."""

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        outputs = forward(batch)
        if outputs is None:
            return None
        log_probs = token_log_probs(outputs, batch["ids"])
        whole = torch.log_softmax(outputs.gathered("softcap.0").detach().float(), -1)
        assert torch.allclose(log_probs, whole.gather(-1, batch["ids"]), atol=1e-5)
        far = (batch["teacher"].exp() * (batch["teacher"] - log_probs)).sum(-1)
        near = (token_log_probs(outputs, batch["labels"]) - batch["reference"]) ** 2
        return ((far + near).mean(1) * batch["reward"]).sum(), torch.tensor(float(len(far)))


def beside(plans: Plans) -> dict[str, Any]:
    """On each rank: losses of steps, tensors of both frozen models, and what their parameters are."""
    student, larger = model_named(plans.student.model), model_named(plans.teacher.model)
    engine = shard(student, plans.student, RECIPE, steps=Student())
    reference = FrozenModel.of(engine)
    teacher = shard_frozen(larger, plans.teacher, weights_of(larger))
    groups, share = engine.groups, BATCH // plans.layout.dp
    is_first = not (groups.tp_rank or groups.cp_rank or groups.pp_rank)
    losses, found = [], {}
    for step in range(2):
        own = {k: x[groups.dp_rank * share :][:share] for k, x in rows(step).items()}
        batch = reference.extend(own if is_first else None, from_reference)
        assert batch.keys() - {"reference"} == own.keys()
        batch = teacher.extend(batch, from_teacher)
        found[step] = {name: batch[name] for name in batch.keys() - own.keys()}
        result = engine.step(batch if step == 0 else sampled(batch, groups.dp_rank, share))
        losses += [result.loss, result.grad_norm]
    first = {k: x[groups.dp_rank * share :][:share] for k, x in rows(0).items()}
    again = reference.extend(first, from_reference)
    now = FrozenModel.of(engine).extend(first, from_reference)
    if "reference" in again:
        assert torch.equal(again["reference"], found[0]["reference"])
        assert not torch.equal(now["reference"], again["reference"])
    half = shard_frozen(larger, plans.half, weights_of(larger))
    assert {p.dtype for chunk in half.model_chunks for p in chunk.parameters()} == {torch.bfloat16}
    rough = half.extend(first, from_teacher)
    if "teacher" in rough:
        assert torch.allclose(rough["teacher"], found[0]["teacher"], atol=0.05)
    steps = [step for model in (reference, teacher) for step in model.pipeline.reported]
    assert len(steps) == 2, "each call of extend leaves something in memory"
    parameters = [p for model in (reference, teacher) for chunk in model.model_chunks for p in chunk.parameters()]
    held, whole = (sum(of(p).numel() for p in parameters) for of in (own_values, lambda p: p))
    assert held / whole == pytest.approx(1 / plans.layout.dp if plans.layout.fsdp else 1, rel=0.02)
    assert not any(p.requires_grad or p.grad is not None or hasattr(p, "main_grad") for p in parameters)
    return {"losses": losses, "dp_rank": groups.dp_rank, "found": found}


def sampled(batch: dict[str, Tensor], dp_rank: int, share: int) -> Any:
    """Return a function from i to sample i of the global batch, of which this rank has its own rows."""
    return lambda i: {name: x[i - dp_rank * share] for name, x in batch.items()}


@pytest.fixture(scope="module")
def results(plan_of: Any) -> Results:
    def make(layout: Layout) -> Any:
        student, teacher = (plan_of(name, layout, batch=BATCH, seq=SEQ) for name in (STUDENT, TEACHER))
        return Plans(student, teacher, evolve(teacher, workload=evolve(teacher.workload, precision=Precision.BF16)))

    return under_layouts(beside, {name: make(layout) for name, layout in LAYOUTS.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_student_learns_under_a_layout_what_it_learns_in_one_process(layout: str, results: Results) -> None:
    expected = results["DP1"][0]
    with_tensors = 0
    for rank in results[layout]:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for step, tensors in rank["found"].items():
            with_tensors += bool(tensors)
            for name, x in tensors.items():
                whole = expected["found"][step][name]
                assert torch.allclose(x.float(), whole[rank["dp_rank"] * len(x) :][: len(x)].float(), atol=1e-5), name
    assert with_tensors == 2 * LAYOUTS[layout].world // LAYOUTS[layout].pp
    assert len(set(expected["losses"])) == len(expected["losses"])


REFUSED: dict[str, Any] = {
    "text": (lambda own: torch.zeros(2, SEQ + 1, dtype=torch.int64), from_teacher),
    "no batch": (lambda own: own, from_teacher),
    "no tensors": (lambda own: own, lambda outputs, batch: {"best": 1.0}),
    "taken": (lambda own: own, lambda outputs, batch: {"labels": batch["labels"]}),
    "one row": (lambda own: own, lambda outputs, batch: {"best": batch["labels"].sum()}),
}


def refusals(plans: Plans) -> dict[str, str]:
    """On each rank: the messages of batches and functions that are refused, and of steps without pairs."""
    model = model_named(plans.teacher.model)
    with pytest.raises(UserError, match="all weights of frozen-llama are frozen, so there is nothing to train\n"):
        shard(model, plans.teacher, RECIPE)
    teacher, out = shard_frozen(model, plans.teacher, weights_of(model)), {}
    own = {k: x[:2] for k, x in rows(0).items()}
    for name, (batch, function) in REFUSED.items():
        with pytest.raises(UserError) as raised:
            teacher.extend(None if name == "no batch" and teacher.groups.dp_rank else batch(own), function)
        out[name] = str(raised.value)
    engine = shard(model_named(plans.student.model), plans.student, RECIPE, steps=Empty())
    for name, call in {"step": engine.step, "evaluate": lambda batch: engine.evaluate([batch], micro_batch=4)}.items():
        with pytest.raises(UserError) as raised:
            call(own)
        out[name] = str(raised.value)
    return out


class Empty:
    """Counts nothing."""

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        outputs = forward(batch)
        return None if outputs is None else (0 * outputs.loss_sum, torch.zeros(()))


class Asking(Empty):
    """Asks a frozen model inside the step."""

    def __init__(self, model: FrozenModel) -> None:
        self.model = model

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        return super().training_step(forward, self.model.extend(batch, from_teacher))


def asked(plan: Plan) -> None:
    model = model_named(plan.model)
    teacher = shard_frozen(model, plan, weights_of(model))
    shard(model, plan, RECIPE, steps=Asking(teacher)).step(rows(0))


def test_stages_cannot_ask_inside_a_step(plan_of: Any) -> None:
    plan = plan_of(STUDENT, LAYOUTS["PP2"], batch=BATCH, seq=SEQ)
    with pytest.raises(UserError, match="extend was called inside a step, which the 2 pipeline stages run"):
        launcher.run(asked, (plan,), 2, timeout=LIMIT)


def test_what_is_refused(plan_of: Any) -> None:
    student, teacher = (plan_of(name, LAYOUTS["DP2"], batch=BATCH, seq=SEQ) for name in (STUDENT, TEACHER))
    first, second = under_layouts(refusals, {"DP2": Plans(student, teacher, teacher)})["DP2"]
    assert first["text"] == (
        "a batch of text has no names, which extend needs to add to it\ngive tensors by name: tokens, labels"
    )
    assert second["no batch"] == "data-parallel rank 1 has no batch: give each of them its own rows"
    assert first["no batch"].endswith(second["no batch"])
    assert second["no tensors"] == "extend needs a function that returns a dict of tensors by name"
    assert second["taken"] == "the batch has labels already\ngive what extend adds another name"
    assert second["one row"] == "best has the shape []: it must have a row for each of 2 sequences"
    assert second["step"].startswith(
        "nothing was trained on: the weight_sum of all calls of Empty.training_step is 0\n"
    )
    assert second["evaluate"].startswith("a batch to evaluate has 2 sequences, not a multiple of micro_batch=4\n")
