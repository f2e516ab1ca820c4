"""Averaged weights: their definition, evaluation with them, and checkpoints under other layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, generate, save_run, shard
from megaloom.runtime.checkpoints.checkpoint_folder import newest_intact
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.launch import launcher
from megaloom.runtime.training.evaluation import evaluate_run
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

TP2 = Layout(tp=2, sequence_parallel=True)
DIVIDED = Layout(dp=2, shard="optimizer")
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
DECAY = 0.6
TOKENS = torch.randint(127, (32, 33), generator=torch.Generator().manual_seed(0))


def held_out(i: int) -> dict[str, torch.Tensor]:
    return next_token(TOKENS[24 + i])


def averaged(plan: Plan, folder: Path, start: int, decay: float | None = DECAY) -> list[tuple[float, float, float]]:
    """On each rank: for steps `start` to 3, the loss, and that of an evaluation with and without averages."""
    engine = shard(model_named(plan.model), plan, RECIPE, average=decay)
    assert engine.load(folder) == start
    rows = []
    for step in range(start, 4):
        loss = engine.step(lambda i, step=step: next_token(TOKENS[4 * step + i])).loss  # type: ignore[misc]
        with engine.averaged_weights():
            average = engine.evaluate_samples(held_out, 4).loss
        rows.append((loss, average, engine.evaluate_samples(held_out, 4).loss))
        if engine.done == 2:
            engine.save(folder)
    return rows


def by_definition(plan: Plan) -> list[tuple[float, float, float]]:
    """On one rank: the same, with averages of the parameters computed here."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    weights = list(engine.model_chunks[0].parameters())
    averages = [w.detach().clone() for w in weights]
    rows = []
    for step in range(4):
        loss = engine.step(lambda i, step=step: next_token(TOKENS[4 * step + i])).loss  # type: ignore[misc]
        averages = [DECAY * a + (1 - DECAY) * w.detach() for a, w in zip(averages, weights, strict=True)]
        plain = engine.evaluate_samples(held_out, 4).loss
        now = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for values in (averages, now):
                for w, value in zip(weights, values, strict=True):
                    w.copy_(value)
                if values is averages:
                    average = engine.evaluate_samples(held_out, 4).loss
        rows.append((loss, average, plain))
    return rows


ALBERT = f"{TEST_MODELS / 'shared_weights.py'}:albert"


@pytest.mark.parametrize(
    ("name", "layout", "other"),
    [
        ("tiny_gpt_4", evolve(TP2, pp=2), DIVIDED),
        ("tiny_gpt_4", DIVIDED, TP2),
        ("tiny_gpt_4", Layout(dp=2, shard="weights"), Layout(dp=2, shard="gradients")),
        (ALBERT, Layout(pp=2, vpp=2), evolve(DIVIDED, pp=2)),
    ],
    ids=str,
)
def test_averages_are_those_of_the_definition(
    name: str, layout: Layout, other: Layout, plan_of: Any, tmp_path: Path
) -> None:
    expected = launcher.run(by_definition, (plan_of(name, Layout()),), 1, timeout=LIMIT)[0]
    rows = launcher.run(averaged, (plan_of(name, layout), tmp_path, 0), layout.world, timeout=LIMIT)[0]
    assert rows == [pytest.approx(row, abs=2e-5) for row in expected]
    assert all(abs(average - plain) > 1e-3 for _, average, plain in rows)
    resumed = launcher.run(averaged, (plan_of(name, other), tmp_path, 2), other.world, timeout=LIMIT)[0]
    assert resumed == [pytest.approx(row, abs=2e-5) for row in expected[2:]]


def test_bf16_averages_are_fp32(plan_of: Any, tmp_path: Path) -> None:
    plan = plan_of("tiny_gpt", DIVIDED, precision="bf16")
    rows = launcher.run(averaged, (plan, tmp_path, 0), 2, timeout=LIMIT)[0]
    expected = launcher.run(by_definition, (plan_of("tiny_gpt", Layout()),), 1, timeout=LIMIT)[0]
    assert rows == [pytest.approx(row, abs=3e-2) for row in expected]


def evaluated(plan: Plan, folder: Path) -> float:
    """On one rank: the loss with the averaged weights of a checkpoint."""
    model, checkpoint = model_named(plan.model), newest_intact(folder, fingerprint=plan.fingerprint)
    assert checkpoint
    weights = checkpoint_weights(graph(model), checkpoint, averaged=True)
    return shard(model, plan, RECIPE, weights=weights).evaluate_samples(held_out, 4).loss


def test_commands_use_the_averages_of_a_checkpoint(plan_of: Any, tmp_path: Path) -> None:
    plan = plan_of("byte_gpt", DIVIDED)
    rows = launcher.run(averaged, (plan, tmp_path, 0), 2, timeout=LIMIT)[0]
    loss = launcher.run(evaluated, (plan_of("byte_gpt", Layout()), tmp_path), 1, timeout=LIMIT)[0]
    assert loss == pytest.approx(rows[1][1], abs=2e-5)
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    save_run(tmp_path, plan, model_named(plan.model), RECIPE)
    losses = [evaluate_run(tmp_path, [str(text)], averaged=x).losses[0].result.loss for x in (True, False)]
    assert abs(losses[0] - losses[1]) > 1e-3


def started(plan: Plan, folder: Path) -> bool:
    """On each rank: save without averages."""
    plain = shard(model_named(plan.model), plan, RECIPE)
    plain.step(next_token(TOKENS[:4]))
    plain.save(folder)
    return True


def continued(plan: Plan, folder: Path) -> tuple[float, float]:
    engine = shard(model_named(plan.model), plan, RECIPE, average=DECAY)
    assert engine.load(folder) == 1
    with engine.averaged_weights():
        average = engine.evaluate([TOKENS[:4]]).loss
    return average, engine.evaluate([TOKENS[:4]]).loss


def test_averages_start_at_the_weights_of_a_checkpoint_without_them(plan_of: Any, tmp_path: Path) -> None:
    plan = plan_of("tiny_llama", TP2)
    launcher.run(started, (plan, tmp_path), 2, timeout=LIMIT)
    save_run(tmp_path, plan, model_named(plan.model), RECIPE)
    for use in (evaluate_run, generate):
        with pytest.raises(UserError, match=r"step-000001 has no averaged weights\nomit --averaged"):
            use(tmp_path, ["text"], averaged=True)
    average, loss = launcher.run(continued, (plan, tmp_path), 2, timeout=LIMIT)[0]
    assert average == loss


def refused(plan: Plan) -> str:
    with pytest.raises(UserError) as raised:
        shard(model_named(plan.model), plan, RECIPE).averaged_weights()
    return str(raised.value)


def test_an_engine_without_averages_says_so(plan_of: Any) -> None:
    message = launcher.run(refused, (plan_of("tiny_llama", Layout()),), 1, timeout=LIMIT)[0]
    assert message.startswith("this engine has no averaged weights\ngive a decay")
