"""The balancing loss of experts: its value and its gradients do not depend on the layout, and are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl import Model, MoE, SwiGLU, graph
from megaloom.examples.qwen3 import qwen3
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.models.small import tiny_deepseek_v3

SEED, BATCH, SEQ = 7, 4, 32
TP2 = Layout(tp=2, sequence_parallel=True)
MODELS = f"{__file__}:"


def by_sequence() -> Model:
    return qwen3("by-sequence", 2, 4, 2, 64, MoE(SwiGLU(48), 8, 2, balance=3.0), vocab=127, head_dim=16)


def by_batch() -> Model:
    moe = MoE(SwiGLU(48), 8, 2, balance=3.0, balance_over="batch")
    return qwen3("by-batch", 2, 4, 2, 64, moe, vocab=127, head_dim=16)


def corrected() -> Model:
    return tiny_deepseek_v3()


LAYOUTS = {
    "micro-batch 2": Layout(micro_batch=2),
    "DP2": Layout(dp=2),
    "CP2 PP2, recompute": Layout(cp=2, pp=2, recompute=Recompute.FULL),
    "TP2 SP EP2": evolve(TP2, dp=2, ep=2),
}


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, SEQ))


def trained(plan: Plan) -> list[float]:
    """Return on each rank loss, balancing loss and gradient norm of a step, and the losses of an evaluation."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=3, seed=SEED, warmup=0))
    held_out = engine.evaluate_samples(sample, 3)
    step = engine.step(sample)
    return [step.loss, step.terms["balancing"], step.grad_norm, held_out.loss, held_out.terms["balancing"]]


def declared(m: Model) -> list[float]:
    """Return what `trained` returns by the bodies, in one process."""
    g = graph(m)
    weights = {k: initial_weight(s, SEED).read().requires_grad_(s.trained) for k, s in g.weights.items()}
    values = []
    for count in (BATCH, BATCH - 1):
        samples, balances = [sample(i) for i in range(count)], {}  # type: ignore[var-annotated]
        batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
        (sums,) = interpret(m, weights, batch, balancing=balances)
        loss, mean = sums[0] / sums[1], torch.stack([*balances.values()]).mean()
        values += [loss.item(), mean.item()]
        if count == BATCH:
            coefficients = {n.name: n.op.balance for n in g.nodes if isinstance(n.op, MoE)}
            (loss + sum(coefficients[name] * x for name, x in balances.items())).backward()
            grads = [w.grad for w in weights.values() if w.grad is not None]
            values.append(torch.nn.utils.get_total_norm(grads).item())
    return values


@pytest.mark.parametrize(
    ("make", "row"),
    [
        *((by_sequence, row) for row in LAYOUTS),
        (by_batch, "DP2"),
        (by_batch, "CP2 PP2, recompute"),
        (corrected, "TP2 SP EP2"),
    ],
)
def test_a_layout_balances_as_the_reference_does(make: Any, row: str, plan_of: Any) -> None:
    layout = LAYOUTS[row]
    plan = plan_of(MODELS + make.__name__, layout, batch=BATCH, seq=SEQ)
    got = launcher.run(trained, (plan,), layout.world, timeout=LIMIT)[0]
    assert got == pytest.approx(declared(make()), rel=1e-6)
