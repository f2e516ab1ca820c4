"""The oracle: what megatron-core trains is what the declared mathematics and torch's AdamW make of the same start."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from megaloom.dsl import MoE, graph, model
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from tests.support.batches import next_token, random_text
from tests.support.paths import SUPPORT

SEQ, BATCH, VOCAB = 32, 4, 127
RECIPE = Recipe(steps=3, seed=7, lr=3e-3, min_lr=3e-3, warmup=0)
NOT_DECAYED = ("scale", "shift", "bias", "sinks")  # how their names end
MOVES = 1e-3  # by which a step moves the correction of an expert: arXiv:2412.19437, 4.2
TP2 = Layout(tp=2, sequence_parallel=True)
OWN = f"{SUPPORT / 'own_models.py'}:balanced"  # layers whose bodies run


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, VOCAB, SEQ))


def declared(plan: Plan) -> tuple[list[float], list[float]]:
    """Losses by the layers' own mathematics, and norms of the gradients, balancing losses included."""
    m, _ = find(plan.model)
    slots = graph(m).weights
    weights = {k: initial_weight(s, RECIPE.seed).requires_grad_(s.trained) for k, s in slots.items()}
    optimizer = adamw({k: w for k, w in weights.items() if slots[k].trained})
    mixtures = [n for n in graph(m).nodes if isinstance(n.op, MoE)]
    watched = model(m.name, *m.outputs, *(n.value.args[0] for n in mixtures))
    losses, norms = [], []
    for step in range(RECIPE.steps):
        x = torch.stack([random_text(step * BATCH + i, VOCAB, SEQ) for i in range(BATCH)])
        (total, count), *routed = interpret(watched, weights, next_token(x))
        loss = total / count
        optimizer.zero_grad()
        for n, h in zip(mixtures, routed, strict=True):
            scores = h @ weights[f"{n.name}.router"] + weights.get(f"{n.name}.router_bias", 0.0)
            correction = weights.get(f"{n.name}.correction", torch.zeros(n.op.experts))
            chosen = choice(n.op, scores.detach(), correction)
            loss = loss + (balance := balancing(n.op, scores, chosen)) - balance.detach()
            counts = chosen.sum((0, 1))
            correction += MOVES * (counts.mean() - counts).sign()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), RECIPE.clip_grad).item())
        optimizer.step()
    return losses, norms


def choice(op: MoE, scores: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """Return which experts each token goes to, [batch seq experts]: the best experts of the best groups."""
    better = (scores.softmax(-1) if op.score == "softmax" else scores.sigmoid()) + correction
    groups = better.unflatten(-1, (op.groups, -1))
    if op.groups > 1:
        worth = groups.sort(-1).values[..., -op.best :].sum(-1)
        worst = worth.sort(-1).values[..., -op.top_groups, None]
        groups = groups.where((worth >= worst)[..., None], -1.0)
    best = groups.flatten(-2).topk(op.top_k).indices
    return F.one_hot(best, op.experts).sum(2).double()


def adamw(weights: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """torch's own, as the recipe says."""
    decayed, others = (
        {"params": [w for k, w in weights.items() if k.endswith(NOT_DECAYED) is not decay], "weight_decay": amount}
        for decay, amount in ((True, RECIPE.weight_decay), (False, 0.0))
    )
    return torch.optim.AdamW([decayed, others], RECIPE.lr, (RECIPE.beta1, RECIPE.beta2), RECIPE.eps)


def balancing(op: MoE, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The mean over micro-batches, here of one sequence, of E Σ f P, weighted: of scores [batch seq experts].

    f is the share of the tokens' choices that an expert got, P its mean probability. Source: arXiv:2101.03961, eq. 4.
    """
    chances = scores.softmax(-1) if op.score == "softmax" else F.normalize(scores.sigmoid(), p=1, dim=-1)
    return op.balance * op.experts * (chosen.mean(1) / op.top_k * chances.mean(1)).sum(-1).mean()


def trained(plan: Plan) -> tuple[float, list[float], list[float]]:
    """On each rank: the loss of the first batch before training on it, then losses and norms of the gradients."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, find(plan.model)[0], RECIPE)
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
    before, losses, norms = launcher.run(trained, (plan,), layout.world, timeout=60)[0]
    expected, expected_norms = declared(plan)
    assert before == pytest.approx(expected[0], abs=1e-5)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert len(set(losses)) == RECIPE.steps
    assert max(norms) > RECIPE.clip_grad  # so that it is clipped
