"""Drawn parity: model x options x layout, each compared with one process and with the oracle.

python -m tests.support.parity.drawn              # 500 draws; continues where an interrupted run stopped
python -m tests.support.parity.drawn --axis "shard weights" "shard gradients"    # only the draws with one of these
python -m tests.support.parity.drawn --counts     # the table of the draws that have run
python -m tests.support.parity.drawn --draw 17    # repeat one draw
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import count, islice, pairwise, permutations
from pathlib import Path
from random import Random

from attrs import evolve, fields, frozen

from megaloom.dsl import Graph, Model, MoE, graph
from megaloom.planner import violations
from megaloom.planner.contract.choices import ExpertShard, Module, Overlap, Recompute, Reshard, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import runtime_violations, untrainable
from megaloom.planner.rules.divisors import divisors
from megaloom.planner.rules.shared_weights import shared_weight_users
from megaloom.planner.search.search import plan
from tests.support.parity.axes import AXES, WANTED, axes_of
from tests.support.parity.families import FAMILIES, SEQ
from tests.support.parity.feeds import Feed
from tests.support.parity.hf_oracle import HF, NAMES
from tests.support.parity.rank_pool import Case, Result, explanation, run_cases
from tests.support.parity.torch_twins import TWINS
from tests.support.paths import ROOT, TEST_MODELS

PROGRESS = ROOT / ".parity"
DRAWS = 500
ATTEMPTS = 400  # layouts tried for one family before another is drawn
POOL = 14  # draws that one set of processes runs
FACTORS = {1: (), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}  # of the numbers of processes
SHARDS = (Shard.NONE, Shard.OPTIMIZER, *(Shard.GRADIENTS,) * 2, *(Shard.WEIGHTS,) * 3)  # a third of all draws has FSDP
EXPERT_SHARD_PAIRS = [
    (shard, ExpertShard(1 + other))
    for shard, other in permutations((Shard.OPTIMIZER, Shard.GRADIENTS, Shard.WEIGHTS), 2)
]
WORLDS = (1, 2, 2, 3, 4, 4, 4, 4, 4, 4, 6, 8, 8)
SPARSE = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v2", "deepseek-v3", "deepseek-v3-mtp") * 2
EXPERTS_OF_TWINS = ("two_mixtures", "corrected_sizes") * 2
MORE = (
    "t5",
    "bart",
    *SPARSE,
    *(f"{TEST_MODELS / 'small.py'}:{n}" for n in ("uneven_t5", "deep_llama", "tiny_gpt_lora")),
)
SHARING = ("albert", "albert_blocks", "two_heads", "positions_again", "sharing_experts", "scattered")
WITH_DROPOUT = [name for name, family in FAMILIES.items() if family.has_dropout]
EXPERT_SHARDS = 0.7  # of the draws, where the model has experts
SMALL = 4  # processes of `make test`, and of the smaller sets of processes
MOST_SEQUENCES = 12  # in a batch, unless pipeline ranks need more


@cache
def drawn(seed: int, number: int) -> Case:
    """Return a draw, determined by seed and number."""
    draw = Random(f"{seed} {number}")
    world, refused = draw.choice(WORLDS), 0
    while True:
        name, dropout = drawn_model(draw, number)
        case = Case(f"draw {seed}.{number}", name, dropout=dropout, is_long=True)
        g = graph(case.make())
        if untrainable(g):
            continue
        wishes = Wishes(vpp=draw.random() < 0.5, etp=draw.random() < 0.6)
        if draw.random() < EXPERT_SHARDS and has_experts(g):
            wishes = evolve(wishes, etp=False, expert_shard=True)
        precision = Precision.BF16 if draw.random() < 0.2 else Precision.FP32
        for attempt in range(ATTEMPTS):
            asked = wishes if attempt < ATTEMPTS / 2 else Wishes()
            layout = drawn_layout(draw, world, g, asked)
            if asked.expert_shard and not layout.expert_shard:
                continue
            load = load_of(draw, layout, 24 if world % 3 == 0 else SEQ, precision)
            layout = with_group(draw, layout, load)
            if is_legal(layout, g, load):
                first = priced(case.make(), layout, load, draw)
                second, feed = second_plan(draw, case.make(), load, world), drawn_feed(draw, g)
                return evolve(case, plan=first, second=second, refused=refused, feed=feed)
            refused += 1


def drawn_model(draw: Random, number: int) -> tuple[str, float]:
    """Return the name of a model, and its dropout.

    Of seven draws one has a model with shared weights, two have layers of their own, one is of transformers, and one
    may have dropout.
    """
    match number % 7:
        case 6:
            return f"{TEST_MODELS / 'shared_weights.py'}:{draw.choice(SHARING)}", 0.0
        case 5:
            return HF + draw.choice(NAMES), 0.0
        case 3 | 4:
            return f"{TEST_MODELS / 'twins.py'}:{draw.choice([*TWINS, *EXPERTS_OF_TWINS])}", 0.0
        case 2:
            return draw.choice(MORE), 0.0
        case 1:
            return draw.choice(WITH_DROPOUT), draw.choice([0.0, 0.1, 0.1, 0.1, 0.1])
    return draw.choice([*FAMILIES, *SPARSE]), 0.0


def drawn_feed(draw: Random, g: Graph) -> Feed:
    """Return how a run gets its samples; an own step needs logits of tokens and one loss."""
    feed = draw.choice([Feed.SAMPLES, Feed.SAMPLES, Feed.BATCHES, Feed.FIRST_RANK, Feed.OWN_STEP])
    logits = [g.nodes[g.index[name]].shape for name in g.predictions]
    fits = len(logits) == 1 and logits[0].names == ("batch", "seq", "vocab")
    return feed if fits or feed is not Feed.OWN_STEP else Feed.SAMPLES


def small_draws(seed: int) -> Iterator[Case]:
    """Yield the draws of at most SMALL processes."""
    return (case for number in count() if (case := drawn(seed, number)).processes <= SMALL)


@frozen
class Wishes:
    """Properties that a draw asks of its layout, if one with them is legal."""

    vpp: bool = False
    etp: bool = False
    expert_shard: bool = False  # experts share their state otherwise than all other weights


def has_experts(g: Graph) -> bool:
    """Return whether a layer of a model is a mixture of experts."""
    return any(isinstance(n.op, MoE) for n in g.nodes)


def drawn_layout(draw: Random, world: int, g: Graph, wishes: Wishes) -> Layout:
    """Return a layout of `world` devices, often a legal one."""
    degrees, factors = dict.fromkeys(("tp", "pp", "cp", "dp"), 1), FACTORS[world]
    for i, factor in enumerate(draw.sample(factors, len(factors))):
        degrees["pp" if wishes.vpp and i == 0 else draw.choice(list(degrees))] *= factor
    tp, pp, cp, dp = degrees.values()
    sparse = has_experts(g)
    recompute = draw.choice([Recompute.NONE, Recompute.SELECTIVE, Recompute.SELECTIVE, Recompute.FULL])
    modules = draw.sample(list(Module), draw.randint(0, 2)) if recompute is Recompute.SELECTIVE else []
    overlaps = [o for o in (Overlap.GRADIENTS, Overlap.WEIGHTS) if draw.random() < (0.4 if dp * cp > 1 else 0)]
    shard, reshard = draw.choice(SHARDS if dp * cp > 1 else SHARDS[:2]), Reshard.MICRO_BATCH
    if shard is Shard.WEIGHTS:
        reshard = draw.choice(list(Reshard))
    if shard in (Shard.GRADIENTS, Shard.WEIGHTS):
        overlaps = [Overlap.GRADIENTS, Overlap.WEIGHTS]
    rest = tp * cp * dp
    etp = draw.choice(divisors(rest)[1:] or (1,)) if sparse and wishes.etp else 1
    expert_shard = ExpertShard.SAME
    if sparse and wishes.expert_shard and dp * cp > 1:
        shard, expert_shard = draw.choice(EXPERT_SHARD_PAIRS)
        reshard, overlaps = Reshard.MICRO_BATCH, [Overlap.GRADIENTS, Overlap.WEIGHTS]
    return Layout(
        **degrees,
        vpp=draw.choice([2, 2, 3]) if pp > 1 and wishes.vpp else 1,
        ep=draw.choice(divisors(rest // etp)[draw.random() < 0.6 :] or (1,)) if sparse else 1,
        etp=etp,
        sequence_parallel=tp > 1 and draw.random() < 0.7,
        micro_batch=draw.choice([1, 1, 2]),
        recompute=recompute,
        recompute_modules=modules,
        recompute_layers=draw.choice([0, 0, 1]) if recompute is Recompute.FULL else 0,
        shard=shard,
        reshard=reshard,
        expert_shard=expert_shard,
        overlaps=overlaps,
        vocab_multiple=draw.choice([1, 8, 128]),
    )


def load_of(draw: Random, layout: Layout, seq: int, precision: Precision) -> Workload:
    """Return one to two micro-batches for each pipeline rank and one more, if they are at most MOST_SEQUENCES."""
    unit = layout.dp * layout.micro_batch
    most = max(layout.pp, MOST_SEQUENCES // unit)
    count = draw.randint(layout.pp, min(layout.pp * (3 if layout.vpp > 1 else 2) + 1, most))
    return Workload(seq=seq, batch=count * unit, precision=precision)


def with_group(draw: Random, layout: Layout, load: Workload) -> Layout:
    """Return an interleaved layout with the default group of micro-batches or a drawn one, which may leave some."""
    count = load.batch // (layout.dp * layout.micro_batch)
    if layout.vpp == 1 or draw.random() < 0.3:
        return layout
    uneven = [n for n in range(layout.pp, count) if count % n >= layout.pp]
    even = [n for n in range(layout.pp, count + 1) if count % n == 0]
    groups = uneven if uneven and draw.random() < 0.8 else even
    return evolve(layout, microbatch_group=draw.choice(groups or [0]))


def second_plan(draw: Random, m: Model, load: Workload, world: int) -> Plan | None:
    """Return a plan of another layout for the same batch, on as many processes or fewer; None in some draws."""
    if draw.random() < 0.3:
        return None
    g, other = graph(m), draw.choice([n for n in FACTORS if n <= world])
    for _ in range(ATTEMPTS // 4):
        wishes = Wishes(vpp=draw.random() < 0.5, etp=draw.random() < 0.5, expert_shard=draw.random() < 0.3)
        layout = drawn_layout(draw, other, g, wishes)
        if load.batch % (layout.dp * layout.micro_batch) == 0:
            layout = with_group(draw, layout, load)
            if is_legal(layout, g, load):
                return priced(m, layout, load, draw)
    return None


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
    if layout.fsdp and layout.vpp > 1 and shared_weight_users(g):
        return best  # which has a shared table on two ranks
    cuts = sorted(draw.sample(g.cut_points, len(best.stages) - 1))
    borders = pairwise((0, *cuts, len(g.nodes)))
    return evolve(
        best, stages=tuple(evolve(s, start=a, stop=b) for s, (a, b) in zip(best.stages, borders, strict=True))
    )


def campaign(draws: int, seed: int, *, progress: Path, axes: Sequence[str] = ()) -> list[Result]:
    """Return the results of draws 0 to count - 1. Those in the progress file are not run again.

    axes: draws that have none of them are left out; by default none is.
    """
    progress.parent.mkdir(exist_ok=True)
    known = read_results(progress)
    references = Path(tempfile.mkdtemp(prefix="megaloom-references-"))
    missing = (number for number in range(draws) if f"draw {seed}.{number}" not in known)
    left = (number for number in missing if not axes or set(axes) & set(axes_of(drawn(seed, number))))
    while some := list(islice(left, POOL)):
        began, cases = time.monotonic(), [drawn(seed, number) for number in some]
        drawing = time.monotonic() - began
        for size in (SMALL, 8):
            if cases_of_size := [c for c in cases if (c.processes > SMALL) is (size > SMALL)]:
                results = run_cases(cases_of_size, size, progress=progress, references=references)
                known |= {r.name: r for r in results}
                report_failures(results)
        bad = sum(not r.agrees for r in known.values())
        print(
            f"{len(known)} of {draws} draws of seed {seed}, {bad} differ; the last {len(some)} took "
            f"{time.monotonic() - began:.0f} s ({drawing:.0f} s to draw)",
            flush=True,
        )
    shutil.rmtree(references)
    return [known[name] for number in range(draws) if (name := f"draw {seed}.{number}") in known]


def counts(results: Sequence[Result]) -> str:
    """Return a table: for each axis the draws that ran and those that differ, and the largest differences."""
    lines = ["| axis | draws | differ |", "|---|---|---|"]
    for axis in ("all", *AXES):
        having = [r for r in results if axis == "all" or axis in r.axes]
        lines.append(f"| {axis} | {len(having)} | {sum(not r.agrees for r in having)} |")
    for what, some in (
        ("fp32", [r for r in results if r.agrees and "bf16" not in r.axes]),
        ("bf16", [r for r in results if r.agrees and "bf16" in r.axes]),
    ):
        errors = (
            ("losses", lambda r: r.loss_error),
            ("gradients", lambda r: r.gradient_error),
            ("weights", lambda r: r.weight_error),
            ("after loading", lambda r: r.resumed_error),
            ("one process from the oracles", lambda r: max(r.oracle_loss_error, r.oracle_gradient_error)),
        )
        found = ", ".join(f"{name} {max(map(of, some), default=0.0):.0e}" for name, of in errors)
        lines.append(f"\nLargest differences in {what}: {found}.")
    lines.append(f"Layouts that were drawn and are refused by a rule: {sum(r.refused for r in results):,}.")
    few = [axis for axis in AXES if sum(axis in r.axes for r in results) < WANTED]
    return "\n".join([*lines, *([f"Fewer than {WANTED} draws: {', '.join(few)}."] if few else [])])


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
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw", type=int, help="repeat this draw only")
    parser.add_argument("--axis", nargs="+", default=[], choices=AXES, metavar="AXIS", help="leave out other draws")
    parser.add_argument(
        "--counts", action="store_true", help="print the table of the draws that have run, and run none"
    )
    options = parser.parse_args()
    progress = PROGRESS / f"draws-{options.seed}.jsonl"
    if options.draw is not None:
        case = drawn(options.seed, options.draw)
        results = run_cases([case], case.processes)
        print(f"{case.name}: {case.model}, {results[0].layout}, dropout {case.dropout}\n  {explanation(results[0])}")
    else:
        known = read_results(progress)
        run = partial(campaign, options.draws, options.seed, progress=progress, axes=options.axis)
        results = list(known.values()) if options.counts else run()
        print(counts(results))
    return 0 if all(r.agrees for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
