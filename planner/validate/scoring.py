"""The cost model against published runs: a scoreboard that anyone can make again.

Protocol: `predict(run)` prices a run as it was laid out; `validate(path, …)` does so for files and scores the result by
group. Errors are predicted / measured - 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.devices import GiB
from megaloom.planner.cost.measured_memory import held_bytes, required_bytes, upper_bytes
from megaloom.planner.cost.profiles.frameworks import DEEPSPEED_BF16, DEEPSPEED_FP16, NANOTRON
from megaloom.planner.partition.partitioner import Partition, PartitionProblem, balanced
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.intervals import OTHER, interval, run_class
from megaloom.planner.simulate.price import Priced

from .run import Run, Skipped
from .run_files import read_runs
from .stage_assignment import by_weights, evenly, filled

# The rules without which a layout has no price.
UNPRICED = ("positive", "plausible", "world", "expert-grid", "batch", "precision", "stages", "vpp-microbatches")
# How programs deal blocks to stages, by their profile, if not evenly.
DEALT = {NANOTRON.name: by_weights, DEEPSPEED_FP16.name: filled, DEEPSPEED_BF16.name: filled}
APART = 0.05  # runs whose times differ by less say nothing about which is better


@frozen
class Predicted:
    """A run and what the cost model says of it."""

    run: Run
    step_seconds: float
    memory_gib: float  # of the kind that was measured
    oom: bool = False  # it should run out of memory
    memory_gib_upper: float = inf  # that should not be exceeded
    within: tuple[float, float] = (0.0, inf)  # of a step, nine times of ten
    kind: str = ""  # of runs whose spread that is

    @property
    def held(self) -> bool:
        """Whether the step took what it was predicted to at the least and at the most."""
        return self.run.step_seconds is not None and self.within[0] <= self.run.step_seconds <= self.within[1]

    @property
    def time_error(self) -> float | None:
        """Of the step time."""
        measured = self.run.step_seconds
        return None if measured is None else self.step_seconds / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Of the memory."""
        measured = self.run.memory_gib
        return None if measured is None else self.memory_gib / measured - 1


@frozen(kw_only=True)
class Group:
    """The scores of the runs of one source, GPU, precision and kind of model. None where nothing was measured."""

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
    memory_covered: float | None  # share of the rows below the upper bound
    oom_rows: int  # that ran out of memory
    oom_found: int  # of those, as predicted
    oom_false: int  # rows that ran and were predicted not to


@frozen
class Validation:
    """All scores, what they are of, and what was left out."""

    groups: tuple[Group, ...]
    rows: tuple[Predicted, ...]
    skipped: tuple[Skipped, ...]


def validate(*paths: str | Path) -> Validation:
    """The cost model against the runs of these files. Raises UserError for a file without runs."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for path in paths:
        found, left = read_runs(path)
        runs += found
        skipped += left
    return score(runs, skipped)


def score(runs: Iterable[Run], skipped: Iterable[Skipped] = ()) -> Validation:
    """Predict runs and return their scores. Runs without a price join the skipped rows."""
    left = list(skipped)
    predicted = list(_predicted(runs, left))
    return Validation(tuple(_groups(predicted, left)), tuple(predicted), tuple(left))


def _predicted(runs: Iterable[Run], skipped: list[Skipped]) -> Iterator[Predicted]:
    """Of each run what it takes; those that have no price are added to the skipped."""
    for run in runs:
        try:
            yield predict(run)
        except UserError as error:
            reason = str(error).partition("\n")[0]
            said = (run.id, run.source, run.gpu, str(run.workload.precision), run.sparse)
            skipped.append(Skipped(*said, reason))


def predict(run: Run) -> Predicted:
    """What a run takes as it was laid out, its blocks dealt to the stages as its program deals them."""
    priced = priced_as(run)
    held = priced.prediction.nbytes[-1 if run.last_rank else _fullest(priced)]
    oom = max(required_bytes(peak.held) for peak in priced.partition.rank_peaks) > run.cluster.device.nbytes
    most = upper_bytes(held, run.memory_kind or "device", run.profile.kernels.cuda_graphs)
    of = (
        OTHER
        if run.profile.name == NANOTRON.name
        else run_class(run.sparse, run.workload.precision, run.cluster.device)
    )
    within = interval(priced.seconds, of)
    return Predicted(run, priced.seconds, held_bytes(held, run.memory_kind) / GiB, oom, most / GiB, within, of)


def priced_as(run: Run) -> Priced:
    """The price of a run. Raises UserError when its layout cannot be that of its model."""
    g = graph(run.model)
    pricer = Pricer(g, run.cluster, run.workload, run.profile)
    layout = run.layout
    for broken in violations(layout, g, run.workload, run.cluster):
        if broken.rule in UNPRICED:
            raise UserError(broken.message)
    fit = PartitionProblem(layout, pricer.cost_table(layout), pricer.capacity)
    bounds = DEALT.get(run.profile.name, evenly)(g, layout.pp * layout.vpp)
    return pricer.simulate(Partition(fit, bounds) if bounds else Partition(fit, balanced(fit)))


def _fullest(priced: Priced) -> int:
    peaks = priced.partition.peaks
    return peaks.index(max(peaks))


Key = tuple[str, str, str, bool]


def _groups(predicted: Iterable[Predicted], skipped: Iterable[Skipped]) -> Iterator[Group]:
    by: dict[Key, list[Predicted]] = defaultdict(list)
    left: dict[Key, int] = defaultdict(int)
    for p in predicted:
        by[p.run.source, p.run.gpu, str(p.run.workload.precision), p.run.sparse].append(p)
    for s in skipped:
        left[s.source, s.gpu, s.precision, s.sparse] += 1
    for key in sorted({*by, *left}):
        yield _score(key, by[key], left[key])


def _score(key: Key, rows: Sequence[Predicted], skipped: int) -> Group:
    source, gpu, precision, sparse = key
    errors = [e for p in rows if (e := p.time_error) is not None]
    memory = [e for p in rows if (e := p.memory_error) is not None]
    covered = [p.run.memory_gib <= p.memory_gib_upper for p in rows if p.run.memory_gib is not None]
    pairs, first, third = choices(rows)
    return Group(
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
        oom_rows=sum(p.run.oom for p in rows),
        oom_found=sum(p.run.oom and p.oom for p in rows),
        oom_false=sum(p.oom and not p.run.oom for p in rows),
    )


def p90(errors: Sequence[float]) -> float:
    """The value that nine tenths do not exceed."""
    return quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]


def choices(rows: Sequence[Predicted]) -> tuple[float | None, float | None, float | None]:
    """How well layouts of one sweep are told apart: pairs in the right order, and how much slower the choice is.

    The regret is that of the best by prediction, and of the best measured among the best three by prediction.
    """
    sweeps: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.run.sweep and p.run.step_seconds is not None:
            sweeps[p.run.sweep].append(p)
    right: list[bool] = []
    regrets: list[tuple[float, float]] = []
    for sweep in sweeps.values():
        timed = [(p.step_seconds, float(p.run.step_seconds or 0.0)) for p in sweep]
        if len({p.run.layout for p in sweep}) < 3:
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


def as_json(found: Validation) -> dict[str, Any]:
    """The scores as JSON has them."""
    from attrs import asdict

    from .coverage import coverage

    return {
        "groups": [asdict(group) for group in found.groups],
        "intervals": [asdict(line) for line in coverage(found.rows)],
        "rows": [
            {
                "id": p.run.id,
                "predicted_step_seconds": p.step_seconds,
                "predicted_step_seconds_low": p.within[0],
                "predicted_step_seconds_high": p.within[1],
                "measured_step_seconds": p.run.step_seconds,
                "predicted_memory_gib": p.memory_gib,
                "predicted_memory_gib_upper": p.memory_gib_upper,
                "measured_memory_gib": p.run.memory_gib,
                "predicted_out_of_memory": p.oom,
            }
            for p in found.rows
        ],
        "skipped": [asdict(s) for s in found.skipped],
    }
