"""Lower bound of the time after the last micro-batch: gradient reduction, optimizer, weight gather.

`end_of_step_bound` evaluates it for many layouts at once. `simulate.end_of_step` has the exact time of one rank whose
weights are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.contract.state_placement import state_placements
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.simulate.price import EndOfStep, OverlapWindow, end_of_step

EVERYTHING_HIDDEN = OverlapWindow(inf, inf)

_Known = TypeVar("_Known")
Later = dict[tuple[int, ...], bool]  # answers of `ends_later`
Ends = dict[tuple[int, ...], tuple[float, ...]]  # bounds by all that they depend on: elements, device mesh, sharding


def end_of_step_bound(x: Layouts, base: Column, params: Column, experts: Column, cache: CostCache, known: Ends) -> Rows:
    """Return seconds of (optimizer and weight gather, gradient reduction): [layouts, 2].

    `params` and `experts` are the dense and expert elements of the whole model on one device, by base layout. `known`
    are bounds of the same job so far; new ones are added.

    Bound: with P dense and Q expert elements, some rank holds P/p or more dense and Q/p or more expert elements, or its
    share of both together; the time of each phase grows with the elements. Communication that may overlap counts 0,
    except the last bucket of gathered weights, behind which no computation is left. See docs/concepts/bounds.md.
    """
    exposed = ~np.array([x.has_overlap(Overlap.WEIGHTS), x.has_overlap(Overlap.GRADIENTS)]).T
    first, which = alike(base, x.shard, x.expert_shard, x.reshard, x.replicas)
    x, base = x.take(first), base[first]
    sharding = x.shard, x.expert_shard, x.reshard, x.replicas, x.grad_reduce
    columns = params[base], experts[base], x.pp, x.tp, x.dp * x.cp, x.ep, x.etp, *sharding
    ends, each = known_of(
        columns, known, lambda i, dense, sparse: _least_ends(x[i], dense / x.pp[i], sparse / x.pp[i], cache)
    )
    last_bucket, optimizer, *communication = np.array(ends).reshape(-1, 4)[each][which].T
    out: Rows = np.array(communication).T * exposed
    out[:, 0] += np.where(exposed[:, 0], optimizer, last_bucket)
    return out


def ends_later(
    x: Layouts, y: Layouts, base: Column, params: Column, experts: Column, cache: CostCache, known: Later
) -> NDArray[np.bool_]:
    """Return where a step of a rank with the mean elements ends later under y than under x: [layouts].

    x, y: layouts of the same device mesh that shard and overlap differently. They are compared once with all
    communication hidden that may overlap, and once with none. `params`, `experts`, `known`: as in `end_of_step_bound`.
    """
    first, which = alike(base, x.shard, x.overlaps, y.shard, y.overlaps, x.expert_shard)
    x, y, base = x.take(first), y.take(first), base[first]
    sharding = x.shard, x.overlaps, y.shard, y.overlaps, x.expert_shard, x.grad_reduce
    columns = params[base], experts[base], x.pp, x.tp, x.dp * x.cp, x.ep, x.etp, *sharding
    later, each = known_of(
        columns, known, lambda i, dense, sparse: _ends_later(x[i], y[i], dense / x.pp[i], sparse / x.pp[i], cache)
    )
    return np.array(later, dtype=np.bool_)[each][which]


def known_of(
    columns: Sequence[Column], known: dict[tuple[int, ...], _Known], compute: Callable[[int, int, int], _Known]
) -> tuple[list[_Known], Column]:
    """Return what `known` has for each distinct row of the columns, and the index of each layout's row among these.

    What it lacks is computed from the index of a layout with this row, and the first two columns, and added.
    """
    first, which = alike(*columns)
    keys = list(zip(*(column[first].tolist() for column in columns), strict=True))
    for i, key in zip(first.tolist(), keys, strict=True):
        if key not in known:
            known[key] = compute(i, key[0], key[1])
    return [known[key] for key in keys], which


def _ends_later(x: Layout, y: Layout, dense: float, sparse: float, cache: CostCache) -> bool:
    def seconds(layout: Layout, window: OverlapWindow) -> float:
        end = end_of_step(dense, sparse, 0.0, layout, cache.job, window)
        return end.reducing + end.updating

    return any(seconds(y, window) > seconds(x, window) for window in (OverlapWindow(), EVERYTHING_HIDDEN))


def _least_ends(x: Layout, dense: float, sparse: float, cache: CostCache) -> tuple[float, ...]:
    """Return the seconds up to the last bucket of gathered weights, of the optimizer, the gather and the reduction.

    dense, sparse: mean elements of a rank.
    """
    serial, overlapped = (evolve(x, overlaps=OverlapSet(of)) for of in ((), (Overlap.WEIGHTS,)))

    def of_rank(dense: float, sparse: float, layout: Layout) -> EndOfStep:
        return end_of_step(dense, sparse, 0.0, layout, cache.job, EVERYTHING_HIDDEN)

    mean, one_kind = of_rank(dense, sparse, serial), list[EndOfStep]()
    if any(state.gather.communication for state in state_placements(x)):
        one_kind = [of_rank(a, b, overlapped) for a, b in ((dense, 0.0), (0.0, sparse)) if a or b]
    last_bucket = max([mean.optimizer, *(end.optimizer + end.gathering for end in one_kind)])
    return last_bucket, mean.optimizer, mean.gathering, mean.reduction
