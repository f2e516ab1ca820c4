"""The kernels that a runtime uses for a node, by environment, and their readers."""

import pytest
from attrs import evolve

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    Layer,
    Mamba2,
    MoE,
    Node,
    RMSNorm,
    Rope,
    Split,
    SwiGLU,
    Unembed,
    graph,
    ids,
    model,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.sharding_table import WHOLE
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.capability import (
    ADDED_GRADIENTS,
    FLEX_ATTENTION,
    GROUPED_GEMM,
    TRANSFORMER_ENGINE,
    AttentionKernel,
    Capability,
    ConvolutionKernel,
    Environment,
    Execution,
    ScanKernel,
    assumed_environment,
    capability,
    differences,
    needs_flex_attention,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import unfused_cores
from megaloom.planner.search.pricing import price

OWN = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, "H100"))
ON_CPU = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, "CPU"))
MEGATRON = capability(Runtime.MEGATRON, assumed_environment(Runtime.MEGATRON, "H100"))
NORM = RMSNorm(over="head_dim")
LATENT = MLA(heads=4, q_rank=None, kv_rank=8, nope=8, rope=4, v=8, positions=Rope(1e4))


def node_of(layer: Layer) -> Node:
    """The node of a layer in a model."""
    x = ids() >> Embed(weight("wte", Dim("vocab", 64), Dim("embed", 64)))
    return graph(model("m", x >> layer)).nodes[-1]


def execution(
    found: Capability, layer: Layer, split: Split = WHOLE, precision: Precision = Precision.BF16
) -> Execution:
    """Return how a runtime runs a layer."""
    return found.execution(node_of(layer), split, precision)


@pytest.mark.parametrize(
    ("layer", "module", "on_gpu", "on_cpu"),
    [
        (Attention(heads=4, rope=1e4), True, "TORCH", "TORCH"),
        (Attention(heads=4, causal=False, dropout=0.1), True, "TORCH", "TORCH"),
        (Attention(heads=4, qk_norm=NORM), True, "TORCH", "TORCH"),
        (Attention(heads=4, qk_norm=evolve(NORM, plus_one=True)), False, "TORCH", "TORCH"),
        (Attention(heads=4, scale=0.5), False, "TORCH", "TORCH"),
        (LATENT, False, "TORCH", "BLOCKS"),
        (Attention(heads=4, window=16), False, "FLEX", "BLOCKS"),
        (Attention(heads=4, softcap=50.0), False, "FLEX", "BLOCKS"),
        (Attention(heads=4, sink=True), False, "FLEX", "BLOCKS"),
        (Attention(heads=4, alibi=True), False, "FLEX", "BLOCKS"),
    ],
)
def test_kernel_of_attention(layer: Layer, module: bool, on_gpu: str, on_cpu: str) -> None:
    for found, kernel in ((OWN, on_gpu), (ON_CPU, on_cpu)):
        how = execution(found, layer)
        assert how.module is module
        assert [core.kernel for core in how.cores] == [AttentionKernel[kernel]]
    (core,) = execution(MEGATRON, layer).cores
    assert core.kernel is AttentionKernel.TRANSFORMER_ENGINE


RING = Split(cp=2)


@pytest.mark.parametrize(
    ("layer", "split", "parts"),
    [
        (Attention(heads=4, rope=1e4), RING, {"ATTENTION"}),
        (Attention(heads=4, qk_norm=NORM), RING, {"ATTENTION"}),
        (Attention(heads=4), WHOLE, set()),  # torch has the same kernels
        (Attention(heads=4), Split(cp=2, tp=2), set()),
        (Attention(heads=4, causal=False), RING, set()),
        (Attention(heads=4, dropout=0.1), RING, set()),  # its masks are torch's
        (Attention(heads=4, head_dim=12), RING, set()),  # channels that cuDNN does not take
        (Attention(heads=4, head_dim=256), RING, set()),
        (Attention(heads=4, window=16), RING, set()),  # its body computes this layer
        (LATENT, RING, set()),
        (MoE(SwiGLU(2**19), experts=8, top_k=2), WHOLE, {"EXPERTS"}),
        (MoE(SwiGLU(2**19), experts=8, top_k=2), Split(ep=8, cp=2), {"EXPERTS"}),
        (MoE(MLP(96, bias=True), experts=8, top_k=2), WHOLE, set()),  # small: torch has one kernel for all of them
        (MoE(SwiGLU(96), experts=8, top_k=2), Split(etp=2), set()),
        (SwiGLU(96), WHOLE, set()),
        (RMSNorm(), WHOLE, set()),
        (Mamba2(heads=8, head_dim=16, state=8), WHOLE, set()),
    ],
)
def test_parts_that_the_engine_computes(layer: Layer, split: Split, parts: set[str]) -> None:
    here = Environment(device="H100", torch="2.11", backends=(FLEX_ATTENTION, GROUPED_GEMM, TRANSFORMER_ENGINE))
    engine = capability(Runtime.MEGALOOM, here)
    found, without = execution(engine, layer, split), execution(OWN, layer, split)
    assert {part.name for part in found.engine} == parts and not without.engine
    assert found.module is without.module
    if "ATTENTION" in parts:
        assert [core.kernel for core in found.cores] == [AttentionKernel.TRANSFORMER_ENGINE]
    else:
        assert [core.kernel for core in found.cores] == [core.kernel for core in without.cores]
    if "EXPERTS" in parts:  # each of which has its own parameters
        assert found.grouped_experts and not found.stacked_experts
    assert not execution(engine, layer, split, Precision.FP32).engine


def test_kernel_of_scans() -> None:
    layer = Mamba2(heads=8, head_dim=16, state=8)
    scan_and_convolutions = {
        OWN: (ScanKernel.COMPILED_CHUNKS, ConvolutionKernel.COMPILED),
        ON_CPU: (ScanKernel.CHUNKS, ConvolutionKernel.SEPARATE),
        MEGATRON: (ScanKernel.FUSED, ConvolutionKernel.FUSED),
    }
    for runtime, kernels in scan_and_convolutions.items():
        assert {core.kernel for core in execution(runtime, layer).cores} == set(kernels)


def test_a_plan_names_cores_without_a_fused_kernel() -> None:
    case = Layout(), Workload(seq=4096, batch=64)
    assert not unfused_cores(graph(find("llama3-8b")[0]), *case, cluster("8xV100"))
    assert not unfused_cores(graph(find("gemma2-2b")[0]), *case, cluster("8xH100"))
    assert len(unfused_cores(graph(find("gemma2-2b")[0]), *case, cluster("8xV100"))) == 26
    assert len(unfused_cores(graph(find("mamba2-370m")[0]), *case, cluster("8xH100"))) == 48
    assert needs_flex_attention(graph(find("gemma2-2b")[0]).nodes)
    assert not needs_flex_attention(graph(find("llama3-8b")[0]).nodes)


@pytest.mark.parametrize(
    ("expert", "split", "precision", "grouped"),
    [
        (SwiGLU(96), WHOLE, Precision.BF16, True),
        (SwiGLU(96), WHOLE, Precision.FP32, False),
        (SwiGLU(96), Split(ep=8), Precision.BF16, False),  # one expert on each device
        (MLP(96, bias=True), WHOLE, Precision.BF16, True),
        (MLP(96, bias=True), Split(etp=2), Precision.BF16, False),  # its body computes this layer
        (SwiGLU(100), WHOLE, Precision.BF16, False),  # rows that are not aligned
        (SwiGLU(2**19), WHOLE, Precision.BF16, False),  # large products
        (SwiGLU(2**19), Split(etp=8), Precision.BF16, True),
    ],
)
def test_grouped_experts(expert: Layer, split: Split, precision: Precision, grouped: bool) -> None:
    assert execution(OWN, MoE(expert, experts=8, top_k=2), split, precision).grouped_experts is grouped
    assert not execution(ON_CPU, MoE(expert, experts=8, top_k=2), split, precision).grouped_experts


@pytest.mark.parametrize("device", ["A100", "V100", "CPU"])
def test_devices_without_grouped_products(device: str) -> None:
    assumed = assumed_environment(Runtime.MEGALOOM, device)
    assert GROUPED_GEMM not in assumed.backends
    assert not capability(Runtime.MEGALOOM, assumed).grouped_gemm
    here = (FLEX_ATTENTION, ADDED_GRADIENTS)
    assert not differences(assumed, Environment(device=device, torch="2.9", backends=here))


@pytest.mark.parametrize(
    ("layer", "adds"),
    [
        (SwiGLU(96), True),
        (Attention(heads=4), True),
        (MoE(SwiGLU(96), experts=8, top_k=2), True),
        (LATENT, False),  # bodies multiply by torch's functions
        (Attention(heads=4, window=16), False),
    ],
)
def test_layers_whose_products_add_gradients(layer: Layer, adds: bool) -> None:
    assert execution(OWN, layer).adds_gradients is adds
    assert execution(MEGATRON, layer).adds_gradients
    assert not execution(ON_CPU, layer).adds_gradients


@pytest.mark.parametrize(("backend", "ff", "adds"), [("torch", 96, False), ("torch", 2**19, True), ("te", 2**19, True)])
def test_a_grouped_product_of_torch_adds_to_nothing(backend: str, ff: int, adds: bool) -> None:
    """The products of a mixture's shared expert add all the same."""
    node = node_of(MoE(MLP(ff), experts=8, top_k=2, shared=MLP(64)))
    backends = (GROUPED_GEMM, ADDED_GRADIENTS, *(TRANSFORMER_ENGINE,) * (backend == "te"))
    here = capability(Runtime.MEGALOOM, Environment(device="H100", torch="2.11", backends=backends))
    found = here.execution(node, WHOLE, Precision.BF16)
    products = [w for w in costs(node, batch=1, seq=64).work if w.kind is WorkKind.PRODUCT]
    assert [found.product_adds(w) for w in products if w.experts] == [adds] * 2
    assert all(found.product_adds(w) for w in products if not w.experts)


def test_gradients_of_a_shared_table_are_added_by_autograd() -> None:
    for name, shared, added in (("llama3-8b", (), True), ("gpt2", ("wte",), False)):
        (head,) = (node for node in graph(find(name)[0]).nodes if isinstance(node.op, Unembed))
        assert OWN.execution(head, WHOLE, Precision.BF16, shared).adds_gradients is added


def test_the_cost_model_prices_the_experts_that_the_runtime_has() -> None:
    g, work = graph(find("qwen3-30b-a3b")[0]), Workload(seq=4096, batch=64)
    layout = Layout(dp=64, ep=8, shard="optimizer")
    a100 = cluster("64xA100")
    grouped = evolve(a100, device=evolve(a100.device, name="another GPU"))
    slow, fast = (price(g, layout, devices, work).prediction.step_seconds for devices in (a100, grouped))
    assert slow > fast


def test_a_module_drops_hidden_states_only() -> None:
    table = weight("wte", Dim("vocab", 64), Dim("embed", 64))
    logits = ids() >> Embed(table) >> Dropout(0.1) >> Unembed(table) >> Dropout(0.1)
    nodes = [node for node in graph(model("m", logits)).nodes if isinstance(node.op, Dropout)]
    assert [runs_as_module(node, WHOLE) for node in nodes] == [True, False]
