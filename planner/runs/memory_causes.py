"""Causes of memory beside the prediction of a measured run, as far as its log tells them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megaloom.dsl.graph import graph
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.search.reasons import format_nbytes

from .run import Measured, TrainingRun


def memory_causes(run: TrainingRun, measured: Measured) -> Iterator[str]:
    """Yield sentences on fragmentation, imbalance of experts and buffers of NCCL; none if no memory was measured."""
    if measured.nbytes is None:
        return
    if measured.reserved is None:
        yield "fragmentation cannot be told: the log has no `max reserved`"
    else:
        held = format_nbytes(max(0, measured.reserved - measured.nbytes))
        yield f"fragmentation: torch's allocator holds {held} more than tensors took on that rank"
    if model_requirements(graph(run.model)).experts:
        yield _imbalance(run, measured)
    yield (
        "buffers of NCCL and the CUDA context are outside of both and stand in no such log; "
        "`nvidia-smi` less `max reserved` has them together"
    )


def _imbalance(run: TrainingRun, measured: Measured) -> str:
    """Return how far ranks that the prediction has as equal differ, which is what unequal experts may take."""
    spreads = [max(ranks) - min(ranks) for ranks in _equal_ranks(run, measured) if len(ranks) > 1]
    if not spreads:
        return "imbalance of experts cannot be told: the log has no two ranks of one pipeline rank"
    return f"imbalance of experts: at most {format_nbytes(max(spreads))}, by which ranks of one pipeline rank differ"


def _equal_ranks(run: TrainingRun, measured: Measured) -> list[list[int]]:
    """Return the most bytes of each rank that the log reports, by pipeline rank."""
    out = defaultdict[int, list[int]](list)
    for rank, nbytes in measured.by_rank:
        if rank < run.layout.world:
            out[rank * run.layout.pp // run.layout.world].append(nbytes)
    return [*out.values()]
