"""Days, device-hours and money of a training run, with failures; and the fewest devices that are fast enough.

`training_cost` is for a plan, `costs_of_points` and `fewest_devices` for a scaling table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from attrs import frozen

from megaloom.dsl.facts.parameters import params
from megaloom.dsl.graph import Model
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import Plan, Prediction
from megaloom.planner.contract.workload import Workload

from .goodput import RECOVERY_SECONDS, goodput
from .token_budget import DAY, HOUR, TokenBudget, duration_text, tokens_text

if TYPE_CHECKING:
    from megaloom.planner.search.scaling import ScalingPoint
    from megaloom.planner.simulate.price import Priced


@frozen(kw_only=True)
class RunCost:
    """Time, device-hours and money of a training run. They are infinite if the share of lasting progress is 0."""

    cluster: Cluster
    unit: str  # what is counted: tokens, or inputs such as images
    steps: int
    seconds: float  # with failures and checkpoints
    interval: tuple[float, float]  # the seconds, if a step takes those of its 90 % interval
    share: float  # of the time that makes lasting progress
    price: float | None  # per device and hour

    @property
    def days(self) -> float:
        """Return the days that the run takes."""
        return self.seconds / DAY

    @property
    def gpu_hours(self) -> float:
        """Return the hours that all devices together take."""
        return self.seconds / HOUR * self.cluster.count

    @property
    def money(self) -> float | None:
        """Return the price of all devices; None without a price."""
        return None if self.price is None else self.gpu_hours * self.price

    def is_met(self, budget: TokenBudget) -> bool | None:
        """Return whether the run ends within the time of a budget; None for a budget without a time."""
        return None if budget.within_seconds is None else self.seconds <= budget.within_seconds


def training_cost(plan: Plan, model: Model, budget: TokenBudget) -> RunCost:
    """Return time, device-hours and money for training a model by its plan on the tokens of a budget."""
    return run_cost(plan.cluster, plan.workload, plan.predicted, params(model), budget)


def run_cost(
    machine: Cluster, workload: Workload, predicted: Prediction, count_of_params: int, budget: TokenBudget
) -> RunCost:
    """Return time, device-hours and money for the tokens of a budget, in whole steps."""
    lasting = goodput(count_of_params, workload.precision, machine, predicted.step_seconds)
    share, steps = (1.0 if lasting is None else lasting.share), -(-budget.tokens // workload.tokens)
    low, mean, high = (
        steps * seconds / share if share else inf
        for seconds in (predicted.interval[0], predicted.step_seconds, predicted.interval[1])
    )
    unit = "tokens" if workload.seq > 1 else "inputs"
    return RunCost(
        cluster=machine, unit=unit, steps=steps, seconds=mean, interval=(low, high), share=share, price=budget.price
    )


def costs_of_points(
    points: Sequence[ScalingPoint], count_of_params: int, budget: TokenBudget
) -> tuple[RunCost | None, ...]:
    """Return the cost of a run on each cluster of a scaling table; None where no legal layout fits."""
    return tuple(
        None if best is None else run_cost(point.cluster, _workload(best), best.prediction, count_of_params, budget)
        for point, best in ((point, point.best) for point in points)
    )


def _workload(best: Priced) -> Workload:
    return best.partition.problem.job.workload


def fewest_devices(costs: Sequence[RunCost | None], budget: TokenBudget) -> RunCost | None:
    """Return the run with the fewest devices that ends within the time of a budget; None if none does.

    Of runs with equally many devices it is the fastest.
    """
    met = (cost for cost in costs if cost is not None and cost.is_met(budget))
    return min(met, key=lambda cost: (cost.cluster.count, cost.seconds), default=None)


def answer_text(costs: Sequence[RunCost | None], budget: TokenBudget, name: str) -> str:
    """Return which cluster is the smallest that trains the named model in time, or that none does, as one sentence."""
    fastest = min((cost for cost in costs if cost is not None), key=lambda cost: cost.seconds)
    aim = f"trains {name} on {tokens_text(budget.tokens)} {fastest.unit}{_within(budget)}"
    if best := fewest_devices(costs, budget):
        return f"{best.cluster} is the smallest of these clusters that {aim}: it takes {duration_and_price(best)}."
    if not isfinite(fastest.seconds):
        return f"None of these clusters {aim}: each fails before its first checkpoint is written."
    return f"None of these clusters {aim}: the fastest, {fastest.cluster}, takes {duration_and_price(fastest)}."


def cost_text(cost: RunCost, budget: TokenBudget) -> str:
    """Return days, device-hours and money of a run, and whether it ends in time, as one or two sentences."""
    if not isfinite(cost.seconds):
        return (
            f"No run of {tokens_text(budget.tokens)} {cost.unit} ends: it fails before the first checkpoint is written."
        )
    text = f"{tokens_text(budget.tokens)} {cost.unit} ({cost.steps:,} steps) take {duration_and_price(cost)}."
    if budget.within_seconds is None:
        return text
    wanted = duration_text(budget.within_seconds)
    return f"{text} " + (
        f"This is within {wanted}."
        if cost.is_met(budget)
        else f"This is longer than {wanted}; a range, such as --gpus 8..4096xH100, shows how many GPUs are enough."
    )


def assumed_text(machine: Cluster) -> str:
    """Return what the expected failures assume of a cluster, as one sentence."""
    if not machine.failures:
        return "Failures: none (failures = 0 in the cluster file)."
    return (
        f"Failures are included: {1e6 * machine.failures:.3g} per million GPU-hours, "
        f"{RECOVERY_SECONDS / 60:.0f} minutes until each is found, and checkpoints at the best interval, "
        f"written at {machine.storage / 1e6:.3g} MB/s per GPU."
    )


def _within(budget: TokenBudget) -> str:
    return "" if budget.within_seconds is None else f" within {duration_text(budget.within_seconds)}"


def duration_and_price(cost: RunCost) -> str:
    """Return the days of a run with their interval, its device-hours, and its money if there is a price."""
    low, high = (days_text(seconds) for seconds in cost.interval)
    money = "" if cost.money is None else f", {amount_text(cost.money)} at {cost.price:g} per GPU-hour"
    hours = f"{amount_text(cost.gpu_hours)} GPU-hours"
    return f"{days_text(cost.seconds)} days (90 % interval: {low} to {high}), {hours}{money}"


def days_text(seconds: float) -> str:
    """Return seconds in days, with three digits or more."""
    days = seconds / DAY
    return amount_text(days) if days >= 0.001 else "<0.001"


def amount_text(amount: float) -> str:
    """Return an amount with three digits or more, and with a power of ten from 1e15 on."""
    return f"{amount:,.0f}" if 99.95 <= amount < 1e15 else f"{amount:#.3g}"


def cost_json(cost: RunCost, budget: TokenBudget) -> dict[str, Any]:
    """Return a run as JSON; a run that never ends has None for days, device-hours and money."""
    low, high = cost.interval
    fields = {
        "days": cost.days,
        "days_low": low / DAY,
        "days_high": high / DAY,
        "gpu_hours": cost.gpu_hours,
        **({} if cost.money is None else {"price": cost.price, "money": cost.money}),
    }
    within = budget.within_seconds
    return {
        "tokens": budget.tokens,
        "steps": cost.steps,
        **{name: value if value is not None and isfinite(value) else None for name, value in fields.items()},
        **({} if within is None else {"within_days": within / DAY, "is_met": cost.is_met(budget)}),
    }
