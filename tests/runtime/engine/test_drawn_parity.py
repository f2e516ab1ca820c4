"""Drawn parity: families x options x layouts, and collectives that are broken on purpose in the same draws.

`make parity` runs 300 draws. Here are the first 20 of at most 4 processes.
"""

from itertools import islice

from attrs import evolve

from megaloom.dsl import graph
from tests.support.limits import LIMIT
from tests.support.parity.broken_collectives import BROKEN, uses
from tests.support.parity.drawn import small_draws
from tests.support.parity.rank_pool import check, run_cases

SEED, DRAWS = 1, 20


def test_drawn_layouts_compute_what_one_process_and_the_oracle_compute() -> None:
    try:
        check(run_cases(list(islice(small_draws(SEED), DRAWS)), 4, timeout=LIMIT))
    except AssertionError as error:
        error.add_note("repeat with: python -m tests.support.parity.drawn --seed SEED --draw NUMBER")
        raise


def test_each_broken_collective_is_found_by_the_weights_that_it_breaks() -> None:
    cases = [
        evolve(next(c for c in small_draws(SEED) if uses(c.plan.layout, graph(c.make()), name)), broken=name)
        for name in BROKEN
    ]
    results = run_cases(cases, 4, timeout=LIMIT)
    for case, result in zip(cases, results, strict=True):
        trained = [name for name, slot in graph(case.make()).weights.items() if slot.trained]
        context = f"{case.broken}, {case.model}, {case.plan.layout}: {result.error}"
        assert not BROKEN[case.broken].mistakes(trained, result.differing), context
        assert result.gradient_error > 1e-2, context
