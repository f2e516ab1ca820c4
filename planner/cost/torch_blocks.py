"""Blocks as torch runs them, where that differs from Megatron-core: kept results, gathered inputs, early casts.

Each function answers for one node under one layout, by its facts and by the settings of the framework profile.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaloom.dsl.facts.collectives import Collective
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows

from . import communication, kernels
from .columns import AXIS_COLUMNS, FORWARD_COLUMNS, CostColumn
from .job import Job


def kept_results(job: Job, facts: Costs, layout: Layout) -> tuple[Rows, int]:
    """Return the results of a node that full recompute keeps: seconds to compute them [FORWARD_COLUMNS], and bytes.

    They are those of attention, of the first of every two products, and of reduce-scatters.
    """
    precision, seconds, nbytes = job.workload.precision, np.zeros(len(FORWARD_COLUMNS)), 0
    if not job.profile.saved.every_second_product:
        return seconds, nbytes
    products = [w for w in facts.work if w.kind is WorkKind.PRODUCT]
    for w in (*products[::2], *(w for w in facts.work if w.kind is WorkKind.ATTENTION)):
        took = kernels.kernel_seconds(w, job.cluster.slowest, precision, job.profile)
        seconds[FORWARD_COLUMNS.index(CostColumn.FORWARD)] += took.forward
        nbytes += precision.nbytes * w.count * w.m * (w.n if w.kind is WorkKind.PRODUCT else w.k)
    for c in (c for c in facts.collectives if c.axis == "tp" and c.kind == "reduce_scatter" and not c.backward):
        part = c.elements * precision.nbytes, communication.process_group(c.axis, layout)
        exposed = 1 - job.profile.overlap.tensor_hidden * layout.has_overlap(Overlap.TENSOR)
        took_seconds = exposed * communication.collective_seconds(c.kind, job.cluster, part)
        seconds[FORWARD_COLUMNS.index(AXIS_COLUMNS[c.axis][0])] += took_seconds
    return seconds, nbytes


def run_collectives(job: Job, facts: Costs) -> Iterator[Collective]:
    """Yield the collectives of a node that run.

    Where gathered inputs are saved, the backward pass does not gather them again. The facts list this gather, of as
    many elements, before those of gradients.
    """
    saved: list[int] = []
    for c in facts.collectives:
        if c.axis == "tp" and c.kind == "all_gather" and job.profile.saved.gathered_inputs:
            if not c.backward:
                saved.append(c.elements)
            elif c.elements in saved:
                saved.remove(c.elements)
                continue
        yield c


def gathered_inputs(job: Job, facts: Costs) -> list[Collective]:
    """Return the gathers of a node whose results are saved."""
    if not job.profile.saved.gathered_inputs:
        return []
    return [c for c in facts.collectives if c.axis == "tp" and c.kind == "all_gather" and not c.backward]


def gathered_nbytes(job: Job, c: Collective, inside: bool) -> int:
    """Return the bytes of an element of a collective. inside: it is in a block, where products may be narrow."""
    precision = job.workload.precision
    narrow = precision.narrow and inside and job.profile.narrow.cast_before_gathers
    return 1 if narrow and c.axis == "tp" and c.kind == "all_gather" else precision.nbytes


def uncast_elements(job: Job, facts: Costs, layout: Layout) -> tuple[int, int]:
    """Return the elements that products do not cast, forward and backward, because a gather brings them cast.

    Each rank casts its share of what is gathered, once for all products that read it.
    """
    if not (job.workload.precision.narrow and job.profile.narrow.cast_before_gathers):
        return 0, 0
    products = [w for w in facts.work if w.kind is WorkKind.PRODUCT]
    forward = backward = 0
    for c in (c for c in run_collectives(job, facts) if c.axis == "tp" and c.kind == "all_gather"):
        sizes = [w.count * w.m * (w.n if c.backward else w.k) for w in products]
        read = c.elements * sizes.count(c.elements) - c.elements // layout.tp
        forward, backward = forward + read * (not c.backward), backward + read * c.backward
    return max(0, forward), max(0, backward)


def key_repeats(job: Job, facts: Costs, layout: Layout) -> float:
    """Return how often context-parallel ranks exchange each key and value: once, or for all heads of queries."""
    if not job.profile.attention.repeats_keys:
        return 1.0
    keys = sum(c.elements for c in facts.collectives if c.axis == "cp" and not c.backward)
    queries = layout.cp * sum(w.count * w.m * w.k for w in facts.work if w.kind is WorkKind.ATTENTION)
    return max(1.0, 2 * queries / keys) if keys else 1.0
