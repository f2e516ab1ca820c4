"""Result of a search, and its state while it runs."""

from __future__ import annotations

from attrs import frozen

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan

from .reasons import Rejected


@frozen
class Found:
    """Result of a search.

    best: the recommended plan, or the fastest one if that was asked for.
    fastest: the fastest plan; of plans within 0.1 % the simplest.
    recommended: the simplest plan of those at most 1 % slower than the fastest; see `simple_first`.
    others: the best plan of each other device mesh; with one device mesh only, all its other layouts.
    variants: the other simulated layouts of these device meshes, fastest first.
    rejected: neighbours of the best layout that are illegal or do not fit, with the cause.
    slower: neighbours that fit and are slower, fastest first, with the cause.
    seconds: duration of the search.
    gap: None if the best plan is proven. After an interruption, the share of its step time that another layout could
    still save.
    """

    best: Plan
    fastest: Plan
    recommended: Plan
    others: tuple[Plan, ...]
    variants: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    slower: tuple[Rejected, ...]
    seconds: float
    gap: float | None = None

    def next(self, count: int) -> tuple[Plan, ...]:
        """Return this many runners-up, fastest first: other device meshes, then variants if there are too few."""
        chosen = (*self.others, *self.variants)[:count]
        return tuple(sorted(chosen, key=lambda plan: plan.predicted.step_seconds))


@frozen
class Progress:
    """State of a running search: the best layout so far, its step time, and a lower bound of every step time."""

    layout: Layout
    seconds: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """Return the share of the step time that another layout could still save."""
        return max(0.0, 1 - self.lower_bound / self.seconds)
