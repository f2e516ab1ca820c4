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
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.plans import Prediction, Stage
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost import communication
from megaloom.planner.cost.cost_table import (
    BACKWARD_COLUMNS,
    FORWARD_COLUMNS,
    STEP_COLUMNS,
    CostColumn,
)
from megaloom.planner.cost.memory import Peak
from megaloom.planner.partition.partitioner import Partition, PartitionProblem, stages_of

from . import schedule
from .end_of_step import (
    EndOfStep,
    OverlapWindow,
    end_of_step,
    tied_weight_seconds,
)
from .intervals import interval, run_class
from .schedule import Timeline, send_seconds

CAUSES = {  # of the time that a pipeline rank computes for, and the columns that they are in
    "forward": [CostColumn.FORWARD],
    "backward": [CostColumn.BACKWARD],
    "recompute": [CostColumn.AGAIN],
    "tensor-parallel communication": [CostColumn.TP_FORWARD, CostColumn.TP_BACKWARD],
    "context-parallel communication": [CostColumn.CP_FORWARD, CostColumn.CP_BACKWARD],
    "expert-parallel communication": [CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD],
}


@frozen(eq=False, slots=False)
class Priced:
    """A layout with its cut and what is predicted of it."""

    partition: Partition
    stages: tuple[Stage, ...]
    prediction: Prediction
    p2p_seconds: tuple[float, ...]  # seconds of what passes from each stage to the next, either way
    ends_of_step: tuple[EndOfStep, ...]  # of each pipeline rank, what follows its last micro-batch

    @cached_property
    def timeline(self) -> Timeline:
        """What each pipeline rank does when."""
        x, m = self.layout, self.partition.problem.microbatches
        forward, backward = ([getattr(s, way) for s in self.stages] for way in ("forward_seconds", "backward_seconds"))
        return schedule.replay(forward, backward, self.p2p_seconds, x.pp, m, x.microbatch_group)

    @property
    def layout(self) -> Layout:
        """The layout that is priced."""
        return self.partition.layout

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
        return cls(flops, run_class(moe, workload.precision, cluster.device))


def step_lower_bound(placed: Partition) -> float:
    """Seconds of a step of a layout whose stages have a place, at the least: `priced` without a replay.

    Of what follows the last micro-batch it looks at two ranks: the last to be done, and the one with most weights.
    """
    fit, (forward, backward, hops) = placed.problem, _times(placed)
    ends = pipeline.ends(forward, backward, hops, fit.layout.pp, fit.microbatches, fit.layout.microbatch_group)
    params = _params(placed)
    ranks = sorted({int(ends.argmax()), int(params.sum(axis=0).argmax())})
    return _end([float(ends[r]) for r in ranks], _tails(placed, params, forward, backward, ranks))


def _times(placed: Partition) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a micro-batch by stage: forward, backward, and of what passes to the next."""
    fit, sums, pp = placed.problem, placed.sums, placed.layout.pp
    crosses = fit.table.structure.live_values[np.array(placed.bounds[1:-1], dtype=np.intp)].tolist()
    took = {
        (n, r): communication.p2p_seconds(
            n * fit.table.boundary, r, fit.layout, fit.cluster, scattered=fit.profile.overlap.scattered_sends
        )
        for n, r in product({*crosses}, range(pp))
    }
    hops = [took[n, s % pp] for s, n in enumerate(crosses)]
    return sums[:, FORWARD_COLUMNS].sum(axis=1).tolist(), sums[:, BACKWARD_COLUMNS].sum(axis=1).tolist(), hops


def _params(placed: Partition) -> Rows:
    """The elements of each rank's weights: [dense and experts', ranks]."""
    sums, x = placed.sums[:, [CostColumn.PARAMS, CostColumn.EXPERT_PARAMS]].copy(), placed.layout
    sums[:, 0] -= placed.problem.spare(placed.bounds)
    params: Rows = sums.reshape(x.vpp, x.pp, 2).sum(axis=0).T
    return params


def _tails(
    placed: Partition, params: Rows, forward: Sequence[float], backward: Sequence[float], ranks: Sequence[int]
) -> list[EndOfStep]:
    """What these ranks do after their last micro-batch; `params` are those of `_params`."""
    fit, x = placed.problem, placed.layout
    turns = (
        min(x.microbatch_group_size, fit.microbatches) * (x.vpp - 1) + 1
    ) / x.vpp  # of chunks, while others are done
    ties = [
        ({stage % x.pp for stage in stages_of(nodes, placed.bounds)}, elements)
        for (_, nodes), elements in zip(fit.table.structure.shared_weights, fit.table.shared, strict=True)
    ]
    out = []
    for r in ranks:
        cover = OverlapWindow(turns * sum(backward[r :: x.pp]), turns * sum(forward[r :: x.pp]))
        mine = sum(tied_weight_seconds(n, users, x, fit.cluster, fit.profile) for users, n in ties if r in users)
        dense, experts = params[:, r].tolist()
        out.append(end_of_step(dense, experts, mine, x, fit.workload.precision, fit.cluster, fit.profile, cover))
    return out


def simulate(placed: Partition, counted: Counted) -> Priced:
    """The step time of a layout whose stages have a place."""
    fit, bounds, sums, parts = placed.problem, placed.bounds, placed.sums, placed.parts
    layout, m = fit.layout, fit.microbatches
    forward, backward, hops = _times(placed)
    ends = schedule.finish_times(forward, backward, hops, layout.pp, m, layout.microbatch_group)
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
    prediction = _predict(counted, fit, m * sums, ends, send_seconds(hops, layout.pp, m), tails, placed.rank_peaks)
    return Priced(placed, stages, prediction, tuple(hops), tuple(tails))


def _predict(
    counted: Counted,
    fit: PartitionProblem,
    sums: Rows,
    ends: tuple[float, ...],
    sent: tuple[float, ...],
    tails: list[EndOfStep],
    peaks: tuple[Peak, ...],
) -> Prediction:
    """The breakdown is that of the rank that waits the least."""
    layout, precision = fit.layout, fit.workload.precision
    ranks = range(layout.pp)
    busy = [float(sums[r :: layout.pp][:, STEP_COLUMNS].sum()) for r in ranks]
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
        interval=interval(step, counted.kind),
        tokens_per_second_per_device=fit.workload.tokens / step / layout.world,
        flops_per_second_per_device=flops,
        mfu=flops / fit.cluster.device.flops[precision],
        bubble=max(0.0, 1 - sum(own) / (layout.pp * step)) if layout.pp > 1 else 0.0,
        breakdown=breakdown,
        nbytes=tuple(peak.held for peak in peaks),
        moments=tuple(peak.moment for peak in peaks),
    )


def _end(ends: Sequence[float], tails: Sequence[EndOfStep]) -> float:
    """When a step ends, by when each rank's micro-batches do.

    Every rank waits until all have reduced, for the gradient's norm; the step ends with the last of them.
    """
    reduced = max(end + tail.reduction + tail.tied for end, tail in zip(ends, tails, strict=True))
    return reduced + max(tail.optimizer + tail.gathering for tail in tails)
