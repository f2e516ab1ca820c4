"""Gradients of the whole model by the names of its weights: those of the declared mathematics, under any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

if TYPE_CHECKING:
    from megaloom.runtime.engine.gradients import WeightGradient

RECIPE = Recipe(steps=10, seed=7, lr=1e-2, warmup=0)
TP2 = Layout(tp=2, sequence_parallel=True)
SOME_EXPERTS = f"{TEST_MODELS / 'own_layers.py'}:some_experts"  # bodies and modules, a tied table with a bias


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def run(plan: Plan, *, asks: bool) -> tuple[dict[str, WeightGradient] | None, list[float]]:
    """Return on each rank the gradients of the first batch, if asked for, and the losses of two steps after that."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    gradients = engine.gradients(sample) if asks else None
    return gradients, [engine.step(lambda i, k=k: sample(4 * k + i)).loss for k in range(2)]


def asked(plan: Plan) -> tuple[dict[str, WeightGradient] | None, list[float]]:
    return run(plan, asks=True)


def not_asked(plan: Plan) -> tuple[dict[str, WeightGradient] | None, list[float]]:
    return run(plan, asks=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny_gpt", Layout(tp=2, pp=2, sequence_parallel=True)),
        (SOME_EXPERTS, Layout(dp=2, tp=2, ep=2, sequence_parallel=True, shard="optimizer")),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_declaration(name: str, layout: Layout, plan_of: Any) -> None:
    plan = plan_of(name, layout)
    (gradients, _), *others = launcher.run(asked, (plan,), layout.world, timeout=LIMIT)
    assert all(each is None for each, _ in others)
    assert gradients is not None
    m, _ = find(plan.model)
    weights = {k: initial_weight(s, RECIPE.seed).read().requires_grad_(s.trained) for k, s in graph(m).weights.items()}
    batch = next_token(torch.stack([random_text(i, 127, 32) for i in range(4)]))
    ((total, count),) = interpret(m, weights, batch)
    (total / count).backward()
    assert list(gradients) == [k for k, s in graph(m).weights.items() if s.trained]
    for weight, gradient in gradients.items():
        expected = weights[weight].grad
        assert expected is not None
        torch.testing.assert_close(gradient.value, expected, rtol=0, atol=1e-5 * float(expected.abs().max()) + 1e-10)
        assert gradient.disagreement <= 1e-6 * float(expected.abs().max()) + 1e-10


@pytest.mark.parametrize("layout", [Layout(dp=2, shard="optimizer", overlaps=("gradients", "weights"))], ids=str)
def test_asking_for_gradients_changes_no_step(layout: Layout, plan_of: Any) -> None:
    plan = plan_of("tiny_deepseek_v3", layout)
    with_, without = (launcher.run(entry, (plan,), 2, timeout=LIMIT)[0][1] for entry in (asked, not_asked))
    assert with_ == without
