"""The scaling table: the best layout of each cluster, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.dsl.facts.parameters import params as parameters
from megaloom.dsl.graph import Model
from megaloom.planner.contract.devices import Cluster, GiB
from megaloom.planner.search.scaling import ScalingPoint
from megaloom.planner.simulate.price import Priced

from .folded_table import text_table
from .goodput import MANY_DEVICES, goodput
from .run_cost import RunCost, amount_text, answer_text, assumed_text, costs_of_points, days_text
from .token_budget import TokenBudget

BAR_WIDTH = 24  # characters of the longest bar
BAR_TITLE = "speed"


def scaling_report(points: Sequence[ScalingPoint], model: Model, budget: TokenBudget | None = None) -> RenderableType:
    """Return the table of the best layouts. With a time in the budget, the first sentence names the cluster to take."""
    count = parameters(model)
    table = scaling_table(points, count, budget)
    if budget is None:
        return table
    parts: list[RenderableType] = [table, Text(f"\n{assumed_text(points[0].cluster)}")]
    if budget.within_seconds is not None:
        answer = answer_text(costs_of_points(points, count, budget), budget, model.name)
        parts.insert(0, Text(f"{answer}\n"))
    return Group(*parts)


def scaling_table(points: Sequence[ScalingPoint], params: int, budget: TokenBudget | None = None) -> Table:
    """Return the table of the best layouts, one row per cluster, with bars of tokens per second per device.

    With MANY_DEVICES or more, it has the goodput and the number of steps between checkpoints too; with a budget, the
    days, device-hours and money for its tokens.
    """
    many = any(p.cluster.count >= MANY_DEVICES for p in points)
    lasting = ("goodput", "save every") if many else ()
    costs = costs_of_points(points, params, budget) if budget else (None,) * len(points)
    spent = (("days", "GPU-hours") + (("money",) if budget.price else ())) if budget else ()
    head = ("GPUs", *spent, "batch", "s/step", "tok/s", "tok/s/GPU", "MFU", "GiB", *lasting, BAR_TITLE, "layout")
    rows: list[tuple[str, ...]] = []
    most = max((p.best.prediction.tokens_per_second_per_device for p in points if p.best), default=1.0)
    for point, cost in zip(points, costs, strict=True):
        if point.best is None:
            dashes = ["-"] * (6 + len(lasting) + len(spent))
            rows.append((str(point.cluster), *dashes, "", "no layout is legal and fits"))
            continue
        prediction, each = point.best.prediction, point.best.prediction.tokens_per_second_per_device
        cells = (
            str(point.cluster),
            *(_spent(cost) if cost else ()),
            str(point.best.partition.problem.job.workload.batch),
            f"{prediction.step_seconds:.3g}",
            f"{each * point.cluster.count:,.0f}",
            f"{each:,.0f}",
            f"{prediction.mfu:.1%}",
            f"{max(point.best.partition.peaks) / GiB:.1f}",
            *(_lasting(point.cluster, point.best, params) if many else ()),
            "#" * round(BAR_WIDTH * each / most),
            str(point.best.layout),
        )
        rows.append(cells)
    return text_table(head, rows, left=(BAR_TITLE, "layout"), key=True)


def _spent(cost: RunCost) -> tuple[str, ...]:
    money = () if cost.money is None else (amount_text(cost.money),)
    return days_text(cost.seconds), amount_text(cost.gpu_hours), *money


def _lasting(machine: Cluster, best: Priced, params: int) -> tuple[str, str]:
    estimate = goodput(params, best.partition.problem.job.workload.precision, machine, best.seconds)
    return ("100%", "-") if estimate is None else (f"{estimate.share:.1%}", f"{estimate.every_steps:,} steps")
