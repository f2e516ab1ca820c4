"""What is predicted of a layout whose stages have a place: its step time by cause, its memory by holder.

Protocol: `priced` replays the schedule and adds what follows it; `least` says without a replay what a step takes at the
least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product

import numpy as np
from attrs import frozen

from megaloom.dsl.facts.costs import costs
from megaloom.dsl.graph import Graph
from megaloom.planner.bounds import pipeline
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout, Workload
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.plans import Prediction, Stage
from megaloom.planner.cost import communication
from megaloom.planner.cost.cost_table import (
    AHEAD,
    BACK,
    STEP,
    Col,
)
from megaloom.planner.cost.memory import Peak
from megaloom.planner.partition.partitioner import Fit, Placed, stages_of

from . import schedule
from .end_of_step import (
    Cover,
    Tail,
    tail,
    tied,
)
from .intervals import interval, kind
from .schedule import Timeline, sending

CAUSES = {  # of the time that a pipeline rank computes for, and the columns that they are in
    "forward": [Col.FORWARD],
    "backward": [Col.BACKWARD],
    "recompute": [Col.AGAIN],
    "tensor-parallel communication": [Col.TP_FORWARD, Col.TP_BACKWARD],
    "context-parallel communication": [Col.CP_FORWARD, Col.CP_BACKWARD],
    "expert-parallel communication": [Col.EP_FORWARD, Col.EP_BACKWARD],
}


@frozen(eq=False, slots=False)
class Priced:
    """A layout with its cut and what is predicted of it."""

    placed: Placed
    stages: tuple[Stage, ...]
    prediction: Prediction
    hops: tuple[float, ...]  # seconds of what passes from each stage to the next, either way
    tails: tuple[Tail, ...]  # of each pipeline rank, what follows its last micro-batch

    @cached_property
    def timeline(self) -> Timeline:
        """What each pipeline rank does when."""
        x, m = self.layout, self.placed.fit.microbatches
        forward, backward = ([getattr(s, way) for s in self.stages] for way in ("forward_seconds", "backward_seconds"))
        return schedule.replay(forward, backward, self.hops, x.pp, m, x.microbatch_group)

    @property
    def layout(self) -> Layout:
        """The layout that is priced."""
        return self.placed.layout

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds


@frozen
class Counted:
    """What is the same of all layouts."""

    flops: int  # of a step: no recompute, causal attention counted half
    kind: str  # of runs that show how far off a prediction may be

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster, workload: Workload) -> Counted:
        """Of a step of this model there."""
        work = [w for n in graph.nodes for w in costs(n, batch=workload.batch, seq=workload.seq).work]
        moe = any(w.kind == "route" for w in work)
        flops = sum(w.flops + w.dgrad + w.wgrad for w in work)
        return cls(flops, kind(moe, workload.precision, cluster.device))


def least(placed: Placed) -> float:
    """Seconds of a step of a layout whose stages have a place, at the least: `priced` without a replay.

    Of what follows the last micro-batch it looks at two ranks: the last to be done, and the one with most weights.
    """
    fit, (forward, backward, hops) = placed.fit, _times(placed)
    ends = pipeline.ends(forward, backward, hops, fit.layout.pp, fit.microbatches, fit.layout.microbatch_group)
    params = _params(placed)
    ranks = sorted({int(ends.argmax()), int(params.sum(axis=0).argmax())})
    return _end([float(ends[r]) for r in ranks], _tails(placed, params, forward, backward, ranks))


def _times(placed: Placed) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a micro-batch by stage: forward, backward, and of what passes to the next."""
    fit, sums, pp = placed.fit, placed.sums, placed.layout.pp
    crosses = fit.sheet.structure.live_values[np.array(placed.bounds[1:-1], dtype=np.intp)].tolist()
    took = {
        (n, r): communication.hop(n * fit.sheet.boundary, r, fit.layout, fit.cluster, scattered=fit.profile.scattered)
        for n, r in product({*crosses}, range(pp))
    }
    hops = [took[n, s % pp] for s, n in enumerate(crosses)]
    return sums[:, AHEAD].sum(axis=1).tolist(), sums[:, BACK].sum(axis=1).tolist(), hops


def _params(placed: Placed) -> Rows:
    """The elements of each rank's weights: [dense and experts', ranks]."""
    sums, x = placed.sums[:, [Col.PARAMS, Col.EXPERT_PARAMS]].copy(), placed.layout
    sums[:, 0] -= placed.fit.spare(placed.bounds)
    params: Rows = sums.reshape(x.vpp, x.pp, 2).sum(axis=0).T
    return params


def _tails(
    placed: Placed, params: Rows, forward: Sequence[float], backward: Sequence[float], ranks: Sequence[int]
) -> list[Tail]:
    """What these ranks do after their last micro-batch; `params` are those of `_params`."""
    fit, x = placed.fit, placed.layout
    turns = (min(x.group, fit.microbatches) * (x.vpp - 1) + 1) / x.vpp  # of chunks, while others are done
    ties = [
        ({stage % x.pp for stage in stages_of(nodes, placed.bounds)}, elements)
        for (_, nodes), elements in zip(fit.sheet.structure.shared_weights, fit.sheet.shared, strict=True)
    ]
    out = []
    for r in ranks:
        cover = Cover(turns * sum(backward[r :: x.pp]), turns * sum(forward[r :: x.pp]))
        mine = sum(tied(n, users, x, fit.cluster, fit.profile) for users, n in ties if r in users)
        dense, experts = params[:, r].tolist()
        out.append(tail(dense, experts, mine, x, fit.workload.precision, fit.cluster, fit.profile, cover))
    return out


def priced(placed: Placed, counted: Counted) -> Priced:
    """The step time of a layout whose stages have a place."""
    fit, bounds, sums, parts = placed.fit, placed.bounds, placed.sums, placed.parts
    layout, m = fit.layout, fit.microbatches
    forward, backward, hops = _times(placed)
    ends = schedule.finish(forward, backward, hops, layout.pp, m, layout.microbatch_group)
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
    tails = _tails(placed, _params(placed), forward, backward, range(layout.pp))
    prediction = _predict(counted, fit, m * sums, ends, sending(hops, layout.pp, m), tails, placed.fullest)
    return Priced(placed, stages, prediction, tuple(hops), tuple(tails))


def _predict(
    counted: Counted,
    fit: Fit,
    sums: Rows,
    ends: tuple[float, ...],
    sent: tuple[float, ...],
    tails: list[Tail],
    peaks: tuple[Peak, ...],
) -> Prediction:
    """The breakdown is that of the rank that waits the least."""
    layout, precision = fit.layout, fit.workload.precision
    ranks = range(layout.pp)
    busy = [float(sums[r :: layout.pp][:, STEP].sum()) for r in ranks]
    end = _end(ends, tails)
    own = [busy[r] + sent[r] + tails[r].total for r in ranks]
    busiest = max(ranks, key=own.__getitem__)
    mine, after = sums[busiest :: layout.pp].sum(axis=0), tails[busiest]
    parts = {cause: float(mine[columns].sum()) for cause, columns in CAUSES.items()} | {
        "pipeline communication": sent[busiest],
        "pipeline bubble": max(0.0, end - own[busiest]) if layout.pp > 1 else 0.0,
        "gradient communication": after.reduction + after.gathering,
        "tied-weight communication": after.tied,
        "optimizer": after.optimizer,
    }
    breakdown = {cause: seconds for cause, seconds in parts.items() if seconds}
    step = sum(breakdown.values())
    flops = counted.flops / step / layout.world
    return Prediction(
        step_seconds=step,
        within=interval(step, counted.kind),
        tokens_per_second_per_device=fit.workload.tokens / step / layout.world,
        flops_per_second_per_device=flops,
        mfu=flops / fit.cluster.device.flops[precision],
        bubble=max(0.0, 1 - sum(own) / (layout.pp * step)) if layout.pp > 1 else 0.0,
        breakdown=breakdown,
        nbytes=tuple(peak.held for peak in peaks),
        moments=tuple(peak.moment for peak in peaks),
    )


def _end(ends: Sequence[float], tails: Sequence[Tail]) -> float:
    """When a step ends, by when each rank's micro-batches do.

    Every rank waits until all have reduced, for the gradient's norm; the step ends with the last of them.
    """
    reduced = max(end + tail.reduction + tail.tied for end, tail in zip(ends, tails, strict=True))
    return reduced + max(tail.optimizer + tail.gathering for tail in tails)
