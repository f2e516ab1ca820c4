"""Lower bounds of the time of a pipeline schedule: for one partition, and for every partition.

Symbols: p pipeline ranks, v chunks a rank, stage s = k p + r is chunk k of rank r; m micro-batches, g microbatch group;
f_s, b_s forward and backward seconds of stage s for one micro-batch, h_s seconds of the p2p send from stage s to s + 1;
t_s = f_s + b_s and T = Σ t_s. Proofs: docs/concepts/bounds.md.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaloom.planner.contract.layouts import alike
from megaloom.planner.partition.dynamic_program import FloatVector

Counts = NDArray[np.int64]


def finish_bounds(
    forward: ArrayLike, backward: ArrayLike, transfer: ArrayLike, pp: int, microbatches: ArrayLike, group: ArrayLike = 0
) -> FloatVector:
    """Return the earliest time at which each rank of a given partition can end its last backward pass.

    Arguments are [..., stages] seconds, and [...] micro-batches and groups; the result is [..., ranks].

    Bound: E_r ≥ F_r + m Σ_k t_{kp+r} and E_r ≥ max_{q ≥ r} (F_q + m Σ_k t_{kp+q} + G_q) − Σ_{s<r} (b_s + h_s), where
    F_r = max_k (Σ_{s<kp+r} (f_s + h_s) − g Σ_{j<k} f_{jp+r}), and G_r is F_r with b in place of f. A rank first waits
    until its first micro-batch has come through all stages before; meanwhile it has at most g forward passes of each
    earlier chunk to do. Read backwards in time, the end of the schedule is the beginning of one.
    """
    f, b = np.array(forward), np.array(backward)
    sends = np.zeros(f.shape)
    sends[..., :-1] = np.asarray(transfer)[..., : f.shape[-1] - 1]
    vpp = f.shape[-1] // pp
    last = np.zeros((*f.shape[:-1], pp))
    if vpp == 1:  # without interleaving a rank computes only after its send has ended
        last[..., 1:] = sends[..., :-1]
        own, f, b = f + b + sends + last, f + sends, b + last
        sends = np.zeros(f.shape)
    else:
        own = (f + b).reshape(*f.shape[:-1], vpp, pp).sum(axis=-2)
    m, size = np.asarray(microbatches)[..., None], np.asarray(group)[..., None]
    size = np.minimum(np.where(size, size, pp), m)
    first_wait, last_wait = (_waits(seconds, sends, pp, vpp, size) for seconds in (f, b))
    busy = first_wait + m * own
    earlier = np.cumsum(b + sends, axis=-1)[..., :pp] - (b + sends)[..., :pp]
    later_ranks = np.maximum.accumulate((busy + last_wait)[..., ::-1], axis=-1)[..., ::-1] - earlier
    out: FloatVector = np.maximum(busy, later_ranks) - last
    return out


def _waits(seconds: FloatVector, sends: FloatVector, pp: int, vpp: int, size: NDArray[np.int64]) -> FloatVector:
    """Return for each rank the largest over its chunks of the wait for the first micro-batch, F_r or G_r."""
    path = np.cumsum(seconds + sends, axis=-1) - (seconds + sends)
    rows = seconds.reshape(*seconds.shape[:-1], vpp, pp)
    done = size[..., None] * (np.cumsum(rows, axis=-2) - rows)
    waits: FloatVector = (path.reshape(rows.shape) - done).max(axis=-2)
    return waits


def one_chunk_multiple(pp: FloatVector, microbatches: FloatVector) -> FloatVector:
    """Return c such that a schedule without interleaving takes at least c T, for every partition: [layouts].

    Bound: step ≥ T / (1 − (1 − 1/m)^p) ≥ m T / p. Rank r computes m t_r and waits for one micro-batch through all ranks
    before it, which takes Σ_{s<r} t_s; the slowest rank is fastest when these sums are equal over ranks.
    """
    passes: FloatVector = 1 / (1 - (1 - 1 / microbatches) ** pp)
    return passes


def pass_multiples(
    pp: FloatVector, vpp: Counts, microbatches: FloatVector, group: FloatVector
) -> tuple[FloatVector, FloatVector]:
    """Return (c, d) such that a step takes at least c T + d h for every partition; all arrays are [layouts].

    Bound: without interleaving `one_chunk_multiple`, with it step ≥ c T + d h of `interleaved_multiples`.
    """
    passes = one_chunk_multiple(pp, microbatches)
    sends = np.zeros(len(passes))
    some = np.flatnonzero(vpp > 1)
    if len(some):
        columns = [
            np.asarray(x, dtype=np.int64)[some] for x in (pp, vpp, microbatches, np.minimum(group, microbatches))
        ]
        first, which = alike(*columns)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        passes[some], sends[some] = np.array([interleaved_multiples(*row) for row in rows])[which].T
    return passes, sends


@lru_cache(maxsize=1 << 14)
def interleaved_multiples(pp: int, vpp: int, m: int, size: int) -> tuple[float, float]:
    """Return (c, d) such that an interleaved schedule takes at least c T + d h for every partition.

    Bound: step ≥ Σ_{k,r} y_{k,r} (F_{k,r} + m Σ_j t_{jp+r} + G_{k,r}) for all weights y ≥ 0 with Σ y = 1, where F_{k,r}
    and G_{k,r} are the waits of chunk k of rank r in `finish_bounds`. c is the least coefficient of any t_s in
    this sum.
    The weights used here make the coefficients equal, and no other weights give a larger c: size · y_{k+1,r} is
    the sum of the p weights up to y_{k,r}, and m (Y_{r+1} − Y_r) = y_{v−1,r+1} for the sums Y_r over chunks.
    """
    every, one = _chunk_weights(pp, vpp, size), np.zeros(pp)
    ranks, one[-1] = every.sum(axis=0), 1.0
    equations = np.vstack([np.diff(ranks, axis=0) - every[-1, 1:] / m, ranks.sum(axis=0)])
    y = np.maximum(0.0, every @ np.linalg.solve(equations, one))
    later_chunks = y.sum(axis=0) - np.cumsum(y, axis=0)
    later_stages = y.sum() - np.cumsum(y).reshape(y.shape)
    coefficients = m * y.sum(axis=0) - size * later_chunks + later_stages
    return float(coefficients.min() / y.sum()), float(2 * y.ravel() @ np.arange(pp * vpp) / y.sum())


@lru_cache(maxsize=1 << 10)
def _chunk_weights(pp: int, vpp: int, size: int) -> FloatVector:
    """Return the weights of each chunk's ranks as linear maps of those of the first chunk: [chunks, ranks, ranks]."""
    own, later = size * np.eye(pp) - np.tri(pp), np.triu(np.ones((pp, pp)), 1)
    step = np.linalg.solve(own, later)
    out = [np.eye(pp)]
    for _ in range(vpp - 1):
        out.append(step @ out[-1])
    return np.array(out)
