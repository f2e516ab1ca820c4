"""Kernels that the facts count as one: gates, which their ops mark, and the cross-entropy."""

from __future__ import annotations

import pytest
from attrs import frozen

from megaloom.dsl import (
    MLP,
    ClampedGLU,
    Dim,
    Embed,
    GeGLU,
    Layer,
    Mamba2,
    MoE,
    SwiGLU,
    Value,
    costs,
    dot,
    fn,
    graph,
    ids,
    model,
    weight,
)
from megaloom.dsl.facts.work import Work
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner import Precision, cluster
from megaloom.planner.contract.devices import Device
from megaloom.planner.cost.kernels import MEMORY_KERNELS, KernelSeconds, kernel_seconds
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN
from megaloom.planner.cost.profiles.groups import FrameworkProfile


@frozen
class Product(Layer):
    """A product of two activations, which no framework fuses as a gate."""

    ff: int

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = dot(x, weight("one", e, f), "embed") * dot(x, weight("two", e, f), "embed")
        return dot(h, weight("down", f, e), "ff")


def pointwise(layer: Layer) -> list[Work]:
    """Return the pointwise work of a layer."""
    m = model("m", ids() >> Embed(weight("wte", Dim("vocab", 64), Dim("embed", 32))) >> layer)
    result = costs(graph(m).nodes[-1], batch=1, seq=16).work
    return [w for w in result if w.kind == "pointwise"]


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (SwiGLU(64), "gate"),
        (GeGLU(64), "gate"),
        (ClampedGLU(64), "gate"),
        (Mamba2(heads=4, head_dim=8, state=8), "gate"),
        (MoE(SwiGLU(64), 4, 2), "expert gate"),
        (MoE(ClampedGLU(64), 4, 2), "expert gate"),
        (MoE(MLP(64, bias=True), 4, 2), "expert bias"),
        (MLP(64, bias=True), "pointwise"),
        (Product(64), "pointwise"),
        (MoE(Product(64), 4, 2), "pointwise"),
    ],
    ids=str,
)
def test_a_kernel_is_fused_where_the_op_says_so(layer: Layer, kernel: str) -> None:
    kernels = {MEMORY_KERNELS.get((w.fusion, w.experts), w.kind) for w in pointwise(layer)}
    assert kernel in kernels
    assert kernels <= {kernel, "pointwise"} | ({"expert bias"} if "ClampedGLU" in str(layer) else set())


def test_a_fusion_group_is_no_part_of_the_mathematics() -> None:
    x = ids() >> Embed(weight("wte", Dim("vocab", 64), Dim("embed", 32)))
    assert fn("mul", x, x, fusion="gate").op == (x * x).op
    assert repr(fn("mul", x, x, fusion="gate").op) == repr((x * x).op)


def cross_entropy(logits: int, device: Device, precision: Precision, profile: FrameworkProfile) -> KernelSeconds:
    """Return the seconds of a cross-entropy of so many logits."""
    return kernel_seconds(Work(WorkKind.LOGITS_LOSS, "", 0, 0, 0, elements=logits), device, precision, profile)


def test_a_cross_entropy_on_a_cpu_takes_many_kernels_and_its_exponentials() -> None:
    cpu = cluster("1xCPU").device
    small, large = (cross_entropy(n, cpu, Precision.FP32, OWN) for n in (512, 2**21))
    # Measured: 0.5 and 0.2 ms for 8 x 64 logits, 7.2 and 0.7 ms for 1024 x 2048, of which a copy moves 8 bytes each.
    assert 0.3e-3 < small.forward < 0.8e-3 and 0.1e-3 < small.backward < 0.4e-3
    assert 5e-3 < large.forward < 10e-3 and 0.5e-3 < large.backward < 1.5e-3
    assert cross_entropy(2**21, cpu, Precision.BF16, OWN).backward > 10 * large.backward


def test_a_cross_entropy_on_a_gpu_takes_its_traffic() -> None:
    h100, logits = cluster("8xH100").device, 2**24
    for profile in (OWN, MEGATRON):
        took = cross_entropy(logits, h100, Precision.BF16, profile)
        assert took.forward + took.backward == pytest.approx(profile.kernels.loss_moved_nbytes * logits / h100.moves)
