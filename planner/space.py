"""The layouts that a search looks at: every way to deal the devices to the axes, and what is chosen beside.

Protocol: `options` are the legal layouts with their lower bounds, `candidates` all of them. What is legal `rules` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl.graph import Graph

from .cluster import Cluster
from .layout import Layout, Recompute, Workload
from .price import Pricer
from .rules import divisors, needs, violations

CHUNKS = 16  # model chunks a pipeline rank, at most
FREED = 0.02  # of what is saved: what selective recompute frees at the least

Fixed = Mapping[str, Any]  # the fields of a layout that the user has decided


@frozen
class Option:
    """A legal layout, and the seconds and bytes that it takes at the least."""

    seconds: float
    nbytes: float
    layout: Layout


def options(pricer: Pricer, fixed: Fixed) -> Iterator[Option]:
    """The candidates that break no rule, each with its lower bound.

    When a micro-batch fits on none of the layouts over some axes, larger ones over the same axes are not tried.
    """
    for axes in grids(pricer.graph, pricer.cluster, fixed):
        if violations(axes, pricer.graph, pricer.workload, pricer.cluster):
            continue
        for micro_batch in micro_batches(axes, pricer.workload, fixed):
            found = [
                Option(*pricer.bound(layout), layout)
                for plain, layouts in fillings(axes, micro_batch, pricer.graph, fixed)
                if not violations(plain, pricer.graph, pricer.workload, pricer.cluster)
                for layout in layouts
                if "recompute" in fixed or worthwhile(layout, pricer)
            ]
            yield from found
            if found and min(option.nbytes for option in found) > pricer.capacity:
                break


def worthwhile(layout: Layout, pricer: Pricer) -> bool:
    """Whether recompute frees what is worth the trouble: fused attention leaves little to selective recompute."""
    if layout.recompute is not Recompute.SELECTIVE:
        return True
    kept = pricer.sheet(evolve(layout, recompute=Recompute.NONE)).saved
    return pricer.sheet(layout).saved < (1 - FREED) * kept


def candidates(graph: Graph, cluster: Cluster, workload: Workload, fixed: Fixed) -> Iterator[Layout]:
    """Every layout that uses all devices and leaves no part of a degree over, legal or not."""
    for axes in grids(graph, cluster, fixed):
        for micro_batch in micro_batches(axes, workload, fixed):
            for _, layouts in fillings(axes, micro_batch, graph, fixed):
                yield from layouts


def grids(graph: Graph, cluster: Cluster, fixed: Fixed) -> Iterator[Layout]:
    """Every way to deal the devices to the axes: all divisors, powers of two or not."""
    world, moe = cluster.count, needs(graph).experts
    for tp in _choices("tp", fixed, divisors(world)):
        for pp in _choices("pp", fixed, divisors(max(1, world // tp))):
            for cp in _choices("cp", fixed, divisors(max(1, world // (tp * pp)))):
                for dp in _choices("dp", fixed, (max(1, world // (tp * pp * cp)),)):
                    for etp in _choices("etp", fixed, sorted({1, tp}) if moe else (1,)):
                        for ep in _choices("ep", fixed, divisors(max(1, dp * cp * tp // etp)) if moe else (1,)):
                            for sp in _choices("sequence_parallel", fixed, (False, True) if tp > 1 else (False,)):
                                yield Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=sp)


def micro_batches(axes: Layout, workload: Workload, fixed: Fixed) -> tuple[int, ...]:
    """The sizes of micro-batch that divide what each copy gets of the batch, least first."""
    return _choices("micro_batch", fixed, divisors(max(1, workload.batch // axes.dp)))


def fillings(axes: Layout, micro_batch: int, graph: Graph, fixed: Fixed) -> Iterator[tuple[Layout, list[Layout]]]:
    """For each number of chunks the layouts on these axes, and before them one that breaks the rules that any breaks.

    No rule looks at where the optimizer's state is, and one at what is computed again.
    """
    blocks = needs(graph).blocks
    modes = _choices("recompute", fixed, (*((Recompute.FULL,) if blocks else ()), Recompute.NONE, Recompute.SELECTIVE))
    state = _choices("distributed_optimizer", fixed, (False, True) if axes.dp * axes.cp > 1 else (False,))
    for vpp in _choices("vpp", fixed, chunks(axes.pp, blocks)):
        layouts = [
            Layout(
                **{axis: getattr(axes, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp", "sequence_parallel")},
                vpp=vpp,
                micro_batch=micro_batch,
                recompute=recompute,
                distributed_optimizer=distributed,
            )
            for recompute, distributed in product(modes, state)
        ]
        yield layouts[0], layouts


def chunks(pp: int, blocks: int) -> tuple[int, ...]:
    """How many chunks a pipeline rank may have: what divides its share of the blocks, rounded up."""
    return tuple(v for v in divisors(max(1, -(-blocks // pp))) if v <= CHUNKS) if pp > 1 else (1,)


def _choices(name: str, fixed: Fixed, free: Iterable[Any]) -> tuple[Any, ...]:
    return (fixed[name],) if name in fixed else tuple(free)
