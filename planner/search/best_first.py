"""The frontier of a best-first branch and bound: all that is left to examine, the least lower bound first.

Four kinds of entries, each a closer look at the one before: base layouts, which are opened many at a time; layouts with
the bounds of `LowerBounds`; balanced layouts, whose stages have been balanced; partitions and simulated layouts. `pop`
returns the entry with the least bound once it is a balanced layout or more; `push` puts it back with a better bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from heapq import heappop, heappush
from math import inf

import numpy as np
from attrs import define, field, frozen

from megaloom.planner.bounds.balanced_partition import EXPECTED_SHARE, balanced_bounds
from megaloom.planner.bounds.chained_layouts import ChainedLayouts
from megaloom.planner.bounds.lower_bounds import BoundedLayouts
from megaloom.planner.bounds.one_stage import one_stage_seconds
from megaloom.planner.bounds.time_cap import capped_bounds
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.simulate.price import Priced

from .candidates import Candidates
from .device_meshes import (
    MESH_FIELDS,
    TIE_RATIO,
    DeviceMesh,
    device_mesh,
    has_mesh,
)
from .pricing import PartitionedLayout, Pricer

FIRST_BASES, BASES_AT_ONCE = 16, 128  # base layouts that are opened together: at first, and at most
SMALLEST_BATCH, LARGEST_BATCH = 64, 8192  # number of layouts that are balanced together
SMALLEST_RATIO, BATCH_RATIO = 1.02, 1.08  # least and largest multiple of the least bound up to which they are balanced
HORIZON_RATIO = 1.05  # the horizon lies this far beyond the least bound of all that is open


@frozen(eq=False, slots=False)
class BalancedLayout:
    """A layout whose stages have been balanced."""

    pricer: Pricer
    layouts: Layouts
    i: int
    may_fit: bool  # the balanced partition may fit the memory
    expected: float = 0.0  # seconds that a step hardly goes below
    base: int | None = None  # number of its base layout; None for one with less overlap than that has

    @cached_property
    def layout(self) -> Layout:
        """Return the layout itself."""
        return self.layouts[self.i]

    @cached_property
    def even(self) -> Partition:
        """Return its balanced partition."""
        return self.pricer.even(self.layout)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the degrees of the axes that divide devices."""
        return tuple(int(getattr(self.layouts, axis)[self.i]) for axis in MESH_FIELDS)

    @cached_property
    def steps(self) -> Iterator[PartitionedLayout | Layout]:
        """Yield layouts with less overlap that need less memory, then the partition if one fits."""
        if self.may_fit:
            yield from self.pricer.fewer_overlaps(self.even)
        found = self.pricer.refined(self.even, full=not self.may_fit)
        yield from [found] if found else []


Entry = Priced | PartitionedLayout | BalancedLayout


@define(eq=False)
class Frontier:
    """Priority queue of everything that a search has not examined yet."""

    candidates: Candidates
    meshes: int = 1  # device meshes whose best layout is to be found
    closed: dict[DeviceMesh, float] = field(factory=dict)  # of each mesh, seconds above which nothing is examined
    _heap: list[tuple[float, int, Entry]] = field(factory=list)
    _pushed: int = 0
    _unopened: Column = field(factory=lambda: np.zeros(0, dtype=np.int64))  # base layouts, by ascending bound
    _unopened_seconds: Rows = field(factory=lambda: np.zeros(0))
    _at_once: int = FIRST_BASES
    _opened: list[BoundedLayouts] = field(factory=list)  # layouts not yet balanced, each part by ascending bound
    _opened_seconds: float = inf  # least bound of these
    _full: list[BoundedLayouts] = field(factory=list)  # layouts that do not fit, whose more sharded ones are not opened
    _full_seconds: float = inf  # least bound of what these become
    _limit: float = inf  # seconds above which a balanced layout waits until its expected time is the least
    _expected: dict[DeviceMesh, float] = field(factory=dict)  # of the layouts that may fit, least seconds by mesh
    _postponed: list[tuple[float, Entry]] = field(factory=list)  # of closed meshes
    _postponed_layouts: list[BoundedLayouts] = field(factory=list)

    def push(self, seconds: float, entry: Entry) -> None:
        """Add an entry, to be examined when no other has a smaller bound."""
        self._pushed += 1
        heappush(self._heap, (seconds, self._pushed, entry))

    def pop(self) -> tuple[float, Entry] | None:
        """Return the least bound and its entry, or None if nothing is left."""
        while True:
            while self._expand(self._heap[0][0] if self._heap else inf):
                pass
            if not self._heap:
                return None
            seconds, _, entry = heappop(self._heap)
            if isinstance(entry, BalancedLayout) and entry.expected > seconds > self._limit:
                self.push(entry.expected, entry)
            elif seconds > self.closed.get(_mesh_of(entry), inf):
                self._postponed.append((seconds, entry))
            else:
                return seconds, entry

    def close(self, best: Priced) -> None:
        """Postpone all layouts of this one's device mesh that are slower than it by more than a tie."""
        self.closed.setdefault(device_mesh(best.layout), TIE_RATIO * best.seconds)
        self._limit = min(self.closed.values())

    def reopen(self) -> None:
        """Bring back everything postponed."""
        self.closed.clear()
        for seconds, entry in self._postponed:
            self.push(seconds, entry)
        self._postponed.clear()
        self._set_opened([*self._opened, *self._postponed_layouts])
        self._postponed_layouts.clear()

    def feasible(self) -> Iterator[Partition]:
        """Yield partitions that fit the memory, the most promising first: without proof that none is faster."""
        others = []
        while top := self.pop():
            entry = top[1]
            if isinstance(entry, PartitionedLayout):
                yield entry.partition
            elif isinstance(entry, BalancedLayout):
                if entry.may_fit and entry.even.fits:
                    yield entry.pricer.refine(entry.even)
                else:
                    others.append(top)
        for top in others:
            self.push(*top)

    def _expand(self, seconds: float) -> bool:
        """Take one step that may bring an entry of at most this bound to the heap; False if there is none."""
        limit, horizon = min(seconds, self._opened_seconds, self._full_seconds), self.candidates.horizon
        limit, bounds = self._batch_limit(limit), self._unopened_seconds
        first = float(bounds[0]) if len(bounds) else inf
        last = float(bounds[self._at_once - 1]) if len(bounds) >= self._at_once else inf
        if horizon < last and min(first, horizon) <= limit:  # some of the next base layouts may have no bound yet
            self._extend(limit)
        elif first < inf and first <= limit:
            self._open()
        elif self._full and self._full_seconds <= min(seconds, self._opened_seconds):
            self._shard(limit)
        elif self._opened and self._opened_seconds <= seconds:
            self._balance()
        else:
            return False
        return True

    def _batch_limit(self, seconds: float) -> float:
        """Return the bound up to which layouts are examined together with the one that has this bound.

        What the search will hardly examine is left out: layouts slower than the expected best ones of enough meshes.
        """
        known = sorted(self._expected.values())
        enough = known[self.meshes - 1] / EXPECTED_SHARE if len(known) >= self.meshes else inf
        return min(BATCH_RATIO * seconds, max(SMALLEST_RATIO * seconds, enough))

    def _extend(self, limit: float) -> None:
        """Bound more base layouts, up to a horizon beyond `limit`."""
        candidates, first = self.candidates, self.candidates.bounded
        candidates.extend(HORIZON_RATIO * limit if limit < inf else 0.0)
        if candidates.bounded == first:
            return
        seconds, nbytes = candidates.lower_bounds.ideal(first)
        fits = np.flatnonzero(nbytes <= candidates.pricer.capacity)
        base = np.concatenate([self._unopened, first + fits])
        bounds = np.concatenate([self._unopened_seconds, seconds[fits]])
        order = np.lexsort((candidates.numbers[base], bounds))
        self._unopened, self._unopened_seconds = base[order], bounds[order]

    def _open(self) -> None:
        """Bound the layouts of the next base layouts."""
        count, self._at_once = self._at_once, min(2 * self._at_once, BASES_AT_ONCE)
        bounded = self.candidates.variants(self._unopened[:count], fully=False)
        self._unopened, self._unopened_seconds = self._unopened[count:], self._unopened_seconds[count:]
        self._add_opened(bounded)

    def _add_opened(self, bounded: BoundedLayouts) -> None:
        """Add layouts that are not yet balanced. Those that do not fit wait to become layouts that shard more state."""
        fits = bounded.nbytes <= self.candidates.pricer.capacity
        order = np.flatnonzero(fits)[np.argsort(bounded.seconds[fits], kind="stable")]
        self._set_opened([*self._opened, bounded.take(order)])
        self._add_full(bounded.take(~fits))

    def _add_full(self, bounded: BoundedLayouts) -> None:
        """Add layouts that do not fit. What shards more of their state has a bound of at least their `passes`."""
        some = np.flatnonzero(self.candidates.space.may_shard_more(bounded.layouts))
        self._set_full([*self._full, bounded.take(some[np.argsort(bounded.passes[some], kind="stable")])])

    def _set_full(self, parts: list[BoundedLayouts]) -> None:
        self._full = [part for part in parts if len(part)]
        self._full_seconds = min((float(part.passes[0]) for part in self._full), default=inf)

    def _shard(self, limit: float) -> None:
        """Open the layouts that shard more state than those that do not fit, up to a bound."""
        pairs = [(part, int(np.searchsorted(part.passes, limit, side="right"))) for part in self._full]
        self._set_full([part.take(slice(n, None)) if n else part for part, n in pairs])
        self._add_opened(self._more_sharded(BoundedLayouts.joined([part.take(slice(n)) for part, n in pairs if n])))

    def shard_more(self, entry: BalancedLayout) -> None:
        """Add the layout that shards more of its state, if the balanced partition of this one does not fit.

        Where that fits, more sharding only adds communication.
        """
        if entry.base is not None and entry.may_fit and not entry.even.fits:
            self._add_opened(self.candidates.more_sharded(Layouts.of([entry.layout]), np.array([entry.base])))

    def _more_sharded(self, bounded: BoundedLayouts) -> BoundedLayouts:
        return self.candidates.more_sharded(bounded.layouts, bounded.base)

    def _balance(self) -> None:
        """Take the layouts with the least bounds, and balance their stages."""
        self._postpone()
        if not self._opened:
            return
        every = np.sort(np.concatenate([part.seconds[:LARGEST_BATCH] for part in self._opened]))[:LARGEST_BATCH]
        most = max(every[:SMALLEST_BATCH][-1], every[every <= self._batch_limit(self._opened_seconds)][-1])
        sizes = [int(np.searchsorted(part.seconds, most, side="right")) for part in self._opened]
        pairs = list(zip(self._opened, sizes, strict=True))
        batch = BoundedLayouts.joined([part.take(slice(n)) for part, n in pairs if n])
        self._set_opened([part.take(slice(n, None)) if n else part for part, n in pairs])
        self._push_balanced(batch)

    def _push_balanced(self, batch: BoundedLayouts) -> None:
        """Balance the stages of layouts that may fit, and push them."""
        pricer, limit = self.candidates.pricer, self.candidates.pricer.capacity
        lower_bounds, x = self.candidates.lower_bounds, batch.layouts
        chained = ChainedLayouts.of(batch, pricer.chain_costs)
        capped, seconds = capped_bounds(pricer.balanced_example, lower_bounds, chained), batch.seconds.copy()
        one = np.flatnonzero((x.vpp == 1) & (x.pp > 1))
        seconds[one] = one_stage_seconds(lower_bounds, chained.take(one), limit)
        fits = (capped.nbytes <= limit) & (seconds < inf)
        bounds = balanced_bounds(pricer.balance_all, lower_bounds, chained.take(fits), capped.through[fits])
        full = bounds.nbytes > limit
        least = np.where(full, np.maximum(bounds.seconds, seconds[fits]), bounds.seconds)
        each = np.flatnonzero(fits), least, ~full, bounds.expected_seconds, batch.base[fits]
        for i, bound, *row in zip(*(column.tolist() for column in each), strict=True):
            entry = BalancedLayout(pricer, x, i, *row)
            self.push(bound, entry)
            if entry.may_fit:
                mesh = entry.device_mesh
                self._expected[mesh] = min(entry.expected, self._expected.get(mesh, inf))
        no_room = ~fits
        no_room[fits] = full
        self._add_full(batch.take(no_room))

    def _postpone(self) -> None:
        """Set aside the opened layouts of closed meshes."""
        for mesh, most in self.closed.items():
            slower = [has_mesh(part.layouts, mesh) & (part.seconds > most) for part in self._opened]
            pairs = [(part, out, bool(out.any())) for part, out in zip(self._opened, slower, strict=True)]
            self._postponed_layouts += [part.take(out) for part, out, some in pairs if some]
            self._set_opened([part.take(~out) if some else part for part, out, some in pairs])

    def _set_opened(self, parts: list[BoundedLayouts]) -> None:
        self._opened = [part for part in parts if len(part)]
        self._opened_seconds = min((float(part.seconds[0]) for part in self._opened), default=inf)


def _mesh_of(entry: Entry) -> DeviceMesh:
    if isinstance(entry, BalancedLayout):
        return entry.device_mesh
    return device_mesh(entry.partition.layout if isinstance(entry, PartitionedLayout) else entry.layout)
