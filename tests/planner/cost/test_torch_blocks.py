"""Blocks as torch runs them: kept results, gathered inputs, early casts, repeated keys."""

from __future__ import annotations

import numpy as np
import pytest

from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.columns import CostColumn
from megaloom.planner.cost.profiles.frameworks import EAGER, PROFILES
from megaloom.planner.cost.profiles.groups import FrameworkProfile
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.pricing import Pricer
from tests.support.profiles import changed

SEQ, HIDDEN, HEADS, KV_HEADS, BLOCKS = 8192, 4096, 32, 8, 32
TENSOR = Layout(tp=8, sequence_parallel=True)
KEPT = changed(EAGER, saved={"every_second_product": True})


def sums(profile: FrameworkProfile, layout: Layout, precision: Precision = Precision.BF16) -> Rows:
    """Return the costs of one micro-batch through all nodes: [columns]."""
    pricer = Pricer(graph(llama3_8b()), cluster("8xH100"), Workload(seq=SEQ, batch=8, precision=precision), profile)
    total: Rows = pricer.cost_table(layout).by_node.sum(axis=0)
    return total


def test_kept_products_are_saved_and_not_repeated() -> None:
    full = Layout(dp=8, recompute="full")
    none, kept, all_ = sums(KEPT, Layout(dp=8)), sums(KEPT, full), sums(EAGER, full)
    assert 0 < kept[CostColumn.RECOMPUTE] < all_[CostColumn.RECOMPUTE]
    assert all_[CostColumn.SAVED] < kept[CostColumn.SAVED] < none[CostColumn.SAVED]
    # Queries and values, attention, one of the two wide products and the last one, 2 bytes each.
    due = BLOCKS * SEQ * 2 * (HIDDEN + HIDDEN * KV_HEADS // HEADS + HIDDEN + 14336 + HIDDEN)
    assert kept[CostColumn.SAVED] - all_[CostColumn.SAVED] == due
    assert (none == sums(EAGER, Layout(dp=8))).all()  # without recompute nothing changes


def test_plans_save_no_results_under_full_recompute() -> None:
    """`cost_cache.SEARCHED_COSTS` leaves them out."""
    assert not any(profile.saved.every_second_product for profile in PROFILES.values())


def test_kept_reduce_scatters_are_not_repeated() -> None:
    full = Layout(tp=8, sequence_parallel=True, recompute="full")
    kept, all_, none = (sums(p, x)[CostColumn.TP_BACKWARD] for p, x in ((KEPT, full), (EAGER, full), (EAGER, TENSOR)))
    assert kept - none == pytest.approx((all_ - none) / 2)  # of each pair of a gather and a reduction


def test_saved_inputs_are_not_gathered_again() -> None:
    ours, megatron = sums(changed(EAGER, saved={"gathered_inputs": True}), TENSOR), sums(EAGER, TENSOR)
    assert ours[CostColumn.TP_FORWARD] == megatron[CostColumn.TP_FORWARD]
    assert ours[CostColumn.TP_BACKWARD] < megatron[CostColumn.TP_BACKWARD]
    gathers = 2 * BLOCKS + 1  # attention and MLP of each block, and the logits
    assert ours[CostColumn.SAVED] - megatron[CostColumn.SAVED] == gathers * SEQ * HIDDEN * 2 * 7 // 8


def test_what_is_cast_before_a_gather_is_half_as_wide_and_cast_once() -> None:
    early = changed(EAGER, narrow={"cast_before_gathers": True})
    ours, late = (sums(p, TENSOR, Precision.FP8) for p in (early, EAGER))
    for column in (CostColumn.FORWARD, CostColumn.BACKWARD, CostColumn.TP_FORWARD, CostColumn.TP_BACKWARD):
        assert ours[column] < late[column]
    assert (sums(early, TENSOR) == sums(EAGER, TENSOR)).all()  # nothing is cast to 16 bits
    alone = Layout(dp=8)
    assert (sums(early, alone, Precision.FP8) == sums(EAGER, alone, Precision.FP8)).all()


def test_repeated_keys_are_exchanged_for_all_heads() -> None:
    ours, usual = (sums(p, Layout(cp=8)) for p in (changed(EAGER, attention={"repeats_keys": True}), EAGER))
    link = cluster("8xH100").intra
    latency = BLOCKS * (link.latency + 6 * link.hop)  # of a ring of eight
    ratio = (ours[CostColumn.CP_FORWARD] - latency) / (usual[CostColumn.CP_FORWARD] - latency)
    assert ratio == pytest.approx(HEADS / KV_HEADS)
    same = np.delete(np.arange(len(ours)), [CostColumn.CP_FORWARD, CostColumn.CP_BACKWARD])
    assert (ours[same] == usual[same]).all()


def test_attention_of_half_the_speed_takes_twice_as_long_over_long_sequences() -> None:
    slow = changed(EAGER, attention={"speed": 0.5})
    fast_, slow_ = (sums(p, Layout(dp=8))[CostColumn.FORWARD] for p in (EAGER, slow))
    assert fast_ < slow_ < 2 * fast_
