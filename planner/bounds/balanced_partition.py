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
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.weight_units import gathered_fields, waiting_seconds
from megaloom.planner.partition.chain_costs import FORWARD, SAVED, SECONDS, STATE, ChainCosts
from megaloom.planner.partition.dynamic_program import Indices
from megaloom.planner.pipeline import schedules

from . import pipeline
from .chained_layouts import ChainedLayouts
from .lower_bounds import BoundedLayouts, LowerBounds

# Share of the balanced partition's bound that an interleaved layout is expected to need once the partitioner has moved
# its stage boundaries: the gain is 1.6 % on average (partition/local_search.py), and hardly ever more than this where
# the balanced partition fits the memory.
EXPECTED_SHARE = 0.97

Balance = Callable[[ChainedLayouts, Column], Sequence[Indices]]  # balanced partitions of some chains, as cut points


@frozen(eq=False)
class BalancedBounds:
    """Bounds of layouts from their balanced partitions: [layouts] each."""

    seconds: Rows  # lower bound of a step, for every partition
    expected_seconds: Rows  # what a step hardly goes below; not a bound
    nbytes: Rows  # of the rank with the most memory, in the balanced partition


def balanced_bounds(
    balance: Balance, lower_bounds: LowerBounds, chained: ChainedLayouts, through: Rows
) -> BalancedBounds:
    """Return closer bounds of these layouts; `balance` gives the balanced partitions of several chains.

    through: the least seconds of a micro-batch through all stages, see `capped_bounds`.
    Bounds: see `_passes_seconds`.
    """
    bounded, costs, x = chained.bounded, chained.costs, chained.bounded.layouts
    through = through + _waiting_seconds(x, costs, chained.chain)
    seconds = np.maximum(bounded.seconds, _passes_seconds(lower_bounds, bounded, through))
    expected, nbytes = np.zeros(len(bounded)), bounded.nbytes.copy()
    for count, here, chains in chained.by_stages():
        bounds = np.array(balance(chained, chains))
        sums = costs.stages(chains, bounds[:, :-1], bounds[:, 1:])
        row = np.searchsorted(chains, chained.chain[here])
        for pp in np.flatnonzero(np.bincount(x.pp[here])).tolist():
            some = x.pp[here] == pp
            mine, of_mine = here[some], sums[:, row[some]]
            part, transient = bounded.take(mine), costs.transient[:, chained.chain[mine]]
            nbytes[mine] = np.maximum(nbytes[mine], _peak_nbytes(lower_bounds, part, of_mine, transient))
            if pp < count and lower_bounds.many[count]:
                expected[mine] = EXPECTED_SHARE * _interleaved_seconds(lower_bounds, part, of_mine)
    return BalancedBounds(seconds, np.maximum(seconds, expected), nbytes)


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
