"""Laws of ops drawn from templates: true reads are accepted and run under each axis, what claims less is refused.

`make parity` draws 100 pairs of models and 10,000 ops.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.limits import LIMIT
from tests.support.parity.own_op_cases import accepted_lies, applied, cases
from tests.support.parity.rank_pool import check, run_cases


@given(st.randoms(use_true_random=False))
def test_true_reads_are_accepted_and_every_lie_is_refused(draw: Random) -> None:
    assert accepted_lies(applied(draw))[0] == []


def test_ops_with_true_reads_compute_what_one_process_computes() -> None:
    try:
        check(run_cases(list(cases([3])), 2, timeout=LIMIT))
    except AssertionError as error:
        error.add_note("repeat with: python -m tests.support.parity.own_op_cases --seed 3")
        raise
