"""The best layout of a model over a cluster: the legal ones, their lower bounds, the price of those that can win.

Protocol: `plan` is the whole of it, `price` the price of one layout. Layouts are priced from the least lower bound on,
until no other can be among the best: the result is exact, as far as the price is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from time import perf_counter

import numpy as np
from attrs import define, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, fingerprint, graph

from .cluster import Cluster
from .columns import Column, Layouts
from .field import Field
from .fit import HEADROOM
from .layout import Layout, Recompute, Workload
from .limits import caveats
from .misses import checked, nothing_fits, nothing_legal
from .neighbours import judged
from .plan import VERSION, Plan
from .price import Priced, Pricer, price
from .reasons import Rejected, why, why_not
from .rules import senseless
from .sheet import Rows
from .space import Fixed

__all__ = ["Found", "Rejected", "plan", "price", "search"]

KEEP = 10  # plans of a search, the best included
AT_ONCE = 32  # places whose layouts are looked at together
ROUNDING = 1 - 1e-10  # bounds and prices add up the same seconds in different orders
Tell = Callable[[Layout, float], None]
SAME = 1.001  # a step that is this little longer is as good, and the simpler layout wins


@frozen
class Found:
    """What a search found: the best plan, the next best, the nearest that cannot be had, and how long it took."""

    best: Plan
    others: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    seconds: float


def plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    ref: str,
    fixed: Fixed | None = None,
    headroom: float = HEADROOM,
    tell: Tell | None = None,
) -> Found:
    """The quickest layout that is legal and fits the memory; `ref` says where the model is found again.

    headroom: the share of each device's memory that is left free. tell: is given each layout that is the best so far.
    Raises UserError if what is fixed breaks a rule, or if nothing fits: then with the nearest miss.
    """
    began = perf_counter()
    chosen = checked(fixed or {})
    for wrong in senseless(Layout(**chosen), graph(model), workload, cluster):
        raise UserError(str(wrong))
    pricer = Pricer(graph(model), cluster, workload, headroom=headroom)
    among = Field(pricer, chosen)
    count = among.count
    if not count:
        raise UserError(nothing_legal(pricer, chosen))
    found = search(among, tell=tell)
    if not found:
        raise UserError(nothing_fits(pricer, among))
    best, *others = simplest_first(found)
    rivals, rejected = judged(best.layout, pricer, chosen)
    identity = fingerprint(model)

    def made(priced: Priced, reasons: tuple[str, ...]) -> Plan:
        return Plan(
            version=VERSION,
            model=ref,
            fingerprint=identity,
            cluster=cluster,
            workload=workload,
            layout=priced.layout,
            stages=priced.stages,
            predicted=priced.prediction,
            reasons=(*reasons, *caveats(priced.layout, graph(model), workload, cluster)),
        )

    return Found(
        best=made(best, why(best, others, rivals, count, cluster)),
        others=tuple(made(other, why_not(other, best)) for other in others),
        rejected=rejected,
        seconds=perf_counter() - began,
    )


def search(among: Field, keep: int = KEEP, tell: Tell | None = None) -> list[Priced]:
    """The `keep` quickest of these layouts that fit the memory, quickest first.

    Best first: of all layouts the one whose bound is the least is looked at more closely, so that what is dear to
    know (cuts, replays) is asked only of those that nothing cheaper rules out.
    """
    queue, found, best = _Queue(among), list[Priced](), inf
    while len(found) < keep and (top := queue.pop()) is not None:
        seconds, what = top
        if isinstance(what, Priced):
            found.append(what)
            continue
        step = next(what, None)
        if isinstance(step, Priced):
            queue.push(step.seconds, step)
            if tell and step.seconds < best:
                best = step.seconds
                tell(step.layout, best)
        elif step is not None:
            queue.push(max(seconds, ROUNDING * step), what)
    return found


Entry = Priced | Iterator[float | Priced] | tuple[Layouts, int]


@define(eq=False)
class _Queue:
    """What is still to be looked at, the least bound first: layouts, and places whose layouts are not yet there."""

    among: Field
    heap: list[tuple[float, int, Entry]] = field(factory=list)
    count: int = 0
    order: Column = field(init=False)  # of the places that may have room, the quickest first
    bounds: Rows = field(init=False)
    done: int = 0

    def __attrs_post_init__(self) -> None:
        seconds, nbytes = self.among.floors.ideal()
        self.order = np.flatnonzero(nbytes <= self.among.pricer.capacity)
        self.order = self.order[np.argsort(seconds[self.order], kind="stable")]
        self.bounds = seconds[self.order]

    def push(self, seconds: float, what: Entry) -> None:
        """Look at this again when nothing takes less."""
        self.count += 1
        heappush(self.heap, (seconds, self.count, what))

    def pop(self) -> tuple[float, Priced | Iterator[float | Priced]] | None:
        """What takes the least, if there is anything left."""
        while self.done < len(self.order) and (not self.heap or self.bounds[self.done] <= self.heap[0][0]):
            self._open(self.order[self.done : self.done + AT_ONCE])
            self.done += AT_ONCE
        if not self.heap:
            return None
        seconds, _, what = heappop(self.heap)
        if isinstance(what, tuple):
            layouts, i = what
            what = self.among.pricer.refined(layouts[i])
        return seconds, what

    def _open(self, which: Column) -> None:
        found = self.among.variants(which)
        for i in np.flatnonzero(found.nbytes <= self.among.pricer.capacity).tolist():
            self.push(float(found.seconds[i]), (found.layouts, i))


def simplest_first(found: list[Priced]) -> list[Priced]:
    """The same layouts, the simplest of those that are as quick as the quickest in front."""
    best = min((p for p in found if p.seconds <= SAME * found[0].seconds), key=lambda p: complexity(p.layout))
    return [best, *(p for p in found if p is not best)]


def complexity(x: Layout) -> tuple[int, ...]:
    """How much there is to understand: axes in use, what is computed again, degrees, switches."""
    inner = (x.pp, x.tp, x.cp, x.ep, x.etp, x.vpp)
    again = list(Recompute).index(x.recompute)
    switches = x.sequence_parallel + x.distributed_optimizer
    return sum(n > 1 for n in inner), again, sum(inner), x.microbatch_group, x.recompute_layers, switches, x.micro_batch
