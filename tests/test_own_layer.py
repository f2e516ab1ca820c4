"""A layer without a torch module runs its own body: what it computes is the same on every layout, and the oracle's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaloom.dsl import graph
from megaloom.dsl.find import find
from megaloom.planner.layout import Layout
from megaloom.planner.plan import Plan
from megaloom.runtime import Recipe, launch
from megaloom.runtime.initial import initial
from megaloom.runtime.interpret import interpret

MODELS = Path(__file__).with_name("own_models.py")
SEQ, BATCH = 32, 4


def sample(i: int) -> torch.Tensor:
    return torch.randint(127, (SEQ + 1,), generator=torch.Generator().manual_seed(i))


def first_step(plan: Plan) -> tuple[float, float]:
    """On each rank: the loss of the first batch, and the norm of its gradient."""
    from megaloom.runtime.step import Engine

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=3, seed=7, warmup=0))
    result = engine.step(sample)
    return result.loss, result.grad_norm


def declared(plan: Plan) -> tuple[float, float]:
    """The same by the oracle."""
    m, _ = find(plan.model)
    weights = {k: initial(s, 7).requires_grad_(s.trained) for k, s in graph(m).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    (logits,) = interpret(m, weights, {"tokens": x[:, :-1]})
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return loss.item(), sum(w.grad.square().sum() for w in weights.values() if w.grad is not None).sqrt().item()


LAYOUTS = {
    "one process": Layout(),
    "TP2": Layout(tp=2),
    "TP2 SP": Layout(tp=2, sequence_parallel=True),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
    "TP2 PP2": Layout(tp=2, pp=2),
    "TP2 SP CP2": Layout(tp=2, sequence_parallel=True, cp=2),
    "DP2 distributed optimizer": Layout(dp=2, distributed_optimizer=True),
}


@pytest.mark.parametrize("row", LAYOUTS)
@pytest.mark.parametrize("name", ["gated", "windowed"])
def test_a_body_computes_the_declared_mathematics(name: str, row: str, plan_of: Any) -> None:
    plan = plan_of(f"{MODELS}:{name}", LAYOUTS[row])
    loss, norm = launch.run(first_step, (plan,), plan.layout.world, timeout=60)[0]
    expected = declared(plan)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    assert norm == pytest.approx(expected[1], rel=1e-5)
