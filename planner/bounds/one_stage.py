"""Lower bound of the step time of layouts with one stage a rank, for the partitions that fit the memory limit.

Symbols: p pipeline ranks, m micro-batches; t_r seconds of one micro-batch on rank r, forward and backward, H_r seconds
of its p2p sends of one micro-batch; A seconds after the last backward pass.
"""

from __future__ import annotations

import numpy as np
from attrs import fields_dict, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.job import Job
from megaloom.planner.partition.chain_costs import SAVED, SECONDS, STATE, ChainCosts

from .chained_layouts import ChainedLayouts
from .lower_bounds import LowerBounds

FARTHEST, BISECTIONS = 1.5, 4  # greatest multiple of the bound for every partition, and steps of the bisection up to it
BYTES_TOLERANCE = 1 + 1e-5  # tolerance for bytes, which a prediction rounds to whole numbers, each holder by itself
STATE_SAMPLE = 10**6  # elements whose state is computed, to get the bytes of one


@frozen(eq=False)
class Segments:
    """Sums over the segments before each cut point: [layouts, cut points] each. Bytes are those that a rank reserves.

    Where only the first blocks of a stage are recomputed, a stage [i, j) saves `freed[min(j, e)] - freed[i]` more,
    at most 0, with e the end of these blocks, `last[i]` the last cut point up to e, and `freed_end[i]` the sum at e.
    """

    seconds: Rows  # of one micro-batch, forward and backward, without recompute of first blocks
    state: Rows  # bytes of weights, gradients and optimizer
    saved: Rows  # bytes of saved activations of one micro-batch
    freed: Rows
    freed_end: Rows
    last: Column

    def take(self, which: NDArray[np.bool_]) -> Segments:
        """Return the sums of the layouts for which a mask is true."""
        return Segments(*(getattr(self, name)[which] for name in fields_dict(Segments)))


def one_stage_seconds(lower_bounds: LowerBounds, chained: ChainedLayouts, limit: float) -> Rows:
    """Return a lower bound of the step for the partitions within the memory limit, infinite where there is none.

    The layouts have one stage a rank. Stages that share a weight may count it once, so such models have no bound here.

    Bound: step ≥ min max_r (m (t_r + H_r) + Σ_{s<r} (t_s + H_s)) + A over these partitions. Whether X can be reached is
    seen by filling the ranks in order, each as far as X and its memory allow; bisection finds the least X.
    """
    seconds, pp = chained.bounded.seconds.copy(), chained.bounded.layouts.pp
    if not lower_bounds.cache.structure.shared_weights:
        for ranks in np.flatnonzero(np.bincount(pp)).tolist():
            some = np.flatnonzero(pp == ranks)
            seconds[some] = _seconds_of_ranks(lower_bounds, chained.take(some), limit)
    return seconds


def _seconds_of_ranks(lower_bounds: LowerBounds, chained: ChainedLayouts, limit: float) -> Rows:
    """Return the bound of layouts with equally many ranks."""
    bounded, transient = chained.bounded, chained.costs.transient[:, chained.chain]
    x, job, seconds = bounded.layouts, lower_bounds.cache.job, bounded.seconds.copy()
    segments, m = _segments(chained.costs, chained.chain, x, job), x.microbatches(job.workload.batch)[:, None]
    in_flight = np.minimum(np.arange(x.pp[0], 0, -1), m)
    free = _free_nbytes(transient, in_flight, lower_bounds.costs.runtime_nbytes[bounded.base], job, limit)
    sends = _send_seconds(transient[0], x, job)
    waits = m * sends + np.cumsum(sends, axis=1) - sends + bounded.after[:, None]
    fits = _all_placed(segments, in_flight, free, m)
    segments, in_flight, free, m, waits = segments.take(fits), in_flight[fits], free[fits], m[fits], waits[fits]
    low, high = seconds[fits], FARTHEST * seconds[fits]
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        enough = _all_placed(segments, in_flight, free, m, middle[:, None] - waits)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    seconds[fits], seconds[~fits] = low, np.inf
    return seconds


def _all_placed(
    x: Segments, in_flight: Column, free: Rows, m: Column, seconds: Rows | None = None
) -> NDArray[np.bool_]:
    """Return for each layout whether all segments can be placed on its ranks in order.

    free, seconds: [layouts, ranks] bytes of state and saved activations of a rank, and seconds m t_r + Σ_{s<r} t_s.
    What a stage takes grows with its end, and what it may take with its start, so the farthest ends are the best.
    """
    count, size = x.state.shape
    first, done, here = np.arange(count) * size, np.zeros(count, dtype=np.intp), np.arange(size)
    all_passes, other_passes, partly = m * x.seconds, (m - 1) * x.seconds, bool(x.freed.any())
    for rank, n in enumerate(in_flight.T[..., None]):
        at = first + done
        held = x.state + n * x.saved
        most = held.take(at) + free[:, rank]
        if partly:
            held += n * np.where(here <= x.last.take(at)[:, None], x.freed, x.freed_end.take(at)[:, None])
            most += n[:, 0] * x.freed.take(at)
        fits = held <= most[:, None]
        if seconds is not None:
            fits &= all_passes <= (other_passes.take(at) + seconds[:, rank])[:, None]
        done = np.maximum(done, fits.sum(axis=1) - 1)
    placed: NDArray[np.bool_] = done == size - 1
    return placed


def _segments(costs: ChainCosts, chain: Column, x: Layouts, job: Job) -> Segments:
    table, cuts, reserve = costs.table[chain], costs.structure.cut_points, memory.ALLOCATED
    dense, experts, fixed, copies = STATE_SAMPLE * np.eye(4, dtype=np.int64)[..., None]
    of_one = memory.rank_state(dense, experts, x, job, fixed, copies).total / STATE_SAMPLE
    state = sum(one[:, None] * costs.before[i, table] for one, i in zip(of_one, STATE, strict=True))
    freed, ends = reserve * costs.recompute_before[SAVED, table], costs.ends_of(chain)
    return Segments(
        seconds=costs.before[SECONDS, table],
        state=np.asarray(state),
        saved=reserve * costs.before[SAVED, table],
        freed=freed[:, cuts],
        freed_end=np.take_along_axis(freed, ends, axis=1),
        last=cuts.searchsorted(ends, side="right") - 1,
    )


def _free_nbytes(transient: Rows, in_flight: Column, runtime: Rows, job: Job, limit: float) -> Rows:
    """Return the bytes for state and saved activations of each rank at its first backward pass: [layouts, ranks]."""
    pp = in_flight.shape[1]
    least, workspace, library = transient
    buffers = (memory.RECEIVE_BUFFERS + pp * job.profile.saved.stage_output) * least
    received = in_flight * (np.arange(pp) > 0) * least[:, None]
    passing = (workspace + library + buffers)[:, None]
    free: Rows = limit * BYTES_TOLERANCE - memory.rank_memory(runtime[:, None], received, 1.0, passing)
    return free


def _send_seconds(least: Rows, x: Layouts, job: Job) -> Rows:
    """Return the least seconds in which each rank sends one micro-batch, both ways: [layouts, ranks]."""
    scattered = job.profile.overlap.scattered_sends
    first, which = alike(least.astype(np.int64), x.tp, x.sequence_parallel)
    out = np.zeros((len(first), int(x.pp[0])))
    for row, nbytes, y in zip(out, least[first].tolist(), x.each(first), strict=True):
        levels = communication.crossed_level(np.arange(y.pp - 1), y, job.cluster).tolist()
        known = {n: communication.send_seconds(nbytes, n, y, job.cluster, scattered=scattered) for n in {*levels}}
        sends = np.array([known[n] for n in levels])
        row[:-1] += sends
        row[1:] += sends
    return out[which]
