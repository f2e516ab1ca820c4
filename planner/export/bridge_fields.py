"""Options of Megatron-LM as fields of Megatron-Bridge's configuration: one table, to write a plan and to read a run.

An option that the tables do not name is the field of its own name below `model`: --num-query-groups and
model.num_query_groups. A switch without a row is true there.
Sources: training/config.py, training/mixed_precision.py and models/gpt_provider.py of Megatron-Bridge 0.3.1 to 0.6.0,
and core_transformer_config_from_args of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .option import Option

VALUE_FIELDS = {
    "norm-epsilon": "model.layernorm_epsilon",
    "num-experts": "model.num_moe_experts",
    "rotary-seq-len-interpolation-factor": "model.seq_len_interpolation_factor",
    "microbatch-group-size-per-virtual-pipeline-stage": "model.microbatch_group_size_per_vp_stage",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "model.num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "model.num_layers_in_last_pipeline_stage",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "train-iters": "train.train_iters",
    "data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "ckpt-format": "checkpoint.ckpt_format",
    "fp8-format": "mixed_precision.fp8",
    "fp8-recipe": "mixed_precision.fp8_recipe",
    "fp4-format": "mixed_precision.fp4",
    "fp4-recipe": "mixed_precision.fp4_recipe",
    "lr": "optimizer.lr",
    "tokenizer-type": "tokenizer.tokenizer_type",
    "tokenizer-model": "tokenizer.tokenizer_model",
    "vocab-size": "tokenizer.vocab_size",
    "eval-iters": "train.eval_iters",
    "eval-interval": "train.eval_interval",
    "log-interval": "logger.log_interval",
}
"""Options with a value, and the field that has it."""

SWITCH_FIELDS = {
    "disable-bias-linear": {"model.add_bias_linear": "False"},
    "untie-embeddings-and-output-weights": {"model.share_embeddings_and_output_weights": "False"},
    "apply-layernorm-1p": {"model.layernorm_zero_centered_gamma": "True"},
    "no-bias-gelu-fusion": {"model.bias_activation_fusion": "False"},
    "no-rope-fusion": {"model.apply_rope_fusion": "False"},
    "no-gradient-accumulation-fusion": {"model.gradient_accumulation_fusion": "False"},
    "use-rope-scaling": {"model.rope_scaling": "True"},
    "swiglu": {"model.activation_func": "torch.nn.functional.silu", "model.gated_linear_unit": "True"},
    "quick-geglu": {"model.activation_func": "activations.quick_gelu", "model.gated_linear_unit": "True"},
    "squared-relu": {"model.activation_func": "activations.squared_relu"},
    "use-distributed-optimizer": {
        "ddp.use_distributed_optimizer": "True",
        "optimizer.use_distributed_optimizer": "True",
    },
    "overlap-grad-reduce": {"ddp.overlap_grad_reduce": "True"},
    "overlap-param-gather": {"ddp.overlap_param_gather": "True"},
    "use-megatron-fsdp": {"ddp.use_megatron_fsdp": "True", "dist.use_megatron_fsdp": "True"},
    "bf16": {
        "mixed_precision.bf16": "True",
        "mixed_precision.params_dtype": "torch.bfloat16",
        "mixed_precision.pipeline_dtype": "torch.bfloat16",
    },
    "fp16": {
        "mixed_precision.fp16": "True",
        "mixed_precision.params_dtype": "torch.half",
        "mixed_precision.pipeline_dtype": "torch.half",
    },
    "accumulate-allreduce-grads-in-fp32": {"mixed_precision.grad_reduce_in_fp32": "True"},
    "grad-reduce-in-bf16": {"mixed_precision.grad_reduce_in_fp32": "False"},
    "fp8-param-gather": {"mixed_precision.fp8_param_gather": "True"},
    "group-query-attention": {},  # num_query_groups says it
}
"""Options without a value, and the fields with their values as Python writes them."""

LISTS = frozenset({"recompute-modules"})
EXPRESSIONS = frozenset({"moe-layer-freq"})  # their text is a Python expression


def fields_of(one: Option) -> Iterator[tuple[str, str]]:
    """Yield the fields of an option, each with its value as Python writes it."""
    if one.name in SWITCH_FIELDS:
        yield from SWITCH_FIELDS[one.name].items()
        return
    path = VALUE_FIELDS.get(one.name, f"model.{one.name.replace('-', '_')}")
    if not one.values:
        yield path, "True"
    elif one.name in LISTS:
        yield path, json.dumps([*one.values])
    elif one.name == "window-size":
        yield path, f"({one.values[0].replace(',', ', ')})"
    else:
        yield path, _spaced(one.values[0]) if one.name in EXPRESSIONS else python_value(one.values[0])


def python_value(text: str) -> str:
    """Return the text of an option's value as Python writes that value: a number as it is, other text quoted."""
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text


def _spaced(text: str) -> str:
    """Return an expression of lists with spaces around its operators."""
    return text.replace("+", " + ").replace("*", " * ")
