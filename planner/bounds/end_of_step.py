"""What follows the last micro-batch of many layouts, at the least, however they are cut.

Protocol: `after` says it of layouts by their columns; `cost.tail` has it of one rank whose weights are known.
"""

from __future__ import annotations

from math import inf

import numpy as np
from attrs import evolve

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import (
    Column,
    Layouts,
    Rows,
    alike,
)
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.simulate.price import EndOfStep, OverlapWindow, end_of_step

UNSEEN = OverlapWindow(inf, inf)  # all that can be hidden is


def after(x: Layouts, place: Column, params: Column, experts: Column, book: CostCache) -> Rows:
    """[layouts, 2]: seconds of the optimizer and gathering, and of reduction, that the average rank takes.

    params, experts: elements of the whole model on one device, by place. What may hide behind computation counts for
    nothing, but for the last bucket of gathered weights: some rank has as many dense ones as the average, and some as
    many of experts.
    """
    shown = ~np.array([x.has_overlap(Overlap.WEIGHTS), x.has_overlap(Overlap.GRADIENTS)]).T
    first, which = alike(place, x.shard)
    waiting, hiding = (evolve(x, overlaps=np.full(len(x), bit)) for bit in (0, Overlap.WEIGHTS.bit))

    def one(dense: float, sparse: float, layout: Layout) -> EndOfStep:
        return end_of_step(dense, sparse, 0.0, layout, book.job, UNSEEN)

    rows = []
    for i in first.tolist():
        dense, sparse = float(params[place[i]]) / x.pp[i], float(experts[place[i]]) / x.pp[i]
        average, alone = one(dense, sparse, waiting[i]), list[EndOfStep]()
        if x.shard[i]:
            alone = [one(a, b, hiding[i]) for a, b in ((dense, 0.0), (0.0, sparse)) if a or b]
        hidden = max([average.optimizer, *(t.optimizer + t.gathering for t in alone)])
        rows.append((hidden, average.optimizer, average.gathering, average.reduction))
    hidden, optimizer, *exchanged = np.array(rows).reshape(-1, 4)[which].T
    out: Rows = np.array(exchanged).T * shown
    out[:, 0] += np.where(shown[:, 0], optimizer, hidden)
    return out
