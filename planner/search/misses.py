"""What to say when there is no plan: what is fixed is no layout, or breaks a rule, or nothing fits the memory.

Protocol: the functions give the text of a UserError: what, where, and the smallest change that would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from attrs import evolve, fields_dict

from megaloom.dsl.errors import UserError
from megaloom.planner.cluster import Cluster
from megaloom.planner.cost.fit import Placed
from megaloom.planner.layout import Layout, Module, Overlap, Recompute, Workload, modules, overlaps
from megaloom.planner.legal import steps as step_rules
from megaloom.planner.legal.rule import Violation

from .field import Field
from .price import Pricer
from .reasons import broken, lacking
from .space import Fixed, candidates

OF_A_STEP = {rule.id for rule in step_rules.RULES}
LOOKED_AT = 2000  # illegal layouts among which the nearest to legal is sought
PLACED = 20  # of the layouts that need the least memory, those that are cut
GROWTH = (2, 4, 8, 16, 32, 64)  # times the devices, or parts of the sequence, that are tried


def checked(fixed: Mapping[str, Any]) -> Fixed:
    """What the user has fixed, if it can be part of a layout. Raises UserError."""
    known = fields_dict(Layout)
    out = dict(fixed)
    for name, value in fixed.items():
        if name not in known:
            raise UserError(f"a layout has no {name!r}\nit has {', '.join(known)}")
        default = known[name].default
        if isinstance(default, Recompute):
            if value not in list(Recompute):
                raise UserError(f"recompute cannot be {value!r}\nit can be {', '.join(Recompute)}")
            out[name] = Recompute(value)
        elif name == "recompute_modules":
            if unknown := [str(it) for it in value if it not in list(Module)]:
                raise UserError(f"no module to recompute is called {unknown[0]!r}\nthere are {', '.join(Module)}")
            out[name] = modules(value)
        elif name == "overlaps":
            if unknown := [str(it) for it in value if it not in list(Overlap)]:
                raise UserError(f"no overlap is called {unknown[0]!r}\nthere are {', '.join(Overlap)}, or none")
            out[name] = overlaps(value)
        elif type(value) is not type(default):
            kind = "true or false" if isinstance(default, bool) else "a whole number"
            raise UserError(f"{name} cannot be {value!r}\nit is {kind}")
    if out.get("recompute_modules"):
        out.setdefault("recompute", Recompute.SELECTIVE)
    return out


def nothing_legal(pricer: Pricer, fixed: Fixed) -> str:
    """Every candidate breaks a rule: those that the nearest one breaks, each with what would work."""
    g, cluster, workload = pricer.graph, pricer.cluster, pricer.workload
    tried = ((x, pricer.broken(x)) for x in candidates(g, cluster, workload, fixed))
    layout, wrong = min(islice(tried, LOOKED_AT), key=_far)
    said = f" with {_said(fixed)}" if fixed else ""
    lines = [f"no layout of {g.name} on {cluster}{said} is legal; the nearest, {layout}, breaks"]
    return "\n".join([*lines, *(f"- {broken([v])}" for v in wrong)])


def _far(entry: tuple[Layout, tuple[Violation, ...]]) -> tuple[int, int, int]:
    """How far from legal: the rules of the axes first, as those of a step follow dp; then how much is divided."""
    x, wrong = entry
    axes = sum(v.rule not in OF_A_STEP for v in wrong)
    return axes, x.tp * x.pp * x.cp + x.ep * x.etp, len(wrong)


def nothing_fits(pricer: Pricer, among: Field) -> str:
    """No legal layout fits the memory: the nearest miss, and changes that would make one fit."""
    miss = leanest(among)
    lines = [
        f"no layout of {pricer.graph.name} on {pricer.cluster} fits the memory",
        f"the nearest, {miss.layout}: {lacking(miss)}",
    ]
    changes = list(_changes(pricer, among.fixed))
    return "\n".join([*lines, *(changes or ["a smaller model would fit, or devices with more memory"])])


def leanest(among: Field) -> Placed:
    """The layout that lacks the least memory, of those that may need the least."""
    _, ideal = among.floors.ideal()
    found = among.variants(np.argsort(ideal, kind="stable")[:PLACED])
    first = np.argsort(found.nbytes, kind="stable")[:PLACED]
    return min((among.pricer.place(found.layouts[int(i)]) for i in first), key=lambda placed: placed.excess)


def _changes(pricer: Pricer, fixed: Fixed) -> Iterator[str]:
    """For each kind of change the smallest that makes a layout fit: freeing what is fixed, devices, the sequence."""
    for name in fixed:
        free = {other: value for other, value in fixed.items() if other != name}
        if (found := _fitting(pricer, pricer.cluster, pricer.workload, free)) is not None:
            yield f"{name} {getattr(found.layout, name)} in place of {fixed[name]} would fit: {found.layout}"
            return
    if "dp" not in fixed:
        for times in GROWTH:
            larger = evolve(pricer.cluster, count=pricer.cluster.count * times)
            if (found := _fitting(pricer, larger, pricer.workload, fixed)) is not None:
                yield f"{larger} would do: {found.layout}"
                break
    for parts in GROWTH:
        if pricer.workload.seq % parts == 0:
            shorter = evolve(pricer.workload, seq=pricer.workload.seq // parts)
            if (found := _fitting(pricer, pricer.cluster, shorter, fixed)) is not None:
                yield f"a sequence of {shorter.seq} would do: {found.layout}"
                break


def _fitting(pricer: Pricer, cluster: Cluster, workload: Workload, fixed: Fixed) -> Placed | None:
    among = Field(Pricer(pricer.graph, cluster, workload, pricer.practice, pricer.headroom), fixed)
    found = leanest(among) if len(among.at) else None
    return found if found is not None and found.fits else None


def _said(fixed: Fixed) -> str:
    return ", ".join(f"{name} {value}" for name, value in fixed.items())
