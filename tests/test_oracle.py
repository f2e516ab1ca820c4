"""The oracle: megatron-core's modules compute what the layers' own mathematics says, from the same initial weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from megaloom.dsl import graph
from megaloom.dsl.find import find
from megaloom.planner.layout import Layout, Recompute
from megaloom.planner.plan import Plan
from megaloom.runtime import Recipe, launch
from megaloom.runtime.initial import initial
from megaloom.runtime.interpret import interpret

SEED, SEQ, BATCH, VOCAB = 7, 32, 4, 127
TP2 = Layout(tp=2, sequence_parallel=True)


def sample(i: int) -> torch.Tensor:
    return torch.randint(VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(i))


def declared(plan: Plan) -> tuple[float, float]:
    """The loss of the first batch by the layers' own mathematics, and the norm of its gradient."""
    model, _ = find(plan.model)
    weights = {k: initial(s, SEED).requires_grad_() for k, s in graph(model).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    (logits,) = interpret(model, weights, {"tokens": x[:, :-1]})
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return loss.item(), torch.stack([w.grad.norm() for w in weights.values()]).norm().item()


def trained(plan: Plan) -> tuple[float, float]:
    """On each rank: the loss before the first step, and the first step's gradient norm."""
    from megaloom.runtime.step import Engine

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=1, seed=SEED, warmup=0))
    return engine.evaluate(sample, 1), engine.step(sample).grad_norm


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
    ],
    ids=str,
)
def test_the_runtime_computes_the_declared_mathematics(name: str, layout: Layout, plan_of: Any) -> None:
    plan = plan_of(name, layout)
    (loss, norm), got = declared(plan), launch.run(trained, (plan,), layout.world, timeout=60)[0]
    assert got[0] == pytest.approx(loss, abs=1e-5)
    assert got[1] == pytest.approx(norm, rel=1e-5)


def test_experts_compute_the_declared_mathematics(plan_of: Any) -> None:
    """The loss alone: the balancing loss has a gradient, and no part in the layer's output."""
    plan = plan_of("tiny_mixtral", Layout(dp=2, ep=2))
    assert launch.run(trained, (plan,), 2, timeout=60)[0][0] == pytest.approx(declared(plan)[0], abs=1e-5)
