"""Training in fp16: the loss scale falls after an overflow, grows again, and does not depend on the layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.training import verify
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

TP2 = Layout(tp=2, sequence_parallel=True)
DIVIDED = Layout(dp=2, shard="optimizer")
RECIPE = Recipe(steps=30, lr=1e-2, warmup=0, seed=5)  # of half of all seeds, rounding to fp16 moves the curves further
HUGE = 2.0**40  # every gradient overflows
LARGE = 2.0**27  # gradients overflow for some steps
Row = tuple[float, bool, float | None]  # loss, skipped, loss scale after the step


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(torch.arange(33) * (1 + i % 4) % 61)


def curve(plan: Plan, recipe: Recipe, steps: int, folder: Path | None = None) -> list[Row]:
    """On each rank: train some steps; from the last checkpoint of a folder if there is one, else save one there."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.checkpoints.checkpoint_folder import latest
    from megaloom.runtime.checkpoints.manifest import Manifest
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), recipe)
    if found := folder and latest(folder, fingerprint=plan.fingerprint):
        checkpoint.load(engine.state, found)
    results = [engine.step(sample) for _ in range(steps)]
    if folder and not found:
        manifest = Manifest(
            step=steps, samples=0, model="m", fingerprint=plan.fingerprint, data="", recipe={}, layout=str(plan.layout)
        )
        checkpoint.save(engine.state, folder, manifest)
    return [(r.loss, r.skipped, r.loss_scale) for r in results]


def trained(plan: Plan, recipe: Recipe = RECIPE, steps: int = 20, folder: Path | None = None) -> list[Row]:
    return launcher.run(curve, (plan, recipe, steps, folder), plan.layout.world, timeout=LIMIT)[0]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mixtral"])
def test_it_learns_what_fp32_learns(name: str, plan_of: Any) -> None:
    fp32, fp16 = (trained(plan_of(name, Layout(), precision=p)) for p in ("fp32", "fp16"))
    assert not any(skipped for _, skipped, _ in fp16)
    first = 6  # later, a router of experts in fp16 sends some tokens elsewhere
    assert [loss for loss, *_ in fp16[:first]] == pytest.approx([loss for loss, *_ in fp32[:first]], abs=0.02)
    assert fp16[-1][0] == pytest.approx(fp32[-1][0], abs=0.1)
    assert fp16[-1][0] < fp16[0][0] - 1
    assert [scale for *_, scale in fp32] == [None] * 20


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny_gpt", evolve(TP2, pp=2)),
        ("tiny_llama", DIVIDED),
        ("tiny_mixtral", Layout(dp=2, tp=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_a_layout_computes_the_same_but_for_rounding(name: str, layout: Layout, plan_of: Any) -> None:
    found = verify.compare(plan_of(name, layout, precision="fp16"), seed=1, timeout=LIMIT)
    assert found.agrees, f"losses differ by {found.loss_error:.1e}, norms by {found.norm_error:.1e}"
    assert found.loss_error > 0  # fp16 was used


@pytest.mark.parametrize(
    ("name", "layout"), [("tiny_llama", TP2), ("tiny_mixtral", Layout(dp=2, tp=2, sequence_parallel=True))], ids=str
)
def test_an_overflow_skips_the_step_and_lowers_the_scale(name: str, layout: Layout, plan_of: Any) -> None:
    rows = trained(plan_of(name, layout, precision="fp16"), evolve(RECIPE, initial_loss_scale=LARGE), 16)
    skips = [skipped for _, skipped, _ in rows]
    assert [scale for *_, scale in rows] == [LARGE / 2 ** sum(skips[: k + 1]) for k in range(16)]
    count = skips.index(False)
    assert 3 < count < 12
    assert len({loss for loss, *_ in rows[: count + 1]}) == 1  # no weight has changed
    assert rows[-1][0] < rows[0][0] - 0.3


def test_the_scale_grows_after_steps_without_an_overflow(plan_of: Any) -> None:
    rows = trained(plan_of("tiny_llama_4", Layout(), precision="fp16"), evolve(RECIPE, loss_scale_window=3), 7)
    assert [scale for *_, scale in rows] == [2.0**k for k in (16, 16, 17, 17, 17, 18, 18)]


def test_an_overflow_at_the_smallest_scale_is_an_error(plan_of: Any) -> None:
    recipe = evolve(RECIPE, initial_loss_scale=HUGE, min_loss_scale=HUGE / 2)
    message = launcher.run(refused, (plan_of("tiny_llama", TP2, precision="fp16"), recipe), 2, timeout=LIMIT)[0]
    assert message.startswith("step 2: loss ")
    assert "at the smallest loss scale, 5.49756e+11: training has diverged\nfirst at " in message
    assert "the gradient of " in message


def refused(plan: Plan, recipe: Recipe) -> str:
    """On each rank: the message of the second step."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.weight_update import NonFiniteError

    engine = Engine.build(plan, model_named(plan.model), recipe)
    assert engine.step(sample).skipped
    with pytest.raises(NonFiniteError) as raised:
        engine.step(sample)
    return str(raised.value)


def test_a_checkpoint_holds_the_scale(plan_of: Any, tmp_path: Path) -> None:
    """It is saved after two steps of a window of three: the next one lets the scale grow."""
    recipe = evolve(RECIPE, lr=1e-3, initial_loss_scale=2.0**21, loss_scale_window=3)
    straight = trained(plan_of("tiny_llama_4", TP2, precision="fp16"), recipe, 8)
    trained(plan_of("tiny_llama_4", TP2, precision="fp16"), recipe, 4, tmp_path)
    resumed = trained(plan_of("tiny_llama_4", TP2, precision="fp16"), recipe, 4, tmp_path)
    assert [skipped for _, skipped, _ in straight[:4]] == [True, True, False, False]
    assert resumed[0][2] == 2 * straight[3][2]
    assert [scale for *_, scale in resumed] == [scale for *_, scale in straight[4:]]
    assert [loss for loss, *_ in resumed] == pytest.approx([loss for loss, *_ in straight[4:]], abs=1e-2)


def learning_rates(plan: Plan, recipe: Recipe, folder: Path) -> list[tuple[float, bool]]:
    """On each rank: train five steps from the last checkpoint, and save. Return rates and skipped steps."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), recipe)
    engine.load(folder)
    results = [engine.step(sample) for _ in range(5)]
    engine.save(folder)
    return [(r.lr, r.skipped) for r in results]


def test_the_schedule_waits_in_skipped_steps(plan_of: Any, tmp_path: Path) -> None:
    """As in Megatron-LM: the rate is that of the updates done, before and after a resume."""
    plan = plan_of("tiny_llama", Layout(), precision="fp16")
    recipe = Recipe(steps=10, lr=1e-2, min_lr=0.0, warmup=0, schedule="linear", initial_loss_scale=2.0**24)
    found = [
        row for _ in range(2) for row in launcher.run(learning_rates, (plan, recipe, tmp_path), 1, timeout=LIMIT)[0]
    ]
    skipped = [skipped for _, skipped in found]
    assert 1 < sum(skipped) < 9
    updates = [sum(not s for s in skipped[:i]) for i in range(10)]
    assert [lr for lr, _ in found] == pytest.approx([1e-2 * (1 - k / 10) for k in updates])
