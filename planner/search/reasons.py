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
from megaloom.planner.simulate.prediction import Priced

from .step_difference import size, slower, time

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


def why(
    best: Priced, quickest: Priced, others: Sequence[Priced], rivals: Sequence[Rival], legal: int, cluster: Cluster
) -> tuple[str, ...]:
    """Why the best plan is the best one, what limits it, and why the next best and its neighbours lose.

    It may be simpler than the quickest, and as quick.
    """
    said = [_wins(best, quickest, others, legal), _limits(best), _memory(best, cluster)]
    rivals = sorted((r for r in rivals if r.priced.seconds > best.seconds), key=lambda r: r.priced.seconds)
    said += [
        f"{rival.change} it would be {slower(best.prediction, rival.priced.prediction)}."
        for rival in rivals[:MENTIONED]
    ]
    return tuple(said)


def losing(best: Priced, rivals: Iterable[Rival]) -> tuple[Rejected, ...]:
    """The neighbours that take longer, the quickest first, each with the time that it loses by."""
    slow = sorted((r.priced for r in rivals if r.priced.seconds > best.seconds), key=lambda priced: priced.seconds)
    return tuple(Rejected(priced.layout, slower(best.prediction, priced.prediction)) for priced in slow)


def why_not(plan: Priced, best: Priced) -> tuple[str, ...]:
    """What a plan loses by."""
    if plan.seconds <= best.seconds:
        return (f"It is as quick as {best.layout}, which is simpler.",)
    return (f"Beside {best.layout} it is {slower(best.prediction, plan.prediction)}.", _limits(plan))


def _wins(best: Priced, quickest: Priced, others: Sequence[Priced], legal: int) -> str:
    took = f"{best.layout} takes {time(best.seconds)} a step, {best.prediction.mfu:.1%} MFU"
    if not others:
        return f"{took}: it is the only one of {legal:,} legal layouts that fits the memory."
    least = f", the least of {legal:,} legal layouts"
    if quickest.seconds < best.seconds:
        least = f": as quick as {quickest.layout} to 0.1 %, and simpler; no other of {legal:,} legal layouts is quicker"
    next_ = min(others, key=lambda priced: priced.seconds)
    if next_.seconds <= best.seconds:
        return f"{took}{least}."
    return f"{took}{least}; the next, {next_.layout}, is {slower(best.prediction, next_.prediction)}."


def _limits(plan: Priced) -> str:
    step, parts = plan.seconds, plan.prediction.breakdown
    compute = sum(parts.get(cause, 0.0) for cause in COMPUTE)
    rest = {cause: seconds for cause, seconds in parts.items() if cause not in COMPUTE}
    cause = max(rest, key=rest.__getitem__)
    return f"Of a step {compute / step:.1%} is computation; the largest other part is {cause}, {time(rest[cause])}."


def _memory(plan: Priced, cluster: Cluster) -> str:
    rank, peak = fullest(plan.partition)
    used, most = peak.nbytes, cluster.device.nbytes
    who = f"Pipeline rank {rank}, the fullest," if plan.layout.pp > 1 else "Each device"
    return f"{who} fills {size(used)} of {size(most)} ({used / most:.0%}) at the {peak.moment}: {holders(peak)}."


def holders(peak: Peak) -> str:
    """What holds the most at a peak."""
    largest = sorted(peak.held.items(), key=lambda entry: -entry[1])[:HOLDERS]
    return ", ".join(f"{holder} {size(nbytes)}" for holder, nbytes in largest)


def lacking(plan: Partition) -> str:
    """Which rank lacks how much memory, and what holds the most of it."""
    rank, peak = fullest(plan)
    return (
        f"pipeline rank {rank} needs {size(peak.nbytes)} at the {peak.moment}, {size(plan.deficit)} more than the "
        f"{size(plan.capacity)} that a plan may fill: {holders(peak)}"
    )


def broken(violations: Iterable[Violation]) -> str:
    """The rules that a layout breaks, each with what would work."""
    return "; ".join(f"{v.message} [{v.rule}]: {v.fix}" for v in violations)


def fullest(plan: Partition) -> tuple[int, Peak]:
    """The pipeline rank that holds the most, and when it does."""
    return max(enumerate(plan.rank_peaks), key=lambda entry: entry[1].nbytes)
