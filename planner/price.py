"""The price of one layout: its stages, its step time by cause, its memory by holder.

Protocol: `price` cuts the graph, replays the schedule and adds what follows it. A `Pricer` keeps what layouts share;
its `bound` is the cheap lower bound by which a search leaves layouts out, `refined` what it takes to the price.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from attrs import define, field, frozen

from megaloom.dsl.facts import costs
from megaloom.dsl.graph import Graph

from . import memory, timeline, traffic
from .book import Book
from .cluster import Cluster
from .fit import MORE, Bounds, Fit, Placed, capacity, stages_of
from .layout import Layout, Workload
from .memory import Part
from .plan import Prediction, Stage
from .practice import OWN, Practice
from .sheet import AHEAD, BACK, Anatomy, Base, Col, Rows, Sheet, anatomy, sheet
from .tail import Cover, Tail, tail, tied
from .timeline import Timeline

CAUSES = {  # of the time that a pipeline rank computes for, and the columns that they are in
    "forward": [Col.FORWARD],
    "backward": [Col.BACKWARD],
    "recompute": [Col.AGAIN],
    "tensor-parallel communication": [Col.TP_FORWARD, Col.TP_BACKWARD],
    "context-parallel communication": [Col.CP_FORWARD, Col.CP_BACKWARD],
    "expert-parallel communication": [Col.EP_FORWARD, Col.EP_BACKWARD],
}


@frozen
class Priced:
    """A layout with its cut and what is predicted of it."""

    placed: Placed
    stages: tuple[Stage, ...]
    prediction: Prediction
    timeline: Timeline
    tails: tuple[Tail, ...]  # of each pipeline rank, what follows its last micro-batch

    @property
    def layout(self) -> Layout:
        """The layout that is priced."""
        return self.placed.layout

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds


def price(graph: Graph, layout: Layout, cluster: Cluster, workload: Workload) -> Priced:
    """What this legal layout takes, whether or not it fits the memory."""
    return Pricer(graph, cluster, workload).price(layout)


@define(eq=False)
class Pricer:
    """Prices layouts of one graph on one cluster; what they share is computed once."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    practice: Practice = OWN
    anatomy: Anatomy = field(init=False)
    book: Book = field(init=False)
    model_flops: int = field(init=False)  # of a step: no recompute, causal attention counted half
    _bases: dict[tuple[object, ...], Base] = field(factory=dict, init=False)
    _sheets: dict[tuple[object, ...], Sheet] = field(factory=dict, init=False)
    _cuts: dict[tuple[object, ...], Bounds] = field(factory=dict, init=False)
    _floors: dict[tuple[object, ...], tuple[Tail, float]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.anatomy = anatomy(self.graph)
        self.book = Book(self.anatomy, self.workload, self.cluster, self.practice)
        batch, seq = self.workload.batch, self.workload.seq
        work = [w for n in self.graph.nodes for w in costs(n, batch=batch, seq=seq).work]
        self.model_flops = sum(w.flops + w.dgrad + w.wgrad for w in work)

    def sheet(self, layout: Layout) -> Sheet:
        """The costs of every node under a layout."""
        where = _where(layout)
        key = (*where, layout.recompute)
        if key not in self._sheets:
            if where not in self._bases:
                self._bases[where] = self.book.base(layout)
            self._sheets[key] = sheet(self._bases[where], self.anatomy, layout, self.workload)
        return self._sheets[key]

    def price(self, layout: Layout) -> Priced:
        """The stages, the step time and the memory of a legal layout: cut to fit the memory if that can be."""
        return self.priced(self.place(layout))

    def place(self, layout: Layout) -> Placed:
        """The stages of a legal layout: the most even of those that fit the memory, or of all when none do."""
        even = self._even(layout)
        return even if even.fits else even.tight()

    def refined(self, layout: Layout) -> Iterator[float | Priced]:
        """Lower bounds of the seconds of a step of a legal layout, each dearer than the one before, then its price.

        Ends without a price if no cut fits the memory.
        """
        placed = self._even(layout)
        if not placed.fits:
            yield placed.fit.microbatches * max(placed.seconds)  # no cut has a quicker slowest stage
            placed = placed.tight()
            if not placed.fits:
                return
        after, _ = self._floor(layout, placed.fit.sheet)
        pipeline = timeline.bound(placed.seconds, layout.pp, placed.fit.microbatches)
        yield pipeline + after.optimizer + after.gathering
        yield self.priced(placed)

    @property
    def capacity(self) -> int:
        """Bytes of a device that a plan may fill."""
        return capacity(self.cluster)

    def _even(self, layout: Layout) -> Placed:
        fit = Fit(layout, self.sheet(layout), self.workload, self.cluster, self.practice)
        key = (*_where(layout), layout.recompute, layout.pp * layout.vpp)
        if key not in self._cuts:
            self._cuts[key] = fit.even()
        return Placed(fit, self._cuts[key])

    def priced(self, placed: Placed) -> Priced:
        """The step time of a layout whose stages have a place."""
        fit, bounds, sums, parts = placed.fit, placed.bounds, placed.sums, placed.parts
        layout, m = fit.layout, fit.microbatches
        forward, backward = sums[:, AHEAD].sum(axis=1).tolist(), sums[:, BACK].sum(axis=1).tolist()
        hops = [traffic.hop(fit.sheet.boundary, s, layout, self.cluster) for s in range(len(parts) - 1)]
        line = timeline.replay(forward, backward, hops, layout.pp, m)
        stages = tuple(
            Stage(
                rank=i % layout.pp,
                chunk=i // layout.pp,
                start=bounds[i],
                stop=bounds[i + 1],
                forward_seconds=forward[i],
                backward_seconds=backward[i],
                params=part.params + part.expert_params,
            )
            for i, part in enumerate(parts)
        )
        covers = [Cover(sum(backward[r :: layout.pp]), sum(forward[r :: layout.pp])) for r in range(layout.pp)]
        tails = [self._tail(fit, parts, bounds, r, cover) for r, cover in enumerate(covers)]
        prediction = self._predict(layout, m * sums, line, tails, placed.nbytes)
        return Priced(placed, stages, prediction, line, tuple(tails))

    def _tail(self, fit: Fit, parts: list[Part], bounds: Bounds, rank: int, cover: Cover) -> Tail:
        layout, mine = fit.layout, parts[rank :: fit.layout.pp]
        ties = 0.0
        for (_, nodes), elements in zip(self.anatomy.shared, fit.sheet.shared, strict=True):
            ranks = {stage % layout.pp for stage in stages_of(nodes, bounds)}
            ties += tied(elements, ranks, layout, self.cluster, self.practice) if rank in ranks else 0.0
        params, experts = sum(p.params for p in mine), sum(p.expert_params for p in mine)
        return tail(params, experts, ties, layout, self.workload.precision, self.cluster, self.practice, cover)

    def _predict(
        self, layout: Layout, sums: Rows, line: Timeline, tails: list[Tail], peaks: tuple[dict[str, int], ...]
    ) -> Prediction:
        """Every rank waits until all have reduced, for the gradient's norm; the step ends with the last of them.

        The breakdown is that of the rank that waits the least.
        """
        ranks = range(layout.pp)
        reduced = max(line.ends[r] + tails[r].reduction + tails[r].tied for r in ranks)
        end = reduced + max(tail.optimizer + tail.gathering for tail in tails)
        own = [line.busy[r] + line.sending[r] + tails[r].total for r in ranks]
        busiest = max(ranks, key=own.__getitem__)
        mine, after = sums[busiest :: layout.pp].sum(axis=0), tails[busiest]
        parts = {cause: float(mine[columns].sum()) for cause, columns in CAUSES.items()} | {
            "pipeline communication": line.sending[busiest],
            "pipeline bubble": max(0.0, end - own[busiest]) if layout.pp > 1 else 0.0,
            "gradient communication": after.reduction + after.gathering,
            "tied-weight communication": after.tied,
            "optimizer": after.optimizer,
        }
        breakdown = {cause: seconds for cause, seconds in parts.items() if seconds}
        step = sum(breakdown.values())
        flops = self.model_flops / step / layout.world
        return Prediction(
            step_seconds=step,
            tokens_per_second_per_device=self.workload.tokens / step / layout.world,
            flops_per_second_per_device=flops,
            mfu=flops / self.cluster.device.flops[self.workload.precision],
            bubble=max(0.0, 1 - sum(own) / (layout.pp * step)) if layout.pp > 1 else 0.0,
            breakdown=breakdown,
            nbytes=peaks,
        )

    def bound(self, layout: Layout) -> tuple[float, float]:
        """(seconds of a step, bytes of the fullest rank): no way to cut the graph into these stages takes less.

        Seconds: rank r waits for those before it, at the start and at the end, and does its share of every
        micro-batch. Whatever the shares t, max(m t[r] + sum of t before r) is least when all are equal, which is
        total / (1 - (1 - 1/m)^pp). With chunks, what is waited for may be as short as one likes.
        """
        sheet, m, pp = self.sheet(layout), layout.microbatches(self.workload.batch), layout.pp
        after, fixed = self._floor(layout, sheet)
        work = m * sheet.step / pp
        pipeline = work if layout.vpp > 1 or m == 1 else sheet.step / (1 - (1 - 1 / m) ** pp)
        seconds = max(pipeline, work + after.reduction, sheet.step) + after.optimizer + after.gathering
        params, experts = sheet.params
        state = sum(memory.static(params, experts, layout, self.workload.precision, self.practice).values())
        return seconds, fixed + memory.least(state, MORE * sheet.saved, layout, m) + MORE * sheet.workspace

    def _floor(self, layout: Layout, sheet: Sheet) -> tuple[Tail, float]:
        """What the average rank does after its micro-batches, and the bytes that no tensor holds."""
        key = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.distributed_optimizer)
        if key not in self._floors:
            params, experts = (n / layout.pp for n in sheet.params)
            wide = Cover(inf, inf)
            after = tail(params, experts, 0.0, layout, self.workload.precision, self.cluster, self.practice, wide)
            self._floors[key] = after, memory.runtime(layout, self.cluster)
        return self._floors[key]


def _where(layout: Layout) -> tuple[object, ...]:
    """What the costs of a node depend on."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel, layout.micro_batch
