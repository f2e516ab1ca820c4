"""The price of one layout: its stages, its step time by cause, its memory by holder.

Protocol: `price` cuts the graph, replays the schedule and adds what follows it: gradient reduction, tied weights, the
optimizer. The runtime overlaps none of that with compute, so all of it counts. A `Pricer` keeps what layouts share;
its `bound` is the cheap lower bound by which a search leaves layouts out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from megaloom.dsl.facts import costs
from megaloom.dsl.graph import Graph

from . import memory, timeline, traffic
from .cluster import Cluster
from .layout import Layout, Precision, Workload
from .memory import Part
from .plan import Prediction, Stage
from .sheet import AHEAD, BACK, STEP, Anatomy, Base, Col, Rows, Sheet, anatomy, base, sheet
from .stages import cut
from .timeline import Timeline
from .traffic import Group

# Bytes that a step moves for each element of the optimizer's share: 4 for the gradient's norm and 8 for its scaling;
# AdamW as torch's foreach kernels do it, a pass for each operation (decay 8, first moment 12, second moment 8 + 12,
# root 8, division 8, epsilon 8, update 16); and for bf16 the copy of the master weight.
STEP_TRAFFIC = {Precision.FP32: 4 + 8 + 80, Precision.BF16: 4 + 8 + 80 + 4 + 2}
ZERO_TRAFFIC = 4  # the whole gradient buffer is zeroed

CAUSES = {  # of the time of a pipeline rank that computes, and the columns that they are in
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

    layout: Layout
    stages: tuple[Stage, ...]
    prediction: Prediction
    timeline: Timeline
    capacity: int  # bytes of one device

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each pipeline rank holds at its fullest."""
        return tuple(sum(held.values()) for held in self.prediction.nbytes)

    @property
    def excess(self) -> int:
        """Bytes that the fullest rank lacks; negative when there is room."""
        return max(self.peaks) - self.capacity

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds


@frozen
class Tail:
    """What follows the last micro-batch on one rank, in seconds."""

    reduction: float  # of gradients; with the distributed optimizer, then the gathering of new weights
    gathering: float
    tied: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.reduction + self.gathering + self.tied + self.optimizer


def price(graph: Graph, layout: Layout, cluster: Cluster, workload: Workload) -> Priced:
    """What this legal layout takes, whether or not it fits the memory."""
    return Pricer(graph, cluster, workload).price(layout)


@define(eq=False)
class Pricer:
    """Prices layouts of one graph on one cluster; what they share is computed once."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    anatomy: Anatomy = field(init=False)
    model_flops: int = field(init=False)  # of a step: no recompute, causal attention counted half
    _bases: dict[tuple[object, ...], Base] = field(factory=dict, init=False)
    _sheets: dict[tuple[object, ...], Sheet] = field(factory=dict, init=False)
    _cuts: dict[tuple[object, ...], tuple[int, ...]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.anatomy = anatomy(self.graph)
        batch, seq = self.workload.batch, self.workload.seq
        work = [w for n in self.graph.nodes for w in costs(n, batch=batch, seq=seq).work]
        self.model_flops = sum(w.flops + w.dgrad + w.wgrad for w in work)

    def sheet(self, layout: Layout) -> Sheet:
        """The costs of every node under a layout."""
        where = _where(layout)
        found = self._sheets.get((*where, layout.recompute))
        if found is None:
            if where not in self._bases:
                self._bases[where] = base(self.anatomy, layout, self.workload, self.cluster)
            found = sheet(self._bases[where], self.anatomy, layout, self.workload)
            self._sheets[(*where, layout.recompute)] = found
        return found

    def price(self, layout: Layout) -> Priced:
        """The stages, the step time and the memory of a legal layout."""
        costs, bounds = self.sheet(layout), self.cut(layout)
        m = layout.microbatches(self.workload.batch)
        sums, parts = costs.sums(bounds), self.parts(layout, bounds)
        forward, backward = sums[:, AHEAD].sum(axis=1).tolist(), sums[:, BACK].sum(axis=1).tolist()
        hops = [traffic.hop(costs.boundary, s, layout, self.cluster) for s in range(len(parts) - 1)]
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
        tails = [self.tail(layout, parts[r :: layout.pp], bounds, r) for r in range(layout.pp)]
        return Priced(
            layout=layout,
            stages=stages,
            prediction=self._predict(layout, sums, line, tails, self.peaks(layout, parts)),
            timeline=line,
            capacity=self.cluster.device.nbytes,
        )

    def _predict(
        self, layout: Layout, sums: Rows, line: Timeline, tails: list[Tail], peaks: tuple[dict[str, int], ...]
    ) -> Prediction:
        """Every rank waits until all have reduced, for the gradient's norm; the step ends with the last of them."""
        m, ranks = layout.microbatches(self.workload.batch), range(layout.pp)
        reduced = max(line.ends[r] + tails[r].reduction + tails[r].tied for r in ranks)
        end = reduced + max(tail.optimizer + tail.gathering for tail in tails)
        own = [line.busy[r] + line.sending[r] + tails[r].total for r in ranks]
        slowest = max(ranks, key=own.__getitem__)
        mine, tail = m * sums[slowest :: layout.pp].sum(axis=0), tails[slowest]
        breakdown = {cause: float(mine[columns].sum()) for cause, columns in CAUSES.items()} | {
            "pipeline communication": line.sending[slowest],
            "pipeline bubble": max(0.0, end - own[slowest]) if layout.pp > 1 else 0.0,
            "gradient communication": tail.reduction + tail.gathering,
            "tied-weight communication": tail.tied,
            "optimizer": tail.optimizer,
        }
        breakdown = {cause: seconds for cause, seconds in breakdown.items() if seconds}
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

    def parts(self, layout: Layout, bounds: tuple[int, ...]) -> list[Part]:
        """What each stage holds. A weight that several nodes of a rank share is there once."""
        sheet = self.sheet(layout)
        sums = sheet.sums(bounds)
        spare = self._spare(sheet, layout, bounds)
        last = len(bounds) - 2
        return [
            Part(
                params=int(row[Col.PARAMS]) - spare[i],
                expert_params=int(row[Col.EXPERT_PARAMS]),
                saved=int(row[Col.SAVED]) + (sheet.boundary if i else 0),
                workspace=sheet.workspace,
                logits=sheet.logits if i == last else 0,
            )
            for i, row in enumerate(sums)
        ]

    def _spare(self, sheet: Sheet, layout: Layout, bounds: tuple[int, ...]) -> list[int]:
        """The elements that each stage counts of weights that it, or an earlier stage of its rank, has already."""
        spare = [0] * (len(bounds) - 1)
        for (_, nodes), elements in zip(self.anatomy.shared, sheet.shared, strict=True):
            seen: set[int] = set()
            for stage in _stages_of(nodes, bounds):
                spare[stage] += elements * (stage % layout.pp in seen)
                seen.add(stage % layout.pp)
        return spare

    def peaks(self, layout: Layout, parts: list[Part]) -> tuple[dict[str, int], ...]:
        """The memory of each pipeline rank at its fullest, by holder."""
        m = layout.microbatches(self.workload.batch)
        return tuple(
            memory.peak(parts[r :: layout.pp], r, layout, m, self.workload.precision, self.cluster)
            for r in range(layout.pp)
        )

    def cut(self, layout: Layout) -> tuple[int, ...]:
        """The bounds of the stages: the most even in time that fit the memory; if none fit, the most even."""
        count = layout.pp * layout.vpp
        key = (*_where(layout), layout.recompute, count)
        if key not in self._cuts:
            self._cuts[key] = self._even(layout, None)
        even = self._cuts[key]
        if count == 1 or self._fits(layout, even):
            return even
        try:
            tight = self._even(layout, self._allowed(layout))
        except LookupError:
            return even
        return tight

    def _even(self, layout: Layout, allowed: Callable[[int], NDArray[np.bool_]] | None) -> tuple[int, ...]:
        seconds = self.sheet(layout).by_node[:, STEP].sum(axis=1)
        found = cut(seconds.tolist(), self.graph.cuts, layout.pp * layout.vpp, allowed)
        if found is None:
            raise LookupError("no such cut")
        return found

    def _fits(self, layout: Layout, bounds: tuple[int, ...]) -> bool:
        peaks = self.peaks(layout, self.parts(layout, bounds))
        return max(sum(held.values()) for held in peaks) <= self.cluster.device.nbytes

    def _allowed(self, layout: Layout) -> Callable[[int], NDArray[np.bool_]]:
        """Which runs of atoms fit the memory as stage k. Exact for one chunk a rank; several get equal shares of it."""
        sheet, precision = self.sheet(layout), self.workload.precision
        m = layout.microbatches(self.workload.batch)
        places = (0, *self.graph.cuts, len(self.graph.nodes))
        atoms = np.add.reduceat(sheet.by_node, places[:-1])
        sums = np.concatenate([np.zeros((1, len(Col))), np.cumsum(atoms, axis=0)])
        one, expert = (sum(memory.static(*pair, layout, precision).values()) for pair in ((10**6, 0), (0, 10**6)))
        state = (one * sums[:, Col.PARAMS] + expert * sums[:, Col.EXPERT_PARAMS]) / 10**6

        def allowed(k: int) -> NDArray[np.bool_]:
            rank, chunk = k % layout.pp, k // layout.pp
            flights = max(flight[chunk] for flight in timeline.held(rank, layout.pp, layout.vpp, m))
            logits = sheet.logits if k == layout.pp * layout.vpp - 1 else 0
            none = [Part(0, 0, 0, sheet.workspace, logits)] * layout.vpp
            fixed = sum(memory.peak(none, rank, layout, m, precision, self.cluster).values())
            room = (self.cluster.device.nbytes - fixed) / layout.vpp
            saved = flights * (1 + memory.ALLOCATOR) * sums[:, Col.SAVED]
            need = state + saved
            entry = flights * (1 + memory.ALLOCATOR) * (sheet.boundary if k else 0)
            fits: NDArray[np.bool_] = need[None, :] - need[:, None] + entry <= room
            return fits

        return allowed

    def tail(self, layout: Layout, parts: list[Part], bounds: tuple[int, ...], rank: int) -> Tail:
        """What pipeline rank `rank` does after its last micro-batch."""
        params, experts = sum(p.params for p in parts), sum(p.expert_params for p in parts)
        sheet, tied = self.sheet(layout), 0.0
        for (_, nodes), elements in zip(self.anatomy.shared, sheet.shared, strict=True):
            ranks = {stage % layout.pp for stage in _stages_of(nodes, bounds)}
            if len(ranks) > 1 and rank in ranks:
                apart = Group(len(ranks), (max(ranks) - min(ranks)) // (len(ranks) - 1) * (layout.world // layout.pp))
                tied += traffic.seconds("all_reduce", memory.GRADIENT * elements, apart, self.cluster)
        return self._tail(layout, params, experts, tied)

    def _tail(self, layout: Layout, params: float, experts: float, tied: float = 0.0) -> Tail:
        reduction = gathering = 0.0
        for elements, axis in ((params, "dp"), (experts, "edp")):
            group, precision = traffic.group(axis, layout), self.workload.precision
            kind = "reduce_scatter" if layout.distributed_optimizer else "all_reduce"
            reduction += traffic.seconds(kind, memory.GRADIENT * elements, group, self.cluster)
            if layout.distributed_optimizer:
                weights = memory.WEIGHT[precision] * elements
                gathering += traffic.seconds("all_gather", weights, group, self.cluster)
        dense, expert = memory.copies(layout)
        moved = STEP_TRAFFIC[self.workload.precision] * (params / dense + experts / expert)
        moved += ZERO_TRAFFIC * (params + experts)
        device = self.cluster.device
        return Tail(reduction, gathering, tied, moved / (device.bandwidth * device.bandwidth_efficiency))

    def bound(self, layout: Layout) -> tuple[float, float]:
        """(seconds of a step, bytes of the fullest rank): no way to cut the graph into these stages takes less.

        Seconds: rank r waits for those before it, at the start and at the end, and does its share of every
        micro-batch. Whatever the shares t, max(m t[r] + sum of t before r) is least when all are equal, which is
        total / (1 - (1 - 1/m)^pp). With chunks, what is waited for may be as short as one likes.
        """
        sheet, m, pp = self.sheet(layout), layout.microbatches(self.workload.batch), layout.pp
        total = float(sheet.total[STEP].sum())
        params = sheet.total[Col.PARAMS] - sum(
            n * (len(nodes) - 1) for (_, nodes), n in zip(self.anatomy.shared, sheet.shared, strict=True)
        )
        experts = sheet.total[Col.EXPERT_PARAMS]
        tail = self._tail(layout, params / pp, experts / pp)
        pipeline = m * total / pp if layout.vpp > 1 or m == 1 else total / (1 - (1 - 1 / m) ** pp)
        seconds = max(pipeline, m * total / pp + tail.reduction, total) + tail.optimizer + tail.gathering
        state = sum(memory.static(int(params), int(experts), layout, self.workload.precision).values())
        return seconds, memory.least(state, float(sheet.total[Col.SAVED]), layout, m, self.cluster)


def _where(layout: Layout) -> tuple[object, ...]:
    """What the costs of a node depend on."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel, layout.micro_batch


def _stages_of(nodes: tuple[int, ...], bounds: tuple[int, ...]) -> list[int]:
    """The stage of each node."""
    return [int(np.searchsorted(bounds, node, side="right")) - 1 for node in nodes]
