"""Calibration on published runs: `python -m benchmarks.calibration` fits each group of one cluster and program.

Without an argument it prints the table, with --update it writes it to docs/accuracy/calibration.md.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import mean

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.calibrate.calibrated import CalibratedRuns, calibrated, median_error
from megaloom.planner.calibrate.held_out import interval_of, left_out
from megaloom.planner.calibrate.observed import Observed
from megaloom.planner.contract.devices import Cluster

from .accuracy.run_files import read_runs, shipped_files
from .accuracy.scoreboard import markdown_table
from .accuracy.scoring import predict, priced_as
from .accuracy.training_run import TrainingRun

PAGE = Path(__file__).parents[1] / "docs" / "accuracy" / "calibration.md"
BEGIN, END = "<!-- begin calibration -->\n", "<!-- end of calibration -->"
LEAST = 4  # runs of a group
HEAD = (
    *("source", "GPU", "program", "runs", "check", "before", "fitted", "left out", "model left out", "in interval"),
    "factors",
)
SHORT = ("products", "within", "between", "host")  # names of the factors

GroupName = tuple[str, str, str]
"""Source, GPU and framework profile of a group."""


@frozen
class GroupScore:
    """The calibration of one group of runs, with predicted over measured seconds where a whole model is left out."""

    name: GroupName
    found: CalibratedRuns
    model_left_out: tuple[float, ...]  # empty if the group has one model

    @property
    def chosen(self) -> bool:
        """Return whether the constants of the fit were chosen on this group: the SHA-256 of its name says so."""
        return sha256(" ".join(self.name).encode()).digest()[-1] % 2 == 0

    @property
    def inside(self) -> float:
        """Return the share of runs within the interval that the left-out errors of the others give."""
        ratios = self.found.held_out
        intervals = (interval_of([*ratios[:n], *ratios[n + 1 :]]) for n in range(len(ratios)))
        return mean(low <= 1 / ratio <= high for ratio, (low, high) in zip(ratios, intervals, strict=True))

    @property
    def errors(self) -> tuple[float, float, float]:
        """Return the median errors before, after, and of runs left out."""
        return median_error(self.found.before), median_error(self.found.after), median_error(self.found.held_out)


def groups(only: GroupName | None = None) -> dict[GroupName, list[TrainingRun]]:
    """Return the published runs with a step time and a price, by source, GPU and framework profile.

    only: one group, the others left out.
    """
    out: dict[GroupName, list[TrainingRun]] = defaultdict(list)
    for path in shipped_files():
        for run in read_runs(path)[0]:
            name = run.source, run.cluster.device.name, run.profile.name
            if only in (None, name) and run.step_seconds is not None and _has_price(run):
                out[name].append(run)
    return {name: runs for name, runs in sorted(out.items()) if len(runs) >= LEAST}


def _has_price(run: TrainingRun) -> bool:
    try:
        priced_as(run)
    except UserError:
        return False
    return True


def observed(run: TrainingRun) -> Observed:
    """Return a published run as the calibration takes it."""
    assert run.step_seconds is not None

    def seconds_on(cluster: Cluster) -> float:
        return priced_as(evolve(run, cluster=cluster)).seconds

    return Observed(
        name=run.id,
        cluster=run.cluster,
        layout=run.layout,
        run_class=predict(run).run_class,
        seconds=run.step_seconds,
        seconds_on=seconds_on,
    )


def score(name: GroupName, runs: Sequence[TrainingRun]) -> GroupScore:
    """Calibrate one group."""
    found, models = calibrated([observed(run) for run in runs]), {run.id: run.name for run in runs}
    names = [models[run.name] for run in found.runs]
    several = len(set(names)) > 1
    return GroupScore(name, found, tuple(left_out(found.runs, found.fit, names)) if several else ())


def row(group: GroupScore) -> list[str]:
    """Return a group as a row of the table."""
    estimates = zip(SHORT, group.found.estimates, strict=True)
    factors = ", ".join(f"{short} {one.value:.2f}" for short, one in estimates if not one.reason)
    model = f"{median_error(group.model_left_out):.1%}" if group.model_left_out else ""
    errors = [f"{error:.1%}" for error in group.errors]
    check = "" if group.chosen else "yes"
    return [*group.name, str(len(group.found.runs)), check, *errors, model, f"{group.inside:.0%}", factors or "none"]


def summary(scores: Sequence[GroupScore]) -> Iterator[str]:
    """Yield a sentence on each half of the groups."""
    for half, words in ((True, "on which the constants were chosen"), (False, "that only check them")):
        mine = [one for one in scores if one.chosen is half]
        before, after, held_out = (mean(errors) for errors in zip(*(one.errors for one in mine), strict=True))
        better = sum(one.errors[2] < one.errors[0] for one in mine)
        yield (
            f"- The {len(mine)} groups {words}: median error {before:.1%} before, {after:.1%} fitted, {held_out:.1%} "
            f"left out, in the mean of the groups. {better} of them are better left out than before. "
            f"{mean(one.inside for one in mine):.0%} of the runs lie in the interval."
        )


def main() -> None:
    """Calibrate all groups, and print or write the table."""
    scores = []
    for name, runs in groups().items():
        scores.append(score(name, runs))
        print(" ".join(row(scores[-1])), file=sys.stderr, flush=True)
    text = markdown_table(HEAD, [row(one) for one in scores]) + "\n\n" + "\n".join(summary(scores)) + "\n"
    if "--update" not in sys.argv[1:]:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
