"""What layouts take at the least, many at once: seconds of a step, bytes of the fullest rank.

Protocol: `Floors` prices the places of a search by whole columns; `bound` says it of layouts at them. No way to cut the
graph into stages takes less. What a place costs without a schedule is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, evolve, field, fields_dict, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.choices import Module, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import (
    Column,
    Layouts,
    Rows,
    alike,
)
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.columns import FORWARD_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.cost.memory import rank_memory
from megaloom.planner.cost.recompute import ModuleRecompute
from megaloom.planner.partition.local_search import SLOWEST_FACTOR

from . import interleaved_memory, pipeline
from .end_of_step import after
from .rank_memory import in_flight_means, least_rank_memory

ROUNDING = 1 - 1e-6
PLAIN, ALL, LEAN = 0, 1, 2  # what is computed again: nothing, all, and all modules at no cost; then sets of modules


@frozen(eq=False)
class BaseCosts:
    """What each place costs, whatever its schedule. Seconds and bytes are of one micro-batch and of the whole model."""

    step: Rows  # [places, modes]
    saved: Rows  # [places, modes]
    workspace: Rows  # [places, modes]
    repeats: ModuleRecompute  # of the places that differ in costs
    like: Column  # which of these each place is like
    state: Rows  # [places, 2]: bytes of weights, gradients, optimizer, without and with the distributed one
    beside: Rows  # bytes that no tensor holds
    again: Rows  # seconds that it takes to compute a block again, the quickest
    block: Rows  # seconds of a block, the quickest
    frees: Rows  # bytes that computing a block again frees, at the most
    ahead: Rows  # of the seconds of what no cut divides, the share that is forward, where it is the largest
    atom: Rows  # [places, 2]: seconds of what no cut divides, the slowest; if nothing is computed again, and if all is
    kept: Rows  # [places, 2, 2]: likewise, bytes that a block saves, at the most, and those of what is in none
    params: Column  # elements on one device: dense ones
    experts: Column
    hop: Rows  # seconds of what passes from a stage to the next, between the nearest
    blocks: int  # that may be computed again by their number

    def joined(self, more: BaseCosts) -> BaseCosts:
        """Return the costs of these base layouts, then of more of them, in the modes that all have."""
        columns = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in fields_dict(BaseCosts)
            if name not in ("repeats", "like", "blocks", "step", "saved", "workspace")
        }
        modes = {
            name: np.concatenate([getattr(part, name)[:, : LEAN + 1] for part in (self, more)])
            for name in ("step", "saved", "workspace")
        }
        like = np.concatenate([self.like, more.like + len(self.repeats.saved)])
        return BaseCosts(**columns, **modes, repeats=self.repeats.joined(more.repeats), like=like, blocks=self.blocks)


LARGE = 1 << 20  # sequences of a micro-batch that is so large that nothing is left of what it costs once


def large_batch_seconds(base: Layouts, cost_cache: CostCache) -> Rows:
    """Lower bound of the step seconds of each base layout, from one price a device mesh: [base layouts].

    The step takes at least batch / (dp pp) sequences times the seconds a sequence of a very large micro-batch.
    """
    large = evolve(base, micro_batch=np.full(len(base), LARGE))
    first, which = alike(*(getattr(large, name) for name in WHERE))
    rows = cost_cache.rows(large.take(first))[0]
    seconds = rows[:, :, STEP_COLUMNS].sum(axis=2) @ cost_cache.structure.kind_counts / LARGE
    least: Rows = ROUNDING * cost_cache.workload.batch / (base.dp * base.pp) * seconds[which]
    return least


def largest_tensor_fits(at: Layouts, book: CostCache, capacity: float) -> NDArray[np.bool_]:
    """Of which places the largest tensor alone leaves room in the memory, whatever the schedule."""
    return rank_memory(0.0, 0.0, 0.0, 2 * book.largest(at)) <= capacity


@frozen(eq=False)
class BoundedLayouts:
    """Layouts at places, and what each takes at the least."""

    layouts: Layouts
    place: Column
    seconds: Rows  # of a step
    nbytes: Rows  # of the fullest rank
    after: Rows  # seconds of them for what follows the last micro-batch

    @classmethod
    def joined(cls, parts: Sequence[BoundedLayouts]) -> BoundedLayouts:
        """All of these."""
        columns = (np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS)
        return cls(Layouts.joined([p.layouts for p in parts]), *columns)

    def __len__(self) -> int:
        return len(self.place)

    def take(self, which: Column | NDArray[np.bool_] | slice) -> BoundedLayouts:
        """Some of them."""
        return BoundedLayouts(self.layouts.take(which), *(getattr(self, name)[which] for name in COLUMNS))


COLUMNS = ("place", "seconds", "nbytes", "after")


@define(eq=False)
class LowerBounds:
    """The lower bounds of all layouts at some places."""

    at: Layouts
    cost_cache: CostCache
    base_costs: BaseCosts = field(init=False)
    many: NDArray[np.bool_] = field(init=False)  # see `chunks.many`
    modes: Column = field(init=False)  # of each set of modules, the mode of the ground; made as they are met

    def __attrs_post_init__(self) -> None:
        self.base_costs = self._base_costs()
        self.many = interleaved_memory.many(len(self.cost_cache.structure.cut_points) - 1)
        self.modes = np.zeros(1 << len(Module), dtype=np.int64)

    def extend(self, base: Layouts) -> None:
        """Add base layouts behind those that are there."""
        if not len(base):
            return
        more = LowerBounds(base, self.cost_cache)
        self.at = Layouts.joined([self.at, base])
        self.base_costs = self.base_costs.joined(more.base_costs)
        self.modes = np.zeros(1 << len(Module), dtype=np.int64)

    def family(self, which: Column) -> Column:
        """The sets of modules that a search looks at, at these places: [places, counts]."""
        return self.base_costs.repeats.module_sets[self.base_costs.like[which]]

    def bound(self, x: Layouts, place: Column) -> BoundedLayouts:
        """These layouts, each at a place, and what they take at the least."""
        m, g = x.microbatches(self.cost_cache.workload.batch), self.base_costs
        beyond = after(x, place, g.params, g.experts, self.cost_cache)
        waits, passed = pipeline.share(
            x.pp.astype(float), x.vpp, m.astype(float), x.microbatch_group_size.astype(float)
        )
        seconds, nbytes = self._before(x, place, waits) + passed * g.hop[place], self._nbytes(x, place, self._mode(x))
        mean = self._whole(x, place, m / x.pp, 0.0) + beyond[:, 1]  # every rank ends, and reduces its gradients
        return BoundedLayouts(x, place, np.maximum(seconds, mean) + beyond[:, 0], nbytes, beyond[:, 0])

    def _before(self, x: Layouts, place: Column, waits: Rows) -> Rows:
        """Seconds of a step without what follows the last micro-batch; `waits` is `bubbles.share`."""
        m, pp, one = x.microbatches(self.cost_cache.workload.batch).astype(float), x.pp.astype(float), x.vpp == 1
        sent = np.where(one, 2 * (pp - 1) * self.base_costs.hop[place], 0.0)  # ranks wait for their own sends
        alone = np.where(one, pipeline.alone(pp, m, self.base_costs.ahead[place]), 1.0)
        each = self._whole(x, place, np.maximum(waits, m / pp), sent), self._whole(x, place, alone, 0.0) + sent
        seconds: Rows = np.maximum(*each)
        return seconds

    def _mode(self, x: Layouts) -> Column:
        """The mode of each layout."""
        bits = x.recomputed_module_bits
        for number in np.flatnonzero(np.bincount(bits)).tolist():
            if number and not self.modes[number]:
                self.modes[number] = self._more(number)
        return np.where(x.full_recompute, ALL, self.modes[bits])

    def _more(self, number: int) -> int:
        """A mode more: that of a set of modules."""
        g = self.base_costs
        made, freed, back = (column[g.like] for column in g.repeats.of_set(number))
        self.base_costs = evolve(
            g,
            step=np.column_stack([g.step, g.step[:, PLAIN] + made]),
            saved=np.column_stack([g.saved, g.saved[:, PLAIN] - freed]),
            workspace=np.column_stack([g.workspace, g.workspace[:, PLAIN] + back]),
        )
        return int(g.step.shape[1])

    def _nbytes(self, x: Layouts, place: Column, mode: Column | int) -> Rows:
        """Bytes of the fullest rank."""
        g, pp = self.base_costs, x.pp.astype(float)
        saved = g.saved[place, mode]
        some = x.recompute_layers > 0
        freed = np.minimum(x.recompute_layers * x.pp * x.vpp, g.blocks) * g.frees[place]
        saved = np.where(some, np.maximum(saved, g.saved[place, PLAIN] - freed), saved)
        flights = self._flights(x)
        state = g.state[place, x.shard]
        held = least_rank_memory(state, saved, pp, flights)
        if len(which := np.flatnonzero((x.vpp > 1) & self.many[x.pp * x.vpp])):
            group = np.minimum(x.microbatch_group_size, x.microbatches(self.cost_cache.workload.batch))
            each, rest = self._stage(x, place, mode), (x.pp[which], x.vpp[which], group[which])
            chunked = interleaved_memory.held(state[which], saved[which], each[which], *rest)
            held[which] = np.maximum(held[which], chunked)
        nbytes: Rows = rank_memory(held + g.beside[place], 0.0, 0.0, g.workspace[place, mode])
        return nbytes

    def _stage(self, x: Layouts, place: Column, mode: Column | int) -> Rows:
        """Bytes that a stage saves, at the most, if it takes up to SLOWEST_FACTOR times the slowest of the most even cut.

        That is an atom more than their mean at the most. So long a stage has so many blocks, two begun ones, and what
        is in none.
        """
        g, some = self.base_costs, x.recompute_layers > 0
        whole = np.where(some, g.step[place, ALL], g.step[place, mode])
        most = SLOWEST_FACTOR * (whole / (x.pp * x.vpp) + g.atom[place, x.full_recompute.astype(np.int64)])
        everything = x.full_recompute & ~some
        quickest = g.block[place] + np.where(everything, g.again[place], 0.0)
        kept = g.kept[place, everything.astype(np.int64)]
        saved: Rows = (np.floor(most / np.maximum(quickest, interleaved_memory.TINY)) + 2) * kept[:, 0] + kept[:, 1]
        return saved

    def ideal(self, first: int = 0) -> tuple[Rows, Rows]:
        """(seconds, nbytes) that no layout at a place takes less than, for each place from the first on."""
        at, place = self.at.take(slice(first, None)), np.arange(first, len(self.at))
        one = np.ones(len(at), dtype=np.int64)
        quick = evolve(at, recompute=int(Recompute.NONE) * one, vpp=np.minimum(2, at.pp))
        lean = evolve(at, vpp=one, shard=np.minimum(1, at.dp * at.cp - 1))
        m = at.microbatches(self.cost_cache.workload.batch).astype(float)
        nbytes = np.minimum(self._nbytes(lean, place, ALL), self._nbytes(lean, place, LEAN))
        return self._before(quick, place, m / at.pp), nbytes

    def worthwhile(self, x: Layouts, place: Column) -> NDArray[np.bool_]:
        """Whether recompute frees what is worth the trouble: fused attention leaves little to its core."""
        r, bits, at = self.base_costs.repeats, x.recomputed_module_bits, self.base_costs.like[place]
        worth: NDArray[np.bool_] = (bits == 0) | ((r.module_sets[at] == bits[:, None]) & r.worthwhile[at]).any(axis=1)
        return worth

    def _whole(self, x: Layouts, place: Column, share: Rows, more: Rows | float) -> Rows:
        """So many times the seconds of a micro-batch through the model, and those more, at the least.

        Where the first n blocks of a stage are computed again, a stage with b blocks computes min(n, b) again. None has
        more blocks than fit the time of a rank, of which a step takes m or more, so that all compute
        blocks * min(1, n / most) or more again.
        """
        mode, n, some = self._mode(x), x.recompute_layers, x.recompute_layers > 0
        g = self.base_costs
        plain, whole = share * (g.step[place, PLAIN] + more), share * (g.step[place, mode] + more)
        if not some.any():
            return whole
        again, m = share * g.again[place], x.microbatches(self.cost_cache.workload.batch)
        root = (plain + np.sqrt(plain**2 + 4 * again * g.blocks * n * g.block[place] * m)) / 2
        least = np.maximum(root, plain + again * np.minimum(n, g.blocks))
        return np.where(some, np.minimum(least, plain + again * g.blocks), whole)

    def _hops(self) -> Rows:
        """Seconds of what passes from stage to stage: from the first two, which if any do share a node."""
        x, book = self.at, self.cost_cache
        width = book.workload.precision.nbytes * book.structure.hidden_size
        passed = width * (x.micro_batch * book.workload.seq // x.cp) // np.where(x.sequence_parallel, x.tp, 1)
        first, which = alike(passed, x.pp, x.tp, x.sequence_parallel)
        scattered = book.profile.overlap.scattered_sends
        hops = [
            communication.p2p_seconds(int(passed[i]), 0, x[int(i)], book.cluster, scattered=scattered) for i in first
        ]
        return np.array(hops)[which]

    def _flights(self, x: Layouts) -> tuple[Rows, Rows, Rows]:
        m = np.minimum(x.microbatches(self.cost_cache.workload.batch), x.pp)
        interleaved = (x.vpp > 1).astype(np.int64)
        group = np.minimum(x.microbatch_group_size, 2 * x.pp)
        first, which = alike(x.pp, interleaved, group, m)
        found = np.array([in_flight_means(int(x.pp[i]), bool(interleaved[i]), int(group[i]), int(m[i])) for i in first])
        few, inverse, total = found.reshape(-1, 3)[which].T
        return few, inverse, total

    def _base_costs(self) -> BaseCosts:
        first, which = alike(*(getattr(self.at, name) for name in WHERE))
        one = self.at.take(first)
        rows, made, full, largest = self.cost_cache.rows(one)
        kinds, blocks = self.cost_cache.structure.kind_counts, self.cost_cache.structure.distinct_blocks
        atoms, outside = (
            self.cost_cache.structure.distinct_segments,
            kinds - self.cost_cache.structure.kind_counts_in_blocks,
        )
        inside = np.array([kind.in_recomputed_block for kind in self.cost_cache.structure.kinds])
        plain, ahead = rows[:, :, STEP_COLUMNS].sum(axis=2), rows[:, :, FORWARD_COLUMNS].sum(axis=2)
        again = np.where(inside, ahead, 0.0)
        freed = np.where(inside, rows[:, :, CostColumn.SAVED] - full, 0.0)
        saved = rows[:, :, CostColumn.SAVED]
        repeats = ModuleRecompute.of(self.cost_cache.structure, made, saved @ kinds)
        room = 2 * largest.max(axis=1) + self.cost_cache.library
        params, experts = self._params(rows, one)
        return BaseCosts(
            step=np.array([t @ kinds for t in (plain, plain + again, plain)]).T[which],
            saved=np.array([saved @ kinds, full @ kinds, saved @ kinds - repeats.most]).T[which],
            workspace=np.array([room, room + saved @ self.cost_cache.structure.largest_block, room]).T[which],
            repeats=repeats,
            like=which,
            state=self._state(params[which], experts[which]),
            beside=self._beside(),
            again=_extreme(again @ blocks.T, np.min)[which],
            block=_extreme(plain @ blocks.T, np.min)[which],
            frees=_extreme(freed @ blocks.T, np.max)[which],
            ahead=((ahead @ atoms.T) / np.maximum(plain @ atoms.T, interleaved_memory.TINY)).max(axis=1)[which],
            atom=np.array([_extreme(t @ atoms.T, np.max) for t in (plain, plain + again)]).T[which],
            kept=np.array([(_extreme(t @ blocks.T, np.max), t @ outside) for t in (saved, full)]).transpose(2, 0, 1)[
                which
            ],
            params=params[which],
            experts=experts[which],
            hop=self._hops(),
            blocks=self.cost_cache.structure.recomputable_blocks,
        )

    def _params(self, rows: Rows, one: Layouts) -> tuple[Column, Column]:
        """The elements of the whole model on one device, each weight once: dense ones, and experts'."""
        twice = np.zeros(len(one))
        if self.cost_cache.structure.shared_weights:
            first, which = alike(one.tp, one.cp, one.sequence_parallel)
            for i, users in enumerate(len(nodes) for _, nodes in self.cost_cache.structure.shared_weights):
                sizes = [self.cost_cache.shared(one[int(k)])[i] for k in first]
                twice += (users - 1) * np.array(sizes)[which]
        whole = (
            rows[:, :, [CostColumn.PARAMS, CostColumn.EXPERT_PARAMS]].transpose(0, 2, 1)
            @ self.cost_cache.structure.kind_counts
        )
        return (whole[:, 0] - twice).astype(np.int64), whole[:, 1].astype(np.int64)

    def _state(self, params: Column, experts: Column) -> Rows:
        out = []
        for on in (0, 1):
            layouts = evolve(self.at, shard=np.full(len(self.at), on))
            cache = self.cost_cache
            held = memory.state_bytes(params, experts, layouts, cache.workload.precision, cache.profile)
            out.append(sum(held.values()))
        return np.array(out, dtype=float).T

    def _beside(self) -> Rows:
        x = self.at
        several = [(n > 1).astype(np.int64) for n in (x.tp, x.cp, x.dp * x.cp, x.pp, x.ep, x.etp, x.edp)]
        first, which = alike(*several, np.minimum(x.ep, memory.PEERS))
        book = self.cost_cache
        return np.array([float(memory.reserved_bytes(x[int(i)], book.cluster, book.profile)) for i in first])[which]


WHERE = (
    "tp",
    "cp",
    "ep",
    "etp",
    "sequence_parallel",
    "micro_batch",
    "microbatch_overlap_bits",
)  # what the costs of a node depend on


def where(layout: Layout) -> tuple[object, ...]:
    """What the costs of a node depend on."""
    return tuple(getattr(layout, name) for name in WHERE)


def _extreme(rows: Rows, of: Callable[..., Rows]) -> Rows:
    """The least or the greatest of each row; 0 where there is none."""
    return of(rows, axis=1) if rows.shape[1] else np.zeros(len(rows))
