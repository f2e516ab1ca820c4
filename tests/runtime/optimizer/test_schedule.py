"""Learning-rate schedules: their formulas, and the end of a schedule in a continued run."""

from collections.abc import Callable
from math import cos, pi, sqrt
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl import lora
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.runtime import Recipe
from megaloom.runtime.megatron import device
from megaloom.runtime.optimizer.fine_tuning import fine_tuning
from megaloom.runtime.optimizer.recipe import Schedule

MIN, MAX, END = 0.1, 0.5, 20


def rates(recipe: Recipe, steps: int) -> list[float]:
    """Return the learning rates of the first steps."""
    device.prepare()
    from megaloom.runtime.optimizer.optimizer import make_scheduler

    optimizer: Any = torch.optim.SGD([torch.zeros(1)])
    scheduler = make_scheduler(recipe, optimizer)
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return out


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 4), (3, 20)])
def test_by_default_the_learning_rate_warms_up_and_follows_a_cosine(steps: int, warmup: int) -> None:
    recipe = Recipe(steps=steps, warmup=warmup, lr=MAX, min_lr=MIN)
    up = min(warmup, steps - 1)  # a short run still ends at the lowest
    down = [MIN + (MAX - MIN) * (1 + cos(pi * k / (steps - up))) / 2 for k in range(steps - up + 1)]
    assert rates(recipe, steps + 1) == pytest.approx([MAX * k / up for k in range(up)] + down)


def after(share: Callable[[float], float]) -> Callable[[int], float]:
    """Return a schedule whose share of max - min is a function of the share of its steps, after 4 steps of warm-up."""
    return lambda k: MIN + (MAX - MIN) * share((k - 4) / (END - 4))


def final(share: Callable[[float], float]) -> Callable[[int], float]:
    """Return a WSD schedule: the share is a function of the share of the last 5 steps."""
    return lambda k: MIN + (MAX - MIN) * (share((k - 15) / 5) if k > 15 else 1.0)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({"schedule": "constant"}, lambda k: MAX),
    "linear": ({"schedule": "linear"}, after(lambda t: 1 - t)),
    "cosine": ({"schedule": "cosine"}, after(lambda t: (1 + cos(pi * t)) / 2)),
    "inverse square root": ({"schedule": "inverse-square-root"}, lambda k: max(MIN, MAX * sqrt(4 / k))),
    "wsd linear": ({"schedule": "wsd"}, final(lambda t: 1 - t)),
    "wsd cosine": ({"schedule": "wsd", "final_decay": "cosine"}, final(lambda t: (1 + cos(pi * t)) / 2)),
    "wsd exponential": ({"schedule": "wsd", "final_decay": "exponential"}, final(lambda t: 2 * 0.5**t - 1)),
    "wsd minus sqrt": ({"schedule": "wsd", "final_decay": "minus-sqrt"}, final(lambda t: 1 - sqrt(t))),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_a_schedule_has_its_formula(case: str) -> None:
    fields, formula = FORMULAS[case]
    lowest = {} if fields["schedule"] == "constant" else {"min_lr": MIN}
    recipe = Recipe(steps=50, decay_steps=END, warmup=4, lr=MAX, final_decay_steps=5, **lowest, **fields)
    curve = rates(recipe, END + 11)
    assert curve[: END + 1] == pytest.approx([MAX * k / 4 for k in range(5)] + [formula(k) for k in range(5, END + 1)])
    assert curve[END + 1 :] == pytest.approx([MAX if recipe.schedule is Schedule.CONSTANT else MIN] * 10)


def test_an_inverse_square_root_has_no_end_of_its_own() -> None:
    curve = rates(Recipe(steps=10, warmup=4, lr=MAX, min_lr=0.0, schedule="inverse-square-root"), 100)
    assert curve[-1] == pytest.approx(MAX * sqrt(4 / 99))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_more_steps_do_not_stretch_a_schedule(schedule: str) -> None:
    saved = Recipe(steps=10, schedule=schedule).as_saved()
    more = Recipe(steps=40, schedule=schedule)
    assert more.continuing(saved).schedule_end == 10
    assert more.continuing(evolve(more, steps=80).continuing(saved).as_saved()).schedule_end == 10
    assert evolve(more, decay_steps=40).continuing(saved).schedule_end == 40
    assert more.continuing({"steps": 10}).schedule_end == (10 if schedule == "cosine" else 40)  # saved before schedules


def test_another_schedule_ends_with_the_run() -> None:
    assert Recipe(steps=40).continuing(Recipe(steps=10, schedule="constant").as_saved()).schedule_end == 40
    assert Recipe(steps=40, schedule="constant").continuing(Recipe(steps=10).as_saved()).schedule_end is None


def test_a_final_decay_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"--final-decay-steps 30 is longer than the schedule, which ends at step 20\n"):
        Recipe(steps=20, schedule="wsd", final_decay_steps=30)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("lr", [None, 5e-5])
def test_by_default_a_schedule_ends_at_a_tenth_of_its_peak(schedule: str, lr: float | None) -> None:
    curve = rates(Recipe(steps=20, warmup=2, lr=lr, schedule=schedule), 25)
    assert curve[-1] == pytest.approx((lr or 3e-3) / 10)
    assert max(curve) == pytest.approx(lr or 3e-3)


def test_a_lowest_learning_rate_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"--min-lr 6e-05 is above --lr 5e-05\ngive a --min-lr of at most 5e-05"):
        Recipe(lr=5e-5, min_lr=6e-5)
    with pytest.raises(UserError, match=r"--min-lr 0.01 is above --lr 0.003\n"):
        Recipe(min_lr=0.01)
    with pytest.raises(UserError, match=r"--min-lr 0.001 has no effect with --schedule constant\nomit it"):
        Recipe(schedule="constant", min_lr=1e-3)


@pytest.mark.parametrize(("lr", "lowest"), [(3e-3, 1e-4), (5e-5, 5e-5)])
def test_a_run_of_an_earlier_version_keeps_its_learning_rates(lr: float, lowest: float) -> None:
    saved = {"steps": 10, "schedule": "cosine", "lr": lr, "min_lr": 1e-4}
    given = None if lr == 3e-3 else lr
    continued = Recipe(steps=20, lr=given).continuing(saved)
    assert (continued.peak_lr, continued.lowest_lr) == (lr, lowest)
    assert Recipe(steps=20).continuing(saved).peak_lr == lr
    assert Recipe(steps=20, lr=1e-2).continuing(saved).lowest_lr == pytest.approx(1e-3)
    assert Recipe(steps=20, schedule="constant").continuing(saved).lowest_lr == lr


def test_a_continued_run_keeps_what_fine_tuning_has_chosen() -> None:
    saved = Recipe(lr=2e-5, router_bias_update_rate=0.0).as_saved()
    continued = Recipe().continuing(saved)
    assert (continued.peak_lr, continued.lowest_lr, continued.bias_update_rate) == (2e-5, pytest.approx(2e-6), 0.0)


def test_fine_tuning_chooses_learning_rates_by_size_and_leaves_what_is_given() -> None:
    small, large = (find(name)[0] for name in ("bert-base", "llama3-405b"))
    middle = find("llama3-8b")[0]
    assert [fine_tuning(Recipe(), m).lr for m in (small, middle, large)] == [5e-5, 2e-5, 1e-5]
    assert [fine_tuning(Recipe(), lora(m, rank=4)).lr for m in (middle, large)] == [2e-4, 1e-4]
    given = fine_tuning(Recipe(lr=1e-3, router_bias_update_rate=1e-3), find("deepseek-v3")[0])
    assert (given.lr, given.bias_update_rate) == (1e-3, 1e-3)
    assert fine_tuning(Recipe(), find("deepseek-v3")[0]).bias_update_rate == 0
