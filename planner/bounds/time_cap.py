"""Lower bounds of layouts from the time cap that the partitioner keeps on stages.

`capped_bounds` needs no balanced partition of each layout. The slowest stage of any partition is at least as slow as
that of the balanced one, so that a cap from another chain's balanced partition is high enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen

from megaloom.planner.contract.layouts import Column, Rows
from megaloom.planner.cost import memory
from megaloom.planner.partition.chain_costs import SAVED, SECONDS, ChainCosts
from megaloom.planner.partition.dynamic_program import Indices
from megaloom.planner.partition.local_search import SLOWEST_FACTOR
from megaloom.planner.partition.partitioner import WHOLE_BLOCKS

from . import interleaved_memory
from .base_costs import TINY
from .chained_layouts import ChainedLayouts
from .lower_bounds import BoundedLayouts, LowerBounds

SLACK = 1 + 1e-9  # tolerance for sums of the same seconds in another order

Example = Callable[[ChainedLayouts, int, int], Indices]  # cut points: see `capped_bounds`


@frozen(eq=False)
class CappedBounds:
    """Bounds of layouts for the partitions that the partitioner may choose: [layouts] each."""

    through: Rows  # seconds of one micro-batch through all stages
    nbytes: Rows  # of the rank with the most memory


def capped_bounds(example: Example, lower_bounds: LowerBounds, chained: ChainedLayouts) -> CappedBounds:
    """Return bounds of these layouts; of those with one stage a rank, whose stages have no time cap, nothing closer.

    example: gives, for a chain and a number of stages, a partition of any chain of the model into so many stages.
    Bounds: see `_within_cap` and `_capped_nbytes`.
    """
    bounded, costs, x = chained.bounded, chained.costs, chained.bounded.layouts
    through, nbytes = costs.before[SECONDS, costs.table[chained.chain], -1], bounded.nbytes.copy()
    interleaved = np.flatnonzero(x.vpp > 1)
    for count, here, chains in chained.take(interleaved).by_stages():
        cuts = np.broadcast_to(example(chained, int(chains[0]), count), (len(chains), count + 1))
        slowest = costs.stages(chains, cuts[:, :-1], cuts[:, 1:], SECONDS).max(axis=1)
        within = _within_cap(costs, chains, slowest, count)
        mine = interleaved[here]
        rows = [column[np.searchsorted(chains, chained.chain[mine])] for column in within]
        through[mine] = rows[0]
        for pp in np.flatnonzero(np.bincount(x.pp[mine])).tolist():
            some = x.pp[mine] == pp
            part, transient = bounded.take(mine[some]), costs.transient[:, chained.chain[mine[some]]]
            capped = _capped_nbytes(lower_bounds, part, transient, rows[1][some], rows[2][some])
            nbytes[mine[some]] = np.maximum(part.nbytes, capped)
    return CappedBounds(through, nbytes)


def _within_cap(costs: ChainCosts, which: Column, slowest: Rows, count: int) -> tuple[Rows, Rows, Rows]:
    """Return (T, saved, largest saved) of chains of `count` stages, none slower than the partitioner accepts.

    slowest: seconds of the slowest stage of a partition, at least those of the balanced one. T is a lower bound of the
    seconds of one micro-batch through the model, `saved` of the bytes that all stages save of it, and no stage saves
    more than `largest saved`. Bounds where only the first blocks of a stage are recomputed: T ≥ T₀ + q ρ, with ρ the
    seconds of recompute of all blocks, and q the least share of its recompute that a stage has. A stage from cut point
    i has the least share if it is as long as is accepted: what follows its first blocks is not recomputed. And
    Σ a_s ≥ max(a − s F, a'), with a the bytes that the model saves without recompute and a' with recompute of all
    blocks, and F the most that recompute of the first blocks of a stage frees.
    """
    caps = SLACK * WHOLE_BLOCKS * SLOWEST_FACTOR * slowest
    far = costs.farthest(which, caps)
    start, table = np.broadcast_to(np.arange(far.shape[1]), far.shape), costs.table[which]
    most = costs.stages(which, start, far, SAVED).max(axis=1)
    through, least = costs.before[SECONDS, table, -1], costs.before[SAVED, table, -1]
    if costs.blocks[which].any():
        cuts, ends = costs.structure.cut_points, costs.ends_of(which)
        extra, freed = costs.recompute_before[SECONDS, table], costs.recompute_before[SAVED, table]
        every = np.take_along_axis(extra, cuts[far], axis=1) - extra[:, cuts]
        recomputed = np.take_along_axis(extra, np.minimum(ends, cuts[far]), axis=1) - extra[:, cuts]
        share = np.where(every > 0, recomputed / np.maximum(every, TINY), 1.0).min(axis=1)
        through = through + np.minimum(share, 1.0) * extra[:, -1]
        most_freed = (freed[:, cuts] - np.take_along_axis(freed, ends, axis=1)).max(axis=1)
        least = np.where(costs.blocks[which] > 0, np.maximum(least - count * most_freed, least + freed[:, -1]), least)
    return through, least, most


def _capped_nbytes(
    lower_bounds: LowerBounds, bounded: BoundedLayouts, transient: Rows, saved: Rows, largest_saved: Rows
) -> Rows:
    """Return a lower bound of the rank with the most memory, for the partitions that the partitioner may choose.

    Bound: peak ≥ R + (S + a K) / p + a W. All stages together save at least `saved` and none more than `largest_saved`
    bytes of one micro-batch; K are the `capped_activations`, S is the state, R what no tensor holds, W workspace,
    libraries and p2p buffers.
    """
    x, cache, costs = bounded.layouts, lower_bounds.cache, lower_bounds.costs
    pp, (boundary, workspace, library) = int(x.pp[0]), transient
    activations = interleaved_memory.capped_activations(
        saved=saved,
        stage=largest_saved,
        received=boundary,
        pp=pp,
        vpp=int(x.vpp[0]),
        m=x.microbatches(cache.workload.batch),
        group=x.microbatch_group,
    )
    state = costs.state_nbytes[bounded.base, x.shard] / pp + costs.runtime_nbytes[bounded.base]
    passing = workspace + library + memory.RECEIVE_BUFFERS * boundary
    return memory.rank_memory(state, activations / pp, 1.0, passing)
