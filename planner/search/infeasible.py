"""Messages for searches without a plan: fixed values that are no layout, break a rule, or do not fit the memory.

Each function returns the text of a UserError: what is wrong, where, and the smallest changes that help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.rules.rule import Violation
from megaloom.planner.rules.steps import STEP_RULES

from .candidate_space import FixedAxes, unchecked_layouts
from .candidates import Candidates
from .pricing import PartitionedLayout, Pricer
from .reasons import deficit_text
from .suggestions import changes_text, fixed_text, legal_batches, legal_changes, value_text

OF_A_STEP = {rule.id for rule in STEP_RULES}
LOOKED_AT = 2000  # illegal layouts among which the nearest to legal is sought
NEAREST, TRIED = 100, 300  # places that may have room, the quickest first, and layouts there, that are tried
PLACED = 20  # of the layouts that need the least memory, those that are cut
# Times the devices that are tried.
GROWTH = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
SHORTER = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # parts of the sequence that are
PLAIN_AXES = {"cp": 1, "etp": 1, "micro_batch": 1}  # of the layouts among which a first one is sought


def checked_fixed(fixed: Mapping[str, Any]) -> FixedAxes:
    """Return the fixed fields, parsed. Raises UserError for an unknown field or value."""
    out = dict(fixed)
    for name, value in fixed.items():
        if name not in FIELDS:
            raise UserError(f"a layout has no {name!r}\nit has {', '.join(FIELDS)}")
        try:
            out[name] = FIELDS[name].parse(value)
        except ValueError as wrong:
            raise UserError(f"{FIELDS[name].flag} {wrong}") from None
    if out.get("recompute_modules"):
        out.setdefault("recompute", Recompute.SELECTIVE)
    return out


def nothing_legal(pricer: Pricer, fixed: FixedAxes) -> str:
    """Return the message for a search without legal layouts.

    It names the rules that the nearest layout breaks, then changes that are legal with all other fixed fields; where
    there are none, the fixes of the rules.
    """
    g = pricer.graph
    tried = ((x, pricer.broken(x)) for x in unchecked_layouts(g, pricer.cluster, pricer.workload, fixed))
    layout, wrong = min(islice(tried, LOOKED_AT), key=_far)
    said = f" with {fixed_text(fixed)}" if fixed else ""
    lines = [f"no layout of {g.name} on {pricer.cluster}{said} is legal; the nearest, {layout}, breaks"]
    lines += [f"- {v.message} [{v.rule}]" for v in wrong]
    case = (g, pricer.cluster, pricer.workload, fixed)
    changes = changes_text(legal_changes(*case, pricer.inner, not pricer.own), fixed)
    if batches := legal_batches(*case, layout, pricer.inner, not pricer.own):
        changes.append(f"use --batch {' or '.join(str(n) for n in batches)}")
    return "\n".join([*lines, *(changes or [f"{v.rule}: {v.fix}" for v in wrong])])


def _far(entry: tuple[Layout, tuple[Violation, ...]]) -> tuple[int, int, int]:
    """How far from legal: the rules of the axes first, as those of a step follow dp; then how much is divided."""
    x, wrong = entry
    axes = sum(v.rule not in OF_A_STEP for v in wrong)
    return axes, x.tp * x.pp * x.cp + x.ep * x.etp, len(wrong)


def nothing_fits(pricer: Pricer, candidates: Candidates) -> str:
    """Return the message for a search in which nothing fits: the smallest deficit, and changes that help."""
    miss, fixed = leanest(candidates), candidates.fixed
    said = f" with {fixed_text(fixed)}" if fixed else ""
    lines = [
        f"no layout of {pricer.graph.name} on {pricer.cluster}{said} fits the memory",
        f"the nearest, {miss.layout}: {deficit_text(miss)}",
    ]
    freed = [f"{what} would fit: {found.layout}" for what, found in _freed(pricer, fixed)]
    changes = freed or [f"{what} would do: {found.layout}" for what, found in _changed(pricer, miss, fixed)]
    if fixed and not changes:
        other = f"would do, without {fixed_text(fixed)}:"
        changes = [f"{what} {other} {found.layout}" for what, found in _changed(pricer, miss, {})]
    return "\n".join([*lines, *(changes or ["a smaller model would fit, or devices with more memory"])])


def leanest(candidates: Candidates) -> Partition:
    """Return the layout with the smallest deficit, of those with the least bounds of memory."""
    _, ideal = candidates.bound_all().ideal()
    found = candidates.variants(np.argsort(ideal, kind="stable")[:PLACED])
    first = np.argsort(found.nbytes, kind="stable")[:PLACED]
    return min((candidates.pricer.partition(found.layouts[int(i)]) for i in first), key=lambda placed: placed.deficit)


Change = tuple[str, Partition]  # what is changed, and a layout that then fits


def _freed(pricer: Pricer, fixed: FixedAxes) -> Iterator[Change]:
    """Yield for each fixed field another value with which a layout fits; else one layout with nothing fixed."""
    alone = False
    for name in fixed:
        free = {other: value for other, value in fixed.items() if other != name}
        if (found := fitting(pricer, free)) is not None:
            alone = True
            yield f"{name} {value_text(getattr(found.layout, name))} in place of {value_text(fixed[name])}", found
    if not alone and len(fixed) > 1 and (found := fitting(pricer, {})) is not None:
        yield f"another layout than {fixed_text(fixed)}", found


def _changed(pricer: Pricer, miss: Partition, fixed: FixedAxes) -> Iterator[Change]:
    """Yield for each kind of change the smallest one with which a layout fits."""
    for kind in (_fuller(pricer, miss), _narrower(pricer), _larger(pricer, fixed), _roomier(pricer), _shorter(pricer)):
        found = ((what, fitting(other, fixed)) for what, other in kind)
        yield from islice(((what, placed) for what, placed in found if placed is not None), 1)


Asked = Iterator[tuple[str, Pricer]]  # what is changed, and what then prices layouts


def _fuller(pricer: Pricer, miss: Partition) -> Asked:
    """More of each device."""
    most = pricer.cluster.device.nbytes
    headroom = int(100 * (1 - (miss.deficit + miss.problem.memory_limit) / most)) / 100
    if 0 <= headroom < pricer.headroom:
        yield f"a memory headroom of {headroom:.0%}", _with(pricer, headroom=headroom)


def _narrower(pricer: Pricer) -> Asked:
    """Numbers of fewer bits."""
    if pricer.workload.precision is Precision.FP32:
        yield "bf16", _with(pricer, workload=evolve(pricer.workload, precision=Precision.BF16))


def _larger(pricer: Pricer, fixed: FixedAxes) -> Asked:
    """More devices."""
    for times in GROWTH if "dp" not in fixed else ():
        if larger := _devices(pricer.cluster, pricer.cluster.count * times, pricer.cluster.kind):
            yield str(larger), _with(pricer, cluster=larger)


def _roomier(pricer: Pricer) -> Asked:
    """As many devices with more memory each."""
    now, used = pricer.cluster, pricer.workload.precision
    devices = {kind: it.device for kind, it in PRESETS.items() if used in it.device.flops and kind != "CPU"}
    roomier = [kind for kind, device in devices.items() if device.nbytes > now.device.nbytes]
    for kind in sorted(roomier, key=lambda kind: devices[kind].nbytes):
        if other := _devices(now, now.count, kind):
            yield str(other), _with(pricer, cluster=other)


def _shorter(pricer: Pricer) -> Asked:
    """Shorter sequences."""
    seq = pricer.workload.seq
    for parts in SHORTER:
        if seq % parts == 0:
            shorter = evolve(pricer.workload, seq=seq // parts)
            yield f"a sequence of {shorter.seq:,}", _with(pricer, workload=shorter)


def _devices(now: Cluster, count: int, kind: str) -> Cluster | None:
    """So many devices of a kind, in nodes as theirs are; None where these cannot be filled."""
    try:
        named = cluster(f"{now.count}x{now.kind}") == now if now.kind in PRESETS else False
        return cluster(f"{count}x{kind}") if named else evolve(now, count=count) if kind == now.kind else None
    except UserError:
        return None


def _with(pricer: Pricer, **changes: Any) -> Pricer:
    """The same, but for these."""
    asked = {name: getattr(pricer, name) for name in ("graph", "cluster", "workload", "profile", "headroom")}
    return Pricer(**{**asked, **changes})


def fitting(pricer: Pricer, fixed: FixedAxes) -> Partition | None:
    """Return a layout that fits the memory, if one is found: a plain and fast one if there is one."""
    for chosen in ({**PLAIN_AXES, **fixed}, fixed) if _holds(pricer) else ():
        candidates = Candidates(pricer, chosen)
        if len(candidates.base_layouts) and (found := _quick(candidates)) is not None:
            return found
    return None


def _holds(pricer: Pricer) -> bool:
    """Return True if all devices together can hold weights, gradients and optimizer state once."""
    part = pricer.partition(Layout()).stages[0]
    once = state_bytes(part.params, part.expert_params, Layout(), pricer.workload.precision, pricer.profile)
    return sum(once.values()) <= pricer.capacity * pricer.cluster.count


def _quick(candidates: Candidates) -> Partition | None:
    """Return one of the fastest layouts that fit, else the one with the smallest deficit if that fits."""
    seconds, nbytes = candidates.bound_all().ideal()
    order = np.flatnonzero(nbytes <= candidates.pricer.capacity)
    if not len(order):
        return None
    found = candidates.variants(order[np.argsort(seconds[order], kind="stable")][:NEAREST])
    hopeful = np.flatnonzero(found.nbytes <= candidates.pricer.capacity)
    for i in hopeful[np.argsort(found.seconds[hopeful], kind="stable")][:TRIED].tolist():
        if cut := next(
            (step for step in candidates.pricer.refined(found.layouts[i]) if isinstance(step, PartitionedLayout)), None
        ):
            return cut.partition
    last = leanest(candidates)
    return last if last.fits else None
