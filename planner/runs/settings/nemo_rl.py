"""NeMo-RL: `policy.megatron_cfg` of a run of reinforcement learning, with Megatron-Bridge's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed, switch_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.tree import Tree, found, setting_at
from megaloom.planner.runs.words import Unknown, Word

_RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "apply_rope_fusion",
    "moe_token_dispatcher_type",
    "moe_enable_deepep",
    "moe_permute_fusion",
)


def is_nemo_rl(tree: Tree | None) -> bool:
    """Return True for settings with a policy that Megatron can train."""
    return isinstance(found(tree, "policy.megatron_cfg"), Mapping)


def nemo_rl_run(tree: Tree, path: str, environment: Mapping[str, str], missing: tuple[Unknown, ...]) -> SettingsRun:
    """Return the training part of a NeMo-RL file. The model is a name, of which the file has no sizes."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    enabled = setting_at(resolved, "policy.megatron_cfg.enabled")
    if not (enabled and enabled.is_true):
        raise UserError(f"{path} trains with DTensor (policy.megatron_cfg.enabled is false), which is not read")
    nodes, per_node = setting_at(resolved, "cluster.num_nodes"), setting_at(resolved, "cluster.gpus_per_node")
    model = setting_at(resolved, "policy.model_name")
    return SettingsRun(
        framework="NeMo-RL",
        words=tuple(_words(found(resolved, "policy"))),
        nodes=nodes.word if nodes else None,
        per_node=per_node.word if per_node else None,
        model=model.word if model else None,
        unknown=missing,
        assumed=tuple(inserted.assumed),
    )


def _words(policy: Tree | None) -> Iterator[Word]:
    megatron = found(policy, "megatron_cfg")
    for key in _PARALLEL:
        yield from flag_words(_RENAMED.get(key, key), found(megatron, key))
    yield from renamed("--micro-batch-size", setting_at(policy, "train_micro_batch_size"))
    yield from renamed("--global-batch-size", setting_at(policy, "train_global_batch_size"))
    yield from renamed("--seq-length", setting_at(policy, "max_total_sequence_length"))
    precision = setting_at(policy, "precision")
    names = {"bfloat16": "--bf16", "float16": "--fp16", "float32": ""}
    if precision and (flag := names.get(precision.text, f"--precision-{precision.text}")):
        yield Word(flag, precision.word.origin)
    recompute = setting_at(megatron, "activation_checkpointing")
    if recompute and recompute.is_true:
        yield from renamed("--recompute-granularity", recompute, "full")
        yield from renamed("--recompute-method", recompute, "uniform")
        yield from renamed("--recompute-num-layers", recompute, "1")
    ddp = found(megatron, "distributed_data_parallel_config")
    for key in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"):
        value = setting_at(ddp, key)
        flag = "--accumulate-allreduce-grads-in-fp32" if key == "grad_reduce_in_fp32" else f"--{key.replace('_', '-')}"
        yield from switch_words(flag, value if value and value.is_true else None)
    distributed = setting_at(megatron, "optimizer.use_distributed_optimizer")
    yield from switch_words("--use-distributed-optimizer", distributed if distributed and distributed.is_true else None)
