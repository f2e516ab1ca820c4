"""Families x six layouts: each family trains 30 steps, each layout computes what one process and the oracle compute.

python -m tests.support.parity.family_table                    # prints the table
python -m tests.support.parity.family_table --update           # and writes it into docs/develop/parity.md
python -m tests.support.parity.family_table --update t5 bart   # writes these rows only
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from megaloom.dsl import Graph, MoE, graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.launch import launcher
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.samples import Sample, SampleMaker
from tests.support.parity.drawn import is_legal, priced, report_failures
from tests.support.parity.families import FAMILIES, SEQ, trained_families
from tests.support.parity.rank_pool import SEED, Case, Result, process_group, run_cases
from tests.support.paths import ROOT

PAGE = ROOT / "docs/develop/parity.md"
BEGIN, END = "<!-- begin family-table -->", "<!-- end family-table -->"
STEPS, RANKS = 30, 4
LOAD = Workload(seq=SEQ, batch=8, precision=Precision.FP32)
SMALL_LOAD = evolve(LOAD, batch=4)  # of `make test`
SP = {"tp": 2, "sequence_parallel": True, "vocab_multiple": 8}  # each rank has tokens, and one has padding
LAYOUTS = {
    "TP2 SP": Layout(**SP),
    "PP2": Layout(pp=2),
    "PP2 VPP2": Layout(pp=2, vpp=2),
    "CP2": Layout(cp=2),
    "EP2 or DP2": Layout(dp=2, ep=2),
    "mixed": Layout(dp=2, ep=2, **SP),
}
DENSE = {
    "EP2 or DP2": Layout(dp=2, shard="optimizer", overlaps=("gradients", "weights")),
    "mixed": Layout(pp=2, **SP),
}


@frozen
class Row:
    """The results of one family."""

    family: str
    loss: float  # after 30 steps
    results: dict[str, Result | None]  # by layout; None where it is not legal

    @property
    def agrees(self) -> bool:
        """Return whether the loss fell, and all layouts agree."""
        return self.loss < FAMILIES[self.family].falls_below and all(
            r is None or r.agrees for r in self.results.values()
        )


def layouts_of(g: Graph, load: Workload) -> dict[str, Layout | None]:
    """Return the six layouts of a model; None where one is not legal."""
    sparse = any(isinstance(n.op, MoE) for n in g.nodes)
    chosen = LAYOUTS if sparse else LAYOUTS | DENSE
    return {name: layout if is_legal(layout, g, load) else None for name, layout in chosen.items()}


def cases_of(family: str, choose: Callable[[list[str]], list[str]] = list, load: Workload = LOAD) -> dict[str, Case]:
    """Return the cases of a family under the layouts that `choose` takes from the legal ones."""
    model = FAMILIES[family].make(0.0)
    legal = {name: layout for name, layout in layouts_of(graph(model), load).items() if layout is not None}
    plans = {name: priced(model, legal[name], load) for name in choose(list(legal))}
    return {name: Case(f"{family}, {name}", family, plan) for name, plan in plans.items()}


def mixed_case_of(number: int, family: str) -> Case:
    """Return a small case of a family: mixed axes if that is legal, else another layout by the number of the family."""

    def choose(names: list[str]) -> list[str]:
        return ["mixed" if "mixed" in names else names[number % len(names)]]

    (case,) = cases_of(family, choose, SMALL_LOAD).values()
    return case


def table(families: Iterable[str]) -> list[Row]:
    """Return the results of families."""
    families = list(families)
    cases = {(family, name): case for family in families for name, case in cases_of(family).items()}
    found = dict(zip(cases, run_cases(list(cases.values()), RANKS), strict=True))
    report_failures(found.values())
    losses = losses_after_training(families)
    return [Row(f, losses[f], {name: found.get((f, name)) for name in LAYOUTS}) for f in families]


def losses_after_training(families: Sequence[str]) -> dict[str, float]:
    """Return the loss of each family in the last of 30 steps in one process."""
    plans = [priced(FAMILIES[f].make(0.0), Layout(), LOAD) for f in families]
    found = launcher.run(_train, (list(zip(families, plans, strict=True)),), RANKS)
    return {family: loss for each in found for family, loss in each.items()}


def _train(work: list[tuple[str, Any]]) -> dict[str, float]:
    """Train on each process a part of the families."""
    from megaloom.runtime.engine.engine import Engine

    store: Any = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    out = {}
    for family, plan in work[rank::size]:
        with process_group(store, family, 0, 1):
            recipe = Recipe(steps=STEPS, seed=SEED, lr=1e-2, warmup=3)
            engine = Engine.build(plan, FAMILIES[family].make(0.0), recipe)
            maker = SampleMaker.of(engine.graph, SEQ, synthetic=True)
            results = [engine.step(partial(_counting_sample, maker, step)) for step in range(STEPS)]
            out[family] = results[-1].loss
    return out


def _counting_sample(maker: SampleMaker, step: int, i: int) -> Sample:
    return maker.make(counting(LOAD.batch * step + i, maker), LOAD.batch * step + i, SEED)


def counting(i: int, maker: SampleMaker) -> torch.Tensor:
    """Return text i: numbers that count in threes from somewhere, of which there are few."""
    return (7 * i + 3 * torch.arange(maker.length)) % min(maker.ids, 60)


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a table: gradients / losses by layout."""
    lines = [
        f"| family | loss after {STEPS} steps | {' | '.join(LAYOUTS)} | one process from the oracle |",
        "|---|---|" + "---|" * (len(LAYOUTS) + 1),
    ]
    for row in rows:
        cells = ["–" if r is None else _cell(r) for r in row.results.values()]
        done = [r for r in row.results.values() if r is not None]
        oracle = f"{max(r.oracle_gradient_error for r in done):.0e} / {max(r.oracle_loss_error for r in done):.0e}"
        bound = f"{row.loss:.2f} < {FAMILIES[row.family].falls_below:g}"
        lines.append(f"| {row.family} | {bound} | {' | '.join(cells)} | {oracle} |")
    return "\n".join(lines)


def _cell(r: Result) -> str:
    return "error" if r.error else f"{r.gradient_error:.0e} / {r.loss_error:.0e}"


def update(text: str, page: Path = PAGE, begin: str = BEGIN, end: str = END) -> None:
    """Write the rows of a table into the page, between two marks. Families that it lacks keep their rows."""
    before, rest = page.read_text().split(begin)
    old, after = rest.split(end)
    head, rows = text.splitlines()[:2], {}
    for line in (*old.strip().splitlines()[2:], *text.splitlines()[2:]):
        rows[line.split("|")[1].strip()] = line
    table = "\n".join((*head, *(rows[family] for family in FAMILIES if family in rows)))
    page.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    rows = table(options.families or trained_families())
    text = markdown(rows)
    print(text)
    if options.update:
        update(text)
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
