"""The inputs of pricing that all layouts of a search share."""

from __future__ import annotations

from functools import cached_property

from attrs import evolve, frozen

from megaloom.dsl import MoE, Node, Split
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.capability import (
    AttentionKernel,
    Capability,
    Execution,
    assumed_environment,
    capability,
)
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.model.structure import ModelStructure

from .contention import Contention
from .intervals import interval, run_class
from .measured_memory import TENSORS_HIGH
from .profiles.frameworks import OWN
from .profiles.groups import FrameworkProfile

# Multiprocessors that communication takes while others compute: of NCCL, one a channel between nodes (its log of such a
# communicator, as users post it: "16 coll channels"); of HybridEP as many (megatron-core 0.16.1,
# transformer_config.py:725), of DeepEP 20 (722).
CHANNELS = 16
# Transformer Engine's cuBLAS workspace, before Hopper and since. Products by several experts have one for each stream
# (transformer_engine/pytorch/module/base.py: get_cublas_workspace_size_bytes, get_multi_stream_cublas_workspace).
ENGINE_WORKSPACE = {False: 2**22, True: 2**25}


@frozen(eq=False, slots=False)
class Job:
    """A training job: the model, the workload, the cluster and the framework profile."""

    structure: ModelStructure
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile

    @cached_property
    def capability(self) -> Capability:
        """Return what the runtime can do on these devices. Profiles of published runs are of Megatron's kind."""
        runtime = Runtime.MEGALOOM if self.profile is OWN else Runtime.MEGATRON
        precision, name = self.workload.precision, self.cluster.device.name
        found = capability(runtime, assumed_environment(runtime, name, precision=precision))
        found = evolve(found, adds_gradients=found.adds_gradients and self.profile.kernels.wgrad_fusion)
        return found if self.profile.attention.fused else evolve(found, fused_attention=AttentionKernel.STORED_SCORES)

    @cached_property
    def _shared_names(self) -> frozenset[str]:
        return frozenset(slot.name for slot, _ in self.structure.shared_weights)

    def execution(self, node: Node, split: Split) -> Execution:
        """Return how the runtime runs a node of the model."""
        return self.capability.execution(node, split, self.workload.precision, self._shared_names)

    @property
    def frees_gradients(self) -> bool:
        """Return whether FSDP has no main gradients of whole weights, to which products add and which are zeroed.

        Of CPUs, where products add to none either, only the kernel that adds gradients has been measured.
        """
        return self.profile.sharded_weights.frees_gradients and self.capability.adds_gradients

    @property
    def keeps_stand_ins(self) -> bool:
        """Return whether a tensor of each shape of weight stands for its gradient, which a product adds elsewhere."""
        return self.profile.kernels.wgrad_fusion and self.profile.buffers.kept_stand_ins

    @cached_property
    def repeats_forward(self) -> bool:
        """Return whether a step runs all forward passes twice: first to count the load of experts over the batch.

        Only Megaloom's own runtime does. Megatron-LM balances over the micro-batches that it has run so far.
        """
        mixtures = (n.op for n in self.structure.graph.nodes if isinstance(n.op, MoE))
        return self.profile is OWN and any(op.balance and op.balance_over == "batch" for op in mixtures)

    @cached_property
    def flops(self) -> int:
        """Return the FLOPs of a step without recompute. Causal attention counts half."""
        batch, seq = self.workload.batch, self.workload.seq
        work = [w for n in self.structure.graph.nodes for w in costs(n, batch=batch, seq=seq).work]
        return sum(w.flops + w.dgrad + w.wgrad for w in work)

    @property
    def sm_share(self) -> float:
        """Return the share of a device's multiprocessors that communication takes while others compute.

        Beside an all-to-all over two H200 a product of 8,192 takes 6 % longer, beside an all-gather 11 %, measured for
        this project; CHANNELS are 12 % of its multiprocessors.
        """
        return CHANNELS / self.cluster.device.units if self.cluster.device.units > CHANNELS else 0.0

    @cached_property
    def contention(self) -> Contention:
        """Return what gathers and reductions of sharded weights and the computation beside them lose."""
        settings = self.profile.sharded_weights
        if settings.lost_speed is None or "fp8" not in self.cluster.device.flops:  # before Hopper
            return Contention(self.sm_share, 1.0)
        return Contention(settings.lost_speed, settings.stretch)

    @cached_property
    def library_nbytes(self) -> int:
        """Return the bytes of cuBLAS workspaces and of buffers that every layout has."""
        buffers, device = self.profile.buffers, self.cluster.device
        streams = buffers.grouped_streams if self.structure.has_experts else 0
        engine = ENGINE_WORKSPACE["fp8" in device.flops] * (buffers.engine_workspace + streams)
        return buffers.cublas_workspaces * device.library_nbytes + engine + buffers.bucket_nbytes

    @cached_property
    def run_class(self) -> str:
        """Return the class of runs to which a run of this job belongs."""
        work = [w for kind in self.structure.kinds for w in costs(kind.node, batch=1, seq=self.workload.seq).work]
        routed = any(w.kind is WorkKind.DISPATCH for w in work)
        return run_class(routed, self.workload.precision, self.cluster.device)

    @cached_property
    def memory_high(self) -> float:
        """Return the upper end of measured over predicted bytes of tensors: the calibration's, or published runs'."""
        fitted = self.cluster.calibration
        if fitted and fitted.memory_high is not None and self.run_class in fitted.classes and self.profile is not OWN:
            return fitted.memory_high
        return TENSORS_HIGH[self.structure.has_experts]

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Return the 90 % interval of the step time as factors of the prediction.

        It is that of the cluster's calibration, if that has runs of Megatron-core of this class.
        """
        fitted = self.cluster.calibration
        if fitted and self.run_class in fitted.classes and self.profile is not OWN:
            return fitted.step
        return interval(1.0, self.run_class)
