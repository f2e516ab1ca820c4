"""What a pipeline takes at the least, whatever waits for whatever else: by its cut, or however it may be cut.

Protocol: `ends` has lower bounds of `timeline.finish`; `share` is what part of a micro-batch's seconds through the
whole model a step takes at the least. Seconds are of one micro-batch by stage. Derivation, of chunk k of rank r with
groups of G micro-batches: its first forward waits for one micro-batch through all stages before it, and finds rank r
done with no more than G of each chunk before k, and with no backward; its last backward is, backwards, the same. All
the rest of m micro-batches lies between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .spans import Vector

HALF = 0.5  # of the ranks before the average one


def ends(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int = 0,
) -> Vector:
    """No rank ends its last step sooner, as `timeline.finish` has it."""
    ahead, back, hops = np.array(forward), np.array(backward), np.zeros(len(forward))
    hops[:-1] = transfer[: len(forward) - 1]
    vpp = len(forward) // pp
    last = np.zeros(pp)
    if vpp == 1:  # a rank sends before it goes on
        last[1:] = hops[:-1]
        own, ahead, back = ahead + back + hops + last, ahead + hops, back + last
        hops = np.zeros(pp)
    else:
        own = (ahead + back).reshape(vpp, pp).sum(axis=0)
    size = min(group or pp, microbatches)
    waits = [_waits(way, hops, pp, vpp, size) for way in (ahead, back)]
    busy = waits[0] + microbatches * own
    before = np.cumsum(back + hops)[:pp] - (back + hops)[:pp]
    after = np.maximum.accumulate((busy + waits[1])[::-1])[::-1] - before
    out: Vector = np.maximum(busy, after) - last
    return out


def _waits(seconds: Vector, hops: Vector, pp: int, vpp: int, size: int) -> Vector:
    """By rank, how long it waits at the least for a first micro-batch, chunk after chunk."""
    path = np.cumsum(seconds + hops) - (seconds + hops)
    rows = seconds.reshape(vpp, pp)
    done = size * (np.cumsum(rows, axis=0) - rows)
    waits: Vector = (path.reshape(vpp, pp) - done).max(axis=0)
    return waits


def share(pp: Vector, vpp: NDArray[np.int64], microbatches: Vector, group: Vector) -> Vector:
    """Seconds of a step over those of a micro-batch through the whole model, at the least, of many schedules.

    One chunk a rank: rank r takes m t[r] and the t of those before it, of which the greatest is least when all are
    equal. Several: any mean over ranks and chunks of what they take is no more than the greatest. Its weights are w[r],
    each a little more than that before it, times u[k], so chosen that no t counts for much less than others.
    """
    m = microbatches
    out: Vector = 1 / (1 - (1 - 1 / m) ** pp)
    some = np.flatnonzero(vpp > 1)
    if len(some):
        least = _interleaved(pp[some], vpp[some], m[some], np.minimum(group, m)[some])
        out[some] = np.maximum((m / pp)[some], least)
    return out


def _interleaved(pp: Vector, vpp: NDArray[np.int64], m: Vector, size: Vector) -> Vector:
    chunk = np.arange(int(vpp.max()))
    more = 1 + (size / pp - 1) / HALF
    u = np.where(chunk < vpp[:, None], more[:, None] ** (vpp[:, None] - 1.0 - chunk), 0.0)
    u /= u.sum(axis=1, keepdims=True)
    later = u.sum(axis=1, keepdims=True) - np.cumsum(u, axis=1)
    ratio = 1 / (1 - u.min(axis=1, where=u > 0, initial=1.0) / m)
    first = (ratio - 1) / (ratio**pp - 1)
    out = np.full(u.shape, np.inf)
    for w, after in ((first, 1 - first), (first * ratio ** (pp - 1), np.zeros(len(pp)))):
        count = (m[:, None] - size[:, None] * later) * w[:, None] + later + u * after[:, None]
        out = np.minimum(out, count)
    least: Vector = np.where(chunk < vpp[:, None], out, np.inf).min(axis=1)
    return least
