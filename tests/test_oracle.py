"""The oracle: megatron-core's modules compute what the layers' own mathematics says, from the same initial weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megaloom.dsl import graph
from megaloom.dsl.find import find
from megaloom.planner.layout import Layout
from megaloom.runtime import device, launch
from megaloom.runtime.initial import initial
from megaloom.runtime.interpret import interpret

SEED, SEQ, BATCH, VOCAB = 7, 32, 4, 127


def sample(i: int) -> torch.Tensor:
    return torch.randint(VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(i))


def losses(plan: Any) -> tuple[float, float]:
    """On each rank: the loss before the first step, and the first step's gradient norm."""
    from megaloom.runtime.optimize import Recipe
    from megaloom.runtime.step import Engine

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=1, seed=SEED, warmup=0))
    return engine.evaluate(sample, 1), engine.step(sample).grad_norm


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_llama"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(cp=2, pp=2)], ids=str)
def test_the_runtime_computes_the_declared_mathematics(name: str, layout: Layout, plan_of: Any) -> None:
    model, _ = find(f"{Path(__file__).with_name('models.py')}:{name}")
    weights = {k: initial(s, SEED).requires_grad_() for k, s in graph(model).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    (logits,) = interpret(model, weights, {"tokens": x[:, :-1]})
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    norm = torch.stack([w.grad.norm() for w in weights.values() if w.grad is not None]).norm()

    device.prepare()
    got = launch.run(losses, (plan_of(name, layout),), layout.world, timeout=60)[0]
    assert got[0] == pytest.approx(loss.item(), abs=1e-5)
    assert got[1] == pytest.approx(norm.item(), rel=1e-5)


def test_experts_compute_the_declared_mathematics(plan_of: Any) -> None:
    """The loss alone: the balancing loss has a gradient, and no part in the layer's output."""
    model, _ = find(f"{Path(__file__).with_name('models.py')}:tiny_mixtral")
    weights = {k: initial(s, SEED) for k, s in graph(model).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    (logits,) = interpret(model, weights, {"tokens": x[:, :-1]})
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    device.prepare()
    got = launch.run(losses, (plan_of("tiny_mixtral", Layout(dp=2, ep=2)),), 2, timeout=60)[0]
    assert got[0] == pytest.approx(loss.item(), abs=1e-5)
