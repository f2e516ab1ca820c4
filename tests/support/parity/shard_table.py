"""Families x layouts whose gradients or weights are sharded over data-parallel ranks, each compared with one process.

python -m tests.support.parity.shard_table                    # prints the table
python -m tests.support.parity.shard_table --update           # and writes it into docs/develop/parity.md
python -m tests.support.parity.shard_table --update t5 bart   # writes these rows only
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping

from attrs import evolve

from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from tests.support.parity.drawn import is_legal, priced, report_failures
from tests.support.parity.families import FAMILIES, trained_families
from tests.support.parity.family_table import LOAD, RANKS, SMALL_LOAD, SP, update
from tests.support.parity.rank_pool import Case, Result, run_cases

BEGIN, END = "<!-- begin shard-table -->", "<!-- end shard-table -->"
MESHES = {
    "DP4": Layout(dp=4),
    "DP2 TP2 SP": Layout(dp=2, **SP),
    "DP2 CP2": Layout(dp=2, cp=2),
    "DP2 PP2 VPP2": Layout(dp=2, pp=2, vpp=2),
    "DP4 EP2": Layout(dp=4, ep=2),
}
LAYOUTS = {
    f"{mesh}, {shard}": evolve(layout, shard=shard, overlaps=("gradients", "weights"))
    for mesh, layout in MESHES.items()
    for shard in (Shard.GRADIENTS, Shard.WEIGHTS)
}


def legal_layouts(family: str, load: Workload) -> list[str]:
    """Return the names of the layouts that are legal for a family."""
    g = FAMILIES[family].graph()
    return [name for name, layout in LAYOUTS.items() if is_legal(layout, g, load)]


def case_of(family: str, name: str, load: Workload) -> Case:
    """Return the case of a family under the layout of this name."""
    plan = priced(FAMILIES[family].make(0.0), LAYOUTS[name], load)
    return Case(f"{family}, {name}", family, plan)


def sharded_case_of(number: int, family: str) -> Case:
    """Return a small case of a family, under another layout by the number of the family."""
    names = legal_layouts(family, SMALL_LOAD)
    return case_of(family, names[number % len(names)], SMALL_LOAD)


def table(families: Iterable[str]) -> dict[tuple[str, str], Result]:
    """Return the results by family and layout."""
    cases = {(f, name): case_of(f, name, LOAD) for f in families for name in legal_layouts(f, LOAD)}
    found = dict(zip(cases, run_cases(list(cases.values()), RANKS), strict=True))
    report_failures(found.values())
    return found


def markdown(found: Mapping[tuple[str, str], Result]) -> str:
    """Return the results as a table: the larger of the differences in gradients and in losses, by layout."""
    lines = [f"| family | {' | '.join(LAYOUTS)} |", "|---|" + "---|" * len(LAYOUTS)]
    for family in dict.fromkeys(family for family, _ in found):
        results = [found.get((family, name)) for name in LAYOUTS]
        lines.append(f"| {family} | {' | '.join('–' if r is None else _cell(r) for r in results)} |")
    return "\n".join(lines)


def _cell(r: Result) -> str:
    return "error" if r.error else f"{max(r.gradient_error, r.loss_error):.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    found = table(options.families or trained_families())
    text = markdown(found)
    print(text)
    if options.update:
        update(text, begin=BEGIN, end=END)
    return 0 if all(r.agrees for r in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
