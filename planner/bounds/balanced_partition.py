"""Layouts whose chain is cut as evenly as can be, many at once: what their steps then take at the least, and hold.

Protocol: `look(pricer, floors, found)` gives both, and a guess. The cuts are left with the pricer.
"""

from __future__ import annotations

import numpy as np

from megaloom.planner.contract.layouts import Rows, alike
from megaloom.planner.cost import memory
from megaloom.planner.cost.columns import BACKWARD_COLUMNS, FORWARD_COLUMNS, CostColumn
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate import schedule

from . import pipeline
from .layouts import (
    PLAIN,
    WHERE,
    BoundedLayouts,
    LowerBounds,
)

# Of the most even cut's step, what chunks that are cut anew are guessed to need: they gain 1.6 % on average (`shifts`),
# and hardly any gains more than this where its most even cut has room.
GAIN = 0.97
AGAIN = ("recompute", "recompute_modules", "recompute_layers")


def look(pricer: Pricer, lower_bounds: LowerBounds, found: BoundedLayouts) -> tuple[Rows, Rows, Rows]:
    """Seconds of a step of each of these layouts, however it is cut, and as it is likely to be; bytes, cut evenly."""
    x = found.layouts
    stages, seconds, nbytes = x.pp * x.vpp, found.seconds.copy(), found.nbytes.copy()
    likely = np.zeros(len(found))
    first, which = alike(*(getattr(x, name) for name in (*WHERE, *AGAIN)), stages)
    layouts = [x[i] for i in first.tolist()]
    cuts = pricer.balance_all(layouts)
    for count in np.flatnonzero(np.bincount(stages)).tolist():
        some = np.flatnonzero(stages[first] == count).tolist()
        sheets = [pricer.cost_table(layouts[i]) for i in some]
        sums = np.array([sheet.stage_sums(cuts[i]) for i, sheet in zip(some, sheets, strict=True)])
        passing = np.array([(sheet.boundary, sheet.workspace) for sheet in sheets], dtype=float)
        row = np.zeros(len(first), dtype=np.intp)
        row[some] = np.arange(len(some))
        for pp in np.flatnonzero(np.bincount(x.pp[stages == count])).tolist():
            mine = np.flatnonzero((stages == count) & (x.pp == pp))
            part, here = found.take(mine), row[which[mine]]
            held = _held(pricer, lower_bounds, part, sums[here], passing[here])
            nbytes[mine] = np.maximum(nbytes[mine], held)
            if pp == count:
                seconds[mine] = np.maximum(seconds[mine], _apart(pricer, lower_bounds, part, sums[here]))
            elif pricer.many[count]:
                likely[mine] = GAIN * _interleaved(pricer, lower_bounds, part, sums[here])
    return seconds, np.maximum(seconds, likely), nbytes


def _interleaved(pricer: Pricer, lower_bounds: LowerBounds, found: BoundedLayouts, sums: Rows) -> Rows:
    """Seconds of interleaved chunks as they are cut here."""
    x, m = found.layouts, found.layouts.microbatches(pricer.workload.batch)
    ahead, back = (sums[..., columns].sum(axis=2) for columns in (FORWARD_COLUMNS, BACKWARD_COLUMNS))
    hops = np.broadcast_to(lower_bounds.base_costs.hop[found.place, None], ahead.shape)
    ends = pipeline.ends(ahead, back, hops, int(x.pp[0]), m, x.microbatch_group_size)
    least: Rows = ends.max(axis=1) + found.after
    return least


def _apart(pricer: Pricer, lower_bounds: LowerBounds, found: BoundedLayouts, sums: Rows) -> Rows:
    """Seconds of one chunk a rank: in each cut one takes as long as the slowest here. See `bubbles.alone`."""
    x, m = found.layouts, found.layouts.microbatches(pricer.workload.batch)
    g = lower_bounds.base_costs
    slowest, before = sums[..., [*FORWARD_COLUMNS, *BACKWARD_COLUMNS]].sum(axis=2).max(axis=1), np.minimum(x.pp, m) - 1
    whole = g.step[found.place, PLAIN] + 2 * (x.pp - 1) * g.hop[found.place]
    first = whole + (m - 1 - before * g.ahead[found.place]) * slowest
    least: Rows = np.maximum(first, m * slowest) + found.after
    return least


def _held(pricer: Pricer, lower_bounds: LowerBounds, found: BoundedLayouts, sums: Rows, passing: Rows) -> Rows:
    """Bytes of the fullest rank as it is cut here, about: at each rank's first backward."""
    x, book = found.layouts, pricer.cost_cache
    pp, vpp = int(x.pp[0]), int(x.vpp[0])
    params, experts = (
        sums[..., col].reshape(-1, vpp, pp).sum(axis=1).ravel() for col in (CostColumn.PARAMS, CostColumn.EXPERT_PARAMS)
    )
    ranks = x.take(np.repeat(np.arange(len(found)), pp))
    static = memory.state_bytes(params, experts, ranks, book.workload.precision, book.profile)
    m = x.microbatches(book.workload.batch)[:, None]
    after = pp - 1 - np.arange(pp)  # ranks
    group = np.minimum(x.microbatch_group_size[:, None], m)
    forwards = np.minimum(schedule.warmup_limit(after, vpp, group) + 1, m * vpp)
    rounds = (np.arange(3)[:, None] * vpp + np.arange(vpp))[None, :, :, None] * group[:, :, None, None]
    limit = group[:, :, None, None] if vpp > 1 else m[:, :, None, None]
    flights = np.clip(forwards[:, None, None] - rounds, 0, limit).sum(axis=1)
    saved = sums[..., CostColumn.SAVED] + passing[:, :1] * (np.arange(pp * vpp) > 0)
    kept = (flights * saved.reshape(-1, vpp, pp)).sum(axis=1)
    state = np.asarray(sum(static.values()), dtype=float).reshape(-1, pp)
    held = memory.rank_memory(state, kept, 1.0, passing[:, 1:])
    most: Rows = held.max(axis=1) + lower_bounds.base_costs.beside[found.place]
    return most
