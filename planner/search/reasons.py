"""Why a plan is as it is, in sentences with numbers: what it beats, what limits it, why others cannot be had.

Protocol: all functions take priced layouts and give text, one sentence or one line each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.cost.memory import Peak
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.rules.rule import Violation
from megaloom.planner.simulate.price import Priced

from .step_difference import difference_text, format_nbytes, format_seconds

COMPUTE = ("forward", "backward")
MENTIONED = 4  # neighbours that the reasons name
HOLDERS = 3  # of the memory, that the reasons name


@frozen
class Rejected:
    """A layout near the best one that cannot be had, or takes longer, and why."""

    layout: Layout
    cause: str


@frozen
class Rival:
    """A neighbour of the best layout that could be had: what was changed, and its price."""

    change: str
    priced: Priced


def best_reasons(
    best: Priced, quickest: Priced, others: Sequence[Priced], rivals: Sequence[Rival], legal: int, cluster: Cluster
) -> tuple[str, ...]:
    """Why the best plan is the best one, what limits it, and why the next best and its neighbours lose.

    It may be simpler than the quickest, and as quick.
    """
    said = [_wins(best, quickest, others, legal), _limits(best), _memory(best, cluster)]
    rivals = sorted((r for r in rivals if r.priced.seconds > best.seconds), key=lambda r: r.priced.seconds)
    said += [
        f"{rival.change} it would be {difference_text(best.prediction, rival.priced.prediction)}."
        for rival in rivals[:MENTIONED]
    ]
    return tuple(said)


def slower_neighbours(best: Priced, rivals: Iterable[Rival]) -> tuple[Rejected, ...]:
    """The neighbours that take longer, the quickest first, each with the time that it loses by."""
    slow = sorted((r.priced for r in rivals if r.priced.seconds > best.seconds), key=lambda priced: priced.seconds)
    return tuple(Rejected(priced.layout, difference_text(best.prediction, priced.prediction)) for priced in slow)


def other_reasons(plan: Priced, best: Priced) -> tuple[str, ...]:
    """What a plan loses by."""
    if plan.seconds <= best.seconds:
        return (f"It is as quick as {best.layout}, which is simpler.",)
    return (f"Beside {best.layout} it is {difference_text(best.prediction, plan.prediction)}.", _limits(plan))


def _wins(best: Priced, quickest: Priced, others: Sequence[Priced], legal: int) -> str:
    took = f"{best.layout} takes {format_seconds(best.seconds)} a step, {best.prediction.mfu:.1%} MFU"
    if not others:
        return f"{took}: it is the only one of {legal:,} legal layouts that fits the memory."
    least = f", the least of {legal:,} legal layouts"
    if quickest.seconds < best.seconds:
        least = f": as quick as {quickest.layout} to 0.1 %, and simpler; no other of {legal:,} legal layouts is quicker"
    next_ = min(others, key=lambda priced: priced.seconds)
    if next_.seconds <= best.seconds:
        return f"{took}{least}."
    return f"{took}{least}; the next, {next_.layout}, is {difference_text(best.prediction, next_.prediction)}."


def _limits(plan: Priced) -> str:
    step, parts = plan.seconds, plan.prediction.breakdown
    compute = sum(parts.get(cause, 0.0) for cause in COMPUTE)
    rest = {cause: seconds for cause, seconds in parts.items() if cause not in COMPUTE}
    cause = max(rest, key=rest.__getitem__)
    return f"Of a step {compute / step:.1%} is computation; the largest other part is {cause}, {format_seconds(rest[cause])}."


def _memory(plan: Priced, cluster: Cluster) -> str:
    rank, peak = fullest_rank(plan.partition)
    used, most = peak.nbytes, cluster.device.nbytes
    who = f"Pipeline rank {rank}, the fullest," if plan.layout.pp > 1 else "Each device"
    return f"{who} fills {format_nbytes(used)} of {format_nbytes(most)} ({used / most:.0%}) at the {peak.moment}: {largest_holders(peak)}."


def largest_holders(peak: Peak) -> str:
    """What holds the most at a peak."""
    largest = sorted(peak.held.items(), key=lambda entry: -entry[1])[:HOLDERS]
    return ", ".join(f"{holder} {format_nbytes(nbytes)}" for holder, nbytes in largest)


def deficit_text(plan: Partition) -> str:
    """Which rank lacks how much memory, and what holds the most of it."""
    rank, peak = fullest_rank(plan)
    return (
        f"pipeline rank {rank} needs {format_nbytes(peak.nbytes)} at the {peak.moment}, {format_nbytes(plan.deficit)} more than the "
        f"{format_nbytes(plan.problem.memory_limit)} that a plan may fill: {largest_holders(peak)}"
    )


def refusal(violations: Iterable[Violation]) -> str:
    """The rules that a layout breaks, each with what would work."""
    return "; ".join(f"{v.message} [{v.rule}]: {v.fix}" for v in violations)


def fullest_rank(plan: Partition) -> tuple[int, Peak]:
    """The pipeline rank that holds the most, and when it does."""
    return max(enumerate(plan.rank_peaks), key=lambda entry: entry[1].nbytes)
