"""Capabilities of a runtime: what it trains, and how it runs the nodes of a graph, in a given environment.

`capability(runtime, environment)` is the one place that knows. The cost model prices by it, the runtime builds by it.
A plan records the environment that it assumes; `differences` compares that with the one at hand.
"""

from __future__ import annotations

from attrs import frozen

from .choices import MICROBATCH_OVERLAPS, OverlapSet
from .workload import Precision, Runtime

GROUPED_GEMM = "torch._grouped_mm"  # one kernel for the matrix products of several experts
TRANSFORMER_ENGINE = "Transformer Engine"

# Elements of an expert's second weight, below which its matrix products end before the host has launched the next
# expert's. Grouped, all of them are one launch.
GROUPED_ELEMENTS = 2**24


@frozen(kw_only=True)
class Environment:
    """Device and libraries that a program runs with."""

    device: str  # its name, such as H100
    torch: str  # version; empty in a plan, which assumes any that has the backends
    backends: tuple[str, ...]  # optional kernels and libraries that are installed and run on this device


@frozen(kw_only=True)
class Capability:
    """Precisions that a runtime trains in an environment, and kernels by which it runs nodes."""

    precisions: tuple[Precision, ...]
    microbatch_overlaps: OverlapSet  # the overlaps within a micro-batch that it can run
    fused_attention: bool  # attention is one kernel, which stores no scores
    grouped_gemm: bool  # one kernel can multiply by the weights of several experts

    def groups_experts(self, elements: int, experts: int, biased: bool, precision: Precision) -> bool:
        """True if the experts of a device are multiplied in one kernel; `elements` are of an expert's last weight."""
        small = experts > 1 and elements < GROUPED_ELEMENTS
        return self.grouped_gemm and precision is Precision.BF16 and small and not biased


def assumed_environment(runtime: Runtime, device: str, experts: bool = True) -> Environment:
    """Return the environment that a plan assumes for a model with or without experts."""
    backends: tuple[str, ...] = (TRANSFORMER_ENGINE,)
    if runtime is Runtime.MEGALOOM:
        backends = (GROUPED_GEMM,) if experts and device != "CPU" else ()
    return Environment(device=device, torch="", backends=backends)


def capability(runtime: Runtime, environment: Environment) -> Capability:
    """Return what a runtime can do in an environment."""
    if runtime is Runtime.MEGATRON:
        return Capability(
            precisions=tuple(Precision),
            microbatch_overlaps=MICROBATCH_OVERLAPS,
            fused_attention=True,
            grouped_gemm=TRANSFORMER_ENGINE in environment.backends,
        )
    return Capability(
        precisions=(Precision.FP32, Precision.BF16),  # megatron-core has the others with Transformer Engine only
        microbatch_overlaps=OverlapSet(),  # these need Transformer Engine, or megatron-core's own GPTModel
        fused_attention=True,  # torch.nn.functional.scaled_dot_product_attention
        grouped_gemm=GROUPED_GEMM in environment.backends,
    )


def differences(assumed: Environment, found: Environment) -> str:
    """Return in one sentence how the environment at hand differs from the one that a plan assumes; empty if not."""
    parts = []
    if assumed.device != found.device:
        parts.append(f"{assumed.device} devices (here: {found.device})")
    if missing := [name for name in assumed.backends if name not in found.backends]:
        parts.append(f"{' and '.join(missing)} (not available here)")
    if assumed.torch and assumed.torch != found.torch:
        parts.append(f"torch {assumed.torch} (here: {found.torch})")
    return f"the plan assumes {', '.join(parts)}: its predictions do not hold here" if parts else ""
