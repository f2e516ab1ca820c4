"""Packed sequences: a layout computes what the documents compute one by one, loss and gradients to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaloom.dsl import Graph, Model, graph, packed
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from tests.support.limits import LIMIT
from tests.support.models import small
from tests.support.models.examples import model_named

SEED, BATCH, SEQ = 7, 4, 32
ENDS = ((9, 32), (1, 17, 32), (32,), (5, 6, 20, 32))  # of the documents of each sequence
MODELS = f"{__file__}:"


def packed_gpt() -> Model:
    return packed(small.tiny_gpt())


def packed_llama() -> Model:
    return packed(small.tiny_llama())


def packed_bert() -> Model:
    return packed(small.tiny_bert())


def packed_gpt_oss() -> Model:
    return packed(small.tiny_gpt_oss())


def packed_latent() -> Model:
    return packed(small.tiny_deepseek_v2())


RUN = {
    "learned positions, TP2 SP PP2": (packed_gpt, Layout(tp=2, sequence_parallel=True, pp=2)),
    "learned positions, CP2 TP2 SP": (packed_gpt, Layout(cp=2, tp=2, sequence_parallel=True)),
    "rotary positions, CP2 PP2": (packed_llama, Layout(cp=2, pp=2)),
}


def batch_of(g: Graph) -> dict[str, torch.Tensor]:
    """Return a batch of packed sequences of random tokens."""
    random = torch.Generator().manual_seed(SEED)
    vocab = next(n.shape["vocab"].known for n in g.nodes if "vocab" in n.shape)
    out = {}
    for n in (n for n in g.nodes if n.is_input):
        out[n.name] = torch.randint(2 if n.name == "types" else vocab, (BATCH, SEQ), generator=random)
    if "mask" in out:
        out["mask"] = out["mask"] % 3 == 0
    ends = torch.tensor([[sum(end <= i for end in row) for i in range(SEQ)] for row in ENDS])
    return {**out, "documents": ends}


def one_by_one(m: Model) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradient of each weight of the documents, each as a sequence of its own."""
    g = graph(m)
    weights = {k: initial_weight(s, SEED).read().double().requires_grad_(s.trained) for k, s in g.weights.items()}
    batch, total = batch_of(g), torch.zeros(2, dtype=torch.float64)
    for row, ends in enumerate(ENDS):
        for start, stop in zip((0, *ends), ends, strict=False):
            document = {name: x[row : row + 1, start:stop] for name, x in batch.items()}
            total = total + interpret(m, weights, {**document, "documents": torch.zeros(1, stop - start).long()})[0]
    loss = total[0] / total[1].detach()
    loss.backward()
    return loss.item(), {name: w.grad for name, w in weights.items() if w.grad is not None}


def trained(plan: Plan) -> tuple[float, dict[str, torch.Tensor] | None]:
    """Return on each rank the loss of the first step, and on rank 0 the gradient of each weight."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=3, seed=SEED, warmup=0))
    batch = batch_of(engine.graph)

    def sample(i: int) -> dict[str, torch.Tensor]:
        return {name: x[i] for name, x in batch.items()}

    gradients = engine.gradients(sample)
    return engine.step(sample).loss, gradients and {name: g.value for name, g in gradients.items()}


@pytest.mark.parametrize("row", RUN)
def test_packed_documents_train_as_if_each_were_a_sequence(row: str, plan_of: Any) -> None:
    make, layout = RUN[row]
    plan = plan_of(MODELS + make.__name__, layout, batch=BATCH, seq=SEQ)
    loss, gradients = launcher.run(trained, (plan,), layout.world, timeout=LIMIT)[0]
    want_loss, want = one_by_one(make())
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert gradients is not None
    assert gradients.keys() == want.keys()
    largest = {name: float(g.abs().max()) for name, g in want.items()}
    # The gradient of a bias of keys is 0, since softmax does not see it, so it has no scale of its own.
    scales = {name: x if x > 1e-9 else max(largest.values()) for name, x in largest.items()}
    differences = {name: float((gradients[name] - g).abs().max()) / scales[name] for name, g in want.items()}
    assert {name: d for name, d in differences.items() if not d <= 1e-5} == {}


@pytest.mark.parametrize("make", [packed_gpt, packed_llama, packed_bert, packed_gpt_oss, packed_latent])
def test_bodies_keep_documents_apart(make: Any) -> None:
    m = make()
    weights = {k: initial_weight(s, SEED).read().double() for k, s in graph(m).weights.items()}
    loss, _ = one_by_one(m)
    (sums,) = interpret(m, weights, batch_of(graph(m)))
    assert float(sums[0] / sums[1]) == pytest.approx(loss, rel=1e-12)
