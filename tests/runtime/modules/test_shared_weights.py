"""Weights that several layers share: one gradient, one parameter on a rank, equal copies, under every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.samples.samples import Sample, SampleMaker
from megaloom.runtime.training.verify import EPS
from tests.support.batches import random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

MODELS = TEST_MODELS / "shared_weights.py"
RECIPE = Recipe(steps=10, seed=7, lr=1e-2, warmup=0, eps=EPS)
BATCH, SEQ, STEPS = 4, 32, 3
SP = Layout(tp=2, sequence_parallel=True)
OVERLAPPED = Layout(dp=2, shard="optimizer", overlaps=("gradients", "weights"))
CASES = {
    "blocks, a table of three kinds of layers, PP4": ("albert", Layout(pp=4)),
    "PP2 VPP2, chunks of a rank share, DP2 distributed optimizer": ("albert", evolve(OVERLAPPED, pp=2, vpp=2)),
    "PP2 VPP2, recompute full": ("albert", evolve(OVERLAPPED, pp=2, vpp=2, recompute="full")),
    "by rows and by columns, TP2 SP PP2": ("albert", evolve(SP, pp=2)),
    "blocks of built-in layers, TP2 PP2 VPP2": ("albert_blocks", evolve(SP, pp=2, vpp=2)),
    "two heads on one table, PP2 DP2": ("two_heads", evolve(OVERLAPPED, pp=2)),
    "positions, PP2 TP2": ("positions_again", Layout(pp=2, tp=2)),
    "experts that share a matrix, PP2 CP2": ("sharing_experts", Layout(pp=2, cp=2)),
    "encoder, decoder, logits, biases of attention, CP2 TP2 SP": ("tiny_t5", evolve(SP, cp=2)),
    "encoder, decoder, logits, TP2 DP2": ("tiny_bart", Layout(tp=2, dp=2, shard="optimizer")),
    "encoder, decoder and logits on stages, PP2 VPP2 DP2": ("tiny_t5", evolve(OVERLAPPED, pp=2, vpp=2)),
    "multi-token prediction on stages, EP2 PP2": ("tiny_mtp", Layout(dp=2, ep=2, pp=2)),
    "multi-token prediction, EP2 TP2 SP": ("tiny_mtp", evolve(SP, dp=2, ep=2)),
    "multi-token prediction, CP4": ("tiny_mtp", Layout(cp=4)),
}


@cache
def maker_of(model: str) -> SampleMaker:
    return SampleMaker.of(graph(find(model)[0]), SEQ)


def sample_of(plan: Plan, i: int) -> Sample:
    maker = maker_of(plan.model)
    return maker.make(random_text(i, min(256, maker.ids), maker.length - 1), i, RECIPE.seed)


def trained(plans: dict[str, Plan]) -> dict[str, Any]:
    """Return on each rank, for each plan, the gradients of the first step (rank 0), and losses and norms of three."""
    from megatron.core import parallel_state

    from megaloom.runtime.engine.engine import Engine

    out = {}
    for case, plan in plans.items():
        engine = Engine.build(plan, model_named(plan.model), RECIPE)
        first, gradients = engine.step_with_gradients(lambda i, plan=plan: sample_of(plan, i))  # type: ignore[misc]
        steps = [
            first,
            *(
                engine.step(lambda i, plan=plan, k=k: sample_of(plan, BATCH * k + i))  # type: ignore[misc]
                for k in range(1, STEPS)
            ),
        ]
        out[case] = gradients, [(step.loss, step.grad_norm) for step in steps]
        parallel_state.destroy_model_parallel()
    return out


def declared(plan: Plan) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of the first step and its gradients by the bodies of the layers, in one process."""
    m, _ = find(plan.model)
    g = graph(m)
    weights = {k: initial_weight(s, RECIPE.seed).read().requires_grad_(s.trained) for k, s in g.weights.items()}
    samples = [sample_of(plan, i) for i in range(BATCH)]
    (sums,) = interpret(m, weights, {name: torch.stack([s[name] for s in samples]) for name in samples[0]})
    terms = sums.reshape(-1, 2)
    coefficients = torch.tensor(getattr(g.nodes[-1].value.source.op, "coefficients", (1.0,)))
    loss = (coefficients * terms[:, 0] / terms[:, 1]).sum()
    loss.backward()
    return loss.item(), {k: w.grad for k, w in weights.items() if w.grad is not None}


@pytest.fixture(scope="module")
def plans(plan_of: Any) -> dict[str, Plan]:
    """Plans whose vocabularies are padded to a multiple of tp only, so that each rank has tokens."""
    return {
        case: plan_of(f"{MODELS}:{name}", evolve(layout, vocab_multiple=1)) for case, (name, layout) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(plans: dict[str, Plan]) -> dict[str, Any]:
    return launcher.run(trained, (plans,), 4, timeout=LIMIT)[0]


@pytest.fixture(scope="module")
def single(plan_of: Any) -> dict[str, Any]:
    names = {name for name, _ in CASES.values()}
    whole = {name: plan_of(f"{MODELS}:{name}", Layout(vocab_multiple=1)) for name in names}
    return launcher.run(trained, (whole,), 1, timeout=LIMIT)[0]


@pytest.mark.parametrize("case", CASES)
def test_each_use_adds_to_one_gradient(
    case: str, plans: dict[str, Plan], results: dict[str, Any], single: dict[str, Any]
) -> None:
    gradients, steps = results[case]
    loss, expected = declared(plans[case])
    assert steps[0][0] == pytest.approx(loss, rel=1e-5)
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(gradient.value, expected[name], rtol=0, atol=1e-5 * largest + 1e-9, msg=name)
        assert gradient.disagreement <= 1e-6 * largest + 1e-9
    _, one_process = single[CASES[case][0]]
    assert steps == [pytest.approx(step, abs=1e-5) for step in one_process]
    assert len({loss for loss, _ in steps}) == STEPS
