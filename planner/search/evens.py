"""Layouts whose chain is cut as evenly as can be, many at once, and what their steps then take at the least.

Protocol: `seconds(pricer, floors, found)`. The cuts are left with the pricer.
"""

from __future__ import annotations

import numpy as np

from megaloom.planner.columns import Rows, alike
from megaloom.planner.cost import bubbles
from megaloom.planner.cost.sheet import AHEAD, BACK, Col
from megaloom.planner.cost.spans import Places
from megaloom.planner.layout import Layout

from .floors import PLAIN, WHERE, Bounded, Floors
from .price import GAIN, Pricer

AGAIN = ("recompute", "recompute_modules", "recompute_layers")


def seconds(pricer: Pricer, floors: Floors, found: Bounded) -> Rows:
    """Seconds of a step of each of these layouts, however it is cut, as far as `GAIN` holds."""
    x = found.layouts
    stages, out = x.pp * x.vpp, found.seconds.copy()
    first, which = alike(*(getattr(x, name) for name in (*WHERE, *AGAIN)), stages)
    layouts = [x[i] for i in first.tolist()]
    cuts = pricer.evens(layouts)
    for count in np.flatnonzero(np.bincount(stages)).tolist():
        some = np.flatnonzero(stages[first] == count)
        ahead, back = (np.array([_each(pricer, layouts[i], cuts[i], way) for i in some]) for way in (AHEAD, BACK))
        row = np.zeros(len(first), dtype=np.intp)
        row[some] = np.arange(len(some))
        for pp in np.flatnonzero(np.bincount(x.pp[stages == count])).tolist():
            mine = np.flatnonzero((stages == count) & (x.pp == pp))
            if pp == count or pricer.many[count]:
                here = row[which[mine]]
                least = (_cut_anew if pp < count else _apart)(pricer, floors, found.take(mine), ahead[here], back[here])
                out[mine] = np.maximum(out[mine], least)
    return out


def _each(pricer: Pricer, layout: Layout, cut: Places, way: list[Col]) -> Rows:
    """Seconds of each stage."""
    return pricer.sheet(layout).runs(pricer.anatomy.places, way)(cut[:-1], cut[1:])


def _cut_anew(pricer: Pricer, floors: Floors, found: Bounded, ahead: Rows, back: Rows) -> Rows:
    """Of interleaved chunks."""
    x, m = found.layouts, found.layouts.microbatches(pricer.workload.batch)
    hops = np.broadcast_to(floors.ground.hop[found.place, None], ahead.shape)
    ends = bubbles.ends(ahead, back, hops, int(x.pp[0]), m, x.group)
    least: Rows = GAIN * (ends.max(axis=1) + found.after)
    return least


def _apart(pricer: Pricer, floors: Floors, found: Bounded, ahead: Rows, back: Rows) -> Rows:
    """Of one chunk a rank: in each cut one takes as long as the slowest here. See `bubbles.alone`."""
    x, m = found.layouts, found.layouts.microbatches(pricer.workload.batch)
    g = floors.ground
    slowest, before = (ahead + back).max(axis=1), np.minimum(x.pp, m) - 1
    whole = g.step[found.place, PLAIN] + 2 * (x.pp - 1) * g.hop[found.place]
    first = whole + (m - 1 - before * g.ahead[found.place]) * slowest
    least: Rows = np.maximum(first, m * slowest) + found.after
    return least
