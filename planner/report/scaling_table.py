"""The scaling table: the best layout of each cluster, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from megaloom.planner.contract.devices import Cluster, GiB
from megaloom.planner.search.scaling import ScalingPoint
from megaloom.planner.simulate.price import Priced

from .folded_table import text_table
from .goodput import MANY_DEVICES, goodput

BAR_WIDTH = 24  # characters of the longest bar
BAR_TITLE = "speed"


def scaling_table(points: Sequence[ScalingPoint], params: int) -> Table:
    """Return the table of the best layouts, one row per cluster, with bars of tokens per second per device.

    With MANY_DEVICES or more, it has the goodput and the number of steps between checkpoints too.
    """
    many = any(p.cluster.count >= MANY_DEVICES for p in points)
    lasting = ("goodput", "save every") if many else ()
    head = ("GPUs", "batch", "s/step", "tok/s", "tok/s/GPU", "MFU", "GiB", *lasting, BAR_TITLE, "layout")
    rows: list[tuple[str, ...]] = []
    most = max((p.best.prediction.tokens_per_second_per_device for p in points if p.best), default=1.0)
    for point in points:
        if point.best is None:
            dashes = ["-"] * (6 + len(lasting))
            rows.append((str(point.cluster), *dashes, "", "no layout is legal and fits"))
            continue
        prediction, each = point.best.prediction, point.best.prediction.tokens_per_second_per_device
        cells = (
            str(point.cluster),
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


def _lasting(machine: Cluster, best: Priced, params: int) -> tuple[str, str]:
    estimate = goodput(params, best.partition.problem.job.workload.precision, machine, best.seconds)
    return ("100%", "-") if estimate is None else (f"{estimate.share:.1%}", f"{estimate.every_steps:,} steps")
