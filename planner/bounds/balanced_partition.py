"""Tighter lower bounds of layouts, from their balanced partitions: those whose slowest stage is fastest.

`balanced_bounds` evaluates many layouts at once. Its seconds are a lower bound for every partition; the expected
seconds and the bytes are those of the balanced partition, by which the search orders layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.cost import memory
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.weight_units import gathered_fields, waiting_seconds
from megaloom.planner.partition.chain_costs import FORWARD, SAVED, SECONDS, STATE, ChainCosts
from megaloom.planner.partition.dynamic_program import Indices
from megaloom.planner.partition.local_search import SLOWEST_FACTOR
from megaloom.planner.partition.partitioner import WHOLE_BLOCKS
from megaloom.planner.pipeline import schedules

from . import interleaved_memory, pipeline
from .base_costs import TINY
from .lower_bounds import BoundedLayouts, LowerBounds

# Share of the balanced partition's bound that an interleaved layout is expected to need once the partitioner has moved
# its stage boundaries: the gain is 1.6 % on average (partition/local_search.py), and hardly ever more than this where
# the balanced partition fits the memory.
EXPECTED_SHARE = 0.97
SLACK = 1 + 1e-9  # tolerance for sums of the same seconds in another order
RECOMPUTE_FIELDS = ("recompute", "recompute_modules", "recompute_layers")

Balance = Callable[[Layouts], tuple[ChainCosts, Sequence[Indices]]]  # costs and balanced partitions, as cut points


@frozen(eq=False)
class BalancedBounds:
    """Bounds of layouts from their balanced partitions: [layouts] each."""

    seconds: Rows  # lower bound of a step, for every partition
    expected_seconds: Rows  # what a step hardly goes below; not a bound
    nbytes: Rows  # of the rank with the most memory, in the balanced partition
    least_nbytes: Rows  # lower bound of it, for every partition that the partitioner may choose


def balanced_bounds(balance: Balance, lower_bounds: LowerBounds, bounded: BoundedLayouts) -> BalancedBounds:
    """Return closer bounds of these layouts; `balance` gives the balanced partitions of several layouts.

    Bounds: see `_passes_seconds` and `_capped_nbytes`.
    """
    x = bounded.layouts
    stages, seconds, nbytes = x.pp * x.vpp, bounded.seconds.copy(), bounded.nbytes.copy()
    expected, least = np.zeros(len(bounded)), bounded.nbytes.copy()
    columns = *(getattr(x, name) for name in (*NODE_COST_FIELDS, *RECOMPUTE_FIELDS)), *gathered_fields(x)
    first, which = alike(*columns, stages)
    costs, partitions = balance(x.take(first))
    waiting = _waiting_seconds(x, costs, which)
    for count in np.flatnonzero(np.bincount(stages)).tolist():
        here, some = stages == count, np.flatnonzero(stages[first] == count)
        bounds = np.array([partitions[i] for i in some.tolist()])
        sums = costs.stages(some, bounds[:, :-1], bounds[:, 1:])
        plain = costs.before[SECONDS, costs.table[some], -1]
        if (x.vpp[here] > 1).any():
            through, *saved = _within_cap(costs, some, sums[SECONDS].max(axis=1), count)
        row = np.zeros(len(first), dtype=np.intp)
        row[some] = np.arange(len(some))
        for pp in np.flatnonzero(np.bincount(x.pp[here])).tolist():
            mine = np.flatnonzero(here & (x.pp == pp))
            part, chain = bounded.take(mine), row[which[mine]]
            transient = costs.transient[:, which[mine]]
            computing = plain if pp == count else through  # only with several chunks is a stage's time limited
            passes = _passes_seconds(lower_bounds, part, computing[chain] + waiting[mine])
            seconds[mine] = np.maximum(seconds[mine], passes)
            nbytes[mine] = np.maximum(nbytes[mine], _peak_nbytes(lower_bounds, part, sums[:, chain], transient))
            if pp == count:
                continue
            capped = _capped_nbytes(lower_bounds, part, transient, *(column[chain] for column in saved))
            least[mine] = np.maximum(least[mine], capped)
            if lower_bounds.many[count]:
                expected[mine] = EXPECTED_SHARE * _interleaved_seconds(lower_bounds, part, sums[:, chain])
    return BalancedBounds(seconds, np.maximum(seconds, expected), nbytes, least)


def _interleaved_seconds(lower_bounds: LowerBounds, bounded: BoundedLayouts, sums: Rows) -> Rows:
    """Return the lower bound of interleaved layouts under their balanced partitions: see `pipeline.finish_bounds`."""
    x, m = bounded.layouts, bounded.layouts.microbatches(lower_bounds.cache.workload.batch)
    forward, backward = sums[FORWARD], sums[SECONDS] - sums[FORWARD]
    sends = np.broadcast_to(lower_bounds.costs.send_seconds[bounded.base, None], forward.shape)
    ends = pipeline.finish_bounds(forward, backward, sends, int(x.pp[0]), m, x.microbatch_group_size)
    seconds: Rows = ends.max(axis=1) + bounded.after
    return seconds


def _passes_seconds(lower_bounds: LowerBounds, bounded: BoundedLayouts, through: Rows) -> Rows:
    """Return a lower bound of layouts, for the partitions that the partitioner may choose.

    Bound: step ≥ c T + d h + A, with c and d of `pass_multiples` and `through` ≤ T, the seconds of one micro-batch.
    """
    x, m = bounded.layouts, bounded.layouts.microbatches(lower_bounds.cache.workload.batch)
    multiples = (column.astype(float) for column in (x.pp, m, x.microbatch_group_size))
    pp, microbatches, group = multiples
    passes, sends = pipeline.pass_multiples(pp, x.vpp, microbatches, group)
    seconds: Rows = passes * through + sends * lower_bounds.costs.send_seconds[bounded.base] + bounded.after
    return seconds


def _within_cap(costs: ChainCosts, which: Column, slowest: Rows, count: int) -> tuple[Rows, Rows, Rows]:
    """Return (T, saved, largest saved) of chains of `count` stages, none slower than the partitioner accepts.

    slowest: seconds of the slowest stage of the balanced partition. T is a lower bound of the seconds of one
    micro-batch through the model, `saved` of the bytes that all stages save of it, and no stage saves more than
    `largest saved`. Bounds where only the first blocks of a stage are recomputed: T ≥ T₀ + q ρ, with ρ the seconds of
    recompute of all blocks, and q the least share of its recompute that a stage has. A stage from cut point i has the
    least share if it is as long as is accepted: what follows its first blocks is not recomputed. And
    Σ a_s ≥ max(a − s F, a'), with a the bytes that the model saves without recompute and a' with recompute of all
    blocks, and F the most that recompute of the first blocks of a stage frees.
    """
    caps = SLACK * WHOLE_BLOCKS * SLOWEST_FACTOR * slowest
    far = np.array([costs.seconds[i].farthest(cap) for i, cap in zip(which.tolist(), caps.tolist(), strict=True)])
    start, table = np.broadcast_to(np.arange(far.shape[1]), far.shape), costs.table[which]
    most = costs.stages(which, start, far)[SAVED].max(axis=1)
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


def _waiting_seconds(x: Layouts, costs: ChainCosts, which: Column) -> Rows:
    """Return the seconds for which a micro-batch waits for sharded weights and gradients, in both passes: [layouts].

    which: number of the chain of each layout. The sum over all nodes is that of every partition, and the same for any
    number of recomputed blocks.
    """
    seconds = np.zeros(len(x))
    if len(sharded := np.flatnonzero(x.fsdp)):
        some, table = x.take(sharded), costs.table[which[sharded]]
        first, each = alike(table, some.dp, *gathered_fields(some))
        rows = zip(table[first].tolist(), some.each(first), strict=True)
        seconds[sharded] = np.array([_waiting_of_model(costs.tables[i], layout) for i, layout in rows])[each]
    return seconds


def _waiting_of_model(table: CostTable, layout: Layout) -> float:
    if table.units is None:
        return 0.0
    waiting = waiting_seconds(table.rows, table.units, table.job, layout).sum(axis=1)
    return float(waiting @ table.structure.kind_counts)


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


def _peak_nbytes(lower_bounds: LowerBounds, bounded: BoundedLayouts, sums: Rows, transient: Rows) -> Rows:
    """Return about the bytes of the rank with the most memory, at each rank's first backward pass."""
    x, cache = bounded.layouts, lower_bounds.cache
    pp, vpp = int(x.pp[0]), int(x.vpp[0])
    params, experts, fixed, copies = (sums[i].reshape(-1, vpp, pp).sum(axis=1).ravel() for i in STATE)
    ranks = x.take(np.repeat(np.arange(len(bounded)), pp))
    state = memory.rank_state(params, experts, ranks, cache.job, fixed, copies)
    in_flight = schedules.first_in_flight(pp, vpp, x.microbatches(cache.workload.batch), x.microbatch_group)
    saved = sums[SAVED] + transient[0, :, None] * (np.arange(pp * vpp) > 0)
    activations = (in_flight * saved.reshape(-1, vpp, pp)).sum(axis=1)
    resident = state.total.astype(float).reshape(-1, pp)
    rank_nbytes = memory.rank_memory(resident, activations, 1.0, transient[1, :, None])
    nbytes: Rows = rank_nbytes.max(axis=1) + lower_bounds.costs.runtime_nbytes[bounded.base]
    return nbytes
