"""The best layout of a model over a cluster: the legal ones, their lower bounds, the price of those that can win.

Protocol: `plan` is the whole of it, `price` the price of one layout. Layouts are priced from the least lower bound on,
until no other can be among the best: the result is exact, as far as the price is.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from time import perf_counter

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, fingerprint, graph

from .cluster import Cluster
from .layout import Layout, Recompute, Workload
from .misses import checked, nothing_fits, nothing_legal
from .neighbours import judged
from .plan import VERSION, Plan
from .price import Priced, Pricer, price
from .reasons import Rejected, why, why_not
from .rules import senseless
from .space import Fixed, Option, options

__all__ = ["Found", "Rejected", "plan", "price", "search"]

KEEP = 10  # plans of a search, the best included
ROUNDING = 1 - 1e-12  # bounds and prices add up the same seconds in different orders
SAME = 1.001  # a step that is this little longer is as good, and the simpler layout wins


@frozen
class Found:
    """What a search found: the best plan, the next best, the nearest that cannot be had, and how long it took."""

    best: Plan
    others: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    seconds: float


def plan(model: Model, cluster: Cluster, workload: Workload, *, ref: str, fixed: Fixed | None = None) -> Found:
    """The quickest layout that is legal and fits the memory; `ref` says where the model is found again.

    Raises UserError if what is fixed breaks a rule, or if nothing fits: then with the nearest miss.
    """
    began = perf_counter()
    chosen = checked(fixed or {})
    for wrong in senseless(Layout(**chosen), graph(model), workload, cluster):
        raise UserError(str(wrong))
    pricer = Pricer(graph(model), cluster, workload)
    legal = list(options(pricer, chosen))
    if not legal:
        raise UserError(nothing_legal(pricer, chosen))
    found = search(pricer, legal)
    if not found:
        raise UserError(nothing_fits(pricer, legal, chosen))
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
            reasons=reasons,
        )

    return Found(
        best=made(best, why(best, others, rivals, len(legal), cluster)),
        others=tuple(made(other, why_not(other, best)) for other in others),
        rejected=rejected,
        seconds=perf_counter() - began,
    )


def search(pricer: Pricer, legal: Iterable[Option]) -> list[Priced]:
    """The `KEEP` quickest of these layouts that fit the memory, quickest first.

    Best first: of all layouts the one whose bound is the least is looked at more closely, so that what is dear to
    know (cuts, replays) is asked only of those that nothing cheaper rules out.
    """
    hopeful = sorted((x for x in legal if x.nbytes <= pricer.capacity), key=lambda option: option.seconds)
    queue = [(option.seconds, i, pricer.refined(option.layout)) for i, option in enumerate(hopeful)]
    priced: dict[int, Priced] = {}
    found: list[Priced] = []
    while queue and len(found) < KEEP:
        seconds, i, steps = heappop(queue)
        if i in priced:
            found.append(priced[i])
            continue
        step = next(steps, None)
        if isinstance(step, Priced):
            priced[i] = step
            heappush(queue, (step.seconds, i, steps))
        elif step is not None:
            heappush(queue, (max(seconds, ROUNDING * step), i, steps))
    return found


def simplest_first(found: list[Priced]) -> list[Priced]:
    """The same layouts, the simplest of those that are as quick as the quickest in front."""
    best = min((p for p in found if p.seconds <= SAME * found[0].seconds), key=lambda p: complexity(p.layout))
    return [best, *(p for p in found if p is not best)]


def complexity(x: Layout) -> tuple[int, ...]:
    """How much there is to understand: axes in use, what is computed again, degrees, switches."""
    inner = (x.pp, x.tp, x.cp, x.ep, x.etp, x.vpp)
    again = list(Recompute).index(x.recompute)
    return sum(n > 1 for n in inner), again, sum(inner), x.sequence_parallel + x.distributed_optimizer, x.micro_batch
