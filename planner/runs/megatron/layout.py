"""The layout, the workload and the pipeline stages that Megatron-LM's arguments describe."""

from __future__ import annotations

from typing import NoReturn

from megaloom.planner.contract.choices import (
    GradReduce,
    Module,
    ModuleSet,
    Overlap,
    OverlapSet,
    Recompute,
    Shard,
    default_overlaps,
    module_set,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.export.megatron_fsdp import GATHERS_8_BITS, STRATEGIES
from megaloom.planner.export.megatron_lm import OVERLAP_OPTIONS

from .layers import has_experts
from .parser import Arguments
from .refusal import refuse_run
from .stages import chunks

STRATEGY_SHARDS = {
    "no_shard": Shard.NONE,
    "optim": Shard.OPTIMIZER,
    **{strategy: shard for shard, strategy in STRATEGIES.items()},
}
MAIN_GRADIENTS, REDUCED_GRADIENTS = "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"
AS_WEIGHTS = "auto"
MICROBATCH_SIZE_MISSING = "--micro-batch-size is not stated, and Megatron-LM has no default for it"


def read_layout(a: Arguments, world: int) -> Layout:
    """Return the layout on so many devices. Where the degrees do not divide them, dp is rounded down."""
    tp, pp, cp = (a[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
    for dest, degree in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if degree < 1:
            refuse_run(a, f"a degree must be at least 1, got {degree}", dest)
    dp = max(1, world // (tp * pp * cp))
    shard, moe = _shard(a), has_experts(a)
    recompute, modules, layers = _recompute(a)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=chunks(a),
        cp=cp,
        ep=a["expert_model_parallel_size"],
        etp=(a["expert_tensor_parallel_size"] or tp) if moe else 1,
        sequence_parallel=a["sequence_parallel"] and tp > 1,
        micro_batch=a["micro_batch_size"] or _refuse_micro_batch(a),
        recompute=recompute,
        shard=shard,
        recompute_modules=modules,
        recompute_layers=layers,
        microbatch_group=_group(a, pp),
        overlaps=_overlaps(a, shard, several=dp * cp > 1),
        vocab_multiple=1 if a["padded_vocab_size"] or a["pad_vocab_size_to"] else a["make_vocab_size_divisible_by"],
        grad_reduce=_grad_reduce(a),
        replicas=a["num_distributed_optimizer_instances"] if shard in STRATEGIES else 1,
    )


def _refuse_micro_batch(a: Arguments) -> NoReturn:
    """Raise UserError for a run that states no micro-batch, as one that packs its sequences by tokens."""
    if "pack_sequences" not in a.given:
        refuse_run(a, MICROBATCH_SIZE_MISSING)
    what = "micro-batches are packed up to a number of tokens, so the file states no number of sequences"
    refuse_run(a, what, "pack_sequences", instead="give the usual number of them: --set micro-batch-size=4")


def _shard(a: Arguments) -> Shard:
    if _megatron_fsdp(a):
        shard = STRATEGY_SHARDS[a["data_parallel_sharding_strategy"]]
        _check_gathers(a, shard)
        return shard
    if a["deepspeed"]:
        return _zero(a)
    if not a["use_distributed_optimizer"]:
        return Shard.NONE
    if a["num_distributed_optimizer_instances"] > 1:
        what = "several instances of the distributed optimizer are modelled for Megatron-FSDP only"
        refuse_run(a, what, "num_distributed_optimizer_instances")
    return Shard.OPTIMIZER


def _megatron_fsdp(a: Arguments) -> bool:
    return bool(a["use_megatron_fsdp"] or a["use_custom_fsdp"])


def _check_gathers(a: Arguments, shard: Shard) -> None:
    """Raise UserError for weights in 8 bits that Megatron-FSDP has not, and sharded ones that it gathers in bf16."""
    gathers = GATHERS_8_BITS.replace("-", "_")
    if shard is Shard.GRADIENTS and a["fp8"] and gathers in a.given:
        refuse_run(a, "Megatron-FSDP has weights in 8 bits only with optim_grads_params", gathers)
    if shard is Shard.WEIGHTS and a["fp8"] and gathers not in a.given and not a["gathers_in_16_bits"]:
        what = f"without --{GATHERS_8_BITS}, Transformer Engine keeps 8-bit copies of all weights on each device"
        refuse_run(a, f"{what}, which is not modelled beside Megatron-FSDP", "data_parallel_sharding_strategy", "fp8")


def _zero(a: Arguments) -> Shard:
    """Return what DeepSpeed shards. Its optimizer for bf16, which needs stage 0, shards its state as stage 1 does."""
    stage = a["zero_stage"]
    if stage is None:
        refuse_run(a, "the ZeRO stage stands in a file of DeepSpeed: give it as --set zero-stage=1", "deepspeed")
    if stage == 0 and a["bf16"]:
        return Shard.OPTIMIZER
    if stage not in (0, 1, 2, 3):
        refuse_run(a, f"ZeRO has the stages 0 to 3, got {stage}", "zero_stage")
    return Shard(stage)


def _recompute(a: Arguments) -> tuple[Recompute, ModuleSet, int]:
    """Return the mode, the modules of selective recompute, and the first layers of each stage that full recomputes."""
    mode = "selective" if a["recompute_activations"] or a["moe_layer_recompute"] else a["recompute_granularity"]
    if a["checkpoint_activations"]:
        return Recompute.FULL, ModuleSet(), 0
    if mode is None:
        return Recompute.NONE, ModuleSet(), 0
    if mode == "full":
        method, count = a["recompute_method"], a["recompute_num_layers"]
        if method is None:
            refuse_run(a, "full recompute needs --recompute-method", "recompute_granularity")
        return Recompute.FULL, ModuleSet(), (count or 1) if method == "block" else 0
    names = [*(a["recompute_modules"] or ["core_attn"]), *(["moe"] if a["moe_layer_recompute"] else [])]
    if unknown := [name for name in names if name not in {*Module}]:
        refuse_run(a, f"recompute of {', '.join(unknown)} is not modelled", "recompute_modules")
    return Recompute.SELECTIVE, module_set(names), 0


def _overlaps(a: Arguments, shard: Shard, *, several: bool) -> OverlapSet:
    """Return the overlaps; those of gradients and weights have no meaning without data- or context-parallel ranks."""
    stated = {o for o, name in OVERLAP_OPTIONS.items() if a[name.replace("-", "_")]}
    if not several:
        stated |= {*OverlapSet(default_overlaps(shard))}
        stated -= {Overlap.GRADIENTS, Overlap.WEIGHTS} - {*OverlapSet(default_overlaps(shard))}
    return OverlapSet(stated)


def _group(a: Arguments, pp: int) -> int:
    """Return the micro-batches that a model chunk runs before the next one; 0 for the usual pp."""
    group = a["microbatch_group_size_per_vp_stage"] or 0
    return 0 if group == pp else group


def _grad_reduce(a: Arguments) -> GradReduce:
    """Return the format of gradients: under bf16 fp32 unless asked otherwise. See `read.notes` for fp16."""
    if a["bf16"] and _megatron_fsdp(a):
        return _fsdp_gradients(a)
    if a["bf16"]:
        narrow = a["grad_reduce_in_bf16"] or a["main_grads_dtype"] == "bf16"
        return GradReduce.BF16 if narrow else GradReduce.FP32
    return GradReduce.FP32


def _fsdp_gradients(a: Arguments) -> GradReduce:
    """Return the format of Megatron-FSDP's gradients, which has flags of its own.

    Until 0.18 they count beside --grad-reduce-in-bf16 only. Since 0.19 they alone count, and are as wide as the weights
    by default (mcore_fsdp_adapter.py: MixedPrecisionPolicy).
    """
    alone = a.defaults[MAIN_GRADIENTS] == AS_WEIGHTS
    if not (alone or a["grad_reduce_in_bf16"]):
        return GradReduce.FP32
    formats = {
        "fp32": GradReduce.FP32,
        "float32": GradReduce.FP32,
        "bf16": GradReduce.BF16,
        "bfloat16": GradReduce.BF16,
    }
    formats |= dict.fromkeys((AS_WEIGHTS, "None"), GradReduce.BF16)
    summed, reduced = (str(a[dest]).removeprefix("torch.") for dest in (MAIN_GRADIENTS, REDUCED_GRADIENTS))
    if summed not in formats:
        refuse_run(a, f"gradients of Megatron-FSDP in {summed:.20} are not modelled", MAIN_GRADIENTS)
    if reduced not in (AS_WEIGHTS, "None") and formats.get(reduced) is not formats[summed]:
        what = f"gradients of Megatron-FSDP that are reduced in {reduced:.20} and added up in {formats[summed]}"
        refuse_run(a, f"{what} are not modelled", REDUCED_GRADIENTS)
    return formats[summed]


def read_workload(a: Arguments, dp: int) -> Workload:
    """Return the tokens of a step, and the precision. The batch of a ramp is its last one."""
    seq = a["seq_length"] or a["encoder_seq_length"]
    if seq is None:
        refuse_run(a, "--seq-length is not stated, and Megatron-LM has no default for it")
    batch = a["global_batch_size"] or a["micro_batch_size"] * dp
    return Workload(seq=seq, batch=batch, precision=_precision(a))


def _precision(a: Arguments) -> Precision:
    if a["fp8"] and a["fp4"]:
        refuse_run(a, "--fp8-format and --fp4-format exclude each other", "fp4", "fp8")
    if a["bf16"] and a["fp16"]:
        refuse_run(a, "--bf16 and --fp16 exclude each other", "fp16", "bf16")
    if a["fp4"]:
        return Precision.NVFP4
    if a["fp8"]:
        if a["fp8_recipe"] == "custom":
            refuse_run(a, "a recipe of its own is not modelled", "fp8_recipe")
        return Precision.MXFP8 if a["fp8_recipe"] == "mxfp8" else Precision.FP8
    return Precision.BF16 if a["bf16"] else Precision.FP16 if a["fp16"] else Precision.FP32
