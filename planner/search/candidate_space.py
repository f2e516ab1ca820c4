"""The candidate space: all base layouts, and the variants of each, as arrays.

`base_layouts` lists the legal device meshes with every micro-batch size; `variants` adds model chunks, microbatch
group, recompute and sharding of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
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
from megaloom.planner.contract.layout import VOCAB_MULTIPLE, Layout
from megaloom.planner.contract.layouts import NAMES, Column, Layouts, alike
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.rules.divisors import divisors
from megaloom.planner.rules.overlaps import may_overlap_experts, within_node
from megaloom.planner.rules.rules import legal

MAX_CHUNKS = 16  # model chunks a pipeline rank, at most
GROUP_RATIOS = (1.0, 1.25, 1.5, 2.0)  # microbatch groups, as multiples of pp: larger ones wait less and save more
VARIANT_FIELDS = ("vpp", "microbatch_group", "recompute", "recompute_modules", "recompute_layers")

FixedAxes = Mapping[str, Any]  # the fields of a layout that the user has decided
FixedValues = tuple[tuple[str, Any], ...]  # some of these, hashable
InnerOverlaps = tuple[Overlap, ...]  # overlaps within a micro-batch
# Variants of a base layout. Where the search tries both, layouts that overlap experts have a base layout of their own.
ALL_VARIANTS, OVERLAPPED_EXPERTS, OTHER_VARIANTS = 0, 1, 2


def base_layouts(
    graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes, inner: InnerOverlaps = ()
) -> Layouts:
    """Return the legal base layouts: device mesh, micro-batch size, sequence parallelism, overlaps in a micro-batch.

    The fields that `variants` chooses are those of a plain layout. `inner` are the overlaps within a micro-batch
    that the search tries: on wherever they are legal. Layouts that overlap experts are base layouts of their own.
    """
    base = unchecked_base_layouts(graph, cluster, workload, fixed, inner)
    plain = evolve(base, shard=np.full(len(base), _shard_choices(0, fixed)[0]))
    plain = evolve(plain, overlaps=_overlaps(plain, fixed) & ~Overlap.EXPERTS.bit)  # expert overlap needs chunks
    multi_token = model_requirements(graph).multi_token
    may_overlap = ~base.has_overlap(Overlap.EXPERTS) | may_overlap_experts(base, multi_token, workload)
    return base.take(legal(plain, graph, workload, cluster) & may_overlap)


def unchecked_layouts(graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes) -> Iterator[Layout]:
    """Yield every layout that uses all devices and leaves no remainder in any degree, legal or not."""
    chosen = {name: value for name, value in fixed.items() if name in (*VARIANT_FIELDS, "shard", "overlaps")}
    chosen.setdefault("overlaps", OverlapSet(default_overlaps(fixed.get("shard", Shard.NONE))))
    layouts = unchecked_base_layouts(graph, cluster, workload, fixed)
    for base in (layouts[i] for i in range(len(layouts))):
        for vpp in _choices("vpp", fixed, chunk_counts(base.pp, model_requirements(graph).blocks)):
            yield evolve(base, **chosen | {"vpp": vpp})


def unchecked_base_layouts(
    graph: Graph, cluster: Cluster, workload: Workload, fixed: FixedAxes, inner: InnerOverlaps = ()
) -> Layouts:
    """Return every base layout that uses all devices, legal or not: all divisors, powers of two or not."""
    rows = np.array(list(_degrees(graph, cluster, fixed)), dtype=np.int64).reshape(-1, 7)
    zeros, ones = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64)
    columns = dict(zip(("tp", "pp", "cp", "dp", "etp", "ep", "sequence_parallel"), rows.T, strict=True))
    plain = {name: ones if name in ("vpp", "micro_batch") else zeros for name in NAMES}
    plain["vocab_multiple"] = ones * fixed.get("vocab_multiple", VOCAB_MULTIPLE)
    degrees = Layouts(**plain | columns)
    first, which = alike(degrees.sequence_parallel, degrees.tp, degrees.ep)
    overlaps = [_column("overlaps", _inner_overlaps(degrees[int(i)], cluster, fixed, inner)) for i in first]
    degrees = degrees.spread(overlaps, which)
    first, which = alike(degrees.dp)
    sizes = [_column("micro_batch", _micro_batch_choices(int(degrees.dp[i]), workload, fixed)) for i in first]
    return degrees.spread(sizes, which)


def _degrees(graph: Graph, cluster: Cluster, fixed: FixedAxes) -> Iterator[tuple[int, ...]]:
    """Yield tp, pp, cp, dp, etp, ep and sequence parallelism of every base layout."""
    world, moe = cluster.count, model_requirements(graph).experts
    for tp in _choices("tp", fixed, divisors(world)):
        for pp in _choices("pp", fixed, divisors(max(1, world // tp))):
            for cp in _choices("cp", fixed, divisors(max(1, world // (tp * pp)))):
                for dp in _choices("dp", fixed, (max(1, world // (tp * pp * cp)),)):
                    for etp in _choices("etp", fixed, sorted({1, tp}) if moe else (1,)):
                        for ep in _choices("ep", fixed, divisors(max(1, dp * cp * tp // etp)) if moe else (1,)):
                            for sp in _choices("sequence_parallel", fixed, (False, True) if tp > 1 else (False,)):
                                yield tp, pp, cp, dp, etp, ep, sp


def _inner_overlaps(axes: Layout, cluster: Cluster, fixed: FixedAxes, inner: InnerOverlaps) -> tuple[int, ...]:
    """Return the sets of overlaps within a micro-batch that the search tries."""
    if "overlaps" in fixed:
        return (int(fixed["overlaps"] & MICROBATCH_OVERLAPS),)
    on = Overlap.TENSOR in inner and axes.sequence_parallel and within_node(axes.tp, cluster)
    first = Overlap.TENSOR.bit if on else 0
    return (first, first + Overlap.EXPERTS.bit) if Overlap.EXPERTS in inner and axes.ep > 1 else (first,)


def _subsets(graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, inner: InnerOverlaps) -> Column:
    """Return which variants each base layout has: ALL_VARIANTS, OVERLAPPED_EXPERTS or OTHER_VARIANTS."""
    overlapped = base.has_overlap(Overlap.EXPERTS)
    subsets: Column = np.where(overlapped, OVERLAPPED_EXPERTS, ALL_VARIANTS)
    if Overlap.EXPERTS in inner and "overlaps" not in fixed:
        other = ~overlapped & may_overlap_experts(base, model_requirements(graph).multi_token, workload)
        subsets = np.where(other, OTHER_VARIANTS, subsets)
    return subsets


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
    sizes = sorted(n for n in {ceil(ratio * pp) for ratio in GROUP_RATIOS} if _fills_ranks(n, pp, microbatches))
    sizes = sizes or list(islice((n for n in range(pp, microbatches + 1) if _fills_ranks(n, pp, microbatches)), 1))
    return tuple(n if n != pp else 0 for n in sizes)


def variants(
    graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, family: Column, inner: InnerOverlaps = ()
) -> tuple[Layouts, Column]:
    """Return the legal layouts of these base layouts, and the number of the base layout of each.

    family: the sets of modules that selective recompute may have, as bits: [base layouts, sets].
    """
    needs, numbers, m = model_requirements(graph), np.arange(len(base)), base.microbatches(workload.batch)
    subsets, key = _subsets(graph, workload, base, fixed, inner), _variant_key(fixed)
    first, which = alike(base.pp, m, subsets)
    rows = zip(base.pp[first].tolist(), m[first].tolist(), subsets[first].tolist(), strict=True)
    schedules = [_schedules(pp, count, needs.blocks, needs.max_stages, subset, key) for pp, count, subset in rows]
    layouts, numbers = base.spread(schedules, which), _repeat(numbers, schedules, which)
    subsets = subsets[numbers]
    first, which = alike(layouts.pp, layouts.vpp, subsets)
    sets = _module_sets(needs.modules, fixed)
    rows = zip(layouts.pp[first].tolist(), layouts.vpp[first].tolist(), subsets[first].tolist(), strict=True)
    recompute = [_recompute_choices(needs.blocks, pp, vpp, sets, subset, key) for pp, vpp, subset in rows]
    layouts, numbers = layouts.spread(recompute, which), _repeat(numbers, recompute, which)
    if not fixed.get("recompute_modules"):
        modules = np.concatenate([np.zeros((len(base), 1), dtype=np.int64), family], axis=1)
        layouts = evolve(layouts, recompute_modules=modules[numbers, layouts.recompute_modules])
    several = (layouts.dp * layouts.cp > 1).astype(np.int64)
    shards = [_column("shard", _shard_choices(on, fixed)) for on in (0, 1)]
    layouts, numbers = layouts.spread(shards, several), _repeat(numbers, shards, several)
    return evolve(layouts, overlaps=_overlaps(layouts, fixed)), numbers


def _shard_choices(several: int, fixed: FixedAxes) -> tuple[int, ...]:
    """Return the values of `shard` to try; `several` is 1 where several devices share a weight, else 0."""
    return _choices("shard", fixed, (1,) if Overlap.WEIGHTS in fixed.get("overlaps", ()) else range(1 + several))


def _overlaps(layouts: Layouts, fixed: FixedAxes) -> Column:
    """Return the overlaps as bits. Unless the user fixes them, gradients and weights always overlap.

    A step never takes longer with them: only what is hidden takes a share of the device, and the share is below 1.
    Memory does not change.
    """
    if "overlaps" in fixed:
        return np.full(len(layouts), int(fixed["overlaps"]))
    overlaps: Column = layouts.overlaps | default_overlaps(layouts.shard)
    return overlaps


def count_variants(graph: Graph, workload: Workload, base: Layouts, fixed: FixedAxes, inner: InnerOverlaps = ()) -> int:
    """Return the number of `variants` without building them."""
    needs, m, key = model_requirements(graph), base.microbatches(workload.batch), _variant_key(fixed)
    subsets, sets, counts = _subsets(graph, workload, base, fixed, inner), _module_sets(needs.modules, fixed), []
    first, which = alike(base.pp, m, subsets)
    for pp, micro_batches, subset in zip(*(column[first].tolist() for column in (base.pp, m, subsets)), strict=True):
        vpps = _schedules(pp, micro_batches, needs.blocks, needs.max_stages, subset, key)["vpp"].tolist()
        recompute = (_recompute_choices(needs.blocks, pp, vpp, sets, subset, key)["recompute"] for vpp in vpps)
        counts.append(sum(map(len, recompute)))
    shards = np.array([len(_shard_choices(several, fixed)) for several in (0, 1)])
    several = (base.dp * base.cp > 1).astype(np.int64)
    return int((np.array(counts, dtype=np.int64)[which] * shards[several]).sum()) if len(base) else 0


def _repeat(rows: Column, choices: list[dict[str, Column]], which: Column) -> Column:
    counts = np.array([len(next(iter(choice.values()))) for choice in choices], dtype=np.int64)[which]
    return np.repeat(rows, counts)


def _variant_key(fixed: FixedAxes) -> FixedValues:
    """Return the fixed fields that `variants` chooses, hashable."""
    return tuple(sorted((name, value) for name, value in fixed.items() if name in VARIANT_FIELDS))


@lru_cache(maxsize=1 << 14)
def _schedules(pp: int, m: int, blocks: int, stages: int, subset: int, key: FixedValues) -> dict[str, Column]:
    """Return the pairs of chunk count and microbatch group to try; `stages` is the most that the model allows."""
    fixed = dict(key)
    rows = [
        (vpp, group)
        for vpp in _choices("vpp", fixed, chunk_counts(pp, blocks))
        if pp * vpp <= stages and (vpp == 1 or pp > 1) and (subset != OVERLAPPED_EXPERTS or vpp > 1 or pp == 1)
        for group in _choices("microbatch_group", fixed, microbatch_groups(pp, m) if vpp > 1 else (0,))
        if _valid_group(group, vpp, pp, m)
    ]
    vpps, sizes = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return {"vpp": vpps, "microbatch_group": sizes}


def _valid_group(group: int, vpp: int, pp: int, m: int) -> bool:
    return group == 0 if vpp == 1 else _fills_ranks(group or pp, pp, m)


def _fills_ranks(size: int, pp: int, m: int) -> bool:
    """Return True if each microbatch group of this size, the last one too, has a micro-batch for each rank."""
    return pp <= size <= m and (m % size or size) >= pp


def _module_sets(present: tuple[Module, ...], fixed: FixedAxes) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the sets of modules that selective recompute may have; a fixed set as bits."""
    if not fixed.get("recompute_modules"):
        return tuple(range(1, 1 + len(present)))
    return (int(fixed["recompute_modules"]),) if set(fixed["recompute_modules"]) <= set(present) else ()


@lru_cache(maxsize=1 << 10)
def _recompute_choices(
    blocks: int, pp: int, vpp: int, sets: tuple[int, ...], subset: int, key: FixedValues
) -> dict[str, Column]:
    """Return the recompute modes, modules and numbers of blocks a stage to try."""
    fixed, modes, partial = dict(key), _recompute_modes(pp, vpp, subset), range(1, -(-blocks // (pp * vpp)))
    no_modules = () if fixed.get("recompute_modules") else (0,)
    rows = [
        (int(mode), modules, layers)
        for mode in _choices("recompute", fixed, modes)
        if mode in modes
        for modules in (sets if mode == Recompute.SELECTIVE else no_modules)
        for layers in _choices("recompute_layers", fixed, (0, *partial) if mode == Recompute.FULL else (0,))
        if (layers == 0 or mode == Recompute.FULL) and (blocks or mode != Recompute.FULL)
    ]
    codes, modules, layers = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return {"recompute": codes, "recompute_modules": modules, "recompute_layers": layers}


def _recompute_modes(pp: int, vpp: int, subset: int) -> tuple[Recompute, ...]:
    """Return the recompute modes of a subset of variants. Layouts that overlap experts recompute no whole blocks."""
    if subset == ALL_VARIANTS or (subset == OTHER_VARIANTS and vpp == 1 < pp):
        return (Recompute.FULL, Recompute.NONE, Recompute.SELECTIVE)
    return (Recompute.FULL,) if subset == OTHER_VARIANTS else (Recompute.NONE, Recompute.SELECTIVE)


def _column(name: str, values: Iterable[int]) -> dict[str, NDArray[np.int64]]:
    return {name: np.array(list(values), dtype=np.int64)}


def _choices(name: str, fixed: FixedAxes, free: Iterable[Any]) -> tuple[Any, ...]:
    """Return the fixed value of a field, or all its values where it is free."""
    return (fixed[name],) if name in fixed else tuple(free)
