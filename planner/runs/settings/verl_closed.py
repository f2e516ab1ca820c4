"""Sections of verl beside `actor.megatron`: what they change of the training step, and keys that are not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import flag_words, switch_words
from megaloom.planner.runs.settings.near_names import unknown_setting
from megaloom.planner.runs.settings.tree import Tree, found, is_null, leaves, setting_at
from megaloom.planner.runs.words import Word

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_OF_ACTOR = """
_target_ rollout_n strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz
ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos
tau_neg freeze_vision_tower policy_loss loss_agg_mode loss_scale_factor entropy_coeff calculate_entropy
calculate_sum_pi_squared use_kl_loss use_prefix_grouper use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle
data_loader_seed checkpoint optim use_fused_kernels profiler profile router_replay qat entropy_from_logits_with_chunking
entropy_from_logits_chunk_size entropy_checkpointing grad_clip megatron load_weight tis_imp_ratio_cap fsdp_config
ulysses_sequence_parallel_size recompute_old_log_prob use_rollout_log_probs gamma model_engine
"""
_OF_MODEL = """
_target_ path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib override_config
enable_gradient_checkpointing gradient_checkpointing_kwargs enable_activation_offload use_remove_padding lora_rank
lora_alpha target_modules exclude_modules lora_adapter_path use_liger use_fused_kernels fused_kernel_options tiled_mlp
mtp lora rope_theta
"""
_OF_OPTIMIZER = """
_target_ lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas clip_grad optimizer
lr_warmup_init lr_decay_steps lr_decay_style min_lr min_lr_ratio weight_decay_incr_style lr_wsd_decay_style
lr_wsd_decay_steps use_checkpoint_opt_param_scheduler use_precision_aware_optimizer main_grads_dtype exp_avg_dtype
exp_avg_sq_dtype use_layer_wise_distributed_optimizer muon_momentum muon_nesterov muon_split_qkv muon_scale_mode
muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor
muon_scalar_optimizer muon_match_adamw_update_rms override_optimizer_config warmup_style num_cycles
"""
_KNOWN = {ACTOR: _OF_ACTOR.split(), MODEL: _OF_MODEL.split(), f"{ACTOR}.optim": _OF_OPTIMIZER.split()}
CLOSED = (ACTOR, MODEL)
"""Sections of which every key is known."""
_READ_OF_OPTIMIZER = (
    *("optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("use_precision_aware_optimizer", "use_layer_wise_distributed_optimizer"),
)
_SWITCHES = (f"{MODEL}.mtp.enable", f"{MODEL}.mtp.enable_train", f"{ACTOR}.qat.enable", f"{MODEL}.lora.merge")
"""Switches that change the model or its arithmetic where they are on."""
_WITHOUT_EFFECT = frozenset({"attn_implementation", "max_position_embeddings", "_attn_implementation"})
"""Keys of the model's configuration that change no step."""


def verl_words(tree: Tree | None) -> Iterator[Word]:
    """Yield the flags of the optimizer, and as unknown what may change a step. Raise UserError for adapters."""
    strategy = setting_at(tree, f"{ACTOR}.strategy")
    if strategy and strategy.text not in ("megatron", ""):
        raise UserError(f"{strategy.word.origin}: the actor trains with {strategy.text:.20}, not with Megatron")
    for path in (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"):
        rank = setting_at(tree, path)
        if rank and rank.text != "0":
            raise UserError(f"{rank.word.origin}: adapters of verl are not modelled")
    for path, known in _KNOWN.items():
        section = found(tree, path)
        for key, value in section.items() if isinstance(section, Mapping) else ():
            if key not in known:
                yield unknown_setting(f"{path}.{key}", value)
    for path in _SWITCHES:
        switch = setting_at(tree, path)
        if switch and switch.is_true:
            yield unknown_setting(path, switch)
    fused = next((one for section in (MODEL, ACTOR) if (one := setting_at(tree, f"{section}.use_fused_kernels"))), None)
    yield from switch_words("--use-fused-kernels", fused if fused and fused.is_true else None)
    advantages = setting_at(tree, "algorithm.adv_estimator")
    if advantages and advantages.text == "gae":
        yield Word("--trains-a-value-model", advantages.word.origin)
    yield from _optimizer(found(tree, f"{ACTOR}.optim"))
    for path, value in leaves(found(tree, f"{MODEL}.override_config")):
        if path.rpartition(".")[2] not in _WITHOUT_EFFECT and not is_null(value):
            yield unknown_setting(f"override_config.{path}", value)


def _optimizer(optim: Tree | None) -> Iterator[Word]:
    """Yield the optimizer's flags, with what overrides Megatron-core's own settings."""
    for key in _READ_OF_OPTIMIZER:
        yield from flag_words(key, found(optim, key))
    for path, value in leaves(found(optim, "override_optimizer_config")):
        yield from flag_words(path, value)
