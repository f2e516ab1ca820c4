"""The options of Megatron-FSDP, with which Megatron-LM and Megatron-Bridge shard gradients and weights.

Sources, in core_v0.16.1: docs/discussions/megatron-fsdp-user-guide, megatron/training/arguments.py,
megatron/core/distributed/fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.planner.contract.choices import Overlap, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .decoder import DecoderModel
from .option import Option, option
from .target import Target, refuse

STRATEGIES = {Shard.GRADIENTS: "optim_grads", Shard.WEIGHTS: "optim_grads_params"}
GATHERS_8_BITS = "fp8-param-gather"
CHECKPOINTS = "fsdp_dtensor"  # the only format of checkpoints that Megatron-FSDP writes


def fsdp_options(plan: Plan, m: DecoderModel, target: Target) -> Iterator[Option]:
    """Yield the options that shard gradients or weights; none for other layouts. Raise UserError for what has none."""
    x = plan.layout
    if not x.fsdp:
        return
    if x.replicas > 1 and m.moe:
        # mcore_fsdp_adapter.py: with several instances, _init_dist_index builds no mesh for experts.
        what = f"{x.replicas} replicas of a model with experts: Megatron-FSDP shards those over all ranks only"
        refuse(target, what, "plan with --replicas 1")
    narrow = gathers_8_bits(plan)
    if narrow and plan.workload.precision is Precision.MXFP8 and target is Target.MEGATRON_BRIDGE:
        # training/mixed_precision.py of 0.3.1 insists on reuse_grad_buf_for_mxfp8_param_ag, which no Megatron-FSDP has.
        what = f"--shard {x.shard} in {plan.workload.precision}: it would gather weights into buffers of gradients"
        refuse(target, what, "plan with --precision fp8, or --shard optimizer")
    yield option("use-megatron-fsdp")
    yield option("data-parallel-sharding-strategy", STRATEGIES[x.shard])
    if x.replicas > 1:
        yield option("num-distributed-optimizer-instances", x.replicas)
    yield option("no-gradient-accumulation-fusion")
    yield option("ckpt-format", CHECKPOINTS)
    if narrow:
        yield option(GATHERS_8_BITS)
    if on_meta_device(x, m):
        yield option("init-model-with-meta-device")


def gathers_8_bits(plan: Plan) -> bool:
    """Return whether sharded weights are held and gathered in the 8 bits in which products read them.

    Megatron-FSDP has such weights only where it shards them: megatron_fsdp's README, "only ZeRO-3". Of weights in bf16
    Transformer Engine would keep whole copies in 8 bits on each device (module/base.py: get_weight_workspace).
    """
    return plan.layout.shard is Shard.WEIGHTS and plan.workload.precision in (Precision.FP8, Precision.MXFP8)


def on_meta_device(x: Layout, m: DecoderModel) -> bool:
    """Return whether layers get their weights one by one, on the device.

    Learned positions do not: their module, torch's Embedding, would begin with a standard deviation of 1.
    """
    return x.fsdp and m.positions is None


def max_connections(x: Layout) -> int | None:
    """Return the value of CUDA_DEVICE_MAX_CONNECTIONS that a layout needs; 0 if any will do, None if it must be unset.

    Before Blackwell, tensor- and context-parallel collectives that overlap with computation need 1, and Megatron-LM
    insists on it. With Megatron-FSDP it refuses 1, and overlap of experts needs more than one, too.
    """
    if x.fsdp or x.has_overlap(Overlap.EXPERTS):
        return None
    return 1 if x.tp * x.cp > 1 else 0


def connections(x: Layout) -> str:
    """Return the line of a shell script that sets CUDA_DEVICE_MAX_CONNECTIONS, or an empty text."""
    limit = max_connections(x)
    if limit is None:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return f"export CUDA_DEVICE_MAX_CONNECTIONS={limit}\n" if limit else ""
