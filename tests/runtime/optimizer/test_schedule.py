"""Learning-rate schedules: their formulas, and the end of a schedule in a continued run."""

from collections.abc import Callable
from math import cos, pi, sqrt
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.runtime import Recipe
from megaloom.runtime.megatron import device
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
    recipe = Recipe(steps=50, decay_steps=END, warmup=4, lr=MAX, min_lr=MIN, final_decay_steps=5, **fields)
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
