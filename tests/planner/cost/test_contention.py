"""Computation and collectives that run at the same time: what is exposed, beside both counted in small steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner.contract.layout import Layout
from megaloom.planner.cost.contention import Contention
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.cost.weight_units import pass_seconds

from .test_weight_units import pricer

SECONDS = st.floats(0, 1e3)
CONTENTIONS = st.builds(Contention, st.floats(0, 0.9), st.floats(1, 4))


@given(SECONDS, SECONDS, CONTENTIONS)
def test_both_run_until_one_ends_and_the_other_goes_on_alone(took: float, compute: float, x: Contention) -> None:
    now = both = min(took * x.stretch, compute / (1 - x.lost))
    now += took - both / x.stretch  # what remains of the collective, or
    now += compute - both * (1 - x.lost)  # of the computation
    (exposed,) = x.exposed_seconds(np.array([took]), np.array([compute]))
    assert exposed == pytest.approx(now - compute, abs=1e-9)
    assert compute + exposed >= took * (1 - 1e-12) - 1e-9
    assert x.least * took - 1e-9 <= exposed <= max(1.0, x.lost * x.stretch) * took + 1e-9


def test_only_products_of_one_kernel_lose_more_than_multiprocessors() -> None:
    """Since Hopper, in our own runtime: of two H100, 24 channels of 132 multiprocessors and whole clusters."""
    hopper, ampere = (pricer("dense", gpus).cost_cache.job for gpus in ("8xH100", "8xA100"))
    assert hopper.contention.lost == OWN.sharded_weights.lost_speed > 24 / 132
    assert ampere.contention == Contention(ampere.sm_share, 1.0)


def test_two_devices_of_a_node_gather_more_slowly_than_more_do() -> None:
    """H100, 416 MiB of weights in bf16: 250 GB/s between two, 309 between four."""
    elements = 416 * 2**19
    for dp, measured in ((2, 250e9), (4, 309e9)):
        job, x = pricer("dense", f"{dp}xH100").cost_cache.job, Layout(dp=dp, shard="weights")
        reduced = pass_seconds(elements, 0, Layout(dp=dp, shard="gradients"), job)
        took = (pass_seconds(elements, 0, x, job) - reduced) / 2
        assert 2 * elements * (dp - 1) / dp / took == pytest.approx(measured, rel=0.12)
