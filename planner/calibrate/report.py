"""The report of a calibration for a terminal: runs with their errors, factors, and what plans take from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1

from megaloom.dsl.quoting import printable
from megaloom.planner.contract.calibration import Calibration
from megaloom.planner.contract.layout import Layout
from megaloom.planner.search.reasons import format_seconds

from .calibrated import CalibratedRuns, FactorEstimate, median_error
from .logs import LoggedRun

COLUMNS_OF_RUNS = ("run", "GPUs", "layout", "counted", "measured", "before", "after", "left out")


def report_text(found: CalibratedRuns, logged: Sequence[LoggedRun]) -> str:
    """Return the whole report."""
    calibration = found.calibration
    return "\n".join(
        (
            f"Calibration of {found.runs[0].cluster.device.name} from {len(found.runs)} runs\n",
            "Error of the predicted step: by the preset, with the fitted factors, with those that all other runs give",
            *_runs(found, logged),
            "",
            *_left_out_iterations(logged),
            "Factors of time: 1 is the preset, 1.10 takes 10 % longer",
            *map(_factor, found.estimates),
            "",
            *_intervals(calibration),
        )
    )


def _runs(found: CalibratedRuns, logged: Sequence[LoggedRun]) -> Iterator[str]:
    """Yield a table of the runs and their errors, with the median error as its last line."""
    by_name = {one.observed.name: one for one in logged}
    rows = [COLUMNS_OF_RUNS]
    for run, *ratios in zip(found.runs, found.before, found.after, found.held_out, strict=True):
        counted = str(by_name[run.name].measured.iterations)
        errors = [f"{ratio - 1:+.1%}" for ratio in ratios]
        where = str(run.cluster.count), degrees(run.layout)
        rows.append((printable(run.name), *where, counted, format_seconds(run.seconds), *errors))  # type: ignore[arg-type]
    medians = (f"{median_error(ratios):.1%}" for ratios in (found.before, found.after, found.held_out))
    rows.append(("median error", "", "", "", "", *medians))  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def degrees(layout: Layout) -> str:
    """Return the degrees of a layout and its micro-batch: dp8 tp2 mbs1."""
    words = str(layout).split()
    last = next((n for n, word in enumerate(words) if word.startswith("mbs")), len(words))
    return " ".join(words[: last + 1])


def _left_out_iterations(logged: Sequence[LoggedRun]) -> Iterator[str]:
    """Yield which iterations of each run do not count."""
    lines = [
        f"  {printable(one.observed.name)}: {'; '.join(one.measured.left_out)}"
        for one in logged
        if one.measured.left_out
    ]
    if lines:
        yield "Iterations that do not count"
        yield from sorted(lines)
        yield ""


def _factor(estimate: FactorEstimate) -> str:
    if estimate.reason:
        return f"  {estimate.name:<30}1     not fitted: {estimate.reason}"
    return f"  {estimate.name:<30}{estimate.value:.2f}  ± {expm1(estimate.deviation):.0%}"


def _intervals(calibration: Calibration) -> Iterator[str]:
    """Yield the intervals that plans take from a calibration."""
    low, high = calibration.step
    yield f"Interval of plans on this cluster, by the errors of runs left out: {low:.2f} to {high:.2f} of the"
    yield f"predicted step (90 %). It holds for runs of Megatron-core: {'; '.join(calibration.classes)}."
    if calibration.memory_high is None:
        yield "Memory: fewer than two logs report it, so its upper end stays as it was."
    else:
        yield f"Memory: tensors take at most {calibration.memory_high:.2f} of the prediction (95 %)."
