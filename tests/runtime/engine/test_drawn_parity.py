"""Drawn parity: families x options x layouts, and collectives that are broken on purpose in the same draws.

`make parity` runs 500 draws. Here are the first 3 of at most 4 processes.
"""

from itertools import islice

from megaloom.dsl import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from tests.support.limits import LIMIT
from tests.support.parity.broken_collectives import BROKEN, uses
from tests.support.parity.drawn import priced, small_draws
from tests.support.parity.families import FAMILIES, SEQ
from tests.support.parity.rank_pool import Case, check, run_cases

SEED, DRAWS = 1, 3
LOAD = Workload(seq=SEQ, batch=4, precision=Precision.FP32)
CASES = {  # a family and a layout that use each collective
    "sums of row-parallel layers": ("llama", Layout(tp=2)),
    "input gradients of column-parallel layers": ("starcoder", Layout(tp=2)),
    "gradients of replicated parameters under sequence parallelism": (
        "qwen3",
        Layout(tp=2, sequence_parallel=True, pp=2),
    ),
    "gradients over context-parallel ranks": ("mistral", Layout(cp=2)),
    "scaling of gradients over data-parallel ranks": ("gpt2", Layout(dp=2)),
    "gradients of a tied table on two stages": ("qwen2", Layout(pp=2, dp=2)),
    "gradients of experts over their replicas": ("mixtral", Layout(dp=2)),
    "order of tokens after the all-to-all of experts": ("mixtral", Layout(dp=2, ep=2)),
    "sums over a sharded vocabulary": ("llama", Layout(tp=2, vocab_multiple=8)),
    "counts of the balancing loss": ("qwen3-moe", Layout(tp=2, sequence_parallel=True)),
    "order of sends between model chunks": ("llama", Layout(pp=2, vpp=2)),
}
assert CASES.keys() == BROKEN.keys()


def test_drawn_layouts_compute_what_one_process_and_the_oracle_compute() -> None:
    try:
        check(run_cases(list(islice(small_draws(SEED), DRAWS)), 4, timeout=LIMIT))
    except AssertionError as error:
        error.add_note("repeat with: python -m tests.support.parity.drawn --seed SEED --draw NUMBER")
        raise


def test_each_broken_collective_is_found_by_the_weights_that_it_breaks() -> None:
    plans = {name: priced(FAMILIES[family].make(0.0), layout, LOAD) for name, (family, layout) in CASES.items()}
    cases = [Case(name, CASES[name][0], plan, broken=name) for name, plan in plans.items()]
    for case in cases:
        assert uses(case.plan.layout, graph(case.make()), case.broken)
    results = run_cases(cases, 4, timeout=LIMIT)
    for case, result in zip(cases, results, strict=True):
        trained = [name for name, slot in graph(case.make()).weights.items() if slot.trained]
        context = f"{case.broken}, {case.model}, {case.plan.layout}: {result.error}"
        assert not BROKEN[case.broken].mistakes(trained, result.differing), context
        assert result.gradient_error > 1e-2, context
