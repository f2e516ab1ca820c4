"""Capabilities of a runtime: what it trains, and how it runs the nodes of a graph, in a given environment.

`capability(runtime, environment)` is the one place that knows. The cost model prices by it, the runtime builds by it.
A plan records the environment that it assumes; `differences` compares that with the one at hand.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import StrEnum
from functools import lru_cache
from math import prod

from attrs import frozen

from megaloom.dsl import Attend, Node, Op, Sizes, Split, Value
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.facts.work import Work
from megaloom.dsl.work_kinds import WorkKind

from .choices import MICROBATCH_OVERLAPS, OverlapSet
from .engine_parts import NO_PARTS, EnginePart, engine_parts
from .module_kinds import module_kind, runs_as_module
from .workload import Precision, Runtime

GROUPED_GEMM = "torch._grouped_mm"  # one kernel for the matrix products of several experts
FLEX_ATTENTION = "torch.nn.attention.flex_attention"  # compiled by Triton, with a backward pass
TRANSFORMER_ENGINE = "Transformer Engine"
ADDED_GRADIENTS = "torch.addmm into fp32"  # the product that makes a weight's gradient adds it to the main gradient

# Devices on which torch._grouped_mm is a loop over the experts: those of compute capability below 9.0, and CPUs.
WITHOUT_GROUPED_GEMM = ("V100", "A100", "A100-40GB", "A100-PCIe", "A100-PCIe-40GB", "A800", "CPU")
# Devices on which Triton compiles no FlexAttention: those of compute capability below 8.0, and CPUs.
WITHOUT_FLEX_ATTENTION = ("V100", "CPU")
FLEX_CHANNELS = 16  # fewest channels of a head (torch, _inductor/kernel/flex: block sizes of a product)
# Elements of an expert's second weight, below which its matrix products end before the host has launched the next
# expert's. Grouped, all of them are one launch.
GROUPED_ELEMENTS = 2**24
GROUPED_ROW = 8  # rows of the weights must be a multiple of 16 bytes, which is as many 16-bit elements


SCAN_CHUNK = 128  # positions of a chunk of a scan
TRIANGULAR_CHUNK = 64  # of a scan with a triangular system for each chunk


class AttentionKernel(StrEnum):
    """Implementation of one attention core."""

    TRANSFORMER_ENGINE = "Transformer Engine's fused attention"
    TORCH = "torch.nn.functional.scaled_dot_product_attention"
    FLEX = "torch.nn.attention.flex_attention"
    BLOCKS = "matrix products and a softmax by blocks of queries"  # the backward pass recomputes the scores
    STORED_SCORES = "matrix products and a softmax, which save all scores"  # Megatron-LM before fused attention

    @property
    def fused(self) -> bool:
        """True if one kernel computes attention and stores no scores."""
        return self in (AttentionKernel.TRANSFORMER_ENGINE, AttentionKernel.TORCH, AttentionKernel.FLEX)

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes the core in any case, not only under selective recompute."""
        return self is AttentionKernel.BLOCKS


class ScanKernel(StrEnum):
    """Implementation of one scan."""

    FUSED = "the fused kernel of mamba_ssm or flash-linear-attention"
    CHUNKS = "matrix products over chunks of the sequence"  # the backward pass recomputes what is inside
    COMPILED_CHUNKS = "matrix products over chunks of the sequence, compiled"  # the kernels between them are fused

    TRIANGULAR_CHUNKS = "matrix products over chunks of the sequence, in fp32, and one in order for each chunk"

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes the scan."""
        return self is not ScanKernel.FUSED


class ConvolutionKernel(StrEnum):
    """Implementation of one causal convolution along the sequence."""

    FUSED = "the fused kernel of causal_conv1d"
    SEPARATE = "a product and a sum for each entry of the kernel"
    COMPILED = "products and sums, compiled to one kernel"

    @property
    def recomputes(self) -> bool:
        """False: the backward pass reads what the forward pass saved."""
        return False


CoreKernel = AttentionKernel | ScanKernel | ConvolutionKernel
BODY_KERNELS: tuple[CoreKernel, ...] = (
    AttentionKernel.FLEX,
    AttentionKernel.BLOCKS,
    ScanKernel.CHUNKS,
    ScanKernel.COMPILED_CHUNKS,
    ScanKernel.TRIANGULAR_CHUNKS,
    ConvolutionKernel.COMPILED,
)


@frozen(kw_only=True)
class Environment:
    """Device and libraries that a program runs with."""

    device: str  # its name, such as H100
    torch: str  # version; empty in a plan, which assumes any that has the backends
    backends: tuple[str, ...]  # optional kernels and libraries that are installed and run on this device


@frozen(eq=False)
class Core:
    """An attention core, a selective scan or a convolution of a node, and the kernel that computes it."""

    value: Value
    kernel: CoreKernel


@frozen(kw_only=True, eq=False)
class Execution:
    """Module, kernels and grouping of experts with which a runtime runs one graph node."""

    module: bool  # a torch module computes the layer; else the runtime evaluates its body
    cores: tuple[Core, ...]  # in the order of the node's primitives
    grouped_experts: bool  # one kernel multiplies by the weights of all experts of a device
    stacked_experts: bool  # their weights are one parameter, whose gradient a kernel of its own adds
    engine: frozenset[EnginePart] = NO_PARTS  # parts of the module that Transformer Engine computes
    adds_gradients: bool = False  # where DDP has buffers of main gradients, linear layers add to them

    @property
    def recomputes_cores(self) -> bool:
        """True if the backward pass recomputes an attention core or a scan in any case."""
        return any(core.kernel.recomputes for core in self.cores)

    @property
    def holds_extra(self) -> bool:
        """True if the backward pass of the node holds more than gradients of activations, such as those of weights."""
        return self.stacked_experts or any(core.kernel in BODY_KERNELS for core in self.cores)

    def product_adds(self, work: Work) -> bool:
        """True if a product adds the gradient of its weight to a main gradient. torch's grouped product does not."""
        return self.adds_gradients and not (work.experts and self.stacked_experts)

    def body_cores(self, facts: Costs) -> dict[Work, Core]:
        """Return the work of the cores whose kernel only bodies use."""
        works = (w for w in facts.work if w.kind.is_core)
        return {w: core for w, core in zip(works, self.cores, strict=True) if core.kernel in BODY_KERNELS}

    @property
    def saves_two_outputs(self) -> bool:
        """True if the result of attention is saved without and with the share of its sinks."""
        flex = (core.value.op for core in self.cores if core.kernel is AttentionKernel.FLEX)
        return any(isinstance(op, Attend) and op.sink for op in flex)

    @property
    def stores_scores(self) -> bool:
        """True if an attention core saves its scores for the backward pass."""
        return any(core.kernel is AttentionKernel.STORED_SCORES for core in self.cores)


@frozen(kw_only=True)
class Capability:
    """Precisions that a runtime trains in an environment, and kernels by which it runs nodes."""

    precisions: tuple[Precision, ...]
    microbatch_overlaps: OverlapSet  # the overlaps within a micro-batch that it can run
    fused_attention: AttentionKernel  # the kernel of plain attention
    all_modules: bool  # every layer is a module, whose attention of any kind uses that kernel
    fuses_unequal_heads: bool  # so does plain attention whose values have another head size than its keys
    flex_attention: bool  # FlexAttention computes other attention
    scan: ScanKernel
    convolution: ConvolutionKernel
    grouped_gemm: bool  # one kernel can multiply by the weights of several experts
    engine: bool = False  # Transformer Engine computes the parts that it has of megatron-core's modules
    adds_gradients: bool = False  # products can add the gradients of weights to buffers of DDP

    def execution(
        self, node: Node, split: Split, precision: Precision, shared: Container[str] = frozenset()
    ) -> Execution:
        """Return how the runtime runs a node whose tensors are sharded by this split.

        shared: weights that several nodes of the model have.
        """
        module = self.all_modules or runs_as_module(node, split)
        engine, kind = NO_PARTS, module_kind(node.op)
        if module and self.engine and kind is not None:
            engine = engine_parts(kind.engine, node, split, precision)
        grouped = module and self._groups_experts(node, split, precision)
        if grouped and not self.all_modules:  # one kernel of torch is faster than Transformer Engine's for each expert
            engine -= {EnginePart.EXPERTS}
        by_engine = EnginePart.EXPERTS in engine
        grouped |= by_engine
        fused = AttentionKernel.TRANSFORMER_ENGINE if EnginePart.ATTENTION in engine else None
        values = (step.value for step in program(node).steps if step.value.op.work_kind.is_core)
        return Execution(
            module=module,
            cores=tuple(Core(v, fused or self._kernel(v, module)) for v in values),
            grouped_experts=grouped,
            stacked_experts=grouped and not self.all_modules and not by_engine,
            engine=engine,
            adds_gradients=module and self._adds_gradients(node, shared),
        )

    def _adds_gradients(self, node: Node, shared: Container[str]) -> bool:
        """True if linear layers of a node's module add the gradients of their weights to buffers of DDP.

        In our own runtime megatron-core's do. Autograd adds the gradients of a weight that other nodes use too. The
        products of a layer's own module are not known.
        """
        if self.all_modules or not self.adds_gradients:
            return self.adds_gradients
        return module_kind(node.op) is not None and not any(s.name in shared for s in node.weights)

    def _kernel(self, v: Value, module: bool) -> CoreKernel:
        """Return the kernel of one attention core, scan or convolution."""
        match v.op.work_kind:
            case WorkKind.SCAN:
                return self.scan
            case WorkKind.TRIANGULAR_SCAN:
                return ScanKernel.FUSED if self.all_modules else ScanKernel.TRIANGULAR_CHUNKS
            case WorkKind.CONVOLUTION:
                return self.convolution
        return self._attention(v, module)

    def _attention(self, v: Value, module: bool) -> AttentionKernel:
        """Return the kernel of one attention core."""
        if module:
            return self.fused_attention
        _, k, values, *_ = (a.shape for a in v.args)
        fits = self.fuses_unequal_heads or k["head_dim"] == values["head_dim"]
        if fits and is_plain_attention(v.op):
            return self.fused_attention
        wide = min(k["head_dim"].known, values["head_dim"].known) >= FLEX_CHANNELS
        dropout = isinstance(v.op, Attend) and v.op.dropout > 0  # only the blocks have masks
        return AttentionKernel.FLEX if self.flex_attention and wide and not dropout else AttentionKernel.BLOCKS

    def _groups_experts(self, node: Node, split: Split, precision: Precision) -> bool:
        """True if one kernel multiplies by the weights of all experts of a device."""
        if not (self.grouped_gemm and precision is Precision.BF16):
            return False
        experts = [w for w in _local_weights(node, split) if w.experts]
        products = [w for w in experts if len(w.sizes) == 2]
        if not products:
            return False
        small = products[-1].experts > 1 and prod(products[-1].sizes) < GROUPED_ELEMENTS
        return small and all(size % GROUPED_ROW == 0 for w in products for size in w.sizes)


@frozen
class _LocalWeight:
    experts: int  # copies on a device; 0 for a weight that is not an expert's
    sizes: tuple[int, ...]  # of one copy on a device


@lru_cache(maxsize=1 << 12)
def _local_weights(node: Node, split: Split) -> tuple[_LocalWeight, ...]:
    """Return the weights of a node as one device holds them."""
    p = fitted(program(node), split)
    out = []
    for outer, shape in p.weights:
        local = p.table.local(Sizes(), split, p.table.axes(outer, shape), p.table.among_experts(outer))
        experts = local(outer) if p.table.among_experts(outer) else 0
        out.append(_LocalWeight(experts=experts, sizes=tuple(local((d,)) for d in shape)))
    return tuple(out)


def is_plain_attention(op: Op) -> bool:
    """True for softmax(q kᵀ · scale) v, causal or not: no window, soft cap, ALiBi, sinks, relative bias or dropout."""
    return isinstance(op, Attend) and op == Attend(causal=op.causal, scale=op.scale)


def assumed_environment(
    runtime: Runtime,
    device: str,
    experts: bool = True,
    other_attention: bool = True,
    precision: Precision = Precision.BF16,
) -> Environment:
    """Return the environment that a plan assumes for a model.

    experts: the model has experts. other_attention: it has attention with windows, biases, soft caps or sinks. Products
    of 8 bits are Transformer Engine's.
    """
    if runtime is Runtime.MEGATRON:
        return Environment(device=device, torch="", backends=(TRANSFORMER_ENGINE,))
    grouped = experts and device not in WITHOUT_GROUPED_GEMM
    flex = other_attention and device not in WITHOUT_FLEX_ATTENTION
    backends = (GROUPED_GEMM,) * grouped + (FLEX_ATTENTION,) * flex + (ADDED_GRADIENTS,) * (device != "CPU")
    backends += (TRANSFORMER_ENGINE,) * precision.narrow
    return Environment(device=device, torch="", backends=backends)


def needs_flex_attention(nodes: Iterable[Node]) -> bool:
    """True if FlexAttention computes the attention of some nodes where a device has it."""
    found = capability(Runtime.MEGALOOM, Environment(device="", torch="", backends=(FLEX_ATTENTION,)))
    cores = (core for n in nodes for core in found.execution(n, Split(), Precision.BF16).cores)
    return any(core.kernel is AttentionKernel.FLEX for core in cores)


def capability(runtime: Runtime, environment: Environment) -> Capability:
    """Return the precisions, overlaps and kernels that a runtime has on a device with these libraries."""
    if runtime is Runtime.MEGATRON:
        return Capability(
            precisions=tuple(Precision),
            microbatch_overlaps=MICROBATCH_OVERLAPS,
            fused_attention=AttentionKernel.TRANSFORMER_ENGINE,
            all_modules=True,
            fuses_unequal_heads=True,
            flex_attention=False,
            scan=ScanKernel.FUSED,
            convolution=ConvolutionKernel.FUSED,
            grouped_gemm=TRANSFORMER_ENGINE in environment.backends,
            adds_gradients=True,
        )
    compiles = environment.device != "CPU"  # there the runtime does not use torch.compile
    engine = TRANSFORMER_ENGINE in environment.backends  # megatron-core has fp8 only with it
    return Capability(
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16, *([Precision.FP8] if engine else [])),
        microbatch_overlaps=OverlapSet(),  # these need Transformer Engine, or megatron-core's own GPTModel
        fused_attention=AttentionKernel.TORCH,
        all_modules=False,
        fuses_unequal_heads=environment.device != "CPU",  # there torch would store the scores
        flex_attention=FLEX_ATTENTION in environment.backends,
        scan=ScanKernel.COMPILED_CHUNKS if compiles else ScanKernel.CHUNKS,
        convolution=ConvolutionKernel.COMPILED if compiles else ConvolutionKernel.SEPARATE,
        grouped_gemm=GROUPED_GEMM in environment.backends,
        engine=engine,
        adds_gradients=ADDED_GRADIENTS in environment.backends,
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
