"""Results of `gpu_runs` beside what the planner of today predicts: a line for each case, and errors by half.

A file of results has one line for each run, in the order of the runs. Predictions are made anew for each report, so a
change of prices shows in every line. Where `megaloom measure` ran on the same machine, its profile predicts the step a
second time. Held-out cases are reported apart; of runs that were known before their case was listed (`origin`), none is
held out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from attrs import asdict, fields, frozen

from benchmarks.gpu_cases import CASES, Case, planned
from megaloom.planner.report.units import peak_memory

GiB = 2**30
RESULTS = Path(__file__).parent / "data" / "gpu_case_runs.tsv"
MACHINES = RESULTS.parent / "machines"
THIS_COMMAND = "gpu_runs"
HEAD = (
    f"{'case':<84} {'GPUs':<8} {'m':>2} {'held':<4} {'s':>7} {'plan':>7} {'off':>7} {'GiB':>6} {'plan':>6} {'off':>7}"
    f" {'own':>7}"
)


@frozen(kw_only=True)
class Measured:
    """One run of a case, or the error that ended it. A number is 0 where it was not measured."""

    case: str
    gpus: str = ""
    libraries: str = ""
    date: str = ""
    steps: int = 0  # that the median is of; 0: not known
    step_seconds: float = 0.0
    memory_gib: float = 0.0  # the most that torch allocated on any device
    reserved_gib: float = 0.0
    origin: str = THIS_COMMAND  # the command, or the page that has the number
    machine: str = ""  # the file of MACHINES that `megaloom measure` wrote there
    error: str = ""


@frozen
class Score:
    """Relative errors of predictions."""

    runs: int
    middle: float
    nine_of_ten: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Score:
        """Return the score of these errors, of which there must be one."""
        sizes = sorted(map(abs, errors))
        return cls(len(sizes), median(sizes), sizes[ceil(0.9 * len(sizes)) - 1])

    def __str__(self) -> str:
        return f"{self.runs} runs, median {self.middle:.1%}, nine of ten below {self.nine_of_ten:.1%}"


@frozen
class Compared:
    """A run of a case and its prediction."""

    case: Case
    run: Measured
    step_seconds: float
    memory_gib: float
    own_seconds: float | None = None  # predicted from the profile of the machine

    @property
    def held_out(self) -> bool:
        """Return whether the run counts as held out."""
        return self.case.held_out and self.run.origin == THIS_COMMAND

    @property
    def step_error(self) -> float:
        """Return the relative error of the predicted step time."""
        return self.step_seconds / self.run.step_seconds - 1

    @property
    def own_error(self) -> float | None:
        """Return the relative error of the step time that the machine's profile predicts; None if there is none."""
        return None if self.own_seconds is None else self.own_seconds / self.run.step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the predicted memory; None where none was measured."""
        return self.memory_gib / self.run.memory_gib - 1 if self.run.memory_gib else None

    def __str__(self) -> str:
        run, held, error = self.run, "yes" if self.held_out else "no", self.memory_error
        times = f"{run.step_seconds:>7.3f} {self.step_seconds:>7.3f} {self.step_error:>+7.1%}"
        memory = f"{run.memory_gib:>6.1f} {self.memory_gib:>6.1f} {error:>+7.1%}" if error is not None else " " * 21
        own = "" if self.own_error is None else f"{self.own_error:>+7.1%}"
        head = f"{self.case.name:<84} {run.gpus:<8} {self.case.microbatches:>2} {held:<4}"
        return f"{head} {times} {memory} {own}".rstrip()


def append(file: Path, run: Measured) -> None:
    """Write a run to the end of a file, and to the disk."""
    new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, [f.name for f in fields(Measured)], delimiter="\t", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(run))
        out.flush()


def read(file: Path) -> list[Measured]:
    """Return the runs of a file in their order; none if there is no file."""
    if not file.exists():
        return []
    types: Mapping[str, Any] = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Measured)}
    with file.open(encoding="utf-8", newline="") as rows:
        return [
            Measured(**{name: types[name](text) for name, text in row.items()})
            for row in csv.DictReader(rows, delimiter="\t")
        ]


def compared(runs: Iterable[Measured], cases: Sequence[Case] = CASES) -> list[Compared]:
    """Return the newest run of each case, GPUs and profile that ended without an error, with its prediction."""
    by_name, newest = {case.name: case for case in cases}, dict[tuple[str, str, str], Measured]()
    for run in runs:
        if not run.error and run.case in by_name:
            newest[run.case, run.gpus, run.machine] = run
    out = []
    for run in newest.values():
        case, device, own = by_name[run.case], run.gpus.partition("x")[2], None
        plan = planned(case, device)
        if run.machine:
            own = planned(case, str(MACHINES / run.machine)).predicted.step_seconds
        allocated = peak_memory(plan, "allocated") / GiB
        out.append(Compared(case, run, plan.predicted.step_seconds, allocated, own))
    return out


def report(runs: Sequence[Measured], cases: Sequence[Case] = CASES) -> str:
    """Return a line for each run, the errors by half, and the cases that did not end."""
    rows = compared(runs, cases)
    lines = [HEAD, *map(str, rows)]
    for name, held in (("fitted and known", False), ("held out", True)):
        some = [row for row in rows if row.held_out is held]
        memory = [row.memory_error for row in some if row.memory_error is not None]
        for what, errors in (("step", [row.step_error for row in some]), ("memory", memory)):
            lines.append(f"{name}, {what}: {Score.of(errors) if errors else 'no runs'}")
    if own := [row.own_error for row in rows if row.own_error is not None]:
        lines.append(f"with the profile of the machine, step: {Score.of(own)}")
    ended = {(row.case.name, row.run.gpus) for row in rows}
    failed = [run for run in runs if run.error and (run.case, run.gpus) not in ended]
    lines += [f"failed: {run.case} on {run.gpus}: {run.error}" for run in failed]
    return "\n".join(lines)
