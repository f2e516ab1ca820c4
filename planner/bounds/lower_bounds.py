"""Lower bounds of step seconds and peak bytes that hold for every partition of a layout.

`LowerBounds` holds the costs of base layouts; `bound` and `ideal` evaluate the inequalities of docs/concepts/bounds.md
for many layouts at once. Symbols: p pipeline ranks, v chunks a rank, m micro-batches, g microbatch group, T seconds of
one micro-batch through the whole model (forward, backward, recompute), h seconds of one p2p send.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.choices import Module, Recompute, Shard
from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.cost.columns import STEP_COLUMNS
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS, CostCache
from megaloom.planner.cost.memory import rank_memory
from megaloom.planner.cost.weight_units import pass_seconds
from megaloom.planner.partition.local_search import SLOWEST_FACTOR
from megaloom.planner.partition.partitioner import WHOLE_BLOCKS

from . import interleaved_memory, pipeline
from .base_costs import (
    FULL,
    IDEAL,
    PLAIN,
    TINY,
    BaseCosts,
    price_base_layouts,
)
from .end_of_step import Ends, end_of_step_bound, known_of
from .rank_memory import in_flight_means, least_rank_memory

LARGE_BATCH = 1 << 20  # sequences of a micro-batch in which fixed costs and partly filled tiles no longer count
LARGE_BATCH_TOLERANCE = 1 - 1e-6  # tiles and experts of even so large a micro-batch may be rounded up
GATHERED_BY = ("shard", "expert_shard", "reshard", "replicas")  # fields of variants that gathers depend on
BOUND_COLUMNS = ("base", "seconds", "nbytes", "after", "passes")


@frozen(eq=False)
class BoundedLayouts:
    """Layouts with lower bounds of their step seconds and of their memory."""

    layouts: Layouts
    base: Column  # number of the base layout of each
    seconds: Rows  # of a step
    nbytes: Rows  # of the pipeline rank with the most memory
    after: Rows  # part of `seconds` that follows the last micro-batch
    passes: Rows  # least seconds up to the last backward pass, also if more state is sharded

    @classmethod
    def joined(cls, parts: Sequence[BoundedLayouts]) -> BoundedLayouts:
        """Return the layouts of several parts in one, in order."""
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in BOUND_COLUMNS)
        return cls(Layouts.joined([part.layouts for part in parts]), *columns)

    def __len__(self) -> int:
        return len(self.base)

    def take(self, which: Column | NDArray[np.bool_] | slice) -> BoundedLayouts:
        """Return those with these numbers, or for which a mask is true."""
        return BoundedLayouts(self.layouts.take(which), *(getattr(self, name)[which] for name in BOUND_COLUMNS))


def large_batch_seconds(base: Layouts, cache: CostCache) -> Rows:
    """Return a lower bound of the step seconds of each base layout, from one price per device mesh: [base layouts].

    Bound: step ≥ c b · lim T(b) / b, with T(b) the seconds of a micro-batch of b sequences and c of `_least_passes`.
    T(b) / b is never below its limit: latencies, launches and rounding only add to it. See docs/concepts/bounds.md.
    """
    sequences = LARGE_BATCH * base.cp  # equally many tokens on each device, so that most node costs are equal
    first, which = alike(*(getattr(base, name) for name in NODE_COST_FIELDS if name != "micro_batch"))
    rows = cache.rows(evolve(base, micro_batch=sequences).take(first))[0]
    per_sequence = rows[:, :, STEP_COLUMNS].sum(axis=2) @ cache.structure.kind_counts / sequences[first]
    passes = _least_passes(base, _may_interleave(base, cache), cache.workload.batch)
    seconds: Rows = LARGE_BATCH_TOLERANCE * passes * base.micro_batch * per_sequence[which]
    return seconds


def _may_interleave(base: Layouts, cache: CostCache) -> NDArray[np.bool_]:
    """Return whether base layouts may have several chunks a rank: enough stages, and micro-batches for all ranks."""
    enough = base.microbatches(cache.workload.batch) >= base.pp
    return enough & (base.pp > 1) & (2 * base.pp < len(cache.structure.cut_points))


def _least_passes(base: Layouts, interleaved: NDArray[np.bool_], batch: int) -> Rows:
    """Return c such that a step takes at least c T, for every layout of a base layout: [base layouts].

    Bound: step ≥ m T / p, and of `one_chunk_multiple` where no layout may be interleaved.
    """
    pp, m = base.pp.astype(float), base.microbatches(batch).astype(float)
    return np.where(interleaved, m / pp, pipeline.one_chunk_multiple(pp, m))


@define(eq=False)
class LowerBounds:
    """Lower bounds of all layouts of some base layouts."""

    base_layouts: Layouts
    cache: CostCache
    leanest: int = int(max(Shard))  # value of `shard` under which the layouts to bound hold the fewest bytes
    costs: BaseCosts = field(init=False)
    many: NDArray[np.bool_] = field(init=False)  # for each number of stages, see `too_many_partitions`
    _ends: Ends = field(factory=dict, init=False)
    _gathers: dict[tuple[int, ...], float] = field(factory=dict, init=False)  # see `_gathering_seconds`
    _mode_of: Column = field(init=False)  # [sets of modules] mode in `costs`, 0 while it is not there

    def __attrs_post_init__(self) -> None:
        self.costs = price_base_layouts(self.base_layouts, self.cache)
        self.many = interleaved_memory.too_many_partitions(len(self.cache.structure.cut_points) - 1)
        self._mode_of = np.zeros(1 << len(Module), dtype=np.int64)

    def extend(self, more: Layouts) -> None:
        """Append base layouts. The numbers of those that are there do not change."""
        if len(more):
            self.base_layouts = Layouts.joined([self.base_layouts, more])
            self.costs = self.costs.joined(price_base_layouts(more, self.cache))
            self._mode_of = np.zeros(1 << len(Module), dtype=np.int64)

    def module_sets(self, base: Column) -> Column:
        """Return the sets of modules that the search tries, as bits: [base layouts, sets]."""
        return self.costs.modules.module_sets[self.costs.distinct[base]]

    def worth_recomputing(self, layouts: Layouts, base: Column) -> NDArray[np.bool_]:
        """Return whether the last module of each layout's set frees enough memory to be considered."""
        modules, module_bits, at = self.costs.modules, layouts.recomputed_module_bits, self.costs.distinct[base]
        among_sets = (modules.module_sets[at] == module_bits[:, None]) & modules.worthwhile[at]
        worth: NDArray[np.bool_] = (module_bits == 0) | among_sets.any(axis=1)
        return worth

    def bound(self, layouts: Layouts, base: Column) -> BoundedLayouts:
        """Return these layouts with their lower bounds; `base` is the number of each one's base layout.

        Bound: step ≥ max(c T' + 2 c (p − 1) h [v = 1] + d h, m T' / p + R, m G / p) + A, with c, d of
        `pass_multiples`, R and A of `end_of_step_bound`, T' = T + s G. The first term is the pipeline's. The second
        holds because all ranks together compute m T' and the slowest one still reduces its gradients: while weights are
        gathered, communication takes the share s of a device. The third holds because no stage takes less time than its
        gathers.
        Bound: peak ≥ runtime + workspace + the greater of `least_rank_memory` and `interleaved_nbytes`.
        See docs/concepts/bounds.md.
        """
        x, costs, m = layouts, self.costs, layouts.microbatches(self.cache.workload.batch)
        after = end_of_step_bound(x, base, costs.params, costs.expert_params, self.cache, self._ends)
        after[:, 0] += self._counting_seconds(x, base)
        passes, sends = pipeline.pass_multiples(
            x.pp.astype(float), x.vpp, m.astype(float), x.microbatch_group_size.astype(float)
        )
        gathering = self._gathering_seconds(x, base)
        waiting = self.cache.job.contention.least * gathering
        pipeline_seconds = self._pipeline_seconds(x, base, passes, waiting) + sends * costs.send_seconds[base]
        mean = self._passes_seconds(x, base, m / x.pp, waiting) + after[:, 1]
        nbytes = self._nbytes(x, base, self._modes(x))
        seconds = np.maximum(np.maximum(pipeline_seconds, mean), m / x.pp * gathering)
        return BoundedLayouts(x, base, seconds + after[:, 0], nbytes, after[:, 0], pipeline_seconds)

    def ideal(self, first: int = 0) -> tuple[Rows, Rows]:
        """Return (seconds, nbytes) that no layout of a base layout goes below, for each from number `first` on.

        Bound: step ≥ c T₀ with c of `_least_passes`, and peak ≥ the bound of one chunk a rank, the optimizer
        distributed, and the fewest activations of any recompute; T₀ has nothing recomputed. Every layout adds to these.
        See docs/concepts/bounds.md.
        """
        x, base = self.base_layouts.take(slice(first, None)), np.arange(first, len(self.base_layouts))
        ones, interleaved = np.ones(len(x), dtype=np.int64), _may_interleave(x, self.cache)
        x = evolve(x, recompute_layers=0 * ones)
        fast = evolve(x, recompute=int(Recompute.NONE) * ones, vpp=1 + interleaved)
        small = evolve(x, vpp=ones, shard=np.where(x.dp * x.cp > 1, self.leanest, int(Shard.NONE)))
        passes = _least_passes(x, interleaved, self.cache.workload.batch)
        nbytes = np.minimum(self._nbytes(small, base, FULL), self._nbytes(small, base, IDEAL))
        return self._pipeline_seconds(fast, base, passes) + self._counting_seconds(x, base), nbytes

    def _gathering_seconds(self, x: Layouts, base: Column) -> Rows:
        """Return the least seconds G in which one micro-batch gathers all sharded weights and reduces their gradients.

        It is 0 where no weights or gradients are sharded. One collective is no slower than several of its parts.
        """
        seconds, costs, job = np.zeros(len(x)), self.costs, self.cache.job
        if not (sharded := np.flatnonzero(x.fsdp)).size:
            return seconds
        first, all_alike = alike(base[sharded], *(getattr(x, name)[sharded] for name in GATHERED_BY))
        some, base = x.take(sharded[first]), base[sharded[first]]
        elements, shards = (costs.params[base], costs.expert_params[base]), (some.shard, some.expert_shard)
        mesh = some.tp, some.dp * some.cp, some.ep, some.etp
        least, which = known_of(
            (*elements, *mesh, *shards, some.reshard, some.replicas, some.grad_reduce),
            self._gathers,
            lambda i, dense, sparse: pass_seconds(dense, sparse, some[i], job),
        )
        seconds[sharded] = np.array(least)[which][all_alike]
        return seconds

    def _counting_seconds(self, x: Layouts, base: Column) -> Rows:
        """Return the least seconds of the forward passes that count the load of experts, 0 where there are none.

        Bound: C ≥ F + (m − 1) F / p, with F the forward seconds of one micro-batch. The first one passes all stages;
        the slowest rank takes at least the mean for each other one.
        """
        m = x.microbatches(self.cache.workload.batch)
        seconds: Rows = (1 + (m - 1) / x.pp) * self.costs.forward_seconds[base] * self.cache.job.repeats_forward
        return seconds

    def _pipeline_seconds(self, x: Layouts, base: Column, passes: Rows, waiting: Rows | float = 0.0) -> Rows:
        """Return least seconds up to the last backward pass; `passes` micro-batches through the model are certain.

        waiting: seconds that a micro-batch waits for sharded weights, at least and over all stages.
        """
        m, pp, one = x.microbatches(self.cache.workload.batch).astype(float), x.pp.astype(float), x.vpp == 1
        sends = np.where(one, 2 * (pp - 1) * self.costs.send_seconds[base], 0.0)  # without interleaving ranks wait
        return self._passes_seconds(x, base, np.maximum(passes, m / pp), sends + waiting)

    def _passes_seconds(self, x: Layouts, base: Column, count: Rows, more: Rows | float) -> Rows:
        """Return the least of `count` · (T + more) over all partitions.

        If the first n blocks of each stage are recomputed, a stage of b blocks recomputes min(n, b). No stage has more
        blocks than fit into the step, at the seconds of the fastest block; hence all N blocks recompute at least
        N · min(1, n / that number). The bound solves this for the step.
        """
        mode, n, some, costs = self._modes(x), x.recompute_layers, x.recompute_layers > 0, self.costs
        plain, whole = count * (costs.seconds[base, PLAIN] + more), count * (costs.seconds[base, mode] + more)
        if not some.any():
            return whole
        recompute, m = count * costs.recompute_seconds[base], x.microbatches(self.cache.workload.batch)
        root = (plain + np.sqrt(plain**2 + 4 * recompute * costs.blocks * n * costs.block_seconds[base] * m)) / 2
        least = np.maximum(root, plain + recompute * np.minimum(n, costs.blocks))
        return np.where(some, np.minimum(least, plain + recompute * costs.blocks), whole)

    def _modes(self, x: Layouts) -> Column:
        """Return the recompute mode of each layout, a column of `costs`."""
        module_bits = x.recomputed_module_bits
        for number in np.flatnonzero(np.bincount(module_bits)).tolist():
            if number and not self._mode_of[number]:
                self._mode_of[number] = self.costs.seconds.shape[1]
                self.costs = self.costs.with_modules(number)
        return np.where(x.full_recompute, FULL, self._mode_of[module_bits])

    def _nbytes(self, x: Layouts, base: Column, mode: Column | int) -> Rows:
        """Return the least bytes of the pipeline rank with the most memory."""
        costs, pp = self.costs, x.pp.astype(float)
        saved, some = costs.saved_nbytes[base, mode], x.recompute_layers > 0
        freed = np.minimum(x.recompute_layers * x.pp * x.vpp, costs.blocks) * costs.freed_nbytes[base]
        saved = np.where(some, np.maximum(saved, costs.saved_nbytes[base, PLAIN] - freed), saved)
        state = costs.state_nbytes[base, x.shard]
        held = least_rank_memory(state, saved, pp, self._in_flight(x))
        if len(which := np.flatnonzero((x.vpp > 1) & self.many[x.pp * x.vpp])):
            group = np.minimum(x.microbatch_group_size, x.microbatches(self.cache.workload.batch))[which]
            stage = self._stage_saved(x, base, mode)[which]
            rows = (state[which], saved[which], stage, x.pp[which], x.vpp[which], group)
            held[which] = np.maximum(held[which], interleaved_memory.interleaved_nbytes(*rows))
        nbytes: Rows = rank_memory(held + costs.runtime_nbytes[base], 0.0, 0.0, costs.workspace_nbytes[base, mode])
        return nbytes

    def _stage_saved(self, x: Layouts, base: Column, mode: Column | int) -> Rows:
        """Return the most bytes that a stage saves of one micro-batch, if no slower than the partitioner allows.

        The partitioner accepts stages of up to SLOWEST_FACTOR times the slowest stage of the balanced partition, which
        takes at most one segment more than the mean. A stage so long holds as many of the fastest blocks as fit in, two
        more that it has in part, and what lies outside blocks.
        """
        costs, some = self.costs, x.recompute_layers > 0
        whole = np.where(some, costs.seconds[base, FULL], costs.seconds[base, mode])
        longest = (WHOLE_BLOCKS * SLOWEST_FACTOR) * (
            whole / (x.pp * x.vpp) + costs.segment_seconds[base, x.full_recompute.astype(np.int64)]
        )
        all_blocks = x.full_recompute & ~some
        fastest = costs.block_seconds[base] + np.where(all_blocks, costs.recompute_seconds[base], 0.0)
        of_block, outside = costs.block_saved_nbytes[base, all_blocks.astype(np.int64)].T
        saved: Rows = (np.floor(longest / np.maximum(fastest, TINY)) + 2) * of_block + outside
        return saved

    def _in_flight(self, x: Layouts) -> tuple[Rows, Rows, Rows]:
        """Return what `least_rank_memory` needs to know of each schedule."""
        m, group = (
            np.minimum(x.microbatches(self.cache.workload.batch), x.pp),
            np.minimum(x.microbatch_group_size, 2 * x.pp),
        )
        interleaved = (x.vpp > 1).astype(np.int64)
        first, which = alike(x.pp, interleaved, group, m)
        means = [in_flight_means(int(x.pp[i]), bool(interleaved[i]), int(group[i]), int(m[i])) for i in first]
        fewest, inverse, total = np.array(means).reshape(-1, 3)[which].T
        return fewest, inverse, total
