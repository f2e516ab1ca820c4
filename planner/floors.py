"""What layouts take at the least, many at once: seconds of a step, bytes of the fullest rank.

Protocol: `Floors` prices the places of a search by whole columns; `bound` is (seconds, nbytes) of layouts at them. No
way to cut the graph into stages takes less. What a place costs without a schedule is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from . import bubbles, memory, traffic
from .book import Book
from .columns import MODES, Column, Layouts, alike
from .layout import Layout, Recompute
from .memory import MORE
from .sheet import STEP, TRAFFIC, Col, Rows
from .tail import tail

NONE, SELECTIVE, FULL = (MODES.index(mode) for mode in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
FREED = 0.02  # of what is saved: what selective recompute frees at the least


@frozen(eq=False)
class Ground:
    """What each place costs, whatever its schedule. Seconds and bytes are of one micro-batch and of the whole model."""

    step: Rows  # [places, modes]
    saved: Rows  # [places, modes]
    workspace: Rows  # [places, modes]
    state: Rows  # [places, 2]: bytes of weights, gradients, optimizer, without and with the distributed one
    beside: Rows  # bytes that no tensor holds
    again: Rows  # seconds that it takes to compute a block again, the quickest
    block: Rows  # seconds of a block, the quickest
    frees: Rows  # bytes that computing a block again frees, at the most
    params: Column  # elements on one device: dense ones
    experts: Column
    hop: Rows  # seconds of what passes from a stage to the next, between the nearest
    blocks: int


def roomy(at: Layouts, book: Book, capacity: float) -> NDArray[np.bool_]:
    """Of which places the largest tensor alone leaves room in the memory, whatever the schedule."""
    return MORE * 2 * book.largest(at) <= capacity


@define(eq=False)
class Floors:
    """The lower bounds of all layouts at some places."""

    at: Layouts
    book: Book
    ground: Ground = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.ground = self._ground()

    def bound(self, x: Layouts, place: Column) -> tuple[Rows, Rows]:
        """(seconds of a step, bytes of the fullest rank) of these layouts, each at a place."""
        seconds, nbytes = self.before(x, place)
        m, after = x.microbatches(self.book.workload.batch), self._after(x, place)
        mean = m / x.pp * self._work(x, place)[1] + after[:, 1]  # every rank ends, and reduces its gradients
        return np.maximum(seconds, mean) + after[:, 0], nbytes

    def before(self, x: Layouts, place: Column, waits: Rows | None = None) -> tuple[Rows, Rows]:
        """The same without what follows the last micro-batch."""
        m, pp = x.microbatches(self.book.workload.batch).astype(float), x.pp.astype(float)
        least, total = self._work(x, place)
        waits = bubbles.share(pp, x.vpp, m, x.group.astype(float)) if waits is None else waits
        sent = np.where(x.vpp == 1, 2 * (pp - 1) * self.ground.hop[place], 0.0)  # ranks wait for their own sends
        seconds = np.maximum(np.maximum((total + sent) * waits, m * least), total)
        g, mode = self.ground, x.recompute
        saved = g.saved[place, mode]
        some = x.recompute_layers > 0
        freed = np.minimum(x.recompute_layers * x.pp * x.vpp, g.blocks) * g.frees[place]
        saved = np.where(some, np.maximum(saved, g.saved[place, NONE] - freed), saved)
        flights = self._flights(x)
        held = memory.least(g.state[place, x.distributed_optimizer], MORE * saved, pp, flights)
        return seconds, held + g.beside[place] + MORE * g.workspace[place, mode]

    def ideal(self) -> tuple[Rows, Rows]:
        """(seconds, nbytes) that no layout at a place takes less than, for each place."""
        place, one = np.arange(len(self.at)), np.ones(len(self.at), dtype=np.int64)
        quick, m = evolve(self.at, recompute=NONE * one), self.at.microbatches(self.book.workload.batch)
        several = (self.at.pp > 1) & (self.at.pp <= m)
        lean = evolve(self.at, vpp=one, distributed_optimizer=np.minimum(1, self.at.dp * self.at.cp - 1))
        modes = [self.before(evolve(lean, recompute=mode * one), place)[1] for mode in (NONE, SELECTIVE, FULL)]
        waits = np.where(
            several, m / self.at.pp, bubbles.share(self.at.pp.astype(float), one, m.astype(float), one.astype(float))
        )
        quick = evolve(quick, vpp=1 + several)
        return self.before(quick, place, waits)[0], np.minimum.reduce(modes)

    def worthwhile(self, x: Layouts, place: Column) -> NDArray[np.bool_]:
        """Whether recompute frees what is worth the trouble: fused attention leaves little to selective recompute."""
        saved = self.ground.saved
        frees = saved[:, SELECTIVE] < (1 - FREED) * saved[:, NONE]
        worth: NDArray[np.bool_] = (x.recompute != SELECTIVE) | frees[place]
        return worth

    def _work(self, x: Layouts, place: Column) -> tuple[Rows, Rows]:
        """Seconds of a micro-batch: on the slowest rank, and on all of them together, at the least.

        Where the first n blocks of a stage are computed again, a rank with b blocks computes min(n, b) or more again.
        No rank has more blocks than fit its time, so that all ranks do so for blocks * min(1, n / most) or more.
        """
        g = self.ground
        plain, whole, pp = g.step[place, NONE], g.step[place, x.recompute], x.pp
        some, n = x.recompute_layers > 0, x.recompute_layers
        again, block = g.again[place], g.block[place]
        root = (plain + np.sqrt(plain**2 + 4 * pp * again * g.blocks * n * block)) / (2 * pp)
        least = np.minimum(root, (plain + again * g.blocks) / pp)
        total = plain + again * np.minimum(n, g.blocks)
        return np.where(some, least, whole / pp), np.where(some, np.minimum(total, whole), whole)

    def _after(self, x: Layouts, place: Column) -> Rows:
        """[layouts, 2]: seconds of the optimizer and gathering, and of reduction, that the average rank takes.

        What is hidden behind computation counts for nothing.
        """
        b, g = self.book, self.ground
        how = evolve(b.practice, overlap_gradients=False, overlap_weights=False)
        shown = np.array([not b.practice.overlap_weights, not b.practice.overlap_gradients])
        first, which = alike(place, x.distributed_optimizer)
        rows = []
        for i in first.tolist():
            params, experts = (float(n[place[i]]) / x.pp[i] for n in (g.params, g.experts))
            t = tail(params, experts, 0.0, x[i], b.workload.precision, b.cluster, how)
            rows.append((t.optimizer, t.gathering, t.reduction))
        optimizer, *exchanged = np.array(rows).reshape(-1, 3)[which].T
        after: Rows = np.array(exchanged).T * shown
        after[:, 0] += optimizer
        return after

    def _hops(self) -> Rows:
        """Seconds of what passes from stage to stage: from the first two, which if any do share a node."""
        x, book = self.at, self.book
        width = book.workload.precision.nbytes * book.anatomy.embed
        passed = width * (x.micro_batch * book.workload.seq // x.cp) // np.where(x.sequence_parallel, x.tp, 1)
        first, which = alike(passed, x.pp)
        return np.array([traffic.hop(int(passed[i]), 0, x[int(i)], book.cluster) for i in first])[which]

    def _flights(self, x: Layouts) -> tuple[Rows, Rows, Rows]:
        m = np.minimum(x.microbatches(self.book.workload.batch), x.pp)
        chunks = (x.vpp > 1).astype(np.int64)
        group = np.minimum(x.group, 2 * x.pp)
        first, which = alike(x.pp, chunks, group, m)
        found = np.array([memory.means(int(x.pp[i]), bool(chunks[i]), int(group[i]), int(m[i])) for i in first])
        few, inverse, total = found.reshape(-1, 3)[which].T
        return few, inverse, total

    def _ground(self) -> Ground:
        first, which = alike(*(getattr(self.at, name) for name in WHERE))
        one = self.at.take(first)
        rows, core, full, largest = self.book.rows(one)
        kinds, blocks = self.book.anatomy.counts, self.book.anatomy.blocks
        inside = np.array([kind.inside for kind in self.book.anatomy.kinds])
        plain = rows[:, :, STEP].sum(axis=2)
        again = np.where(inside, rows[:, :, Col.FORWARD] + sum(rows[:, :, ahead] for ahead, _ in TRAFFIC_PAIRS), 0.0)
        freed = np.where(inside, rows[:, :, Col.SAVED] - full, 0.0)
        saved = rows[:, :, Col.SAVED]
        steps = [plain, plain + core[:, :, 0] + core[:, :, 1], plain + again]
        kept = [saved, saved - core[:, :, 2], full]
        room = 2 * largest.max(axis=1) + self.book.library
        work = [room, room + core[:, :, 2].max(axis=1), room + saved @ self.book.anatomy.block]
        order = np.argsort([NONE, SELECTIVE, FULL])
        params, experts = self._params(rows, one)
        return Ground(
            step=np.array([t @ kinds for t in steps])[order].T[which],
            saved=np.array([t @ kinds for t in kept])[order].T[which],
            workspace=np.array(work)[order].T[which],
            state=self._state(params[which], experts[which]),
            beside=self._beside(),
            again=_extreme(again @ blocks.T, np.min)[which],
            block=_extreme(plain @ blocks.T, np.min)[which],
            frees=_extreme(freed @ blocks.T, np.max)[which],
            params=params[which],
            experts=experts[which],
            hop=self._hops(),
            blocks=len({n.block for n in self.book.anatomy.graph.nodes} - {None}),
        )

    def _params(self, rows: Rows, one: Layouts) -> tuple[Column, Column]:
        """The elements of the whole model on one device, each weight once: dense ones, and experts'."""
        twice = np.zeros(len(one))
        if self.book.anatomy.shared:
            first, which = alike(one.tp, one.cp, one.sequence_parallel)
            for i, users in enumerate(len(nodes) for _, nodes in self.book.anatomy.shared):
                sizes = [self.book.shared(one[int(k)])[i] for k in first]
                twice += (users - 1) * np.array(sizes)[which]
        whole = rows[:, :, [Col.PARAMS, Col.EXPERT_PARAMS]].transpose(0, 2, 1) @ self.book.anatomy.counts
        return (whole[:, 0] - twice).astype(np.int64), whole[:, 1].astype(np.int64)

    def _state(self, params: Column, experts: Column) -> Rows:
        out = []
        for on in (0, 1):
            layouts = evolve(self.at, distributed_optimizer=np.full(len(self.at), on))
            held = memory.static(params, experts, layouts, self.book.workload.precision, self.book.practice)  # type: ignore[arg-type]
            out.append(sum(held.values()))
        return np.array(out, dtype=float).T

    def _beside(self) -> Rows:
        x = self.at
        several = [(n > 1).astype(np.int64) for n in (x.tp, x.cp, x.dp * x.cp, x.pp, x.ep, x.etp, x.edp)]
        first, which = alike(*several)
        return np.array([float(memory.runtime(x[int(i)], self.book.cluster)) for i in first])[which]


WHERE = ("tp", "cp", "ep", "etp", "sequence_parallel", "micro_batch")  # what the costs of a node depend on
TRAFFIC_PAIRS = sorted(set(TRAFFIC.values()))


def where(layout: Layout) -> tuple[object, ...]:
    """What the costs of a node depend on."""
    return tuple(getattr(layout, name) for name in WHERE)


def _extreme(rows: Rows, of: Callable[..., Rows]) -> Rows:
    """The least or the greatest of each row; 0 where there is none."""
    return of(rows, axis=1) if rows.shape[1] else np.zeros(len(rows))
