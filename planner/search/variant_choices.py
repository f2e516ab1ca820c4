"""The choices of a search for one base layout: micro-batch size, vpp, microbatch group, recompute, shards.

Each function returns the values of a field, or of several as columns, that the search tries: the fixed one if the user
fixed it. Combinations that megatron-core never accepts, such as a microbatch group with vpp 1, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.choices import Module, Overlap, OverlapSet, Recompute, Shard, default_overlaps
from megaloom.planner.contract.layout import FULLY_SHARDED
from megaloom.planner.contract.layouts import Column
from megaloom.planner.contract.workload import Workload
from megaloom.planner.rules.divisors import divisors

MAX_CHUNKS = 16  # model chunks a pipeline rank, at most
POWERS_OF_TWO = (1, 2, 4, 8, 16)
GROUP_RATIOS = (1.0, 1.25, 1.5, 2.0)  # microbatch groups, as multiples of pp: larger ones wait less and save more
# Variants of a base layout. Where the search tries both, layouts that overlap experts have a base layout of their own.
ALL_VARIANTS, OVERLAPPED_EXPERTS, OTHER_VARIANTS = 0, 1, 2

FixedAxes = Mapping[str, Any]  # the fields of a layout that the user has decided
FixedValues = tuple[tuple[str, Any], ...]  # some of these, hashable


def implied(fixed: FixedAxes) -> FixedAxes:
    """Return the fixed fields, with what they imply: selective recompute by its modules, sharded weights by reshard
    and replicas.
    """
    recompute = {"recompute": Recompute.SELECTIVE} if fixed.get("recompute_modules") else {}
    shard = {"shard": Shard.WEIGHTS} if fixed.get("reshard") or fixed.get("replicas", 1) > 1 else {}
    return {**recompute, **shard, **fixed}


def micro_batch_sizes(dp: int, workload: Workload, fixed: FixedAxes) -> tuple[int, ...]:
    """Return the micro-batch sizes that divide the batch of each data-parallel rank, in ascending order."""
    return field_choices("micro_batch", fixed, divisors(max(1, workload.batch // dp)))


def chunk_counts(pp: int, blocks: int, stages: int) -> tuple[int, ...]:
    """Return the numbers of model chunks that a pipeline rank may have, in ascending order.

    These are the divisors of a rank's blocks, rounded up, and the powers of two: NVIDIA runs DeepSeek-V3's 61 blocks as
    8 chunks on each of two ranks. A model without repeated blocks may have any number. `stages` is the most pipeline
    stages that the model can be cut into.
    """
    most = min(MAX_CHUNKS, stages // pp) if pp > 1 else 1
    counts = {*divisors(-(-blocks // pp)), *POWERS_OF_TWO} if blocks else range(1, 1 + most)
    return tuple(sorted(v for v in counts if v <= most)) or (1,)


def microbatch_groups(pp: int, microbatches: int) -> tuple[int, ...]:
    """Return the microbatch groups to try, 0 for pp: legal ones of a few sizes, or the smallest legal one."""
    sizes = sorted(n for n in {ceil(ratio * pp) for ratio in GROUP_RATIOS} if _fills_ranks(n, pp, microbatches))
    sizes = sizes or list(islice((n for n in range(pp, microbatches + 1) if _fills_ranks(n, pp, microbatches)), 1))
    return tuple(n if n != pp else 0 for n in sizes)


def shard_choices(several: bool, fixed: FixedAxes, fully: bool = True) -> tuple[int, ...]:
    """Return the values of `shard` to try.

    several: whether several devices share a weight; fully: whether they may share gradients and weights.
    """
    fixed = implied(fixed)
    if not fully:
        return field_choices("shard", fixed, (x for x in shard_choices(several, fixed) if not FULLY_SHARDED[Shard(x)]))
    if Overlap.WEIGHTS in fixed.get("overlaps", ()):
        return field_choices("shard", fixed, (x for x in Shard if Overlap.WEIGHTS in OverlapSet(default_overlaps(x))))
    return field_choices("shard", fixed, Shard if several else (Shard.NONE,))


@lru_cache(maxsize=1 << 14)
def schedules(pp: int, m: int, blocks: int, stages: int, subset: int, key: FixedValues) -> dict[str, Column]:
    """Return the pairs of chunk count and microbatch group to try; `stages` is the most that the model allows."""
    fixed = dict(key)
    rows = [
        (vpp, group)
        for vpp in field_choices("vpp", fixed, chunk_counts(pp, blocks, stages))
        if pp * vpp <= stages and (vpp == 1 or pp > 1) and (subset != OVERLAPPED_EXPERTS or vpp > 1 or pp == 1)
        for group in field_choices("microbatch_group", fixed, microbatch_groups(pp, m) if vpp > 1 else (0,))
        if _valid_group(group, vpp, pp, m)
    ]
    vpps, sizes = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return {"vpp": vpps, "microbatch_group": sizes}


def _valid_group(group: int, vpp: int, pp: int, m: int) -> bool:
    return group == 0 if vpp == 1 else _fills_ranks(group or pp, pp, m)


def _fills_ranks(size: int, pp: int, m: int) -> bool:
    """Return True if each microbatch group of this size, the last one too, has a micro-batch for each rank."""
    return pp <= size <= m and (m % size or size) >= pp


def module_set_choices(present: tuple[Module, ...], count: int, fixed: FixedAxes) -> tuple[int, ...]:
    """Return the numbers, from 1 to `count`, of the sets of modules to try; a fixed set as bits, if all are present."""
    if not fixed.get("recompute_modules"):
        return tuple(range(1, 1 + count))
    return (int(fixed["recompute_modules"]),) if set(fixed["recompute_modules"]) <= set(present) else ()


@lru_cache(maxsize=1 << 10)
def recompute_choices(
    blocks: int, pp: int, vpp: int, sets: tuple[int, ...], subset: int, key: FixedValues
) -> dict[str, Column]:
    """Return the recompute modes, modules and numbers of blocks a stage to try."""
    fixed, modes, partial = dict(key), _recompute_modes(pp, vpp, subset), range(1, -(-blocks // (pp * vpp)))
    no_modules = () if fixed.get("recompute_modules") else (0,)
    rows = [
        (int(mode), modules, layers)
        for mode in field_choices("recompute", fixed, modes)
        if mode in modes
        for modules in (sets if mode == Recompute.SELECTIVE else no_modules)
        for layers in field_choices("recompute_layers", fixed, (0, *partial) if mode == Recompute.FULL else (0,))
        if (layers == 0 or mode == Recompute.FULL) and (blocks or mode != Recompute.FULL)
    ]
    codes, modules, layers = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return {"recompute": codes, "recompute_modules": modules, "recompute_layers": layers}


def _recompute_modes(pp: int, vpp: int, subset: int) -> tuple[Recompute, ...]:
    """Return the recompute modes of a subset of variants. Layouts that overlap experts recompute no whole blocks."""
    if subset == ALL_VARIANTS or (subset == OTHER_VARIANTS and vpp == 1 < pp):
        return (Recompute.FULL, Recompute.NONE, Recompute.SELECTIVE)
    return (Recompute.FULL,) if subset == OTHER_VARIANTS else (Recompute.NONE, Recompute.SELECTIVE)


def column(name: str, values: Iterable[int]) -> dict[str, NDArray[np.int64]]:
    """Return the values of one field, as `Layouts.spread` takes them."""
    return {name: np.array(list(values), dtype=np.int64)}


def field_choices(name: str, fixed: FixedAxes, free: Iterable[Any]) -> tuple[Any, ...]:
    """Return the fixed value of a field, or all its values where it is free."""
    return (fixed[name],) if name in fixed else tuple(free)
