"""Drawn parity: model x options x layout, each compared with one process and with the oracle.

python -m tests.support.parity.drawn              # 300 draws; continues where an interrupted run stopped
python -m tests.support.parity.drawn --draw 17    # repeat one draw
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random

from attrs import evolve, fields
from cattrs import Converter

from megaloom.dsl import Graph, Model, MoE, graph
from megaloom.dsl.catalog import find
from megaloom.planner import violations
from megaloom.planner.contract.choices import Module, Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import runtime_violations, untrainable
from megaloom.planner.search.search import plan
from tests.support.parity.families import FAMILIES, SEQ
from tests.support.parity.rank_pool import Case, Result, explanation, run_cases
from tests.support.paths import ROOT, TEST_MODELS

CONVERTER = Converter()
PROGRESS = ROOT / ".parity"
ATTEMPTS = 500  # layouts tried for one family before another is drawn
POOL = 25  # draws that one set of processes runs
WORLDS = (2, 4, 4, 4, 8)
SHARING = ("albert", "albert_blocks", "two_heads", "positions_again", "sharing_experts", "scattered")
SMALL = 4  # processes of `make test`
MOST_SEQUENCES = 8  # in a batch


@cache
def drawn(seed: int, number: int) -> Case:
    """Return a draw, determined by seed and number."""
    draw = Random(f"{seed} {number}")
    world = draw.choice(WORLDS)
    while True:
        name, dropout, model = drawn_model(draw, number)
        g = graph(model)
        if untrainable(g):
            continue
        for _ in range(ATTEMPTS):
            layout = drawn_layout(draw, world, g)
            load = load_of(layout)
            if is_legal(layout, g, load):
                return Case(f"draw {seed}.{number}", name, priced(model, layout, load, draw), dropout)


def drawn_model(draw: Random, number: int) -> tuple[str, float, Model]:
    """Return the name, dropout and declaration of a model. Each seventh draw has a model with shared weights."""
    if number % 7 == 6:
        name = f"{TEST_MODELS / 'shared_weights.py'}:{draw.choice(SHARING)}"
        return name, 0.0, find(name)[0]
    name = draw.choice(list(FAMILIES))
    family = FAMILIES[name]
    dropout = 0.1 if family.has_dropout and draw.random() < 0.3 else 0.0
    return name, dropout, family.make(dropout)


def small_draws(seed: int) -> Iterator[Case]:
    """Yield the draws of at most SMALL processes."""
    return (case for number in count() if (case := drawn(seed, number)).plan.layout.world <= SMALL)


def drawn_layout(draw: Random, world: int, g: Graph) -> Layout:
    """Return a layout of `world` devices, often a legal one."""
    degrees = dict.fromkeys(("tp", "pp", "cp", "dp"), 1)
    for _ in range(world.bit_length() - 1):
        degrees[draw.choice(list(degrees))] *= 2
    tp, pp, cp, dp = degrees.values()
    sparse = any(isinstance(n.op, MoE) for n in g.nodes)
    recompute = draw.choice([Recompute.NONE, Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
    modules = draw.sample(list(Module), draw.randint(0, 3)) if recompute is Recompute.SELECTIVE else []
    shard = draw.choice(["none", "optimizer"])
    overlaps = [o for o in (Overlap.GRADIENTS, Overlap.WEIGHTS) if draw.random() < (0.4 if dp * cp > 1 else 0)]
    vpp = draw.choice([1, 2, 3]) if pp > 1 else 1
    return Layout(
        **degrees,
        vpp=vpp,
        ep=draw.choice([k for k in (1, 2, 4) if tp * cp * dp % k == 0]) if sparse else 1,
        etp=draw.choice([1, 1, tp]) if sparse else 1,
        sequence_parallel=tp > 1 and draw.random() < 0.7,
        micro_batch=draw.choice([1, 1, 2]),
        recompute=recompute,
        recompute_modules=modules,
        recompute_layers=draw.choice([0, 0, 1]) if recompute is Recompute.FULL else 0,
        microbatch_group=draw.choice([0, 0, pp, 2 * pp]) if vpp > 1 else 0,
        shard=shard,
        overlaps=overlaps,
        vocab_multiple=draw.choice([1, 8, 128]),
    )


def load_of(layout: Layout) -> Workload:
    """Return two micro-batches for each pipeline rank, if they are at most MOST_SEQUENCES, else these."""
    batch = 2 * layout.pp * layout.dp * layout.micro_batch
    return Workload(seq=SEQ, batch=min(batch, MOST_SEQUENCES), precision=Precision.FP32)


def is_legal(layout: Layout, g: Graph, load: Workload) -> bool:
    """Return whether the runtime trains a model under a layout."""
    devices = cluster(f"{layout.world}xCPU")
    return not violations(layout, g, load, devices) and not runtime_violations(layout, g, load, devices)


def priced(model: Model, layout: Layout, load: Workload, draw: Random | None = None, device: str = "CPU") -> Plan:
    """Return the plan of a layout, with the planner's stages or, at times, drawn ones."""
    fixed = {f.name: getattr(layout, f.name) for f in fields(Layout)}
    g = graph(model)
    best = plan(model, cluster(f"{layout.world}x{device}"), load, ref=g.name, fixed=fixed).best
    if draw is None or layout.pp == 1 or draw.random() < 0.7:
        return best
    cuts = sorted(draw.sample(g.cut_points, len(best.stages) - 1))
    borders = pairwise((0, *cuts, len(g.nodes)))
    return evolve(
        best, stages=tuple(evolve(s, start=a, stop=b) for s, (a, b) in zip(best.stages, borders, strict=True))
    )


def campaign(draws: int, seed: int, *, progress: Path) -> list[Result]:
    """Return the results of draws 0 to count - 1. Those in the progress file are not run again."""
    progress.parent.mkdir(exist_ok=True)
    known = read_results(progress)
    left = iter([number for number in range(draws) if f"draw {seed}.{number}" not in known])
    while some := list(islice(left, POOL)):
        began, cases = time.monotonic(), [drawn(seed, number) for number in some]
        drawing = time.monotonic() - began
        for cases_of_world in ([c for c in cases if (c.plan.layout.world > 4) is large] for large in (False, True)):
            if cases_of_world:
                results = run_cases(
                    cases_of_world, 8 if cases_of_world[0].plan.layout.world > 4 else 4, progress=progress
                )
                known |= {r.name: r for r in results}
                report_failures(results)
        bad = sum(not r.agrees for r in known.values())
        print(
            f"{len(known)} of {draws} draws of seed {seed}, {bad} differ; the last {len(some)} took "
            f"{time.monotonic() - began:.0f} s ({drawing:.0f} s to draw)",
            flush=True,
        )
    return [known[f"draw {seed}.{number}"] for number in range(draws)]


def read_results(progress: Path) -> dict[str, Result]:
    """Return the results in a progress file, by name."""
    lines = progress.read_text().splitlines() if progress.exists() else []
    found = [
        Result(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(line).items()}) for line in lines
    ]
    return {result.name: result for result in found}


def report_failures(results: Iterable[Result]) -> None:
    """Print the cases that differ, each with the command that repeats it."""
    for r in (r for r in results if not r.agrees):
        seed, _, number = r.name.removeprefix("draw ").partition(".")
        repeat = f"\n  repeat: python -m tests.support.parity.drawn --seed {seed} --draw {number}" if number else ""
        print(f"DIFFERS {r.name}: {r.model}, {r.layout}{repeat}\n  {explanation(r)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw", type=int, help="repeat this draw only")
    options = parser.parse_args()
    if options.draw is not None:
        case = drawn(options.seed, options.draw)
        results = run_cases([case], case.plan.layout.world)
        print(f"{case.name}: {case.model}, {case.plan.layout}, dropout {case.dropout}\n  {explanation(results[0])}")
    else:
        results = campaign(options.draws, options.seed, progress=PROGRESS / f"draws-{options.seed}.jsonl")
    return 0 if all(r.agrees for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
