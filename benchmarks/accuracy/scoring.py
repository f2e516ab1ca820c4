"""Predictions of published training runs, and their scores.

`predict(run)` prices a run under its own layout. `validate_files(path, …)` does so for files and scores the
predictions by group. An error is predicted / measured - 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import mean, median, quantiles

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.devices import GiB
from megaloom.planner.cost.intervals import OTHER_CLASS, interval, run_class
from megaloom.planner.cost.measured_memory import held_bytes, required_bytes, upper_bytes
from megaloom.planner.partition.partitioner import Partition, PartitionProblem
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import Priced

from .frameworks import DEEPSPEED_BF16, DEEPSPEED_FP16, NANOTRON, OTHER_KERNELS
from .run_files import read_runs
from .stage_assignment import by_weights, evenly, filled
from .training_run import Skipped, TrainingRun

# Rules that a layout must meet to be priced; published layouts may break others.
PRICING_RULES = ("positive", "plausible", "world", "expert-grid", "batch", "precision", "stages", "vpp-microbatches")
# Assignment of blocks to stages by framework profile; every other framework assigns them evenly.
STAGE_ASSIGNMENT = {NANOTRON.name: by_weights, DEEPSPEED_FP16.name: filled, DEEPSPEED_BF16.name: filled}
APART = 0.05  # two runs whose times differ by less are no pair of layouts to order


@frozen
class Predicted:
    """A run and its prediction."""

    training_run: TrainingRun
    step_seconds: float
    memory_gib: float  # of the kind that was measured
    out_of_memory: bool = False
    memory_gib_upper: float = inf
    interval: tuple[float, float] = (0.0, inf)  # 90 % interval of the step time
    run_class: str = ""  # class of runs that the interval belongs to
    overflow: float = 0.0  # chance that memory does not suffice

    @property
    def inside_interval(self) -> bool:
        """True if the measured step time lies in the interval."""
        return (
            self.training_run.step_seconds is not None
            and self.interval[0] <= self.training_run.step_seconds <= self.interval[1]
        )

    @property
    def time_error(self) -> float | None:
        """Return the error of the step time, None if that was not measured."""
        measured = self.training_run.step_seconds
        return None if measured is None else self.step_seconds / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Return the error of the memory, None if that was not measured."""
        measured = self.training_run.memory_gib
        return None if measured is None else self.memory_gib / measured - 1


@frozen(kw_only=True)
class ScoreGroup:
    """Scores of the runs of one source, GPU, precision and kind of model. None where nothing was measured."""

    source: str
    gpu: str
    precision: str
    sparse: bool
    rows: int
    skipped: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    pair_accuracy: float | None
    top1_regret: float | None
    top3_regret: float | None
    memory_rows: int
    memory_mean_abs_error: float | None
    memory_max_abs_error: float | None
    memory_median_abs_error: float | None
    memory_bias: float | None
    memory_covered: float | None  # share of the rows below the upper bound of memory
    oom_rows: int  # rows that ran out of memory
    oom_found: int  # rows of these that were predicted to
    oom_false: int  # rows that ran and were predicted to run out of memory


@frozen
class Validation:
    """Scores by group, predicted rows, and skipped rows."""

    groups: tuple[ScoreGroup, ...]
    rows: tuple[Predicted, ...]
    skipped: tuple[Skipped, ...]


def validate_files(*paths: str | Path) -> Validation:
    """Predict the runs of these files and return their scores. Raises UserError for a file without runs."""
    runs: list[TrainingRun] = []
    skipped: list[Skipped] = []
    for path in paths:
        file_runs, left = read_runs(path)
        runs += file_runs
        skipped += left
    return score(runs, skipped)


def score(runs: Iterable[TrainingRun], skipped: Iterable[Skipped] = ()) -> Validation:
    """Predict runs and return their scores. Runs without a price join the skipped rows."""
    left = list(skipped)
    predicted = list(_predicted(runs, left))
    return Validation(tuple(_groups(predicted, left)), tuple(predicted), tuple(left))


def _predicted(runs: Iterable[TrainingRun], skipped: list[Skipped]) -> Iterator[Predicted]:
    """Yield the prediction of each run, and append runs without a price to `skipped`."""
    for run in runs:
        try:
            yield predict(run)
        except UserError as error:
            reason = str(error).partition("\n")[0]
            precision = str(run.workload.precision)
            skipped.append(Skipped(run.id, run.source, run.gpu, precision, run.sparse, reason))


def predict(run: TrainingRun) -> Predicted:
    """Predict a run under its layout, with the stages that its framework assigns. Raises UserError without a price."""
    priced = priced_as(run)
    nbytes = priced.prediction.nbytes[-1 if run.last_rank else _fullest(priced)]
    out_of_memory = max(required_bytes(peak.held) for peak in priced.partition.rank_peaks) > run.cluster.device.nbytes
    most = upper_bytes(nbytes, run.memory_kind or "device", run.profile.host.cuda_graphs)
    known = run.profile.name not in OTHER_KERNELS
    class_ = run_class(run.sparse, run.workload.precision, run.cluster.device) if known else OTHER_CLASS
    memory = held_bytes(nbytes, run.memory_kind) / GiB
    return Predicted(
        run,
        priced.seconds,
        memory,
        out_of_memory,
        most / GiB,
        interval(priced.seconds, class_),
        class_,
        priced.prediction.overflow or 0.0,
    )


def priced_as(run: TrainingRun) -> Priced:
    """Return the price of a run. Raises UserError if its layout is illegal for its model."""
    g = graph(run.model)
    pricer = Pricer(g, run.cluster, run.workload, run.profile)
    layout = run.layout
    for broken in violations(layout, g, run.workload, run.cluster):
        if broken.rule in PRICING_RULES:
            raise UserError(broken.message)
    fit = PartitionProblem(layout, pricer.cost_table(layout), pricer.capacity)
    bounds = STAGE_ASSIGNMENT.get(run.profile.name, evenly)(g, layout.pp * layout.vpp)
    return pricer.simulate(Partition(fit, bounds) if bounds else Partition(fit, fit.balanced))


def _fullest(priced: Priced) -> int:
    peaks = priced.partition.peaks
    return peaks.index(max(peaks))


Key = tuple[str, str, str, bool]


def _groups(predicted: Iterable[Predicted], skipped: Iterable[Skipped]) -> Iterator[ScoreGroup]:
    by: dict[Key, list[Predicted]] = defaultdict(list)
    left: dict[Key, int] = defaultdict(int)
    for p in predicted:
        by[
            p.training_run.source, p.training_run.gpu, str(p.training_run.workload.precision), p.training_run.sparse
        ].append(p)
    for s in skipped:
        left[s.source, s.gpu, s.precision, s.sparse] += 1
    for key in sorted({*by, *left}):
        yield _score(key, by[key], left[key])


def _score(key: Key, rows: Sequence[Predicted], skipped: int) -> ScoreGroup:
    source, gpu, precision, sparse = key
    errors = [e for p in rows if (e := p.time_error) is not None]
    memory = [e for p in rows if (e := p.memory_error) is not None]
    covered = [p.training_run.memory_gib <= p.memory_gib_upper for p in rows if p.training_run.memory_gib is not None]
    pairs, first, third = choices(rows)
    return ScoreGroup(
        source=source,
        gpu=gpu,
        precision=precision,
        sparse=sparse,
        rows=len(rows),
        skipped=skipped,
        median_abs_error=median(map(abs, errors)) if errors else None,
        p90_abs_error=p90([abs(e) for e in errors]) if errors else None,
        bias=mean(errors) if errors else None,
        pair_accuracy=pairs,
        top1_regret=first,
        top3_regret=third,
        memory_rows=len(memory),
        memory_mean_abs_error=mean(map(abs, memory)) if memory else None,
        memory_max_abs_error=max(map(abs, memory)) if memory else None,
        memory_median_abs_error=median(map(abs, memory)) if memory else None,
        memory_bias=mean(memory) if memory else None,
        memory_covered=mean(covered) if covered else None,
        oom_rows=sum(p.training_run.oom for p in rows),
        oom_found=sum(p.training_run.oom and p.out_of_memory for p in rows),
        oom_false=sum(p.out_of_memory and not p.training_run.oom for p in rows),
    )


def p90(errors: Sequence[float]) -> float:
    """Return the 90th percentile."""
    return quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]


def choices(rows: Sequence[Predicted]) -> tuple[float | None, float | None, float | None]:
    """Return the share of layout pairs in the right order, and the mean regret of the first and of the best of three.

    Pairs and choices are of runs of one sweep. Regret is the measured time of the choice over the best one, minus 1:
    of the layout that is predicted best, and of the best measured one among the three that are predicted best.
    """
    sweeps: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.training_run.sweep and p.training_run.step_seconds is not None:
            sweeps[p.training_run.sweep].append(p)
    right: list[bool] = []
    regrets: list[tuple[float, float]] = []
    for sweep in sweeps.values():
        timed = [(p.step_seconds, float(p.training_run.step_seconds or 0.0)) for p in sweep]
        if len({p.training_run.layout for p in sweep}) < 3:
            continue
        right += [(a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(timed, 2) if _apart(a[1], b[1])]
        best, order = min(t for _, t in timed), sorted(timed)
        regrets.append((order[0][1] / best - 1, min(t for _, t in order[:3]) / best - 1))
    if not regrets:
        return None, None, None
    first, third = zip(*regrets, strict=True)
    return mean(right) if right else None, mean(first), mean(third)


def _apart(a: float, b: float) -> bool:
    return max(a, b) > (1 + APART) * min(a, b)
