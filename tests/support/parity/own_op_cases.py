"""Ops of a user's own, drawn from templates: lies are refused, true ones compute under each axis what one process does.

python -m tests.support.parity.own_op_cases              # 100 pairs of models, with 9 ops in each pair; and 10,000 ops
python -m tests.support.parity.own_op_cases --seed 17    # repeat one pair of models
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from random import Random

from attrs import evolve

from megaloom.dsl import Dim, DType, Input, Shape, UserError, Value, apply, graph
from megaloom.dsl.catalog import find
from megaloom.dsl.dims import BATCH, SEQ
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.reference.declared_reads import check_reads
from tests.support.parity.drawn import is_legal, priced
from tests.support.parity.own_ops import DrawnOp, drawn_op, lies, second_shape
from tests.support.parity.rank_pool import Case, explanation, run_cases
from tests.support.paths import TEST_MODELS

FILE = TEST_MODELS / "drawn_ops.py"
LOAD = Workload(seq=16, batch=2, precision=Precision.FP32)
CHANNELS = Dim("ff", 16), Dim("rank", 8), Dim("heads", 4)
PAIRS, OPS, TOGETHER = 100, 10_000, 10
LAYOUTS = {
    "drawn": {
        "TP2": Layout(tp=2),
        "TP2 SP": Layout(tp=2, sequence_parallel=True),
        "CP2": Layout(cp=2),
        "DP2": Layout(dp=2),
        "PP2": Layout(pp=2),
    },
    "padded": {"TP2 SP": Layout(tp=2, sequence_parallel=True)},
    "experts": {"EP2": Layout(dp=2, ep=2), "TP2 SP ETP2": Layout(tp=2, sequence_parallel=True, etp=2)},
}


def applied(draw: Random) -> Value:
    """Return a drawn op applied to arguments of drawn channels."""
    channels = draw.sample(CHANNELS, draw.randint(1, len(CHANNELS)))
    x = Shape((BATCH, SEQ, *channels))
    op = drawn_op(draw, ("seq", *(d.name for d in channels)))
    second, kind = second_shape(op, x), DType.INDEX if op.join == "take" else DType.COMPUTE
    args = [Value(Input("x"), (), x), *([] if second is None else [Value(Input("y"), (), second, dtype=kind)])]
    return apply(op, *args)


def accepted_lies(out: Value) -> tuple[list[DrawnOp], int]:
    """Return the lies about an op that are accepted, and the number of all. Raise UserError if its truth is refused."""
    check_reads(out, "drawn")
    assert isinstance(out.op, DrawnOp)
    told = [evolve(out.op, claims=claims) for claims in lies(out.op, out)]
    return [op for op in told if not is_refused(apply(op, *out.args))], len(told)


def is_refused(v: Value) -> bool:
    """Return whether what an op declares is refused."""
    try:
        check_reads(v, "drawn")
    except UserError:
        return True
    return False


def cases(seeds: Iterable[int]) -> Iterator[Case]:
    """Yield the models of each seed under each layout."""
    for seed in seeds:
        for name, layouts in LAYOUTS.items():
            m, ref = find(f"{FILE}:{name}(seed={seed})")
            for axes, layout in layouts.items():
                assert is_legal(layout, graph(m), LOAD), (ref, axes)
                yield Case(f"{name} {seed}, {axes}", ref, priced(m, layout, LOAD))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="repeat the models of this seed only")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--ops", type=int, default=OPS)
    options = parser.parse_args()
    seeds = list(range(options.pairs)) if options.seed is None else [options.seed]
    bad = count = 0
    for i in range(0, len(seeds), TOGETHER):
        for r in run_cases(list(cases(seeds[i : i + TOGETHER])), 2):
            count, bad = count + 1, bad + (not r.agrees)
            if not r.agrees:
                print(f"DIFFERS {r.name}\n  {explanation(r)}", flush=True)
        print(f"{count} cases of own ops, {bad} differ", flush=True)
    told = 0
    for number in range(options.ops if options.seed is None else 0):
        found, n = accepted_lies(applied(Random(number)))
        told, bad = told + n, bad + len(found)
        for op in found:
            print(f"ACCEPTED, drawn op {number}: {op}", flush=True)
    print(f"{told} lies about {options.ops} own ops" if options.seed is None else "")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
