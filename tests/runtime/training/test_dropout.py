"""Dropout that does not depend on the layout: every layout computes what one process and the oracle compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaloom.dsl import MLP, Attention, Dim, Dropout, Embed, Model, MoE, Split, Unembed, graph, ids, model, weight
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.training import verify
from megaloom.runtime.training.layout_dropout import layout_dropout, without_dropout
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.parity.rank_pool import Case, check, run_cases

SEED, BATCH, SEQ, VOCAB = 7, 4, 32, 127
LAYOUTS = {
    "TP2": Layout(tp=2),
    "TP2 SP": Layout(tp=2, sequence_parallel=True),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
    "CP2 TP2 SP": Layout(cp=2, tp=2, sequence_parallel=True),
    "DP2 micro-batch 2": Layout(dp=2, micro_batch=2),
    "EP2 TP2 SP": Layout(dp=2, ep=2, tp=2, sequence_parallel=True),
    "recompute full, PP2": Layout(pp=2, recompute=Recompute.FULL),
    "recompute selective, TP2 SP": Layout(
        tp=2, sequence_parallel=True, recompute=Recompute.SELECTIVE, recompute_modules=("core_attn", "mlp", "layernorm")
    ),
}


def test_a_layout_drops_the_same_elements(plan_of: Any, record_property: Any) -> None:
    names = {row: "dropouts" if "SP" in row or "DP" in row else "dense_dropouts" for row in LAYOUTS}
    plans = {row: plan_of(names[row], layout) for row, layout in LAYOUTS.items()}
    results = run_cases([Case(f"dropout, {row}", plan.model, plan) for row, plan in plans.items()], 4, timeout=LIMIT)
    for name, r in zip(names.values(), results, strict=True):
        record_property("parity", (name, r.name, r.loss_error, r.norm_error, r.gradient_error))
    check(results)
    assert max(r.loss_error for r in results) < 1e-6


def test_the_micro_batch_does_not_change_a_mask(plan_of: Any) -> None:
    one, two = (plan_of("dropouts", Layout(micro_batch=n)) for n in (1, 2))
    assert verify.compare(two, reference=one, timeout=LIMIT).loss_error < 1e-6


def sample(i: int) -> torch.Tensor:
    return torch.randint(VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(i))


def first_loss(plan: Plan) -> tuple[float, float]:
    """On each rank: the loss of the first step, and that of an evaluation before it."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=3, seed=SEED))

    def samples(i: int) -> dict[str, torch.Tensor]:
        return next_token(sample(i))

    return engine.evaluate_samples(samples, BATCH).loss, engine.step(samples).loss


def test_the_oracle_drops_the_same_elements(plan_of: Any) -> None:
    plan = plan_of("dropouts", Layout(dp=2))
    m, _ = find(plan.model)
    weights = {name: initial_weight(s, SEED).read() for name, s in graph(m).weights.items()}
    x = torch.stack([sample(i) for i in range(BATCH)])
    expected = []
    for masks in (None, MaskSource(SEED, step=0, first_sample=0)):
        (sums,) = interpret(m, weights, {"tokens": x[:, :-1], "labels": x[:, 1:]}, masks=masks)
        expected.append((sums[0] / sums[1]).item())
    assert launcher.run(first_loss, (plan,), 2, timeout=LIMIT)[0] == pytest.approx(expected, abs=1e-6)
    assert abs(expected[0] - expected[1]) > 1e-3


def lm(layer: Any) -> Model:
    table = weight("wte", Dim("vocab", 64), Dim("embed", 16))
    return model("m", ids() >> Embed(table) >> layer >> Unembed(table))


@pytest.mark.parametrize(
    ("layer", "node"),
    [
        (Dropout(0.1), None),
        (MLP(16, dropout=0.1), None),
        (Attention(heads=2, window=4, dropout=0.1), None),
        (Attention(heads=2, dropout=0.1), "attention.0"),
        (MoE(MLP(16, dropout=0.1), experts=2, top_k=1), "moe.0"),
    ],
    ids=str,
)
def test_dropout_that_depends_on_the_layout(layer: Any, node: str | None) -> None:
    declared, layout = lm(layer), Layout(tp=2)
    if node == "moe.0":
        with pytest.raises(UserError, match=r"dropout in moe.0: its masks depend on the layout"):
            layout_dropout(declared, layout)
        return
    assert layout_dropout(declared, layout) == ((node,) if node else ())
    zeroed = without_dropout(declared, layout_dropout(declared, layout))
    assert layout_dropout(zeroed, layout) == ()
    assert (zeroed is declared) == (node is None)
    assert list(graph(zeroed).weights) == list(graph(declared).weights)
    modules = [[runs_as_module(n, Split()) for n in graph(m).nodes] for m in (declared, zeroed)]
    assert modules[0] == modules[1]


# The hash


def mask(rate: float, *sizes: int, step: int = 0, node: str = "a", number: int = 0, first: int = 0) -> torch.Tensor:
    source = MaskSource(seed=1, step=step, first_sample=first).of(node)
    x = torch.ones(sizes)
    positions = source.samples(sizes[0], x.device), *(torch.arange(n) for n in sizes[1:])
    return source.drop(x, rate, number, *positions) > 0


def test_a_mask_is_a_function_of_its_arguments() -> None:
    first = mask(0.5, 4, 16, 64)
    assert torch.equal(first, mask(0.5, 4, 16, 64))
    assert torch.equal(first[2:], mask(0.5, 2, 16, 64, first=2))
    assert torch.equal(first[:, :9, :5], mask(0.5, 4, 9, 5))
    for other in ({"step": 1}, {"node": "b"}, {"number": 1}, {"first": 1}):
        assert 0.4 < (first == mask(0.5, 4, 16, 64, **other)).float().mean() < 0.6


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_have_the_rate_and_no_pattern(rate: float) -> None:
    """Over rows, columns and pairs of neighbours, within five standard deviations of independent draws."""
    kept = mask(rate, 8, 256, 512).double()
    n, variance = kept.numel(), rate * (1 - rate)
    assert abs(kept.mean() - (1 - rate)) < 5 * (variance / n) ** 0.5
    for dims in ((0, 1), (0, 2), (1, 2)):
        means = kept.mean(dims)
        assert (means - (1 - rate)).abs().max() < 5.5 * (variance * means.numel() / n) ** 0.5
    centred = kept - (1 - rate)
    for dim in range(3):
        pairs = centred.narrow(dim, 1, kept.shape[dim] - 1) * centred.narrow(dim, 0, kept.shape[dim] - 1)
        assert abs(pairs.mean()) < 5 * variance / pairs.numel() ** 0.5


def test_a_mask_is_the_published_hash() -> None:
    """The outputs of splitmix64 from state 0, as its authors' code gives them (prng.di.unimi.it/splitmix64.c)."""
    from megaloom.runtime.ops.dropout_masks import next_hash

    hashes = [int(next_hash(torch.tensor(0), torch.tensor(i))) % 2**64 for i in range(3)]
    assert hashes == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
