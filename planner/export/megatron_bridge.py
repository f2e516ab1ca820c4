"""Write a plan as overrides of a Megatron-Bridge recipe: one `KEY=VALUE` per line.

The recipe of the same model provides everything that is not a number: activation, norms, tokenizer, data. Every key of
the layout is written, so that none keeps the recipe's value.
Source of the keys: Megatron-Bridge's docs/megatron-lm-to-megatron-bridge.md; those below `model` are the fields of
megatron-core's TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import Graph
from megaloom.planner.contract.choices import GradReduce, Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .decoder import DecoderModel, read_decoder
from .megatron_fsdp import CHECKPOINTS, STRATEGIES, on_meta_device
from .megatron_lm import megatron_options
from .target import Target, refuse
from .whole_layers import equal_layers, pipeline_layout, recomputed_layers, stage_layers

MODEL_KEYS = {  # options of Megatron-LM whose value is a number, and their keys below `model`
    "num-layers": "num_layers",
    "mtp-num-layers": "mtp_num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_query_groups",
    "kv-channels": "kv_channels",
    "ffn-hidden-size": "ffn_hidden_size",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_head_dim",
    "qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "v-head-dim": "v_head_dim",
    "num-experts": "num_moe_experts",
    "moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "moe-router-topk": "moe_router_topk",
    "moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "attention-dropout": "attention_dropout",
    "hidden-dropout": "hidden_dropout",
    "init-method-std": "init_method_std",
    "seq-length": "seq_length",
    "make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
}
RECIPES = {  # of mixed precision
    Precision.BF16: "bf16_mixed",
    Precision.FP16: "fp16_mixed",
    Precision.FP8: "bf16_with_fp8_current_scaling_mixed",
    Precision.MXFP8: "bf16_with_mxfp8_mixed",
    Precision.NVFP4: "bf16_with_nvfp4_mixed",
}


def overrides(plan: Plan, graph: Graph) -> str:
    """Return a plan as overrides of a recipe, KEY=VALUE lines. Raises UserError that names what no key expresses."""
    return "".join(f"{key}={_hydra(value)}\n" for key, value in _pairs(plan, graph))


def _pairs(plan: Plan, graph: Graph) -> Iterator[tuple[str, object]]:
    if plan.workload.precision not in RECIPES:
        refuse(
            Target.MEGATRON_BRIDGE,
            f"precision {plan.workload.precision}",
            f"plan with --precision {' or '.join(RECIPES)}",
        )
    if plan.layout.grad_reduce is not GradReduce.FP32:
        what = f"{plan.layout.grad_reduce} gradients: its named recipes of mixed precision reduce gradients in fp32"
        refuse(Target.MEGATRON_BRIDGE, what, "use `megaloom export --to megatron-lm`, or plan with --grad-reduce fp32")
    options = {one.name: one.values for one in megatron_options(plan, graph, Target.MEGATRON_BRIDGE).model}
    model = read_decoder(graph, Target.MEGATRON_BRIDGE)
    yield from ((f"model.{key}", options[name][0]) for name, key in MODEL_KEYS.items() if name in options)
    yield "dataset.seq_length", plan.workload.seq
    yield from ((f"model.{key}", value) for key, value in _layout(plan, graph))
    yield "train.micro_batch_size", plan.layout.micro_batch
    yield "train.global_batch_size", plan.workload.batch
    x, copies = plan.layout, plan.layout.dp * plan.layout.cp
    yield "ddp.use_distributed_optimizer", bool(x.shard)
    yield "optimizer.use_distributed_optimizer", bool(x.shard)
    yield from _fsdp(x, model)
    yield "ddp.overlap_grad_reduce", copies > 1 and x.has_overlap(Overlap.GRADIENTS)
    yield "ddp.overlap_param_gather", copies > 1 and x.has_overlap(Overlap.WEIGHTS)
    if x.sequence_parallel:
        yield "comm_overlap.tp_comm_overlap", x.has_overlap(Overlap.TENSOR)
    if x.ep > 1:
        yield "comm_overlap.overlap_moe_expert_parallel_comm", x.has_overlap(Overlap.EXPERTS)
    yield "mixed_precision", RECIPES[plan.workload.precision]


def _fsdp(x: Layout, m: DecoderModel) -> Iterator[tuple[str, object]]:
    """Yield the keys of Megatron-FSDP, or those that switch it off in a recipe that has it."""
    yield "dist.use_megatron_fsdp", x.fsdp
    yield "ddp.use_megatron_fsdp", x.fsdp
    yield "model.init_model_with_meta_device", on_meta_device(x, m)
    yield "checkpoint.ckpt_format", CHECKPOINTS if x.fsdp else "torch_dist"
    if x.fsdp:
        yield "ddp.data_parallel_sharding_strategy", STRATEGIES[x.shard]
        yield "ddp.num_distributed_optimizer_instances", x.replicas
        yield "ddp.average_in_collective", False
        yield "model.gradient_accumulation_fusion", False
        yield "dist.use_tp_pp_dp_mapping", False


def _layout(plan: Plan, graph: Graph) -> Iterator[tuple[str, object]]:
    x, model = plan.layout, read_decoder(graph, Target.MEGATRON_BRIDGE)
    stages = stage_layers(plan, model, graph, Target.MEGATRON_BRIDGE)
    yield "tensor_model_parallel_size", x.tp
    yield "sequence_parallel", x.sequence_parallel
    yield "pipeline_model_parallel_size", x.pp
    yield "virtual_pipeline_model_parallel_size", x.vpp if x.vpp > 1 else None
    yield "pipeline_model_parallel_layout", pipeline_layout(stages) if equal_layers(stages) is None else None
    yield "num_layers_in_first_pipeline_stage", None
    yield "num_layers_in_last_pipeline_stage", None
    yield "account_for_embedding_in_pipeline_split", False
    yield "account_for_loss_in_pipeline_split", False
    yield "microbatch_group_size_per_vp_stage", x.microbatch_group or None
    yield "context_parallel_size", x.cp
    yield "expert_model_parallel_size", x.ep
    yield "expert_tensor_parallel_size", x.etp
    blocks = recomputed_layers(x, model, Target.MEGATRON_BRIDGE)
    yield "recompute_granularity", None if x.recompute is Recompute.NONE else str(x.recompute)
    yield "recompute_method", None if blocks == 0 else "block" if blocks else "uniform"
    yield "recompute_num_layers", None if blocks == 0 else blocks or 1
    if x.recompute is Recompute.SELECTIVE:
        yield "recompute_modules", f"[{','.join(x.recomputed_modules)}]"


def _hydra(value: object) -> str:
    """Return a value as Hydra reads it. A stage layout is quoted, because brackets are Hydra's own syntax."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return f"'{text}'" if "(" in text or "|" in text else text
