"""The oracle: megatron-core's modules compute what the layers' own mathematics says, from the same initial weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from megaloom.dsl import MoE, graph, model
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
    """The loss of the first batch by the layers' own mathematics, and the gradient's norm, balancing losses included."""
    m, _ = find(plan.model)
    weights = {k: initial(s, SEED).requires_grad_() for k, s in graph(m).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    mixtures = [n for n in graph(m).nodes if isinstance(n.op, MoE)]
    watched = model(m.name, *m.outputs, *(n.value.args[0] for n in mixtures))
    logits, *routed = interpret(watched, weights, {"tokens": x[:, :-1]})
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    pairs = zip(mixtures, routed, strict=True)
    (loss + sum(balancing(n.op, h @ weights[f"{n.name}.router"]) for n, h in pairs)).backward()
    return loss.item(), torch.stack([w.grad.norm() for w in weights.values()]).norm().item()


def balancing(op: MoE, scores: torch.Tensor) -> torch.Tensor:
    """The mean over micro-batches, here of one sequence, of E Σ f P, weighted: of scores [batch seq experts].

    f is the share of the tokens' choices that an expert got, P its mean probability. Source: arXiv:2101.03961, eq. 4.
    """
    chosen = F.one_hot(scores.topk(op.top_k).indices, op.experts).sum(2).double()
    return op.balance * op.experts * (chosen.mean(1) / op.top_k * scores.softmax(-1).mean(1)).sum(-1).mean()


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
        ("tiny_mixtral", Layout()),
        ("tiny_mixtral", Layout(dp=2, ep=2)),
    ],
    ids=str,
)
def test_the_runtime_computes_the_declared_mathematics(name: str, layout: Layout, plan_of: Any) -> None:
    plan = plan_of(name, layout)
    (loss, norm), got = declared(plan), launch.run(trained, (plan,), layout.world, timeout=60)[0]
    assert got[0] == pytest.approx(loss, abs=1e-5)
    assert got[1] == pytest.approx(norm, rel=1e-5)
