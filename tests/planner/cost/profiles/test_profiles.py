"""Framework profiles: groups, figures, features, and their effect on the cost of kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.features import (
    BLOCKING_LAUNCHES,
    FEATURES,
    FUSED_EXPERTS,
    SLOW_MEMORY_KERNELS,
)
from benchmarks.accuracy.frameworks import DEEPSPEED_FP16, NEMO, PUBLISHED
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.facts.work import Work
from megaloom.dsl.graph import graph
from megaloom.dsl.work_kinds import WorkKind
from megaloom.examples.gpt_oss import gpt_oss_20b
from megaloom.examples.llama3 import llama3_8b
from megaloom.examples.qwen3 import qwen3_30b_a3b
from megaloom.planner.contract.choices import Overlap, OverlapSet
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts, Rows
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.columns import CostColumn
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.cost.kernels import (
    MEMORY_KERNELS,
    SPLIT,
    kernel_seconds,
)
from megaloom.planner.cost.profiles.figures import FigureKind
from megaloom.planner.cost.profiles.flag_features import PADDED_EXPERTS
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN, PROFILES
from megaloom.planner.cost.profiles.groups import GROUPS, Feature, FrameworkProfile, compose, profile_figures
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.model.structure import model_structure
from tests.support.profiles import changed

GB200 = PRESETS["GB200"].device
OLD = compose("before Megatron-Bridge", [SLOW_MEMORY_KERNELS], MEGATRON)
ONE_KERNEL = compose("experts in one kernel", [FUSED_EXPERTS], MEGATRON)


def works(model) -> list[Work]:
    return [w for node in graph(model).nodes for w in costs(node, batch=1, seq=4096).work]


def took(model, used: FrameworkProfile, precision: Precision = Precision.MXFP8) -> float:
    """Seconds of the kernels of one pass through a model, both ways."""
    results = [kernel_seconds(w, GB200, precision, used) for w in works(model)]
    return sum(s.forward + s.backward for s in results)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (llama3_8b, {"gate", "pointwise"}),
        (qwen3_30b_a3b, {"expert gate", "pointwise"}),
        (gpt_oss_20b, {"expert gate", "expert bias", "pointwise"}),
    ],
)
def test_gates_and_biases_have_passes_of_their_own(model, names) -> None:
    pointwise = [w for w in works(model()) if w.kind == "pointwise"]
    assert {MEMORY_KERNELS.get((w.fusion, w.experts), w.kind) for w in pointwise} == names
    for passes in (OWN.kernels.memory_passes, MEGATRON.kernels.memory_passes, NEMO.kernels.memory_passes):
        assert names - {"expert bias"} <= {*passes, "pointwise"}


def test_kernels_that_do_it_all_are_the_quickest_and_change_dense_models_in_nothing() -> None:
    assert took(qwen3_30b_a3b(), ONE_KERNEL) < took(qwen3_30b_a3b(), OLD) < took(qwen3_30b_a3b(), MEGATRON)
    assert took(gpt_oss_20b(), ONE_KERNEL) < took(gpt_oss_20b(), MEGATRON)
    assert took(llama3_8b(), ONE_KERNEL) == took(llama3_8b(), MEGATRON)


@given(*[st.integers(1, 64)] * 4)
def test_a_product_that_adds_its_gradient_counts_it_once(count: int, m: int, n: int, k: int) -> None:
    """The product takes as long; what the gradients move is counted with the node."""
    flops = 2 * count * m * n * k
    work = Work(WorkKind.PRODUCT, "w", flops, flops, flops, count * (m * k + k * n + m * n), count=count, m=m, n=n, k=k)
    apart, adds = (kernel_seconds(work, GB200, Precision.BF16, MEGATRON, adds=adds) for adds in (False, True))
    assert apart.fused_gradients == 0
    assert adds == evolve(apart, fused_gradients=count * n * k)


def test_products_of_8_bits_are_slower_back_where_these_add_up_in_fp32() -> None:
    n = 8192
    work = Work(WorkKind.PRODUCT, "w", 2 * n**3, 2 * n**3, 2 * n**3, 3 * n * n, count=1, m=n, n=n, k=n)
    for name, precision, slower in (
        ("H100", Precision.FP8, 1 / SPLIT),
        ("H100", Precision.BF16, 1),
        ("GB200", Precision.FP8, 1),
    ):
        device = PRESETS[name].device
        cast = MEGATRON.narrow.cast_moved_nbytes * n * n / device.moves if precision.narrow else 0.0
        took = kernel_seconds(work, device, precision, MEGATRON)
        assert took.backward - cast == pytest.approx(2 * slower * (took.forward - cast))


def test_kernels_that_wait_for_each_other_are_launched_one_by_one() -> None:
    """BLOOM's runs on many GPUs set CUDA_LAUNCH_BLOCKING."""
    used = compose("blocking", [BLOCKING_LAUNCHES], DEEPSPEED_FP16)
    device = PRESETS["A100"].device
    for work in works(llama3_8b()):
        ours, alone = (
            kernel_seconds(work, device, Precision.FP16, changed(used, host={"blocking_launches": b}))
            for b in (True, False)
        )
        assert ours.forward == alone.forward + alone.forward_kernels * device.launch_seconds
        assert ours.forward_kernels == ours.backward_kernels == 0


def experts(used: FrameworkProfile, layout: Layout) -> Rows:
    """Costs of a layer of Qwen3 30B A3B's experts on H100."""
    result = model_structure(graph(qwen3_30b_a3b()))
    i = next(i for i, kind in enumerate(result.kinds) if type(kind.node.op).__name__ == "MoE")
    return CostCache(result, Workload(seq=4096, batch=64), cluster("16xH100"), used).node_cost(i, layout).row


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 8, 16]))
def test_a_host_that_waits_for_no_numbers_goes_ahead(ep: int, micro_batch: int) -> None:
    """The launches of padded experts are the host's, beside the kernels; else the kernels wait for them."""
    layout, passes = Layout(dp=16, ep=ep, micro_batch=micro_batch), [CostColumn.FORWARD, CostColumn.BACKWARD]
    waits, each = MEGATRON.experts.dispatch_seconds, 128 // ep * MEGATRON.experts.launch_seconds
    never = experts(changed(MEGATRON, experts={"dispatch_seconds": 0.0, "launch_seconds": 0.0}), layout)
    ahead, late = experts(compose("padded", [PADDED_EXPERTS], MEGATRON), layout), experts(MEGATRON, layout)
    assert late[passes] - never[passes] == pytest.approx([waits + each, waits + 2 * each])
    assert late[CostColumn.HOST] == pytest.approx(never[CostColumn.HOST])
    assert ahead[CostColumn.HOST] - never[CostColumn.HOST] == pytest.approx(2 * waits + 3 * each)


@given(st.sampled_from([1, 8, 64]), st.floats(0, 10), st.floats(0, 10))
def test_kernels_take_the_longer_of_their_own_time_and_the_launches_of_the_whole_model(
    microbatch: int, factor: float, more: float
) -> None:
    """A node that the device has done before the next launch hides the launches of others, not only its own."""
    structure = model_structure(graph(llama3_8b()))
    counts, used = structure.kind_counts, changed(OWN, host={"launch_factor": factor})
    passes, layout = [CostColumn.FORWARD, CostColumn.BACKWARD], Layout(micro_batch=microbatch)
    seconds = []
    for profile in (
        changed(OWN, host={"launch_factor": 0.0}),
        used,
        changed(used, host={"launch_factor": factor + more}),
    ):
        cache = CostCache(structure, Workload(seq=128, batch=64), cluster("1xH100"), profile)
        rows = cache.bare_table(layout).rows
        seconds.append(float((counts[:, None] * rows[:, passes]).sum()))
        host = float((counts * rows[:, CostColumn.HOST]).sum())
        assert seconds[-1] == pytest.approx(max(seconds[0], host))
        assert np.array_equal(cache.rows(Layouts.of([layout]))[0][0], rows)
    assert seconds == sorted(seconds)


def test_an_exchange_that_overlaps_takes_a_share_of_the_device() -> None:
    """However much of it is hidden."""
    layout = Layout(dp=16, ep=16)
    hidden = evolve(layout, overlaps=OverlapSet((*layout.overlaps, Overlap.EXPERTS)))
    alone = experts(MEGATRON, layout)
    seen = experts(changed(MEGATRON, overlap={"experts_hidden": 1.0}), hidden)
    assert seen[CostColumn.EP_FORWARD] == pytest.approx(16 / 132 * alone[CostColumn.EP_FORWARD])


EVERY = [*PROFILES.values(), *PUBLISHED.values(), *(compose(f.name, [f]) for f in FEATURES.values())]


@pytest.mark.parametrize("profile", EVERY, ids=lambda profile: profile.name)
def test_every_value_of_a_profile_is_a_figure_with_unit_kind_and_source(profile: FrameworkProfile) -> None:
    figures = profile_figures(profile)
    assert len({(figure.group, figure.setting) for figure in figures}) == len(figures)
    for figure in figures:
        value = getattr(getattr(profile, figure.group), figure.setting.partition(" ")[0])
        if isinstance(value, Mapping):
            value = value[figure.setting.partition(" ")[2]] if value else value
        assert value == figure.value
        assert figure.meaning
        assert figure.source or figure.value in (False, 0, None, ()) or figure.kind is FigureKind.CODE


def test_a_group_has_few_settings() -> None:
    for group in GROUPS:
        assert 3 <= len(fields(type(getattr(OWN, group)))) <= 8


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="KernelSettings has no speed"):
        compose(
            "wrong", [Feature(name="wrong", kernels={"speed": FEATURES["fused-loss"].kernels["loss_saved_nbytes"]})]
        )


def test_features_are_applied_in_order() -> None:
    fused = compose("a", [FEATURES["transformer-engine"], FEATURES["fused-loss"]])
    assert fused.kernels.loss_saved_nbytes == 0
    assert compose("b", [FEATURES["compiled-loss"]], fused).kernels.loss_saved_nbytes == 8
    assert compose("c", [FEATURES["fused-loss"]], MEGATRON) == compose("c", fused.features)
