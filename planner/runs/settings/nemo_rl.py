"""NeMo-RL: `policy.megatron_cfg` of a run of reinforcement learning, with Megatron-Bridge's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed, switch_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import first_origin, near_names, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, is_null, leaves, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.words import Unknown, Word

_RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_POLICY = (
    "model_name",
    "train_global_batch_size",
    "train_micro_batch_size",
    "max_total_sequence_length",
    "precision",
    "megatron_cfg",
    "sequence_packing.enabled",
    "dynamic_batching.enabled",
    *(
        f"megatron_cfg.distributed_data_parallel_config.{key}"
        for key in ("overlap_grad_reduce", "overlap_param_gather")
    ),
    "megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32",
    "megatron_cfg.fp8_cfg.enabled",
    "megatron_cfg.peft.enabled",
)
"""Paths below `policy` that are read."""
_PER_NODE = "cluster.gpus_per_node"
_CLUSTER = ("cluster.num_nodes", _PER_NODE, "policy")
_OTHER_KEYS = frozenset({"train_mb_tokens", "logprob_mb_tokens", "refit_buffer_size_gb", "logprob_batch_size"})
_LEFT_OUT = """
generation make_sequence_length_divisible_by tokenizer logprob_batch_size sequence_packing dynamic_batching optimizer
scheduler logprob_chunk_size generation_batch_size offload_optimizer_for_logprob max_grad_norm refit_buffer_size_gb
router_replay quant_calib_size quant_sequence_length quant_calib_data quant_batch_size disable_modelopt_layer_spec
is_vlm dtensor_cfg dequantize_base_checkpoint train_mb_tokens logprob_mb_tokens activation_checkpointing_enabled
automodel_kwargs
"""
_KNOWN = frozenset(_LEFT_OUT.split()) | {path.partition(".")[0] for path in _POLICY}
"""Keys of `policy`. Others may change the model or its arithmetic."""
_READ_IN_PART = ("distributed_data_parallel_config", "fp8_cfg", "peft")
_OF_PARTS = (*(f"fp8_cfg.{key}" for key in ("fp8", "fp8_recipe", "fp8_param")),)
_SILENT = (
    *("tokenizer", "scheduler", "optimizer", "max_grad_norm", "logprob_batch_size", "generation_batch_size"),
    *("make_sequence_length_divisible_by", "refit_buffer_size_gb", "offload_optimizer_for_logprob", "dtensor_cfg"),
    *("logprob_chunk_size", "megatron_cfg.peft"),
)
"""Keys of the policy that change no training step with Megatron."""
_OF_MEGATRON = tuple(
    f"megatron_cfg.{key}" for key in ("enabled", "activation_checkpointing", "bias_activation_fusion", *_OF_PARTS)
)
_OF_OPTIMIZER = frozenset({"bf16", "fp16", "params_dtype"})  # which the policy's precision sets
_READ_BELOW = frozenset(
    {
        "enabled",
        "activation_checkpointing",
        "recompute_granularity",
        "recompute_modules",
        "distributed_data_parallel_config",
        "optimizer",
        "fp8_cfg",
        "peft",
        "bias_activation_fusion",
    }
)
_IGNORED = """
env_vars scheduler checkpoint converter_type force_reconvert_from_hf pipeline_dtype freeze_moe_router
use_gloo_process_groups clear_memory_caches_before_refit cuda_graph_modules cuda_graph_warmup_steps offload_modules
moe_pad_experts_for_cuda_graph_inference inference_moe_token_dispatcher_type inference_grouped_gemm_backend
radio_force_cpe_eval_mode freeze_vision_model freeze_vision_projection freeze_sound_encoder freeze_sound_projection
freeze_config moe_per_layer_logging moe_router_bias_update_rate fused_linear_logprobs_chunk_size layernorm_epsilon
hybridep_num_ranks_per_nvlink_domain hybridep_use_mnnvl mtp_use_repeated_layer mtp_detach_heads train_iters
"""
_HARMLESS = frozenset(_IGNORED.split())
"""Keys of `megatron_cfg` that change neither the layout nor the arithmetic of a training step."""


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
    nodes, per_node = _training_gpus(resolved)
    model = setting_at(resolved, "policy.model_name")
    return SettingsRun(
        framework="NeMo-RL",
        words=(*near_names(resolved, _CLUSTER), *_others(resolved), *_words(found(resolved, "policy"))),
        nodes=nodes,
        per_node=per_node,
        model=model.word if model else None,
        unknown=missing,
        assumed=tuple(inserted.assumed),
        left_out=tuple(_unread(resolved)),
    )


def _unread(tree: Tree | None) -> Iterator[Word]:
    """Yield the settings that are not read: sections beside the policy, and keys of its own."""
    megatron = found(tree, "policy.megatron_cfg")
    keys = [key for key in (megatron if isinstance(megatron, Mapping) else ()) if key not in _READ_IN_PART]
    of_megatron = [f"megatron_cfg.{key}" for key in (*keys, *_OF_PARTS)]
    read = [f"policy.{path}" for path in (*_POLICY, *of_megatron) if path != "megatron_cfg"]
    apart = ("policy.generation.colocated.enabled", "policy.generation.colocated.resources")
    yield from unread_settings(tree, (*read, *apart, *_CLUSTER[:2]), [f"policy.{key}" for key in _SILENT])


def _training_gpus(tree: Tree | None) -> tuple[Word | None, Word | None]:
    """Return the machines that train and the GPUs of each: those of the cluster that neither generate nor judge."""
    words = [one.word if one else None for one in map(partial(setting_at, tree), ("cluster.num_nodes", _PER_NODE))]
    nodes, each = words
    apart, named = setting_at(tree, "policy.generation.colocated.enabled"), found(tree, "data")
    taken = ["policy.generation.colocated.resources"] if apart and not apart.is_true else []
    judges = any("reward_model" in leaf.text for _, leaf in leaves(named) if isinstance(leaf, Setting))
    taken += ["env.reward_model.resources"] if judges else []
    if nodes is None or each is None:
        return nodes, each
    shared = nodes.text == "1"  # then they have GPUs of the one machine
    for path in taken:
        lent = setting_at(tree, f"{path}.{'gpus_per_node' if shared else 'num_nodes'}")
        nodes, each = (nodes, _less(each, lent, path)) if shared else (_less(nodes, lent, path), each)
    return nodes, each


def _less(word: Word, lent: Setting | None, path: str) -> Word:
    """Return a number without those that are lent; a word that is not known if either is none."""
    if lent and lent.text.isdecimal() and word.text.isdecimal() and not word.unknown:
        return evolve(word, text=str(int(word.text) - int(lent.text)))
    return evolve(word, text="", unknown=(Unknown(path, "variable", word.origin),))


def _others(tree: Tree | None) -> Iterator[Word]:
    """Yield as unknown what changes the model or its arithmetic, and a flag for a second model that trains."""
    policy = found(tree, "policy")
    yield from near_names(tree, [f"policy.{path}" for path in _POLICY], _OTHER_KEYS)
    values = [f"policy.{path}" for path in (*_POLICY, *_OF_MEGATRON) if path != "megatron_cfg"]
    yield from misshapen_settings(tree, (*values, *_CLUSTER[:2], "policy.generation.colocated.enabled"))
    for key, value in policy.items() if isinstance(policy, Mapping) else ():
        states = [one for _, one in leaves(value) if not is_null(one)]
        switch = setting_at(value, "enabled")
        if key not in _KNOWN and states and (switch is None or switch.is_true):
            yield unknown_setting(f"policy.{key}", value)
    if (rewards := found(tree, "rm")) is not None:
        yield unknown_setting("rm", rewards)
    if found(tree, "ppo") is not None and found(tree, "value") is not None:
        yield Word("--trains-a-value-model", first_origin(found(tree, "value") or []))


def _words(policy: Tree | None) -> Iterator[Word]:
    megatron = found(policy, "megatron_cfg")
    for key, one in megatron.items() if isinstance(megatron, Mapping) else ():
        if key not in _READ_BELOW | _HARMLESS:
            yield from flag_words(_RENAMED.get(key, key), one)
    for name in ("sequence_packing", "dynamic_batching"):
        packed = setting_at(policy, f"{name}.enabled")
        yield from switch_words("--pack-sequences", packed if packed and packed.is_true else None)
    yield from renamed("--micro-batch-size", setting_at(policy, "train_micro_batch_size"))
    yield from renamed("--global-batch-size", setting_at(policy, "train_global_batch_size"))
    yield from renamed("--seq-length", setting_at(policy, "max_total_sequence_length"))
    precision = setting_at(policy, "precision")
    names = {"bfloat16": "--bf16", "float16": "--fp16", "float32": ""}
    if precision and (flag := names.get(precision.text, f"--precision-{precision.text}")):
        yield Word(flag, precision.word.origin)
    yield from _recompute(megatron)
    ddp = found(megatron, "distributed_data_parallel_config")
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        value = setting_at(ddp, key)
        yield from switch_words(f"--{key.replace('_', '-')}", value if value and value.is_true else None)
    wide = setting_at(ddp, "grad_reduce_in_fp32")
    if wide and wide.is_true:
        yield from switch_words("--accumulate-allreduce-grads-in-fp32", wide)
    elif precision and precision.text == "bfloat16":
        yield from switch_words("--grad-reduce-in-bf16", wide)
    optimizer = found(megatron, "optimizer")
    for key, one in optimizer.items() if isinstance(optimizer, Mapping) else ():
        yield from () if key in _OF_OPTIMIZER else flag_words(key, one)
    yield from _narrow(megatron)


def _recompute(megatron: Tree | None) -> Iterator[Word]:
    """Yield what is recomputed: whole layers, unless modules are asked for."""
    recompute = setting_at(megatron, "activation_checkpointing")
    if not (recompute and recompute.is_true):
        return
    granularity = setting_at(megatron, "recompute_granularity")
    if granularity and granularity.text == "selective":
        yield from renamed("--recompute-granularity", granularity)
        yield from flag_words("recompute_modules", found(megatron, "recompute_modules"))
        return
    yield from renamed("--recompute-granularity", granularity or recompute, granularity.text if granularity else "full")
    yield from renamed("--recompute-method", recompute, "uniform")
    yield from renamed("--recompute-num-layers", recompute, "1")


def _narrow(megatron: Tree | None) -> Iterator[Word]:
    """Yield the flags of products in 8 bits, and those of kernels. Raise UserError for adapters."""
    fp8 = setting_at(megatron, "fp8_cfg.enabled")
    if fp8 and fp8.is_true:
        yield from renamed("--fp8-format", setting_at(megatron, "fp8_cfg.fp8") or fp8, None)
        yield from renamed("--fp8-recipe", setting_at(megatron, "fp8_cfg.fp8_recipe"))
        param = setting_at(megatron, "fp8_cfg.fp8_param")
        yield from switch_words("--fp8-param-gather", param if param and param.is_true else None)
    fused = setting_at(megatron, "bias_activation_fusion")
    yield from switch_words("--no-bias-swiglu-fusion", fused if fused and not fused.is_true else None)
    peft = setting_at(megatron, "peft.enabled")
    if peft and peft.is_true:
        raise UserError(f"{peft.word.origin}: adapters of NeMo-RL are not modelled")
