"""What a pipeline takes at the least, whatever waits for whatever else: by its cut, or however it may be cut.

Protocol: `ends` has lower bounds of `timeline.finish`; `share` is how many times a micro-batch's seconds through the
whole model a step takes at the least, however cut. Seconds are of one micro-batch by stage. Derivation, of chunk k of
rank r with groups of G micro-batches: its first forward waits for one micro-batch through all stages before it, and
finds rank r done with no more than G of each chunk before k, and with no backward; its last backward is, backwards, the
same. All the rest of m micro-batches lies between.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaloom.planner.contract.layouts import alike
from megaloom.planner.partition.dynamic_program import FloatVector

Counts = NDArray[np.int64]

HALF = 0.5  # of the ranks before the average one


def ends(
    forward: ArrayLike, backward: ArrayLike, transfer: ArrayLike, pp: int, microbatches: ArrayLike, group: ArrayLike = 0
) -> FloatVector:
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
    waits = [_waits(device_mesh, hops, pp, vpp, size) for device_mesh in (ahead, back)]
    busy = waits[0] + m * own
    before = np.cumsum(back + hops, axis=-1)[..., :pp] - (back + hops)[..., :pp]
    after = np.maximum.accumulate((busy + waits[1])[..., ::-1], axis=-1)[..., ::-1] - before
    out: FloatVector = np.maximum(busy, after) - last
    return out


def _waits(seconds: FloatVector, hops: FloatVector, pp: int, vpp: int, size: NDArray[np.int64]) -> FloatVector:
    """By rank, how long it waits at the least for a first micro-batch, chunk after chunk."""
    path = np.cumsum(seconds + hops, axis=-1) - (seconds + hops)
    rows = seconds.reshape(*seconds.shape[:-1], vpp, pp)
    done = size[..., None] * (np.cumsum(rows, axis=-2) - rows)
    waits: FloatVector = (path.reshape(rows.shape) - done).max(axis=-2)
    return waits


def alone(pp: FloatVector, microbatches: FloatVector, ahead: FloatVector) -> FloatVector:
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


def share(
    pp: FloatVector, vpp: Counts, microbatches: FloatVector, group: FloatVector
) -> tuple[FloatVector, FloatVector]:
    """What a step takes at the least, of many schedules: so many times the seconds of a micro-batch through the whole
    model, and so many times those of what passes from a stage to the next.

    One chunk a rank: rank r takes m t[r] and the t of those before it, of which the greatest is least when all are
    equal. Several: see `interleaved`.
    """
    m = microbatches
    out: FloatVector = 1 / (1 - (1 - 1 / m) ** pp)
    passed = np.zeros(len(out))
    some = np.flatnonzero(vpp > 1)
    if len(some):
        columns = [np.asarray(x, dtype=np.int64)[some] for x in (pp, vpp, m, np.minimum(group, m))]
        first, which = alike(*columns)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        out[some], passed[some] = np.array([interleaved(*row) for row in rows])[which].T
    return out, passed


@lru_cache(maxsize=1 << 14)
def interleaved(pp: int, vpp: int, m: int, size: int) -> tuple[float, float]:
    """`share` of chunks that run groups of so many micro-batches.

    A step takes no less than what rank r waits for at its chunk k, both ways, and m times all its chunks: see above.
    Nor less than any mean of these. With weights y[k, r] of which each stage's seconds count for as much, no cut takes
    less than that, and by no other weights more is sure: a cut may have its seconds where they count for the least.
    Such y of chunk k + 1 follow from those of chunk k: `size` times y[k + 1, r] is the sum of the pp weights up to its
    own. By Y[r], the sums over chunks, m Y[r + 1] - m Y[r] is y[r + 1] of the last chunk.
    """
    every, one = _chunks(pp, vpp, size), np.zeros(pp)
    ranks, one[-1] = every.sum(axis=0), 1.0
    alike_and_one = np.vstack([np.diff(ranks, axis=0) - every[-1, 1:] / m, ranks.sum(axis=0)])
    y = np.maximum(0.0, every @ np.linalg.solve(alike_and_one, one))
    later = y.sum(axis=0) - np.cumsum(y, axis=0)
    after = y.sum() - np.cumsum(y).reshape(y.shape)
    counts = m * y.sum(axis=0) - size * later + after
    return float(counts.min() / y.sum()), float(2 * y.ravel() @ np.arange(pp * vpp) / y.sum())


@lru_cache(maxsize=1 << 10)
def _chunks(pp: int, vpp: int, size: int) -> FloatVector:
    """The weights of each chunk's ranks, by those of the first chunk's: [chunks, ranks, ranks]."""
    own, later = size * np.eye(pp) - np.tri(pp), np.triu(np.ones((pp, pp)), 1)
    step = np.linalg.solve(own, later)
    out = [np.eye(pp)]
    for _ in range(vpp - 1):
        out.append(step @ out[-1])
    return np.array(out)
