"""The few changes of a run's layout that bring most of what the best layout would: at most three, with their gains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

from attrs import define, evolve, field, frozen

from megaloom.planner.contract.layout import Layout
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import Priced

# Fields of a layout that change together, each group as one change.
CHANGE_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tensor parallelism": ("tp", "sequence_parallel"),
        "pipeline": ("pp", "vpp", "microbatch_group"),
        "context parallelism": ("cp",),
        "expert parallelism": ("ep", "etp"),
        "micro-batch": ("micro_batch",),
        "recompute": ("recompute", "recompute_modules", "recompute_layers"),
        "sharded state": ("shard", "expert_shard", "reshard", "replicas"),
        "overlap": ("overlaps",),
        "stages": (),
    }
)
PAIRS = 5  # pairs that are extended to three changes
WORTH_SHARE = 0.01  # share of the step that one more change must save


@frozen
class Move:
    """A group of fields that changes, and the price with this change alone; None if it is illegal or does not fit."""

    group: str
    alone: Priced | None


@frozen
class Moves:
    """At most three changes, most valuable first, and the layout and stages with all of them."""

    moves: tuple[Move, ...]
    together: Priced | None  # None without a change that is worth it


NO_MOVES = Moves((), None)


@define(eq=False)
class _Pricing:
    """Prices of a run's layout with some groups of fields as in another layout."""

    run: Layout
    best: Layout
    own: Pricer  # stages of the run
    free: Pricer  # stages between any two layers
    known: dict[frozenset[str], Priced | None] = field(factory=dict)

    def __call__(self, groups: frozenset[str]) -> Priced | None:
        """Return the price with these groups changed; None if the layout is illegal or does not fit."""
        if groups not in self.known:
            self.known[groups] = self._price(groups)
        return self.known[groups]

    def _price(self, groups: frozenset[str]) -> Priced | None:
        x = self.layout(groups)
        if x is None or self.free.broken(x):
            return None
        same_stages = (x.pp, x.vpp) == (self.run.pp, self.run.vpp) and "stages" not in groups
        pricer = self.own if same_stages else self.free
        partition = pricer.partition(x)
        return pricer.simulate(partition) if partition.fits else None

    def layout(self, groups: frozenset[str]) -> Layout | None:
        """Return the run's layout with these groups as in the best one, and dp as it follows; None if none follows."""
        changes: dict[str, Any] = {name: getattr(self.best, name) for g in groups for name in CHANGE_GROUPS[g]}
        x = evolve(self.run, **changes)
        inner = x.tp * x.pp * x.cp
        if self.run.world % inner:
            return None
        x = evolve(x, dp=self.run.world // inner, vpp=x.vpp if x.pp > 1 else 1)
        return evolve(x, sequence_parallel=x.sequence_parallel and x.tp > 1)


def valuable_moves(run: Layout, seconds: float, best: Layout, own: Pricer, free: Pricer) -> Moves:
    """Return the changes towards the best layout that save most. seconds: the step of the run."""
    pricing = _Pricing(run, best, own, free)
    changed = [
        g for g, names in CHANGE_GROUPS.items() if not names or any(getattr(run, n) != getattr(best, n) for n in names)
    ]
    if (run.pp, run.vpp) != (best.pp, best.vpp) or run.pp == 1:
        changed.remove("stages")
    chosen, least = frozenset[str](), seconds
    for sets in _sets(changed, pricing):
        quickest = min(sets, key=lambda groups: _seconds(pricing, groups), default=frozenset[str]())
        if _seconds(pricing, quickest) < least - WORTH_SHARE * seconds * (len(quickest) - len(chosen)):
            chosen, least = quickest, _seconds(pricing, quickest)
    moves = [Move(group, pricing(frozenset({group}))) for group in chosen]
    moves.sort(key=lambda move: move.alone.seconds if move.alone else float("inf"))
    return Moves(tuple(moves), pricing(chosen) if chosen else None)


def _sets(changed: list[str], pricing: _Pricing) -> Iterable[list[frozenset[str]]]:
    """Yield the single changes, the pairs, and the best pairs with a third."""
    yield [frozenset({group}) for group in changed]
    pairs = [frozenset(pair) for pair in combinations(changed, 2)]
    yield pairs
    best = sorted(pairs, key=lambda groups: _seconds(pricing, groups))[:PAIRS]
    yield list(dict.fromkeys(pair | {group} for pair in best for group in changed if group not in pair))


def _seconds(pricing: _Pricing, groups: frozenset[str]) -> float:
    priced = pricing(groups) if groups else None
    return priced.seconds if priced else float("inf")
