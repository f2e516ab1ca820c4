"""Reasons of a plan, in sentences with numbers: what it beats, what limits it, why its neighbours lose or are illegal.

All functions take simulated layouts or predictions and return text, a sentence or a line each; `cause_differences` and
`peak_nbytes` return the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from megaloom.planner.contract.devices import Cluster, GiB
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Prediction
from megaloom.planner.cost.measured_memory import held_bytes
from megaloom.planner.cost.memory import Peak
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.rules.rule import Violation
from megaloom.planner.simulate.price import Priced

from .simple_first import NEAR_RATIO, contrast

COMPUTE = ("forward", "backward")
MENTIONED = 4  # neighbours in the reasons
HOLDERS = 3  # holders of memory in a sentence
TIE_SHARE = 0.0005  # share of a step; a smaller difference counts as none
NAMED_CAUSES = 3  # of a difference that are named
UNEXPLAINED = 0.2  # share of a difference that the named causes may leave
OTHER_PARTS = "other parts"
EQUALLY_FAST = "equally fast"


@frozen
class Rejected:
    """A neighbour of the best layout that is illegal, does not fit or is slower, and the cause."""

    layout: Layout
    cause: str


@frozen
class Rival:
    """A neighbour of the best layout that is legal and fits: the change, and its simulation."""

    change: str
    priced: Priced


def best_reasons(
    best: Priced, quickest: Priced, others: Sequence[Priced], rivals: Sequence[Rival], legal: int, cluster: Cluster
) -> tuple[str, ...]:
    """Return why the best plan wins, what limits it, its memory, and why its neighbours lose.

    `quickest` may be another layout than `best`, at most NEAR_RATIO faster and less simple.
    """
    reasons = [_wins(best, quickest, others, legal), _limits(best), _memory(best, cluster)]
    rivals = sorted((r for r in rivals if r.priced.seconds > best.seconds), key=lambda r: r.priced.seconds)
    reasons += [
        f"{rival.change} it is {difference_text(best.prediction, rival.priced.prediction)}."
        for rival in rivals[:MENTIONED]
    ]
    return tuple(reasons)


def sharding_reason(best: Priced, without: Priced | None, nearest: Partition | None) -> str:
    """Return what a plan gains by sharding gradients or weights.

    without: the fastest simulated layout that shards neither, None if none fits; nearest: then the one with the
    smallest deficit.
    """
    if without is not None:
        difference = difference_text(best.prediction, without.prediction)
        return f"Without sharded gradients and weights the best layout ({without.layout}) is {difference}."
    reason = "Without sharded gradients and weights no layout fits the memory"
    return f"{reason}." if nearest is None else f"{reason}. Of the nearest ({nearest.layout}), {deficit_text(nearest)}."


def slower_neighbours(best: Priced, rivals: Iterable[Rival]) -> tuple[Rejected, ...]:
    """Return the slower neighbours, the fastest first, each with its difference."""
    slow = sorted((r.priced for r in rivals if r.priced.seconds > best.seconds), key=lambda priced: priced.seconds)
    return tuple(Rejected(priced.layout, difference_text(best.prediction, priced.prediction)) for priced in slow)


def other_reasons(plan: Priced, best: Priced) -> tuple[str, ...]:
    """Return by what a plan loses to the best one, or why the best one is preferred if they cannot be told apart."""
    if not near(plan.seconds, best.seconds):
        difference = difference_text(best.prediction, plan.prediction)
        return (f"Compared with {best.layout} it is {difference}.", _limits(plan))
    words = contrast(plan.layout, best.layout, best.partition.problem.job.cluster)
    difference = tie_text(best.prediction, plan.prediction, words)
    return (f"The model cannot tell it apart from {best.layout}: it is {difference}.", _limits(plan))


def near(seconds: float, other: float) -> bool:
    """Return whether two step times differ by at most NEAR_RATIO, so that the model cannot tell them apart."""
    return max(seconds, other) <= NEAR_RATIO * min(seconds, other)


def tie_text(best: Prediction, other: Prediction, contrast: str) -> str:
    """Return by how much another layout is slower or faster, and in what it is less simple, else its memory.

    contrast: the first difference of the layouts in the order of simplicity; empty if they are equally simple.
    """
    more = peak_nbytes(other) - peak_nbytes(best)
    needs = f"with {format_nbytes(abs(more))} {'more' if more > 0 else 'less'} memory"
    return f"{_speed_text(best, other)}, {contrast or needs}"


def _speed_text(best: Prediction, other: Prediction) -> str:
    change = other.step_seconds / best.step_seconds - 1
    if abs(change) < TIE_SHARE:
        return EQUALLY_FAST
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"


def _wins(best: Priced, quickest: Priced, others: Sequence[Priced], legal: int) -> str:
    text = f"The plan ({best.layout}) takes {format_seconds(best.seconds)} a step, {best.prediction.mfu:.1%} MFU"
    if not others:
        return f"{text}: the only one of {legal:,} legal layouts that fits the memory."
    ties = [priced for priced in others if near(priced.seconds, quickest.seconds)]
    more = sum(priced is not quickest for priced in ties)
    also = f"{more} other layout{'s' * (more > 1)} at most {NEAR_RATIO - 1:.0%} slower" if more else ""
    if quickest is best:
        text += f", the fastest of {legal:,} legal layouts."
        text += f" The model cannot tell it apart from {also}." if also else ""
    else:
        text += f". {_simpler(best, quickest, legal)} The model cannot tell the two apart"
        text += f", nor {also}." if also else "."
    if len(ties) == len(others):
        return text
    next_ = min((priced for priced in others if priced not in ties), key=lambda priced: priced.seconds)
    return f"{text} The next best ({next_.layout}) is {difference_text(best.prediction, next_.prediction)}."


def _simpler(best: Priced, quickest: Priced, legal: int) -> str:
    """Return by how much the best plan is slower than the fastest layout, and why it is preferred."""
    words = contrast(best.layout, quickest.layout, best.partition.problem.job.cluster)
    less = peak_nbytes(quickest.prediction) - peak_nbytes(best.prediction)
    gain = f"simpler: {words}" if words else f"leaves {format_nbytes(less)} more memory free"
    speed = _speed_text(quickest.prediction, best.prediction)
    than = "as fast as" if speed == EQUALLY_FAST else f"{speed} than"
    return f"It is {than} the fastest of {legal:,} legal layouts ({quickest.layout}), and {gain}."


def _limits(plan: Priced) -> str:
    step, parts = plan.seconds, plan.prediction.breakdown
    compute = sum(parts.get(cause, 0.0) for cause in COMPUTE)
    rest = {cause: seconds for cause, seconds in parts.items() if cause not in COMPUTE}
    if not rest:  # such as of a frozen model in one process
        return "All of the step is computation."
    cause = max(rest, key=rest.__getitem__)
    took = format_seconds(rest[cause])
    return f"{compute / step:.1%} of the step is computation. The largest other part: {cause}, {took}."


def _memory(plan: Priced, cluster: Cluster) -> str:
    rank, peak = fullest_rank(plan.partition)
    used, most = peak.nbytes, cluster.device.nbytes
    who = f"Pipeline rank {rank}, the one with the most memory," if plan.layout.pp > 1 else "Each device"
    share = f"{format_nbytes(used)} of {format_nbytes(most)} ({used / most:.0%})"
    return f"{who} needs {share} at its peak, the {peak.moment}. The largest parts: {largest_holders(peak)}."


def largest_holders(peak: Peak) -> str:
    """Return the largest holders of memory at a peak, with their bytes."""
    largest = sorted(peak.held.items(), key=lambda entry: -entry[1])[:HOLDERS]
    return ", ".join(f"{holder} {format_nbytes(nbytes)}" for holder, nbytes in largest)


def deficit_text(plan: Partition) -> str:
    """Return who exceeds the memory limit, a pipeline rank or each device, by how much, and the largest holders."""
    rank, peak = fullest_rank(plan)
    who = f"pipeline rank {rank}" if plan.layout.pp > 1 else "each device"
    return (
        f"{who} needs {format_nbytes(peak.nbytes)} at the {peak.moment}, {format_nbytes(plan.deficit)} "
        f"more than the memory limit of {format_nbytes(plan.problem.memory_limit)}: {largest_holders(peak)}"
    )


def refusal(violations: Iterable[Violation]) -> str:
    """Return the rules that a layout breaks, each with its fix."""
    return "; ".join(f"{v.message} [{v.rule}]: {v.fix}" for v in violations)


def fullest_rank(plan: Partition) -> tuple[int, Peak]:
    """Return the pipeline rank with the most memory, and its peak."""
    return max(enumerate(plan.rank_peaks), key=lambda entry: entry[1].nbytes)


def difference_text(best: Prediction, other: Prediction) -> str:
    """Return by how much another prediction is slower or faster, and why: `5.0% slower: backward +375 ms`.

    The causes are the largest, at most NAMED_CAUSES of them, until what is left is at most UNEXPLAINED of the
    difference. If more is left it stands last, as OTHER_PARTS. Of a prediction that is equally fast, return how much
    more memory it needs.
    """
    slower = other.step_seconds - best.step_seconds
    if abs(slower) < TIE_SHARE * best.step_seconds:
        more = peak_nbytes(other) - peak_nbytes(best)
        needs_more = more > TIE_SHARE * peak_nbytes(best)
        second = f"with {format_nbytes(more)} more memory" if needs_more else "and no simpler than the best plan"
        return f"{EQUALLY_FAST}, {second}"
    named = ", ".join(f"{cause} {_signed_seconds(s)}" for cause, s in _main_causes(best, other).items())
    return f"{_speed_text(best, other)}: {named}"


def _main_causes(best: Prediction, other: Prediction) -> dict[str, float]:
    """Return the seconds of the causes that explain a difference, those that add time first."""
    slower, by_cause = other.step_seconds - best.step_seconds, cause_differences(best, other)
    causes: dict[str, float] = {}
    for cause in sorted(by_cause, key=lambda cause: -abs(by_cause[cause]))[:NAMED_CAUSES]:
        causes[cause] = by_cause[cause]
        if abs(slower - sum(causes.values())) <= UNEXPLAINED * abs(slower):
            break
    causes = dict(sorted(causes.items(), key=lambda entry: -entry[1]))
    rest = slower - sum(causes.values())
    return causes if abs(rest) <= UNEXPLAINED * abs(slower) else causes | {OTHER_PARTS: rest}


def _signed_seconds(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '−'}{format_seconds(abs(seconds))}"


def cause_differences(a: Prediction, b: Prediction) -> dict[str, float]:
    """Return the seconds of a step that b takes more than a, by cause; negative where it takes less."""
    ours, theirs = a.breakdown, b.breakdown
    return {cause: theirs.get(cause, 0.0) - ours.get(cause, 0.0) for cause in {**ours, **theirs}}


def peak_nbytes(of: Prediction, kind: str = "device") -> int:
    """Return the bytes of the pipeline rank with the most memory, as `kind` measures them: see `held_bytes`."""
    return max(held_bytes(held, kind) for held in of.nbytes)


def format_nbytes(nbytes: int) -> str:
    """Return bytes as text, in GiB or MiB."""
    return f"{nbytes / GiB:.1f} GiB" if nbytes >= GiB else f"{nbytes / 2**20:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Return seconds as text, in s or ms."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"  # three digits: never 1e+03 ms
