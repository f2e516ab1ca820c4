"""Neighbours of a layout: layouts that differ in one choice.

`priced_neighbours` simulates those that are legal and fit, and gives the cause why the others are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from megaloom.planner.contract.choices import (
    MICROBATCH_OVERLAPS,
    ExpertShard,
    ModuleSet,
    Overlap,
    OverlapSet,
    Recompute,
    Reshard,
    Shard,
    default_overlaps,
)
from megaloom.planner.contract.layout import AXES, Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.rules.divisors import divisors

from .pricing import Pricer
from .reasons import (
    Rejected,
    Rival,
    deficit_text,
    refusal,
)
from .variant_choices import FixedAxes, chunk_counts, micro_batch_sizes, microbatch_groups

MESH_AXES = ("dp", "tp", "pp", "cp")  # the axes whose product is the number of devices


def priced_neighbours(layout: Layout, pricer: Pricer, fixed: FixedAxes) -> tuple[list[Rival], tuple[Rejected, ...]]:
    """Return the neighbours that are legal and fit, simulated; and the others with the cause."""
    rivals, rejected = [], []
    for change, other in neighbours(layout, pricer, fixed):
        broken = pricer.broken(other)
        if broken:
            rejected.append(Rejected(other, refusal(broken)))
            continue
        partition = pricer.partition(other)
        if partition.fits:
            rivals.append(Rival(change, pricer.simulate(partition)))
        else:
            rejected.append(Rejected(other, deficit_text(partition)))
    return rivals, tuple(rejected)


def neighbours(layout: Layout, pricer: Pricer, fixed: FixedAxes) -> Iterator[tuple[str, Layout]]:
    """Yield each neighbour with its change in words. Fixed fields do not change."""
    seen = {layout}
    for other in _steps(layout, pricer, fixed):
        x = _settled(other, layout, pricer.workload)
        if x not in seen and _keeps(x, fixed):
            seen.add(x)
            yield _change(layout, x), x


def _keeps(x: Layout, fixed: FixedAxes) -> bool:
    """Return whether a layout has all fixed fields."""
    own = {**fixed, "expert_shard": x.expert_shard} if fixed.get("expert_shard") == x.shard_of_experts + 1 else fixed
    return all(getattr(x, name) == value for name, value in own.items())


def _with(x: Layout, **changes: Any) -> Layout:
    """`evolve` for fields whose names are computed: a type checker cannot know their types."""
    return evolve(x, **changes)


def _steps(x: Layout, pricer: Pricer, fixed: FixedAxes) -> Iterator[Layout]:
    needs = model_requirements(pricer.graph)
    for a in MESH_AXES:
        if (factor := _factor(getattr(x, a))) > 1:
            for b in MESH_AXES:
                if a != b:
                    yield _with(x, **{a: getattr(x, a) // factor, b: getattr(x, b) * factor})
    for name, values in (
        ("micro_batch", micro_batch_sizes(x.dp, pricer.workload, {})),
        ("vpp", chunk_counts(x.pp, needs.blocks, needs.max_stages)),
        ("ep", divisors(x.world // (x.pp * x.etp)) if needs.experts else (1,)),
    ):
        now = getattr(x, name)
        for value in (
            max((v for v in values if v < now), default=now),
            min((v for v in values if v > now), default=now),
        ):
            yield _with(x, **{name: value})
    for mode in (Recompute.NONE, *((Recompute.FULL,) if needs.blocks else ())):
        yield evolve(x, recompute=mode, recompute_modules=ModuleSet(), recompute_layers=0)
    for module in needs.modules if x.recomputed_modules else ():
        other = set(x.recomputed_modules) ^ {module}
        if other:
            yield evolve(x, recompute_modules=ModuleSet(other))
    if x.recompute_layers:
        yield evolve(x, recompute_layers=max(1, x.recompute_layers - 1))
        yield evolve(x, recompute_layers=x.recompute_layers + 1)
    yield evolve(x, microbatch_group=0)
    if x.tp > 1:
        yield evolve(x, sequence_parallel=not x.sequence_parallel)
    for shard in (shard for shard in Shard if shard is not x.shard):
        of_step = x.overlaps ^ x.microbatch_overlap_bits
        of_step = default_overlaps(shard) if of_step == default_overlaps(x.shard) else of_step
        overlaps = OverlapSet(of_step | x.microbatch_overlap_bits)
        yield evolve(x, shard=shard, reshard=Reshard.MICRO_BATCH, replicas=1, overlaps=overlaps)
    for overlap in pricer.inner:
        yield evolve(x, overlaps=OverlapSet(x.overlaps ^ overlap.bit))


def _settled(x: Layout, origin: Layout, workload: Workload) -> Layout:
    """The layout with what depends on its axes set as one would: sequence parallelism with tp, chunks with pp."""
    sp = x.sequence_parallel if x.tp == origin.tp else x.tp > 1
    m = x.microbatches(workload.batch)
    same_schedule = m == origin.microbatches(workload.batch) and (x.pp, x.vpp > 1) == (origin.pp, True)
    groups = microbatch_groups(x.pp, m) if x.pp > 1 and x.vpp > 1 else ()
    group = x.microbatch_group if same_schedule else next(iter(groups), 0)
    settled = evolve(
        x,
        sequence_parallel=sp,
        vpp=x.vpp if x.pp > 1 else 1,
        microbatch_group=group,
        shard=x.shard if x.dp * x.cp > 1 else Shard.NONE,
        reshard=x.reshard if x.dp * x.cp > 1 else Reshard.MICRO_BATCH,
        replicas=x.replicas if x.dp * x.cp > x.replicas else 1,
        expert_shard=x.expert_shard if x.dp * x.cp > 1 else ExpertShard.SAME,
    )
    inner = {Overlap.TENSOR: sp, Overlap.EXPERTS: x.ep > 1 and not x.full_recompute and (x.pp == 1 or x.vpp > 1)}
    switched_off = {*OverlapSet(default_overlaps(origin.shard))} - {*origin.overlaps}
    overlaps = {*OverlapSet(default_overlaps(settled.shard))} - switched_off
    return evolve(settled, overlaps=OverlapSet(overlaps | {o for o in x.overlaps if inner.get(o)}))


def _change(layout: Layout, other: Layout) -> str:
    """Return the difference of two layouts in words: `With tp 2, dp 4 instead of tp 1, dp 8`."""
    names = [name for name in (*AXES, "micro_batch") if getattr(layout, name) != getattr(other, name)]
    new, old = (", ".join(f"{_label(name)} {getattr(x, name)}" for name in names) for x in (other, layout))
    parts = [f"with {new} instead of {old}"] if names else []
    if other.recompute_text != layout.recompute_text:
        parts.append(f"with recompute {other.recompute_text} instead of {layout.recompute_text}")
    if (
        other.microbatch_group_size != layout.microbatch_group_size
        and layout.vpp > 1
        and other.vpp > 1
        and layout.pp == other.pp
    ):
        parts.append(
            f"with microbatch groups of {other.microbatch_group_size} instead of {layout.microbatch_group_size}"
        )
    if other.sequence_parallel != layout.sequence_parallel and layout.tp == other.tp:
        parts.append(f"{'with' if other.sequence_parallel else 'without'} sequence parallelism")
    if _sharding(other) != _sharding(layout):
        parts.append(_shard_change(layout, other))
    for overlap in MICROBATCH_OVERLAPS:
        if other.has_overlap(overlap) != layout.has_overlap(overlap):
            parts.append(f"{'with' if other.has_overlap(overlap) else 'without'} overlap of {overlap}")
    text = " and ".join(parts)
    return text[0].upper() + text[1:]


def _sharding(x: Layout) -> tuple[int, ...]:
    return x.shard, x.expert_shard, x.reshard


def _shard_change(layout: Layout, other: Layout) -> str:
    if not (layout.fsdp or other.fsdp):
        return f"{'with' if other.distributed_optimizer else 'without'} the distributed optimizer"
    new, old = (
        f"--shard {x.shard}"
        + (f" --expert-shard {x.expert_shard}" if x.expert_shard else "")
        + (f" --reshard {x.reshard}" if layout.shard is other.shard else "")
        for x in (other, layout)
    )
    return f"with {new} instead of {old}"


def _label(name: str) -> str:
    return {"micro_batch": "micro-batch"}.get(name, name)


def _factor(n: int) -> int:
    """The smallest prime factor; 1 of 1."""
    return next((d for d in range(2, n + 1) if n % d == 0), 1)
