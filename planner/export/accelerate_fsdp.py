"""Write a plan with sharded gradients or weights as Accelerate's file for FSDP 2, torch's fully_shard.

The script that is launched provides the model, a Transformers one or any torch module, so the file describes its
layout only. Every key that has a default of its own is written.
Sources: Accelerate's utils/dataclasses.py, utils/fsdp_utils.py and accelerator.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, ExpertShard, GradReduce, Recompute, Reshard, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .quoting import comment
from .target import Target, refuse

MASTER_WEIGHTS = (
    "fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy="
    "MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16))"
)
"""The policy that reduces gradients in fp32: Accelerate's own reduces them in the precision of the computation."""


def fsdp_notes(plan: Plan) -> str:
    """Return comments on what the script gives to Accelerate, because the file has no keys for it."""
    x, microbatches = plan.layout, plan.layout.microbatches(plan.workload.batch)
    notes = ["The classes of the model's blocks are those in its _no_split_modules."]
    if plan.workload.precision is Precision.BF16:
        notes.append(f"To reduce gradients in fp32: Accelerator({MASTER_WEIGHTS}).")
    if microbatches > 1:
        plugin = f"GradientAccumulationPlugin(num_steps={microbatches}, sync_each_batch=True)"
        notes.append(f"For {microbatches} micro-batches a step: Accelerator(gradient_accumulation_plugin={plugin}).")
    if x.vocab_multiple > 1:
        notes.append(f"For the vocabulary: model.resize_token_embeddings(pad_to_multiple_of={x.vocab_multiple}).")
    return "".join(map(comment, notes))


def fsdp_table(plan: Plan) -> str:
    """Return the keys of FSDP. Raises UserError that names what they do not express."""
    x = plan.layout
    _check_layout(plan)
    keys = "".join(f"  fsdp_{key}: {value}\n" for key, value in _keys(x))
    if x.replicas > 1:
        sizes = {"replicate": x.replicas, "shard": x.dp // x.replicas}
        sized = "".join(f"  parallelism_config_dp_{kind}_size: {size}\n" for kind, size in sizes.items())
        keys += f"parallelism_config:\n{sized}"
    return f"fsdp_config:\n{keys}"


def _check_layout(plan: Plan) -> None:
    """Refuse a layout that Accelerate's FSDP does not have, with the options of `plan` that avoid all of it at once."""
    x, what, options = plan.layout, list[str](), list[str]()
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        if (degree := getattr(x, axis)) > 1:
            what.append(f"{axis} {degree} beside FSDP")
            options.append(f"--{axis} 1")
    if overlaps := [str(o) for o in x.overlaps if o in MICROBATCH_OVERLAPS]:
        what.append(f"overlap of {' and '.join(overlaps)}")
        options.append("--overlap gradients weights")
    if x.recompute is Recompute.SELECTIVE or x.recompute_layers:
        what.append(f"recompute {x.recompute_text}: it recomputes all blocks or none")
        options.append("--recompute none (or full, if that does not fit)")
    if x.reshard is Reshard.STEP:
        what.append("--reshard step: it frees weights after each backward pass")
        options.append("--reshard micro-batch")
    if x.grad_reduce is not GradReduce.FP32:
        what.append(f"{x.grad_reduce} gradients: its FSDP adds them up in fp32")
        options.append(f"--grad-reduce {GradReduce.FP32}")
    if x.expert_shard:
        what.append(f"--expert-shard {x.expert_shard}: it has one fsdp_reshard_after_forward for all weights")
        options.append(f"--expert-shard {ExpertShard.SAME}")
    microbatches = x.microbatches(plan.workload.batch)
    if x.shard is Shard.GRADIENTS and microbatches > 1:
        what.append(f"--shard gradients with {microbatches} micro-batches: it gathers weights for each of them")
        options.append("--shard weights")
    if plan.lora is not None:
        what.append("LoRA: its file has no keys for adapters")
        options.append("no --lora-rank")
    if what:
        advice = f"add to the command that planned it {' '.join(options)}"
        refuse(Target.ACCELERATE, "; ".join(what), advice)


def _keys(x: Layout) -> Iterator[tuple[str, str]]:
    yield "version", "2"
    yield "reshard_after_forward", str(x.shard is Shard.WEIGHTS).lower()
    yield "auto_wrap_policy", "TRANSFORMER_BASED_WRAP"
    yield "state_dict_type", "SHARDED_STATE_DICT"
    yield "offload_params", "false"
    yield "activation_checkpointing", str(x.full_recompute).lower()
    yield "cpu_ram_efficient_loading", "true"
    yield "sync_module_states", "true"  # `accelerate launch` insists on it beside the key before; FSDP 2 ignores it
