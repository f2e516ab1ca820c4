"""Gradients and weights that are sharded over data-parallel ranks: each family under one of ten layouts.

`make parity` runs all families under all of them (`tests.support.parity.shard_table`).
"""

from tests.support.limits import LIMIT
from tests.support.parity.families import trained_families
from tests.support.parity.rank_pool import check, run_cases
from tests.support.parity.shard_table import one_case_of


def test_sharded_weights_compute_what_one_process_and_the_oracle_compute() -> None:
    cases = [one_case_of(number, family) for number, family in enumerate(trained_families())]
    assert len({case.name.partition(", ")[2] for case in cases}) > 7
    check(run_cases(cases, 4, timeout=LIMIT))
