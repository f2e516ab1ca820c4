"""Lower bound of the step time of a layout with its stages, without a simulation."""

from __future__ import annotations

import numpy as np

from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.simulate.price import end_of_rank, end_seconds

from . import pipeline


def step_lower_bound(placed: Partition) -> float:
    """Return a lower bound of `simulate(placed).seconds`.

    Let e[r] <= the end of rank r's last backward pass (`finish_bounds`). The step ends no sooner than it would if only
    some ranks had an end of step; two are looked at: the one with the largest e[r], and the one with most weights.
    """
    x, seconds = placed.layout, (placed.forward_seconds, placed.backward_seconds, placed.send_seconds)
    ends = pipeline.finish_bounds(*seconds, x.pp, placed.problem.microbatches, x.microbatch_group)
    params = [sum(s.params + s.expert_params for s in placed.stages[r :: x.pp]) for r in range(x.pp)]
    ranks = sorted({int(ends.argmax()), int(np.argmax(params))})
    after = [end_of_rank(placed, r) for r in ranks]
    return end_seconds([float(ends[r]) for r in ranks], after)
