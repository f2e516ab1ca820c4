"""Lower bound of the step time of a layout with its stages, without a simulation."""

from __future__ import annotations

from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.simulate.price import counting_seconds, end_of_rank, end_of_ranks

from . import pipeline


def step_lower_bound(partition: Partition) -> float:
    """Return a lower bound of `simulate(partition).seconds`.

    Let e[r] <= the end of rank r's last backward pass (`finish_bounds`). The step ends no sooner than it would if only
    some ranks had an end of step; two are looked at: the one with the largest e[r], and the one with most weights.
    """
    x, seconds = partition.layout, (partition.forward_seconds, partition.backward_seconds, partition.send_seconds)
    ends = pipeline.finish_bounds(*seconds, x.pp, partition.problem.microbatches, x.microbatch_group)
    ranks = sorted({int(ends.argmax()), int(partition.rank_elements.sum(axis=1).argmax())})
    counting = counting_seconds(partition) if partition.problem.job.repeats_forward else 0.0
    return counting + end_of_ranks([float(ends[r]) for r in ranks], [end_of_rank(partition, r) for r in ranks])
