"""The kernels that a runtime uses for a node, by environment, and their readers."""

import pytest
from attrs import evolve

from megaloom.dsl import MLA, Attention, RMSNorm, Rope, graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.capability import (
    GROUPED_GEMM,
    AttentionKernel,
    Environment,
    assumed_environment,
    capability,
    differences,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import unfused_attention
from megaloom.planner.search.pricing import price

OWN = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, "H100"))
MEGATRON = capability(Runtime.MEGATRON, assumed_environment(Runtime.MEGATRON, "H100"))


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (Attention(heads=4, rope=1e4), True),
        (Attention(heads=4, causal=False, dropout=0.1), True),
        (Attention(heads=4, qk_norm=RMSNorm(over="head_dim")), True),
        (Attention(heads=4, window=16), False),
        (Attention(heads=4, softcap=50.0), False),
        (Attention(heads=4, sink=True), False),
        (Attention(heads=4, qk_norm=RMSNorm(over="head_dim", plus_one=True)), False),
        (MLA(heads=4, q_rank=None, kv_rank=8, nope=8, rope=4, v=8, positions=Rope(1e4)), False),
    ],
)
def test_megatron_attention_is_fused(layer: Attention, fused: bool) -> None:
    assert (OWN.attention_kernel(layer) is AttentionKernel.TORCH) is fused
    assert MEGATRON.attention_kernel(layer) is AttentionKernel.TRANSFORMER_ENGINE


def test_a_plan_names_attention_that_is_not_fused() -> None:
    assert not unfused_attention(graph(find("llama3-8b")[0]))
    assert len(unfused_attention(graph(find("gemma2-2b")[0]))) == 26


def test_grouped_experts() -> None:
    shapes = [(1024, 512), (512, 512)]
    assert OWN.groups_experts(shapes, 8, False, Precision.BF16)
    assert not OWN.groups_experts(shapes, 1, False, Precision.BF16)
    assert not OWN.groups_experts(shapes, 8, True, Precision.BF16)
    assert not OWN.groups_experts(shapes, 8, False, Precision.FP32)
    assert not OWN.groups_experts([(1024, 510), (510, 512)], 8, False, Precision.BF16)
    assert not OWN.groups_experts([(2**13, 2**11), (2**11, 2**13)], 8, False, Precision.BF16)


@pytest.mark.parametrize("device", ["A100", "V100", "CPU"])
def test_devices_without_grouped_products(device: str) -> None:
    assumed = assumed_environment(Runtime.MEGALOOM, device)
    assert GROUPED_GEMM not in assumed.backends
    assert not capability(Runtime.MEGALOOM, assumed).grouped_gemm
    assert not differences(assumed, Environment(device=device, torch="2.9", backends=()))


def test_the_cost_model_prices_the_experts_that_the_runtime_has() -> None:
    g, work = graph(find("qwen3-30b-a3b")[0]), Workload(seq=4096, batch=64)
    layout = Layout(dp=64, ep=8, shard="optimizer")
    a100 = cluster("64xA100")
    grouped = evolve(a100, device=evolve(a100.device, name="another GPU"))
    slow, fast = (price(g, layout, devices, work).prediction.step_seconds for devices in (a100, grouped))
    assert slow > fast
