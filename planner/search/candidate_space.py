"""The candidate space: all base layouts, and the variants of each, as arrays.

`base_layouts` lists the legal device meshes with every micro-batch size; `variants` adds model chunks, microbatch
group, recompute and sharding of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.choices import (
    MICROBATCH_OVERLAPS,
    Module,
    Overlap,
    OverlapSet,
    Recompute,
    Shard,
    default_overlaps,
)
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import (
    NAMES,
    Column,
    Layouts,
    alike,
)
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.rules.divisors import divisors
from megaloom.planner.rules.overlaps import may_overlap_experts, within_node
from megaloom.planner.rules.rules import legal

MAX_CHUNKS = 16  # model chunks a pipeline rank, at most
GROUP_RATIOS = (1.0, 1.25, 1.5, 2.0)  # of pp, the micro-batches in a group: more wait for less, and keep more

FixedAxes = Mapping[str, Any]  # the fields of a layout that the user has decided
InnerOverlaps = tuple[Overlap, ...]
ALL_VARIANTS, OVERLAPPED_EXPERTS, OTHER_VARIANTS = (
    0,
    1,
    2,
)  # of a place's layouts: if experts may overlap in some, these are at a place of their own


def base_layouts(
    graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes, inner: InnerOverlaps = ()
) -> Layouts:
    """Return the legal base layouts: device mesh, micro-batch size, sequence parallelism, overlaps in a micro-batch.

    The fields that `variants` chooses are those of a plain layout. `inner` are the overlaps within a micro-batch
    that the search tries: on wherever they are legal. Layouts that overlap experts are base layouts of their own.
    """
    found = unchecked_base_layouts(graph, cluster, workload, fixed, inner)
    states = np.full(len(found), _optimizer_choices(0, fixed)[0])
    plain = evolve(found, shard=states)
    plain = evolve(plain, overlaps=_overlaps(plain, fixed) & ~Overlap.EXPERTS.bit)  # which asks for chunks
    works = ~found.has_overlap(Overlap.EXPERTS) | may_overlap_experts(
        found, model_requirements(graph).multi_token, workload
    )
    return found.take(legal(plain, graph, workload, cluster) & works)


def unchecked_layouts(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> Iterator[Layout]:
    """Yield every layout that uses all devices and leaves no remainder in any degree, legal or not."""
    chosen = {name: value for name, value in fixed.items() if name in (*VARIANT_FIELDS, "shard", "overlaps")}
    chosen.setdefault("overlaps", OverlapSet(default_overlaps(fixed.get("shard", Shard.NONE))))
    found = unchecked_base_layouts(graph, cluster, workload, fixed)
    for place in (found[i] for i in range(len(found))):
        for vpp in _choices("vpp", fixed, chunk_counts(place.pp, model_requirements(graph).blocks)):
            yield evolve(place, **chosen | {"vpp": vpp})


def unchecked_base_layouts(
    graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes, inner: InnerOverlaps = ()
) -> Layouts:
    """Return every base layout that uses all devices, legal or not: all divisors, powers of two or not."""
    rows = np.array(list(_degrees(graph, cluster, fixed)), dtype=np.int64).reshape(-1, 7)
    zeros, ones = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64)
    columns = dict(zip(("tp", "pp", "cp", "dp", "etp", "ep", "sequence_parallel"), rows.T, strict=True))
    plain = {name: ones if name in ("vpp", "micro_batch") else zeros for name in NAMES}
    degrees = Layouts(**plain | columns)
    first, which = alike(degrees.sequence_parallel, degrees.tp, degrees.ep)
    switches = [_column("overlaps", _inner(degrees[int(i)], cluster, fixed, inner)) for i in first]
    degrees = degrees.spread(switches, which)
    first, which = alike(degrees.dp)
    return degrees.spread(
        [_column("micro_batch", _micro_batch_choices(int(degrees.dp[i]), workload, fixed)) for i in first], which
    )


def _degrees(graph: Graph, cluster: Cluster, fixed: FixedAxes) -> Iterator[tuple[int, ...]]:
    world, moe = cluster.count, model_requirements(graph).experts
    for tp in _choices("tp", fixed, divisors(world)):
        for pp in _choices("pp", fixed, divisors(max(1, world // tp))):
            for cp in _choices("cp", fixed, divisors(max(1, world // (tp * pp)))):
                for dp in _choices("dp", fixed, (max(1, world // (tp * pp * cp)),)):
                    for etp in _choices("etp", fixed, sorted({1, tp}) if moe else (1,)):
                        for ep in _choices("ep", fixed, divisors(max(1, dp * cp * tp // etp)) if moe else (1,)):
                            for sp in _choices("sequence_parallel", fixed, (False, True) if tp > 1 else (False,)):
                                yield tp, pp, cp, dp, etp, ep, sp


def _inner(axes: Layout, cluster: Cluster, fixed: FixedAxes, inner: InnerOverlaps) -> tuple[int, ...]:
    """Return the sets of overlaps within a micro-batch that the search tries."""
    if "overlaps" in fixed:
        return (int(fixed["overlaps"] & MICROBATCH_OVERLAPS),)
    on = Overlap.TENSOR in inner and axes.sequence_parallel and within_node(axes.tp, cluster)
    first = Overlap.TENSOR.bit if on else 0
    return (first, first + Overlap.EXPERTS.bit) if Overlap.EXPERTS in inner and axes.ep > 1 else (first,)


def _subsets(graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, inner: InnerOverlaps) -> Column:
    """Return the variants that each base layout has: ALL, those that overlap experts, or the REST."""
    rest = Overlap.EXPERTS in inner and "overlaps" not in fixed
    found: Column = np.where(base.has_overlap(Overlap.EXPERTS), OVERLAPPED_EXPERTS, ALL_VARIANTS)
    return np.where(
        ~base.has_overlap(Overlap.EXPERTS)
        & rest
        & may_overlap_experts(base, model_requirements(graph).multi_token, workload),
        OTHER_VARIANTS,
        found,
    )


def micro_batch_sizes(axes: Layout, workload: Workload, fixed: FixedAxes) -> tuple[int, ...]:
    """Return the micro-batch sizes that divide the batch of each data-parallel rank, in ascending order."""
    return _micro_batch_choices(axes.dp, workload, fixed)


def _micro_batch_choices(dp: int, workload: Workload, fixed: FixedAxes) -> tuple[int, ...]:
    return _choices("micro_batch", fixed, divisors(max(1, workload.batch // dp)))


def chunk_counts(pp: int, blocks: int) -> tuple[int, ...]:
    """Return the numbers of model chunks that a pipeline rank may have: divisors of its blocks, rounded up.

    If there are none up to MAX_CHUNKS, return divisors of one block more: NVIDIA runs DeepSeek-V3's 61 blocks as 8
    chunks on each of two ranks.
    """
    share = max(1, -(-blocks // pp))
    share += share > MAX_CHUNKS and len(divisors(share)) == 2
    return tuple(v for v in divisors(share) if v <= MAX_CHUNKS) if pp > 1 else (1,)


def microbatch_groups(pp: int, microbatches: int) -> tuple[int, ...]:
    """Return the microbatch groups to try, 0 for pp: legal ones of a few sizes, or the smallest legal one."""
    works = [n for n in range(pp, microbatches + 1) if (microbatches % n or n) >= pp]
    within_node = sorted({ceil(times * pp) for times in GROUP_RATIOS} & set(works)) or works[:1]
    return tuple(n if n != pp else 0 for n in within_node)


def variants(
    graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, family: Column, inner: InnerOverlaps = ()
) -> tuple[Layouts, Column]:
    """Return the legal layouts of these base layouts, and the number of the base layout of each.

    family: the sets of modules that selective recompute may have, as bits: [base layouts, sets].
    """
    asked = model_requirements(graph)
    numbered = np.arange(len(base))
    m = base.microbatches(workload.batch)
    subsets = _subsets(graph, workload, base, fixed, inner)
    first, which = alike(base.pp, m, subsets)
    schedules = [
        _schedules(int(base.pp[i]), int(m[i]), asked.blocks, asked.max_stages, int(subsets[i]), _key(fixed))
        for i in first
    ]
    found, numbered = base.spread(schedules, which), _repeat(numbered, schedules, which)
    subsets = subsets[numbered]
    first, which = alike(found.pp, found.vpp, subsets)
    sets, stages = _module_sets(asked.modules, fixed), found.pp * found.vpp
    again = [
        _recompute_choices(
            asked.blocks,
            int(stages[i]),
            sets,
            _recompute_modes(int(found.pp[i]), int(found.vpp[i]), int(subsets[i])),
            _key(fixed),
        )
        for i in first
    ]
    found, numbered = found.spread(again, which), _repeat(numbered, again, which)
    if not fixed.get("recompute_modules"):
        chosen = np.concatenate([np.zeros((len(base), 1), dtype=np.int64), family], axis=1)
        found = evolve(found, recompute_modules=chosen[numbered, found.recompute_modules])
    several = (found.dp * found.cp > 1).astype(np.int64)
    state = [_column("shard", _optimizer_choices(on, fixed)) for on in (0, 1)]
    found, numbered = found.spread(state, several), _repeat(numbered, state, several)
    return evolve(found, overlaps=_overlaps(found, fixed)), numbered


def _optimizer_choices(several: int, fixed: FixedAxes) -> tuple[int, ...]:
    """Return the values of `shard` to try; with data parallelism both."""
    if Overlap.WEIGHTS in fixed.get("overlaps", ()):
        return _choices("shard", fixed, (1,))
    return _choices("shard", fixed, range(1 + several))


def _overlaps(found: Layouts, fixed: FixedAxes) -> Column:
    """Return the overlaps as bits; those of gradients and weights are always on.

    It never loses: `tail` has of an exchange that overlaps no more seconds than of one that does not (only what is
    hidden takes a share of the device, and a share is less than all of it), and memory is the same.
    """
    if "overlaps" in fixed:
        return np.full(len(found), int(fixed["overlaps"]))
    overlaps: Column = found.overlaps | default_overlaps(found.shard)
    return overlaps


def count_variants(graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, inner: InnerOverlaps = ()) -> int:
    """Return the number of `variants` without building them."""
    asked, m = model_requirements(graph), base.microbatches(workload.batch)
    subsets = _subsets(graph, workload, base, fixed, inner)
    first, which = alike(base.pp, m, subsets)
    each, sets = [], _module_sets(asked.modules, fixed)
    for pp, micro, subset in ((int(base.pp[i]), int(m[i]), int(subsets[i])) for i in first):
        vpps = _schedules(pp, micro, asked.blocks, asked.max_stages, subset, _key(fixed))["vpp"].tolist()
        again = (
            _recompute_choices(asked.blocks, pp * vpp, sets, _recompute_modes(pp, vpp, subset), _key(fixed))
            for vpp in vpps
        )
        each.append(sum(len(choices["recompute"]) for choices in again))
    states = np.array([len(_optimizer_choices(several, fixed)) for several in (0, 1)])[
        (base.dp * base.cp > 1).astype(np.int64)
    ]
    return int((np.array(each, dtype=np.int64)[which] * states).sum()) if len(base) else 0


def _repeat(rows: Column, choices: list[dict[str, Column]], which: Column) -> Column:
    counts = np.array([len(next(iter(choice.values()))) for choice in choices], dtype=np.int64)[which]
    return np.repeat(rows, counts)


def _key(fixed: FixedAxes) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, value) for name, value in fixed.items() if name in VARIANT_FIELDS))


VARIANT_FIELDS = ("vpp", "microbatch_group", "recompute", "recompute_modules", "recompute_layers")


@lru_cache(maxsize=1 << 14)
def _schedules(
    pp: int, m: int, blocks: int, stages: int, subset: int, fixed: tuple[tuple[str, Any], ...]
) -> dict[str, Column]:
    """Return the pairs of chunk count and microbatch group to try."""
    given = dict(fixed)
    rows = [
        (vpp, group)
        for vpp in _choices("vpp", given, chunk_counts(pp, blocks))
        if pp * vpp <= stages and (vpp == 1 or pp > 1) and (subset != OVERLAPPED_EXPERTS or vpp > 1 or pp == 1)
        for group in _choices("microbatch_group", given, microbatch_groups(pp, m) if vpp > 1 else (0,))
        if _valid_group(group, vpp, pp, m)
    ]
    vpps, sizes = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return {"vpp": vpps, "microbatch_group": sizes}


def _valid_group(group: int, vpp: int, pp: int, m: int) -> bool:
    size = group or pp
    return group == 0 if vpp == 1 else pp <= size <= m and (m % size or size) >= pp


def _module_sets(present: tuple[Module, ...], fixed: FixedAxes) -> tuple[int, ...]:
    """The sets of modules that selective recompute may be of: by number from 1 on, or the one decided on, as bits."""
    if not fixed.get("recompute_modules"):
        return tuple(range(1, 1 + len(present)))
    return (int(fixed["recompute_modules"]),) if set(fixed["recompute_modules"]) <= set(present) else ()


@lru_cache(maxsize=1 << 10)
def _recompute_choices(
    blocks: int, stages: int, sets: tuple[int, ...], modes: tuple[Recompute, ...], fixed: tuple[tuple[str, Any], ...]
) -> dict[str, Column]:
    """Return the recompute modes, modules and numbers of blocks a stage to try."""
    given = dict(fixed)
    none = () if given.get("recompute_modules") else (0,)
    rows = [
        (int(mode), modules, layers)
        for mode in _choices("recompute", given, modes)
        if mode in modes
        for modules in (sets if mode == Recompute.SELECTIVE else none)
        for layers in _choices(
            "recompute_layers", given, (0, *range(1, -(-blocks // stages))) if mode == Recompute.FULL else (0,)
        )
        if (layers == 0 or mode == Recompute.FULL) and (blocks or mode != Recompute.FULL)
    ]
    codes, modules, layers = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return {"recompute": codes, "recompute_modules": modules, "recompute_layers": layers}


def _recompute_modes(pp: int, vpp: int, subset: int) -> tuple[Recompute, ...]:
    """Return the recompute modes of one part of the variants; chunks that overlap experts recompute no whole blocks."""
    if subset == ALL_VARIANTS or (subset == OTHER_VARIANTS and vpp == 1 < pp):
        return (Recompute.FULL, Recompute.NONE, Recompute.SELECTIVE)
    return (Recompute.FULL,) if subset == OTHER_VARIANTS else (Recompute.NONE, Recompute.SELECTIVE)


def _column(name: str, values: Iterable[int]) -> dict[str, NDArray[np.int64]]:
    return {name: np.array(list(values), dtype=np.int64)}


def _choices(name: str, fixed: FixedAxes, free: Iterable[Any]) -> tuple[Any, ...]:
    return (fixed[name],) if name in fixed else tuple(free)
