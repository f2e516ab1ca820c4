"""The oracle: what megatron-core trains is what the declared mathematics and torch's AdamW make of the same start."""

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.parity.oracle import Oracle, stacked
from tests.support.paths import TEST_MODELS

SEQ, BATCH, VOCAB = 32, 4, 127
RECIPE = Recipe(steps=3, seed=7, lr=3e-3, min_lr=3e-3, warmup=0)
TP2 = Layout(tp=2, sequence_parallel=True)
OWN = f"{TEST_MODELS / 'own_layers.py'}:balanced"  # layers whose bodies run


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, VOCAB, SEQ))


def declared(plan: Plan) -> tuple[list[float], list[float]]:
    """Losses by the layers' own mathematics, and norms of the gradients, balancing losses included."""
    oracle = Oracle.of(model_named(plan.model), RECIPE)
    steps = [oracle.step(stacked(sample, range(k * BATCH, (k + 1) * BATCH))) for k in range(RECIPE.steps)]
    return [s.loss for s in steps], [s.grad_norm for s in steps]


def trained(plan: Plan) -> tuple[float, list[float], list[float]]:
    """On each rank: the loss of the first batch before training on it, then losses and norms of the gradients."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    before = engine.evaluate_samples(sample, BATCH).loss
    results = [engine.step(lambda i, k=k: sample(k * BATCH + i)) for k in range(RECIPE.steps)]
    return before, [r.loss for r in results], [r.grad_norm for r in results]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny_gpt", Layout()),
        ("tiny_gpt", TP2),
        ("tiny_gpt", Layout(pp=2, vpp=2)),
        ("tiny_llama", Layout()),
        ("tiny_llama", TP2),
        ("tiny_llama", Layout(cp=2, pp=2)),
        ("tiny_parallel", Layout()),
        ("tiny_parallel", evolve(TP2, pp=2, recompute=Recompute.FULL)),
        ("tiny_mixtral", Layout()),
        ("tiny_mixtral", Layout(dp=2, ep=2)),
        ("tiny_deepseek_v2", Layout()),
        ("tiny_deepseek_v3", Layout()),
        ("tiny_gpt_oss", Layout()),
        ("tiny_llama4", Layout()),
        ("tiny_qwen3", Layout(dp=2, ep=2)),
        (OWN, Layout()),
        (OWN, evolve(TP2, cp=2)),
    ],
    ids=str,
)
def test_the_runtime_computes_the_declared_mathematics(name: str, layout: Layout, plan_of: Any) -> None:
    plan = plan_of(name, layout)
    before, losses, norms = launcher.run(trained, (plan,), layout.world, timeout=LIMIT)[0]
    expected, expected_norms = declared(plan)
    assert before == pytest.approx(expected[0], abs=1e-5)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert len(set(losses)) == RECIPE.steps
    assert max(norms) > RECIPE.clip_grad  # so that it is clipped
