"""Each term of the loss is reported by itself, and each of the three steps of the user runs where it should."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.training.run import train
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.models.pointer import POSITIONS
from tests.support.parity.layouts import under_layouts
from tests.support.paths import ROOT, TEST_MODELS

Z_LOSS = f"{ROOT / 'examples/scripts/own_loss.py'}:with_z_loss"


class Scaled:
    """Steps whose losses are scaled, so that the result shows which of them ran."""

    def training_step(self, forward: Any, batch: Any) -> Any:
        return _scaled(forward(batch), 1)

    def validation_step(self, forward: Any, batch: Any) -> Any:
        return _scaled(forward(batch), 10)

    def test_step(self, forward: Any, batch: Any) -> Any:
        return _scaled(forward(batch), 100)


def _scaled(outputs: Any, factor: float) -> Any:
    if outputs is None:
        return None
    return factor * outputs.loss_sum, outputs.weight_sum, {"factor": (3 * factor, 3)}


def terms(plan: Plan) -> list[dict[str, float]]:
    """Return on each rank the loss and its terms, of a step and of an evaluation."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(warmup=0))
    sample = lambda i: next_token(random_text(i, 250, 32))  # noqa: E731
    held_out = engine.evaluate_samples(sample, 4)
    step = engine.step(sample)
    assert held_out.perplexity == pytest.approx(exp(held_out.terms["next_token.0"]))
    return [{"loss": x.loss, **x.terms} for x in (step, held_out)]


def held_out_losses(plan: Plan) -> tuple[float, float]:
    """Return the losses of two evaluations, by the validation step and by the test step."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(warmup=0), Scaled())
    sample = lambda i: next_token(random_text(i, 127, 32))  # noqa: E731
    batch = {name: x[None] for name, x in sample(0).items()}
    return engine.evaluate([batch]).loss, engine.evaluate([batch], step="test").loss


def test_terms_of_a_weighted_sum_add_up_to_the_loss(plan_of: Any) -> None:
    for layout in (Layout(micro_batch=2), Layout(pp=2)):
        step, held_out = launcher.run(terms, (plan_of(Z_LOSS, layout),), layout.world, timeout=LIMIT)[0]
        for row in (step, held_out):
            assert row["loss"] == pytest.approx(row["next_token.0"] + 1e-4 * row["z_loss.0"], rel=1e-6)
        assert step == pytest.approx(held_out, rel=1e-6)  # of the same samples and weights


def pointed(plan: Plan) -> list[float]:
    """Return losses and gradient norms of steps on a cross-entropy over the positions of a source."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(lr=1e-2, warmup=0))
    results = []
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        text = {"tokens": (97, (4, 32)), "source_tokens": (97, (4, POSITIONS))}
        batch = text | {"labels": (POSITIONS, (4,))}
        results.append(engine.step({n: torch.randint(*of, generator=g) for n, of in batch.items()}))
    return [x for r in results for x in (r.loss, r.grad_norm)]


def test_a_cross_entropy_over_positions_does_not_depend_on_the_layout(plan_of: Any) -> None:
    layouts = {"one": Layout(), "CP2": Layout(cp=2), "CP2 TP2 SP": Layout(cp=2, tp=2, sequence_parallel=True)}
    plans = {name: plan_of(f"{TEST_MODELS / 'pointer.py'}:pointer", layout) for name, layout in layouts.items()}
    ((expected,), *others) = under_layouts(pointed, plans).values()
    for losses in (rank for ranks in others for rank in ranks):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_test_step_evaluates_where_it_is_asked_for(plan_of: Any) -> None:
    validation, test = launcher.run(held_out_losses, (plan_of("tiny_llama", Layout()),), 1, timeout=LIMIT)[0]
    assert test == pytest.approx(10 * validation)


def test_a_run_reports_terms_and_ends_with_the_test_step(
    plan_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n" * 400)
    plan = plan_of(Z_LOSS, Layout())
    run = {"source": str(text), "evaluate_every": 1, "steps": Scaled()}
    done = train(plan, Recipe(steps=2, lr=1e-9, min_lr=0.0), folder=tmp_path / "run", **run)
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] != "checkpoint"] == ["step", "evaluation", "step", "evaluation"]
    assert all(set(e["terms"]) == {"next_token.0", "z_loss.0"} for e in events if "terms" in e)
    during, after = (e for e in events if e["event"] == "evaluation")
    assert [e["report"]["factor"] for e in events if "report" in e] == [1, 10, 1, 100]
    assert after["loss"] == pytest.approx(10 * during["loss"], rel=0.05)  # other samples
    assert done.held_out is not None
    assert done.held_out.terms == after["terms"]
    said = capfd.readouterr().out
    assert "z_loss.0" in said
    assert {f"factor {factor}" for factor in (1, 10, 100)} <= {
        part.partition(" (")[0].strip() for line in said.splitlines() for part in line.replace("  ", ",").split(",")
    }
