"""What a pipeline takes at the least, whatever waits for whatever else: by its cut, or however it may be cut.

Protocol: `ends` has lower bounds of `timeline.finish`; `share` is what part of a micro-batch's seconds through the
whole model a step takes at the least. Seconds are of one micro-batch by stage. Derivation, of chunk k of rank r with
groups of G micro-batches: its first forward waits for one micro-batch through all stages before it, and finds rank r
done with no more than G of each chunk before k, and with no backward; its last backward is, backwards, the same. All
the rest of m micro-batches lies between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spans import Vector

HALF = 0.5  # of the ranks before the average one


def ends(
    forward: ArrayLike, backward: ArrayLike, transfer: ArrayLike, pp: int, microbatches: ArrayLike, group: ArrayLike = 0
) -> Vector:
    """No rank ends its last step sooner, as `timeline.finish` has it; of many pipelines by their first axes."""
    ahead, back = np.array(forward), np.array(backward)
    hops = np.zeros(ahead.shape)
    hops[..., :-1] = np.asarray(transfer)[..., : ahead.shape[-1] - 1]
    vpp = ahead.shape[-1] // pp
    last = np.zeros((*ahead.shape[:-1], pp))
    if vpp == 1:  # a rank sends before it goes on
        last[..., 1:] = hops[..., :-1]
        own, ahead, back = ahead + back + hops + last, ahead + hops, back + last
        hops = np.zeros(ahead.shape)
    else:
        own = (ahead + back).reshape(*ahead.shape[:-1], vpp, pp).sum(axis=-2)
    m, size = np.asarray(microbatches)[..., None], np.asarray(group)[..., None]
    size = np.minimum(np.where(size, size, pp), m)
    waits = [_waits(way, hops, pp, vpp, size) for way in (ahead, back)]
    busy = waits[0] + m * own
    before = np.cumsum(back + hops, axis=-1)[..., :pp] - (back + hops)[..., :pp]
    after = np.maximum.accumulate((busy + waits[1])[..., ::-1], axis=-1)[..., ::-1] - before
    out: Vector = np.maximum(busy, after) - last
    return out


def _waits(seconds: Vector, hops: Vector, pp: int, vpp: int, size: NDArray[np.int64]) -> Vector:
    """By rank, how long it waits at the least for a first micro-batch, chunk after chunk."""
    path = np.cumsum(seconds + hops, axis=-1) - (seconds + hops)
    rows = seconds.reshape(*seconds.shape[:-1], vpp, pp)
    done = size[..., None] * (np.cumsum(rows, axis=-2) - rows)
    waits: Vector = (path.reshape(rows.shape) - done).max(axis=-2)
    return waits


def alone(pp: Vector, microbatches: Vector, ahead: Vector) -> Vector:
    """What `share` says of one chunk a rank by its first backward; `ahead`: of what atom takes, the most is forward.

    That waits for a micro-batch through all stages but those before the rank, which has run j + 1 forwards by then,
    j being the ranks after it. Then it runs all that is left, and a micro-batch goes back through the stages before:
    all of one, and (m - 1) t - j f of the rank. The greatest is least when all are equal: with 1 / (m - 1 - j ahead)
    summed over ranks, which is at most its integral, as it is convex in j.
    """
    rest, some = microbatches - 1, np.minimum(pp, microbatches)
    near, far = rest + HALF * ahead, rest - (some - HALF) * ahead
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.log(near / far) / ahead + (pp - some) / (rest * (1 - ahead))
        return np.where((far > 0) & (inverse > 0), 1 + 1 / inverse, 1.0)


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
