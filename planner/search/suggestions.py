"""Changes of what the user has fixed that make a layout legal, each checked together with all other fixed fields.

`legal_changes` finds the smallest changes; `changes_text` says them in a line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from attrs import evolve

from megaloom.planner.contract.choices import ModuleSet, OverlapSet
from megaloom.planner.contract.layout import FIELDS, Layout, switch
from megaloom.planner.contract.layouts import Layouts, Rows
from megaloom.planner.model.requirements import model_requirements

from .candidate_space import CandidateSpace
from .variant_choices import FixedAxes

MAX_CHANGED = 3  # fields that a suggestion changes at most
BASES_A_STEP, MAX_BASES = 64, 1024  # base layouts whose variants are looked at, the nearest first
LISTED = 4  # suggestions


def legal_changes(space: CandidateSpace) -> list[dict[str, Any]]:
    """Return changes of fixed fields, as few fields each as possible, that make a layout legal.

    Each is the new value of one or more fields, the nearest to the user's. With the other fixed fields as they are, at
    least one layout is legal.
    """
    fixed = space.fixed
    for count in range(1, min(MAX_CHANGED, len(fixed)) + 1):
        changes = []
        for names in combinations(fixed, count):
            wanted = {name: fixed[name] for name in names}
            rest = {name: value for name, value in fixed.items() if name not in names}
            layout = _nearest_legal(evolve(space, fixed=rest), wanted)
            change = {name: getattr(layout, name) for name in names} if layout is not None else wanted
            if change != wanted:  # else a field that is not fixed makes it legal
                changes.append(change)
        if changes:
            return changes
    return []


def legal_batches(space: CandidateSpace, layout: Layout) -> list[int]:
    """Return the nearest smaller and larger batch with which the fixed fields are legal; `layout` is one nearby."""
    now = space.workload.batch
    units = (layout.dp, layout.dp * layout.micro_batch, layout.dp * layout.micro_batch * layout.pp)
    batches = []
    for step in (0, 1):
        nearby = (unit * (now // unit + step) for unit in units)
        for batch in dict.fromkeys(n for n in nearby if n not in (0, now)):
            other = evolve(space, workload=evolve(space.workload, batch=batch))
            if _nearest_legal(other, {}) is not None:
                batches.append(batch)
                break
    return batches


def changes_text(changes: list[dict[str, Any]], fixed: FixedAxes) -> list[str]:
    """Return a line for each of the first changes: `use --tp 2 instead of --tp 4`, `drop --overlap tensor`."""
    lines = []
    for change in changes[:LISTED]:
        empty = {name for name, value in change.items() if isinstance(value, ModuleSet | OverlapSet) and not value}
        kept = {name: value for name, value in change.items() if name not in empty}
        parts = [f"use {fixed_text(kept)} instead of {fixed_text({name: fixed[name] for name in kept})}"] * bool(kept)
        parts += [f"drop {fixed_text({name: fixed[name] for name in change if name in empty})}"] * bool(empty)
        lines.append(", and ".join(parts))
    return lines


def fixed_text(fixed: Mapping[str, Any]) -> str:
    """Return fields and their values as options of the command line: `--tp 4 --recompute full`."""
    return " ".join(_option(name, value) for name, value in fixed.items())


def _option(name: str, value: Any) -> str:
    """Return one field and its value as an option."""
    row = FIELDS[name]
    if row.kind is bool:
        return switch(name, row.kind(value))
    return f"{row.flag} {value_text(value)}"


def value_text(value: object) -> str:
    """Return a value of a field as the command line takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, ModuleSet | OverlapSet):
        return ("," if isinstance(value, OverlapSet) else " ").join(map(str, value)) or "none"
    return str(value) or "none"


def _nearest_legal(space: CandidateSpace, wanted: Mapping[str, Any]) -> Layout | None:
    """Return a legal layout with the fixed fields whose other fields are close to the wanted values."""
    base = space.base_layouts()
    order = np.argsort(_distance(base, wanted), kind="stable")[:MAX_BASES]
    modules = len(model_requirements(space.graph).modules)
    for start in range(0, len(order), BASES_A_STEP):
        near = base.take(order[start : start + BASES_A_STEP])
        layouts, _ = space.variants(near, np.zeros((len(near), modules), dtype=np.int64))
        if len(layouts):
            return layouts[int(_distance(layouts, wanted).argmin())]
    return None


def _distance(layouts: Layouts, wanted: Mapping[str, Any]) -> Rows:
    """Return how far each layout is from the wanted values, in powers of 2."""
    out = np.zeros(len(layouts))
    for name, value in wanted.items():
        out += np.abs(np.log2((1 + getattr(layouts, name)) / (1 + int(value))))
    return out
