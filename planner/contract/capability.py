"""Capabilities of a runtime: what it trains, and how it runs the nodes of a graph, in a given environment.

`capability(runtime, environment)` is the one place that knows. The cost model prices by it, the runtime builds by it.
A plan records the environment that it assumes; `differences` compares that with the one at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from attrs import frozen

from megaloom.dsl import Attend, Attention, LayerNorm, Op, RMSNorm, Rope

from .choices import MICROBATCH_OVERLAPS, OverlapSet
from .workload import Precision, Runtime

GROUPED_GEMM = "torch._grouped_mm"  # one kernel for the matrix products of several experts
TRANSFORMER_ENGINE = "Transformer Engine"

# Devices on which torch._grouped_mm is a loop over the experts: those of compute capability below 9.0, and CPUs.
WITHOUT_GROUPED_GEMM = ("V100", "A100", "A100-40GB", "A100-PCIe", "A100-PCIe-40GB", "A800", "CPU")
# Elements of an expert's second weight, below which its matrix products end before the host has launched the next
# expert's. Grouped, all of them are one launch.
GROUPED_ELEMENTS = 2**24
GROUPED_ROW = 8  # rows of the weights must be a multiple of 16 bytes, which is as many 16-bit elements


class AttentionKernel(StrEnum):
    """Implementation of the attention core of a layer."""

    TRANSFORMER_ENGINE = "Transformer Engine's fused attention"
    TORCH = "torch.nn.functional.scaled_dot_product_attention"
    UNFUSED = "two matrix products and a softmax"  # holds the scores, which the backward pass recomputes

    @property
    def fused(self) -> bool:
        """True if one kernel computes attention and stores no scores."""
        return self is not AttentionKernel.UNFUSED


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
    fused_attention: AttentionKernel  # the fused kernel of attention layers that megatron-core's module computes
    fuses_all_attention: bool  # layers with other attention use that kernel too
    grouped_gemm: bool  # one kernel can multiply by the weights of several experts

    def attention_kernel(self, op: Op) -> AttentionKernel:
        """Return the kernel that computes the attention of a layer."""
        fused = self.fuses_all_attention or is_megatron_attention(op)
        return self.fused_attention if fused else AttentionKernel.UNFUSED

    def groups_experts(
        self, weights: Sequence[tuple[int, int]], experts: int, biased: bool, precision: Precision
    ) -> bool:
        """True if one kernel multiplies by the weights of all experts of a device.

        weights: shapes of one expert's weights, in the order of use.
        """
        rows, columns = weights[-1]
        small = experts > 1 and rows * columns < GROUPED_ELEMENTS
        aligned = all(size % GROUPED_ROW == 0 for weight in weights for size in weight)
        return self.grouped_gemm and precision is Precision.BF16 and small and aligned and not biased


def is_megatron_attention(op: Op) -> bool:
    """True if megatron-core's SelfAttention computes this layer; the runtime then needs not run the layer's body."""
    if not isinstance(op, Attention) or type(op).body is not Attention.body:
        return False
    plain_core = op.core == Attend(causal=op.causal, dropout=op.dropout)  # no window, softcap, ALiBi, sink or bias
    plain_rope = not isinstance(op.rope, Rope) or op.rope.magnitude == 1.0
    return plain_core and plain_rope and (op.qk_norm is None or _is_plain_norm(op.qk_norm))


def _is_plain_norm(op: Op) -> bool:
    """True for an RMSNorm or a LayerNorm whose scale is the weight, not 1 + the weight."""
    kinds = (RMSNorm, LayerNorm)
    return isinstance(op, kinds) and any(type(op).body is kind.body for kind in kinds) and not op.plus_one


def assumed_environment(runtime: Runtime, device: str, experts: bool = True) -> Environment:
    """Return the environment that a plan assumes for a model with or without experts."""
    backends: tuple[str, ...] = (TRANSFORMER_ENGINE,)
    if runtime is Runtime.MEGALOOM:
        backends = (GROUPED_GEMM,) if experts and device not in WITHOUT_GROUPED_GEMM else ()
    return Environment(device=device, torch="", backends=backends)


def capability(runtime: Runtime, environment: Environment) -> Capability:
    """Return what a runtime can do in an environment."""
    if runtime is Runtime.MEGATRON:
        return Capability(
            precisions=tuple(Precision),
            microbatch_overlaps=MICROBATCH_OVERLAPS,
            fused_attention=AttentionKernel.TRANSFORMER_ENGINE,
            fuses_all_attention=True,
            grouped_gemm=TRANSFORMER_ENGINE in environment.backends,
        )
    return Capability(
        # megatron-core has the other precisions only with Transformer Engine.
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        microbatch_overlaps=OverlapSet(),  # these need Transformer Engine, or megatron-core's own GPTModel
        fused_attention=AttentionKernel.TORCH,
        fuses_all_attention=False,  # the body of another layer computes its scores
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
