"""A layer without a torch module runs its body, with the oracle's results on every layout."""

from collections.abc import Callable
from inspect import signature
from runpy import run_path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from megaloom.dsl import (
    Layer,
    Model,
    UserError,
    Value,
    graph,
)
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.training import verify
from tests.support.batches import next_token, random_text, with_mask
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

FILE = TEST_MODELS / "own_layers.py"
NAMES = [
    name
    for name, it in run_path(str(FILE)).items()
    if getattr(it, "__annotations__", {}).get("return") is Model
    and not signature(it).parameters
    and name != "balanced"  # see test_oracle
]
DENSE = ["gated", "windowed", "near"]
SOME = [*DENSE, "some_experts"]  # of which all layouts are tried
MIXED = ["experts", "some_experts", "biased_experts"]
UNEVEN = ["squared_510", "hashed_odd"]
SEQ, BATCH, VOCAB, SEED = 32, 2, 127, 7
SP = Layout(tp=2, sequence_parallel=True)
LAYOUTS = {
    "TP2": (Layout(tp=2), DENSE),
    "TP2 SP": (SP, NAMES),
    "TP4 SP, fewer KV heads than TP": (evolve(SP, tp=4), ["two_kv_heads", "one_kv_head"]),
    "TP4 SP ETP4, dims kept whole or padded": (evolve(SP, tp=4, etp=4), UNEVEN),
    "TP2 SP ETP4 DP2, experts kept whole": (evolve(SP, dp=2, etp=4), ["squared_510"]),
    "ETP4 CP2 DP2, dims kept whole": (Layout(dp=2, tp=1, cp=2, etp=4), ["squared_510"]),
    "CP2": (Layout(cp=2), NAMES),
    "PP2": (Layout(pp=2), SOME),
    "TP2 CP2": (Layout(tp=2, cp=2), DENSE),
    "TP2 SP CP2": (evolve(SP, cp=2), SOME),
    "TP2 SP PP2, recompute full": (evolve(SP, pp=2, recompute=Recompute.FULL), SOME),
    "parts of bodies, recomputed": (
        Layout(
            tp=2,
            sequence_parallel=True,
            recompute=Recompute.SELECTIVE,
            recompute_modules=("layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts"),
        ),
        ["gated", "latent", "experts", "some_experts"],
    ),
    "EP2 ETP2 TP2 SP": (evolve(SP, dp=2, ep=2, etp=2), MIXED),
    "EP2 TP2 SP CP2": (evolve(SP, cp=2, ep=2), MIXED),
    "DP2 distributed optimizer": (Layout(dp=2, shard="optimizer"), SOME),
}
Curve = list[tuple[float, float]]


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, VOCAB, SEQ))


def laid(plan: Plan, layout: Layout) -> Plan:
    """The plan of one process under another layout, cut in the middle for two stages."""
    (whole,) = plan.stages
    if layout.pp == 1:
        return evolve(plan, layout=layout)
    cut_points = graph(model_named(plan.model)).cut_points
    middle = cut_points[len(cut_points) // 2]
    stages = evolve(whole, stop=middle), evolve(whole, rank=1, start=middle)
    return evolve(plan, layout=layout, stages=stages)


def curves(plans: list[Plan]) -> list[Curve]:
    """On each rank: the losses and the norms of the gradients of two steps, of each plan."""
    from megatron.core import parallel_state

    from megaloom.runtime.engine.engine import Engine

    out = []
    for plan in plans:
        engine = Engine.build(plan, model_named(plan.model), Recipe(steps=3, seed=SEED, lr=1e-4, warmup=0))
        g = engine.graph
        results = [engine.step(lambda i, k=k, g=g: with_mask(g, sample(k * BATCH + i))) for k in range(2)]
        out.append([(r.loss, r.grad_norm) for r in results])
        parallel_state.destroy_model_parallel()
    return out


def declared(plan: Plan) -> tuple[float, float]:
    """The first of these by the oracle."""
    m, _ = find(plan.model)
    weights = {k: initial_weight(s, SEED).read().requires_grad_(s.trained) for k, s in graph(m).weights.items()}
    x = torch.stack([random_text(i, VOCAB, SEQ) for i in range(BATCH)])
    ((total, count),) = interpret(m, weights, with_mask(graph(m), next_token(x)))
    loss = total / count
    loss.backward()
    grads = [w.grad for w in weights.values() if w.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(grads).item()


@pytest.fixture(scope="module")
def plans(plan_of: Callable[..., Plan]) -> dict[str, Plan]:
    return {name: plan_of(f"{FILE}:{name}", Layout(), batch=BATCH, seq=SEQ) for name in NAMES}


@pytest.fixture(scope="module")
def alone(plans: dict[str, Plan]) -> dict[str, Curve]:
    """Return losses and gradient norms of both steps, computed by one process."""
    results = launcher.run(curves, (list(plans.values()),), 1, timeout=LIMIT)[0]
    return dict(zip(plans, results, strict=True))


@pytest.fixture(scope="module")
def expected(plans: dict[str, Plan], alone: dict[str, Curve]) -> dict[str, Curve]:
    """The first step by the oracle, the second by one process."""
    return {name: [declared(plans[name]), curve[1]] for name, curve in alone.items()}


def check(found: dict[str, Curve], expected: dict[str, Curve]) -> None:
    """Raise AssertionError that names the models whose losses or norms differ from what is expected."""
    wrong = {}
    for name, curve in found.items():
        losses, norms = ([pair[i] for pair in curve] for i in (0, 1))
        want_losses, want_norms = ([pair[i] for pair in expected[name]] for i in (0, 1))
        if losses != pytest.approx(want_losses, abs=1e-5) or norms != pytest.approx(want_norms, rel=1e-5, abs=1e-5):
            wrong[name] = curve, expected[name]
    assert not wrong


def test_a_body_computes_the_declared_mathematics_in_one_process(alone: Any, expected: Any) -> None:
    check(alone, expected)


@pytest.mark.parametrize("row", LAYOUTS)
def test_a_body_computes_the_declared_mathematics(row: str, plans: Any, expected: Any) -> None:
    layout, names = LAYOUTS[row]
    results = launcher.run(curves, ([laid(plans[name], layout) for name in names],), layout.world, timeout=LIMIT)[0]
    check(dict(zip(names, results, strict=True)), expected)


@pytest.mark.parametrize("name", ["own-layer", "own-module"])
def test_the_examples_pass_verify(name: str, plan_of: Any) -> None:
    comparison = verify.compare(plan_of(name, evolve(SP, pp=2)), timeout=LIMIT)
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"


@frozen
class Wordless(Layer):
    """Has a module, and does not say what its parameters are made of."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return x

    def module(self, context: object) -> torch.nn.Module:
        return torch.nn.Identity()


def test_a_module_must_say_what_its_parameters_are_made_of() -> None:
    from megaloom.runtime.modules.parameters import Weights, parameters

    with pytest.raises(UserError, match=r"Wordless\(\) has its own torch module, .*\nwrite a method parameters"):
        parameters(Wordless(), Weights({}, lambda slot, index: torch.empty(0), range(0)))
