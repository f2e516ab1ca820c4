"""What a search has still to look at, the least bound first: places, layouts at them, and those cut already.

Protocol: `pop` is what takes the least, made ready to be looked at more closely; `push` puts it back with what is then
known. Places and layouts are taken many at a time. Once the best of a way to deal the devices is known, `settle` puts
slower layouts of that aside, until `recall`; from then on a layout waits until what it is likely to take is the least.
`roomy` are layouts that are sure to have room, without proof that none is quicker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from math import inf

import numpy as np
from attrs import define, field, frozen

from megaloom.planner.bounds import balanced_partition
from megaloom.planner.bounds.layouts import BoundedLayouts
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.simulate.price import Priced

from .candidates import Candidates
from .device_meshes import (
    DEGREES,
    TIE_RATIO,
    DeviceMesh,
    device_mesh,
    has_mesh,
)
from .pricing import PartitionedLayout, Pricer

HORIZON = 1.1
BASES_AT_ONCE = 32  # whose layouts are looked at together
FIRST_BATCH, LARGEST_BATCH = 32, 512  # layouts that are cut evenly together, at first and at the most


@frozen(eq=False, slots=False)
class BalancedLayout:
    """A layout that has been cut evenly."""

    pricer: Pricer
    layouts: Layouts
    i: int
    roomy: bool  # whether it may have room as it is cut
    likely: float = 0.0  # seconds of a step that it hardly takes less than

    @cached_property
    def layout(self) -> Layout:
        """Which."""
        return self.layouts[self.i]

    @property
    def device_mesh(self) -> DeviceMesh:
        """How it deals the devices."""
        return tuple(int(getattr(self.layouts, axis)[self.i]) for axis in DEGREES)

    @cached_property
    def steps(self) -> Iterator[float | PartitionedLayout | Layout]:
        """What is known of it, more and more closely; first layouts to be looked at beside it."""
        return chain(self.pricer.fewer_overlaps(self.layout) if self.roomy else [], self.pricer.refined(self.layout))


Entry = Priced | PartitionedLayout | BalancedLayout


@define(eq=False)
class Frontier:
    """A search's queue."""

    candidates: Candidates
    heap: list[tuple[float, int, Entry]] = field(factory=list)
    count: int = 0
    order: Column = field(factory=lambda: np.zeros(0, dtype=np.int64))  # of the places that may have room, not opened
    bounds: Rows = field(factory=lambda: np.zeros(0))
    found: list[BoundedLayouts] = field(factory=list)  # layouts at places, the quickest first, that are not in the heap
    least: float = inf  # seconds of all those
    at_once: int = FIRST_BATCH
    sure: float = inf  # seconds up to which all is looked at, likely or not
    settled: dict[DeviceMesh, float] = field(
        factory=dict
    )  # the seconds of a way beyond which nothing of it is looked at
    aside: list[tuple[float, Entry]] = field(factory=list)
    beside: list[BoundedLayouts] = field(factory=list)  # of which likewise nothing is in the heap

    def push(self, seconds: float, what: Entry) -> None:
        """Look at this again when nothing takes less."""
        self.count += 1
        heappush(self.heap, (seconds, self.count, what))

    def pop(self) -> tuple[float, Entry] | None:
        """What takes the least, if there is anything left."""
        while True:
            while self._more(self.heap[0][0] if self.heap else inf):
                pass
            if not self.heap:
                return None
            seconds, _, what = heappop(self.heap)
            if isinstance(what, BalancedLayout) and what.likely > seconds > self.sure:
                self.push(what.likely, what)
            elif seconds > self.settled.get(_device_mesh(what), inf):
                self.aside.append((seconds, what))
            else:
                return seconds, what

    def settle(self, best: Priced) -> None:
        """Of its way look no more at what is slower; at what is as quick, still."""
        self.settled.setdefault(device_mesh(best.layout), TIE_RATIO * best.seconds)
        self.sure = min(self.settled.values())

    def recall(self) -> None:
        """Look at all of them again."""
        self.settled.clear()
        for seconds, what in self.aside:
            self.push(seconds, what)
        self.aside.clear()
        self._keep([*self.found, *self.beside])
        self.beside.clear()

    def roomy(self) -> Iterator[Partition]:
        """Those that have room as evenly cut: of those that are cut the most promising first, then of more and more."""
        seen = 0
        while True:
            new, seen = sorted(entry for entry in self.heap if entry[1] > seen), self.count
            for _, _, what in new:
                if isinstance(what, PartitionedLayout):
                    yield what.partition
                elif (
                    isinstance(what, BalancedLayout)
                    and what.roomy
                    and (placed := self.candidates.pricer.even_if_it_fits(what.layout))
                ):
                    yield placed
            while self.count == seen:
                if not self._more(inf):
                    return

    def _more(self, seconds: float) -> bool:
        """Look at more layouts, if there are any that may take less than this, or as little."""
        limit, horizon = min(seconds, self.least), self.candidates.horizon
        first = float(self.bounds[0]) if len(self.bounds) else inf
        last = float(self.bounds[BASES_AT_ONCE - 1]) if len(self.bounds) >= BASES_AT_ONCE else inf
        if horizon < last and min(first, horizon) <= limit:  # the next base layouts are not all known
            self._extend(limit)
        elif first < inf and first <= limit:
            self._open()
        elif self.found and self.least <= seconds:
            self._nearer()
        else:
            return False
        return True

    def _extend(self, limit: float) -> None:
        """Bound the base layouts of which a step may take as little as this."""
        candidates, first = self.candidates, self.candidates.bounded
        candidates.extend(HORIZON * limit if limit < inf else 0.0)
        if candidates.bounded == first:
            return
        seconds, nbytes = candidates.lower_bounds.ideal(first)
        fits = np.flatnonzero(nbytes <= candidates.pricer.capacity)
        order, bounds = np.concatenate([self.order, first + fits]), np.concatenate([self.bounds, seconds[fits]])
        rank = np.lexsort((candidates.numbers[order], bounds))
        self.order, self.bounds = order[rank], bounds[rank]

    def _keep(self, found: list[BoundedLayouts]) -> None:
        self.found = [some for some in found if len(some)]
        self.least = min((float(some.seconds[0]) for some in self.found), default=inf)

    def _open(self) -> None:
        """Look at the layouts at more places."""
        found = self.candidates.variants(self.order[:BASES_AT_ONCE])
        self.order, self.bounds = self.order[BASES_AT_ONCE:], self.bounds[BASES_AT_ONCE:]
        which = np.flatnonzero(found.nbytes <= self.candidates.pricer.capacity)
        self._keep([*self.found, found.take(which[np.argsort(found.seconds[which], kind="stable")])])

    def _nearer(self) -> None:
        """Cut more layouts evenly: those that take the least."""
        self._leave()
        if not self.found:
            return
        every = np.concatenate([found.seconds[: self.at_once] for found in self.found])
        last = min(self.at_once, len(every)) - 1
        most = np.partition(every, last)[last]
        sizes = [int(np.searchsorted(found.seconds, most, side="right")) for found in self.found]
        pairs = list(zip(self.found, sizes, strict=True))
        near = BoundedLayouts.joined([found.take(slice(n)) for found, n in pairs if n])
        self._keep([found.take(slice(n, None)) if n else found for found, n in pairs])
        self.at_once = min(2 * self.at_once, LARGEST_BATCH)
        pricer = self.candidates.pricer
        seconds, likely, nbytes = balanced_partition.look(pricer, self.candidates.lower_bounds, near)
        rows = zip(seconds.tolist(), likely.tolist(), (nbytes <= pricer.capacity).tolist(), strict=True)
        for i, (least, guess, roomy) in enumerate(rows):
            self.push(least, BalancedLayout(pricer, near.layouts, i, roomy, guess))

    def _leave(self) -> None:
        """Put layouts aside of which nothing is looked at any more."""
        for one, most in self.settled.items():
            slower = [has_mesh(some.layouts, one) & (some.seconds > most) for some in self.found]
            self.beside += [some.take(out) for some, out in zip(self.found, slower, strict=True) if out.any()]
            self._keep([some.take(~out) for some, out in zip(self.found, slower, strict=True)])


def _device_mesh(what: Entry) -> DeviceMesh:
    """How what is looked at deals the devices."""
    if isinstance(what, BalancedLayout):
        return what.device_mesh
    return device_mesh(what.partition.layout if isinstance(what, PartitionedLayout) else what.layout)
