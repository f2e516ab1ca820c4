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
from megaloom.planner.cost.columns import BACKWARD_COLUMNS, ELEMENTS, FORWARD_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.weight_units import gathered_fields, waiting_seconds
from megaloom.planner.partition.local_search import SLOWEST_FACTOR
from megaloom.planner.partition.partitioner import WHOLE_BLOCKS, StageBounds, segment_sums
from megaloom.planner.pipeline import schedules

from . import interleaved_memory, pipeline
from .lower_bounds import BoundedLayouts, LowerBounds

# Share of the balanced partition's bound that an interleaved layout is expected to need once the partitioner has moved
# its stage boundaries: the gain is 1.6 % on average (partition/local_search.py), and hardly ever more than this where
# the balanced partition fits the memory.
EXPECTED_SHARE = 0.97
SLACK = 1 + 1e-9  # tolerance for sums of the same seconds in another order
RECOMPUTE_FIELDS = ("recompute", "recompute_modules", "recompute_layers")

Balance = Callable[[Sequence[Layout]], Sequence[tuple[CostTable, StageBounds]]]  # cost table and balanced partition


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
    partitions = balance(x.each(first))
    waiting = _waiting_seconds(x, which, [table for table, _ in partitions])
    for count in np.flatnonzero(np.bincount(stages)).tolist():
        some = np.flatnonzero(stages[first] == count).tolist()
        chosen = [partitions[i] for i in some]
        sums = np.array([table.stage_sums(bounds) for table, bounds in chosen])
        extra = np.array([(table.least_boundary, table.workspace, table.library) for table, _ in chosen], dtype=float)
        here, tables = stages == count, [table for table, _ in chosen]
        slowest = sums[..., STEP_COLUMNS].sum(axis=2).max(axis=1)
        plain = np.array([_plain_seconds(table) for table in tables])
        if (x.vpp[here] > 1).any():
            each = zip(tables, slowest.tolist(), strict=True)
            through, *saved = np.array([_within_cap(one, most, count) for one, most in each]).T
        row = np.zeros(len(first), dtype=np.intp)
        row[some] = np.arange(len(some))
        for pp in np.flatnonzero(np.bincount(x.pp[here])).tolist():
            mine = np.flatnonzero(here & (x.pp == pp))
            part, table = bounded.take(mine), row[which[mine]]
            computing = plain if pp == count else through  # only with several chunks is a stage's time limited
            passes = _passes_seconds(lower_bounds, part, computing[table] + waiting[mine])
            seconds[mine] = np.maximum(seconds[mine], passes)
            nbytes[mine] = np.maximum(nbytes[mine], _peak_nbytes(lower_bounds, part, sums[table], extra[table]))
            if pp == count:
                continue
            capped = _capped_nbytes(lower_bounds, part, extra[table], *(column[table] for column in saved))
            least[mine] = np.maximum(least[mine], capped)
            if lower_bounds.many[count]:
                expected[mine] = EXPECTED_SHARE * _interleaved_seconds(lower_bounds, part, sums[table])
    return BalancedBounds(seconds, np.maximum(seconds, expected), nbytes, least)


def _interleaved_seconds(lower_bounds: LowerBounds, bounded: BoundedLayouts, sums: Rows) -> Rows:
    """Return the lower bound of interleaved layouts under their balanced partitions: see `pipeline.finish_bounds`."""
    x, m = bounded.layouts, bounded.layouts.microbatches(lower_bounds.cache.workload.batch)
    forward, backward = (sums[..., columns].sum(axis=2) for columns in (FORWARD_COLUMNS, BACKWARD_COLUMNS))
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


def _plain_seconds(table: CostTable) -> float:
    """Return the seconds T₀ of one micro-batch through the model, without the recompute of first blocks."""
    return float(table.rows[:, STEP_COLUMNS].sum(axis=1) @ table.structure.kind_counts)


def _within_cap(table: CostTable, slowest: float, count: int) -> tuple[float, float, float]:
    """Return (T, saved, largest saved) of `count` stages, none of which is slower than the partitioner accepts.

    slowest: seconds of the slowest stage of the balanced partition. T is a lower bound of the seconds of one
    micro-batch through the model, `saved` of the bytes that all stages save of it, and no stage saves more than
    `largest saved`. Bounds where only the first blocks of a stage are recomputed: T ≥ T₀ + q ρ, with ρ the seconds of
    recompute of all blocks, and q the least share of its recompute that a stage has. A stage from cut point i has the
    least share if it is as long as is accepted: what follows its first blocks is not recomputed. And
    Σ a_s ≥ max(a − s F, a'), with a the bytes that the model saves without recompute and a' with recompute of all
    blocks, and F the most that recompute of the first blocks of a stage frees.
    """
    cuts = np.array(table.structure.cut_points)
    seconds, saved = (segment_sums(table, cuts, columns) for columns in (STEP_COLUMNS, [CostColumn.SAVED]))
    far = seconds.farthest(SLACK * WHOLE_BLOCKS * SLOWEST_FACTOR * slowest)
    through, least, most = _plain_seconds(table), float(saved.sums[-1]), float(saved(np.arange(len(cuts)), far).max())
    if seconds.extra is not None and seconds.extra_end is not None:
        every = seconds.extra[far] - seconds.extra
        recomputed = np.minimum(seconds.extra_end, seconds.extra[far]) - seconds.extra
        some = every > 0
        through += float((recomputed[some] / every[some]).min(initial=1.0) * seconds.extra[-1])
    if saved.extra is not None and saved.extra_end is not None:
        freed = float((saved.extra - saved.extra_end).max())
        least = max(least - count * freed, least + float(saved.extra[-1]))
    return through, least, most


def _waiting_seconds(x: Layouts, which: Column, tables: Sequence[CostTable]) -> Rows:
    """Return the seconds for which a micro-batch waits for sharded weights and gradients, in both passes: [layouts].

    which: number of the cost table of each layout. The sum over all nodes is that of every partition, and the same for
    any number of recomputed blocks.
    """
    seconds = np.zeros(len(x))
    if len(sharded := np.flatnonzero(x.fsdp)):
        some = x.take(sharded)
        partly = some.recompute_layers > 0
        columns = (getattr(some, name) for name in (*NODE_COST_FIELDS, "recompute", "recompute_modules", "dp"))
        first, each = alike(*columns, partly, *gathered_fields(some))
        rows = zip(which[sharded[first]].tolist(), some.each(first), strict=True)
        seconds[sharded] = np.array([_waiting_of_model(tables[i], layout) for i, layout in rows])[each]
    return seconds


def _waiting_of_model(table: CostTable, layout: Layout) -> float:
    if table.units is None:
        return 0.0
    waiting = waiting_seconds(table.rows, table.units, table.job, layout).sum(axis=1)
    return float(waiting @ table.structure.kind_counts)


def _capped_nbytes(
    lower_bounds: LowerBounds, bounded: BoundedLayouts, extra: Rows, saved: Rows, largest_saved: Rows
) -> Rows:
    """Return a lower bound of the rank with the most memory, for the partitions that the partitioner may choose.

    Bound: peak ≥ R + (S + a K) / p + a W. All stages together save at least `saved` and none more than `largest_saved`
    bytes of one micro-batch; K are the `capped_activations`, S is the state, R what no tensor holds, W workspace,
    libraries and p2p buffers.
    """
    x, cache, costs = bounded.layouts, lower_bounds.cache, lower_bounds.costs
    pp, (boundary, workspace, library) = int(x.pp[0]), extra.T
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
    transient = workspace + library + memory.RECEIVE_BUFFERS * boundary
    return memory.rank_memory(state, activations / pp, 1.0, transient)


def _peak_nbytes(lower_bounds: LowerBounds, bounded: BoundedLayouts, sums: Rows, extra: Rows) -> Rows:
    """Return about the bytes of the rank with the most memory, at each rank's first backward pass."""
    x, cache = bounded.layouts, lower_bounds.cache
    pp, vpp = int(x.pp[0]), int(x.vpp[0])
    params, experts, fixed = (sums[..., column].reshape(-1, vpp, pp).sum(axis=1).ravel() for column in ELEMENTS)
    ranks = x.take(np.repeat(np.arange(len(bounded)), pp))
    state = memory.rank_state(params, experts, ranks, cache.job, fixed)
    in_flight = schedules.first_in_flight(pp, vpp, x.microbatches(cache.workload.batch), x.microbatch_group)
    saved = sums[..., CostColumn.SAVED] + extra[:, :1] * (np.arange(pp * vpp) > 0)
    activations = (in_flight * saved.reshape(-1, vpp, pp)).sum(axis=1)
    resident = state.total.astype(float).reshape(-1, pp)
    rank_nbytes = memory.rank_memory(resident, activations, 1.0, extra[:, 1:2])
    nbytes: Rows = rank_nbytes.max(axis=1) + lower_bounds.costs.runtime_nbytes[bounded.base]
    return nbytes
