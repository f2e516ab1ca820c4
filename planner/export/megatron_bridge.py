"""A plan as overrides of a recipe of Megatron-Bridge: `KEY=VALUE`, a line each.

They go on top of a recipe of the same model, which says what is not a number: activation, norms, tokenizer, data. What
a recipe may have set about the layout is always set anew, so that nothing of its own layout is left.
Source of the keys: Megatron-Bridge's docs/megatron-lm-to-megatron-bridge.md; those below `model` are the fields of
megatron-core's TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import Graph
from megaloom.planner.contract.layout import Overlap, Precision, Recompute
from megaloom.planner.contract.plans import Plan

from .decoder import cannot, gpt
from .megatron_lm import options
from .whole_layers import (
    even,
    layout,
    parts,
    recomputed,
)

NAME = "Megatron-Bridge"
NUMBERS = {  # of Megatron-LM's options about a model, those that are a number, and a field of its configuration
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
    "seq-length": "seq_length",
}
PRECISION = {
    Precision.BF16: "bf16_mixed",
    Precision.FP16: "fp16_mixed",
    Precision.FP8: "bf16_with_fp8_current_scaling_mixed",
    Precision.MXFP8: "bf16_with_mxfp8_mixed",
    Precision.NVFP4: "bf16_with_nvfp4_mixed",
}


def overrides(plan: Plan, graph: Graph) -> str:
    """The overrides. Raises UserError that names what none of them says."""
    return "".join(f"{key}={_said(value)}\n" for key, value in _pairs(plan, graph))


def _pairs(plan: Plan, graph: Graph) -> Iterator[tuple[str, object]]:
    if plan.workload.precision not in PRECISION:
        cannot(NAME, f"precision {plan.workload.precision}", f"plan with --precision {' or '.join(PRECISION)}")
    said = {one.name: one.values for one in options(plan, graph, NAME).model}
    yield from ((f"model.{key}", said[name][0]) for name, key in NUMBERS.items() if name in said)
    yield "dataset.seq_length", plan.workload.seq
    yield from ((f"model.{key}", value) for key, value in _layout(plan, graph))
    yield "train.micro_batch_size", plan.layout.micro_batch
    yield "train.global_batch_size", plan.workload.batch
    sharded = plan.layout.distributed_optimizer
    yield "ddp.use_distributed_optimizer", sharded
    yield "optimizer.use_distributed_optimizer", sharded
    x, several = plan.layout, plan.layout.dp * plan.layout.cp > 1
    yield "ddp.overlap_grad_reduce", several and x.hides(Overlap.GRADIENTS)
    yield "ddp.overlap_param_gather", several and x.hides(Overlap.WEIGHTS)
    if x.sequence_parallel:
        yield "comm_overlap.tp_comm_overlap", x.hides(Overlap.TENSOR)
    if x.ep > 1:
        yield "comm_overlap.overlap_moe_expert_parallel_comm", x.hides(Overlap.EXPERTS)
    yield "mixed_precision", PRECISION[plan.workload.precision]


def _layout(plan: Plan, graph: Graph) -> Iterator[tuple[str, object]]:
    x, read = plan.layout, gpt(graph, NAME)
    cut = parts(plan, read, graph, NAME)
    yield "tensor_model_parallel_size", x.tp
    yield "sequence_parallel", x.sequence_parallel
    yield "pipeline_model_parallel_size", x.pp
    yield "virtual_pipeline_model_parallel_size", x.vpp if x.vpp > 1 else None
    yield "pipeline_model_parallel_layout", layout(cut) if even(cut) is None else None
    yield "num_layers_in_first_pipeline_stage", None
    yield "num_layers_in_last_pipeline_stage", None
    yield "account_for_embedding_in_pipeline_split", False
    yield "account_for_loss_in_pipeline_split", False
    yield "microbatch_group_size_per_vp_stage", x.microbatch_group or None
    yield "context_parallel_size", x.cp
    yield "expert_model_parallel_size", x.ep
    yield "expert_tensor_parallel_size", x.etp
    first = recomputed(x, read, NAME)
    yield "recompute_granularity", None if x.recompute is Recompute.NONE else str(x.recompute)
    yield "recompute_method", None if first == 0 else "block" if first else "uniform"
    yield "recompute_num_layers", None if first == 0 else first or 1
    if x.recompute is Recompute.SELECTIVE:
        yield "recompute_modules", f"[{','.join(x.modules)}]"


def _said(value: object) -> str:
    """As Hydra reads it: brackets of a stage layout would be its own syntax."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    said = str(value)
    return f"'{said}'" if "(" in said or "|" in said else said
