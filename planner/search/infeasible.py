"""Messages for searches without a plan: fixed values that no layout has, break a rule, or do not fit the memory.

Each function returns the text of a UserError: what is wrong, where, and the smallest changes that help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.choices import GradReduce, ModuleSet, OverlapSet
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.model.structure import model_structure
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.rules.rule import Violation
from megaloom.planner.rules.rules import range_violations
from megaloom.planner.rules.steps import STEP_RULES

from .candidates import Candidates
from .pricing import Pricer
from .reasons import deficit_text
from .suggestions import changes_text, fixed_text, legal_batches, legal_changes
from .variant_choices import FixedAxes, shard_choices

OF_A_STEP = {rule.id for rule in STEP_RULES}
MAX_ILLEGAL = 2000  # illegal layouts that are compared for the one that is nearest to legal
FASTEST_BASES, MAX_TRIED = 100, 300  # base layouts that may fit, the fastest first, and their layouts that are tried
LEANEST = 20  # layouts with the least bounds of memory that are partitioned
# Multiples of the number of devices that are tried.
GROWTH = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
SHORTER = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # divisors of the sequence length that are tried
PLAIN_AXES = {"cp": 1, "etp": 1, "micro_batch": 1}  # a first plan is searched among these layouts


def checked_fixed(fixed: Mapping[str, Any]) -> FixedAxes:
    """Return the fixed fields, parsed. Raises UserError for an unknown field or value."""
    out = dict(fixed)
    for name, value in fixed.items():
        if name not in FIELDS:
            raise UserError(f"a layout has no {name!r}\nit has {', '.join(FIELDS)}")
        try:
            out[name] = FIELDS[name].parse(value)
        except ValueError as error:
            raise UserError(f"{FIELDS[name].flag} {error}") from None
    return out


def check_ranges(fixed: FixedAxes, g: Graph, workload: Workload, machine: Cluster) -> None:
    """Raise UserError for a fixed number out of range, before anything is computed with it."""
    for violation in range_violations(Layout(**fixed), g, workload, machine):
        raise UserError(str(violation))
    layers, blocks = fixed.get("recompute_layers", 0), model_structure(g).recomputable_blocks
    if blocks and layers > blocks:
        raise UserError(
            f"--recompute-layers {layers} is more than the {blocks} blocks of the model\n"
            f"use {blocks} or fewer; 0 recomputes all"
        )


class NoLegalLayoutError(UserError):
    """No layout with the fixed fields is legal on the cluster."""


Advice = Callable[[Cluster], str | None]
"""Returns the words of the command line that give a larger cluster or one of other devices; None if there are none."""


def gpus_option(other: Cluster) -> str | None:
    """Return the option of `plan` that gives another cluster."""
    return f"--gpus {other}"


def nothing_legal(pricer: Pricer, fixed: FixedAxes) -> str:
    """Return the message for a search without legal layouts.

    It names the rules that the nearest layout breaks, then changes that are legal with all other fixed fields; where
    there are none, the fixes of the rules.
    """
    g, space = pricer.graph, pricer.space(fixed)
    tried = ((x, pricer.broken(x)) for x in space.unchecked_layouts())
    layout, broken = min(islice(tried, MAX_ILLEGAL), key=_distance_from_legal)
    condition = f" with {fixed_text(fixed)}" if fixed else ""
    lines = [f"no layout of {g.name} on {pricer.cluster}{condition} is legal. The nearest, {layout}, breaks:"]
    lines += [f"- {v.message} [{v.rule}]" for v in broken]
    changes = changes_text(legal_changes(space), fixed)
    if batches := legal_batches(space, layout):
        changes.append(f"use --batch {' or '.join(str(n) for n in batches)}")
    return "\n".join([*lines, *(changes or [f"{v.fix} [{v.rule}]" for v in broken])])


def _distance_from_legal(entry: tuple[Layout, tuple[Violation, ...]]) -> tuple[int, int, int]:
    """Return a sort key: broken rules of the device mesh, then its degrees, then all broken rules.

    Rules of the batch come last, because dp decides them.
    """
    x, broken = entry
    axes = sum(v.rule not in OF_A_STEP for v in broken)
    return axes, x.tp * x.pp * x.cp + x.ep * x.etp, len(broken)


def nothing_fits(pricer: Pricer, candidates: Candidates, advice: Advice = gpus_option) -> str:
    """Return the message for a search in which nothing fits: the smallest deficit, and changes that help."""
    nearest, fixed = leanest(candidates), candidates.fixed
    if nearest is None:
        return nothing_legal(pricer, fixed)
    condition = f" with {fixed_text(fixed)}" if fixed else ""
    lines = [
        f"no layout of {pricer.graph.name} on {pricer.cluster}{condition} fits the memory",
        f"nearest layout, {nearest.layout}: {deficit_text(nearest)}",
    ]
    changes = [f"{change} fits: {partition.layout}" for change, partition in _other_values(pricer, fixed)]
    if not changes:
        changes = [
            f"{change} fits: {partition.layout}" for change, partition in _changed(pricer, nearest, fixed, advice)
        ]
    if fixed and not changes:
        without = f"fits, without {fixed_text(fixed)}"
        changes = [
            f"{change} {without}: {partition.layout}" for change, partition in _changed(pricer, nearest, {}, advice)
        ]
    return "\n".join([*lines, *(changes or ["use a smaller model, or devices with more memory"])])


def leanest(candidates: Candidates) -> Partition | None:
    """Return the layout with the smallest deficit, of those with the least bounds of memory; None without layouts."""
    _, ideal = candidates.bound_all().ideal()
    bounded = candidates.variants(np.argsort(ideal, kind="stable")[:LEANEST])
    first = np.argsort(bounded.nbytes, kind="stable")[:LEANEST]
    partitions = (candidates.pricer.partition(bounded.layouts[int(i)]) for i in first)
    return min(partitions, key=lambda partition: partition.deficit, default=None)


Change = tuple[str, Partition]  # the change, and a layout that fits with it


def _other_values(pricer: Pricer, fixed: FixedAxes) -> Iterator[Change]:
    """Yield for each fixed field another value with which a layout fits; else one layout with nothing fixed."""
    any_fits = False
    for name in fixed:
        others = {other: value for other, value in fixed.items() if other != name}
        if (partition := fitting(pricer, others)) is not None:
            any_fits = True
            value, now = getattr(partition.layout, name), fixed_text({name: fixed[name]})
            if isinstance(value, ModuleSet | OverlapSet) and not value:
                yield f"a layout without {now}", partition
            else:
                yield f"{fixed_text({name: value})} instead of {now}", partition
    if not any_fits and len(fixed) > 1 and (partition := fitting(pricer, {})) is not None:
        yield f"a layout without {fixed_text(fixed)}", partition


def _changed(pricer: Pricer, nearest: Partition, fixed: FixedAxes, advice: Advice) -> Iterator[Change]:
    """Yield for each kind of change the smallest one with which a layout fits."""
    kinds = (
        _less_headroom(pricer, nearest),
        _lower_precision(pricer),
        _more_devices(pricer, fixed, advice),
        _larger_devices(pricer, advice),
        _shorter_sequences(pricer),
    )
    for kind in kinds:
        tried = ((change, fitting(changed, fixed)) for change, changed in kind)
        yield from islice(((change, partition) for change, partition in tried if partition is not None), 1)


ChangedPricers = Iterator[tuple[str, Pricer]]  # the change, and the pricer with it; the smallest change first


def _less_headroom(pricer: Pricer, nearest: Partition) -> ChangedPricers:
    """Yield the headroom with which the nearest layout fits."""
    nbytes = pricer.cluster.device.nbytes
    headroom = int(100 * (1 - (nearest.deficit + nearest.problem.memory_limit) / nbytes)) / 100
    if 0 <= headroom < pricer.headroom:
        yield f"--memory-headroom {headroom:.0%}", _with(pricer, headroom=headroom)


def _lower_precision(pricer: Pricer) -> ChangedPricers:
    """Yield the 16-bit precisions of the device in place of fp32."""
    for precision in (Precision.BF16, Precision.FP16) if pricer.workload.precision is Precision.FP32 else ():
        if precision in pricer.cluster.device.flops:
            yield f"--precision {precision}", _with(pricer, workload=evolve(pricer.workload, precision=precision))


def _more_devices(pricer: Pricer, fixed: FixedAxes, advice: Advice) -> ChangedPricers:
    """Yield larger clusters of the same device, unless dp is fixed."""
    for times in GROWTH if "dp" not in fixed else ():
        larger = _devices(pricer.cluster, pricer.cluster.count * times, pricer.cluster.kind)
        if larger and (option := advice(larger)):
            yield option, _with(pricer, cluster=larger)


def _larger_devices(pricer: Pricer, advice: Advice) -> ChangedPricers:
    """Yield as many devices with more memory each, the least memory first."""
    now, precision = pricer.cluster, pricer.workload.precision
    devices = {kind: it.device for kind, it in PRESETS.items() if precision in it.device.flops and kind != "CPU"}
    larger = [kind for kind, device in devices.items() if device.nbytes > now.device.nbytes]
    for kind in sorted(larger, key=lambda kind: devices[kind].nbytes):
        other = _devices(now, now.count, kind)
        if other and (option := advice(other)):
            yield option, _with(pricer, cluster=other)


def _shorter_sequences(pricer: Pricer) -> ChangedPricers:
    """Yield shorter sequences, the longest first."""
    seq = pricer.workload.seq
    for divisor in SHORTER:
        if seq % divisor == 0:
            shorter = evolve(pricer.workload, seq=seq // divisor)
            yield f"--seq {shorter.seq}", _with(pricer, workload=shorter)


def _devices(now: Cluster, count: int, kind: str) -> Cluster | None:
    """Return a cluster of this many devices of a kind, in the nodes of `now`; None if it would not fill its nodes."""
    try:
        named = cluster(f"{now.count}x{now.kind}") == now if now.kind in PRESETS else False
        return cluster(f"{count}x{kind}") if named else evolve(now, count=count) if kind == now.kind else None
    except UserError:
        return None


def _with(pricer: Pricer, **changes: Any) -> Pricer:
    """Return a new pricer with these fields changed."""
    fields = {name: getattr(pricer, name) for name in ("graph", "cluster", "workload", "profile", "headroom")}
    return Pricer(**{**fields, **changes})


def fitting(pricer: Pricer, fixed: FixedAxes) -> Partition | None:
    """Return a layout that fits the memory, or None if none is found. Layouts with PLAIN_AXES come first."""
    for chosen in ({**PLAIN_AXES, **fixed}, fixed) if _state_fits(pricer, fixed) else ():
        candidates = Candidates(pricer, chosen)
        if len(candidates.base_layouts) and (partition := _fast_or_leanest(candidates)) is not None:
            return partition
    return None


def _state_fits(pricer: Pricer, fixed: FixedAxes) -> bool:
    """Return True if all devices together can hold weights, gradients and optimizer state once."""
    one = Layout(grad_reduce=fixed.get("grad_reduce", GradReduce.FP32))
    leanest = evolve(one, shard=max(shard_choices(True, fixed)))
    part = pricer.partition(one).stages[0]
    elements, precision = (part.params, part.expert_params), pricer.workload.precision
    once = state_bytes(*elements, leanest, precision, pricer.profile, frozen_params=part.frozen_params)
    return once.total <= pricer.capacity * pricer.cluster.count


def _fast_or_leanest(candidates: Candidates) -> Partition | None:
    """Return one of the fastest layouts that fit, else the one with the smallest deficit if that fits."""
    seconds, nbytes = candidates.bound_all().ideal()
    order = np.flatnonzero(nbytes <= candidates.pricer.capacity)
    if not len(order):
        return None
    bounded = candidates.variants(order[np.argsort(seconds[order], kind="stable")][:FASTEST_BASES])
    feasible = np.flatnonzero(bounded.nbytes <= candidates.pricer.capacity)
    for i in feasible[np.argsort(bounded.seconds[feasible], kind="stable")][:MAX_TRIED].tolist():
        if found := candidates.pricer.refined(candidates.pricer.even(bounded.layouts[i])):
            return found.partition
    last = leanest(candidates)
    return last if last and last.fits else None
