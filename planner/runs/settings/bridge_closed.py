"""Fields of Megatron-Bridge's sections that change no step, so that every other one is read, named or refused.

Sources: megatron/core (distributed_data_parallel_config.py, optimizer_config.py) and training/ of Megatron-Bridge
(config.py, comm_overlap.py, mixed_precision.py), until 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HARMLESS = {
    "ddp": """
align_param_gather check_for_nan_in_grad check_for_large_grads preserve_fp32_weights grad_reduce_in_fp32
fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag finalize_model_grads_func
""",
    "optimizer": """
lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm fp8_recipe fp16 bf16 params_dtype
store_param_remainders loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis adam_beta1 adam_beta2
adam_eps decoupled_weight_decay sgd_momentum overlap_param_gather clip_grad log_num_zeros_in_grad barrier_with_L1_time
timers config_logger_dir pin_cpu_grads pin_cpu_params optimizer_offload_fraction reuse_grad_buf_for_mxfp8_param_ag
eps use_distributed_optimizer
""",
    "comm_overlap": """
tp_comm_overlap_cfg tp_comm_bootstrap_backend batch_p2p_comm align_param_gather wgrad_deferral_limit data_parallel_size
user_comm_overlap_cfg
""",
    "mixed_precision": """
fp32 params_dtype pipeline_dtype autocast_dtype autocast_enabled loss_scale initial_loss_scale min_loss_scale
loss_scale_window hysteresis num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_param fp4_param
""",
    "train": """
decrease_batch_size_if_needed check_weight_hash_across_dp_replicas_interval check_optimizer_step_success
skip_sync_grad_norm_across_mp train_sync_interval train_iters train_samples num_epochs exit_signal exit_signal_handler
exit_signal_handler_for_dataloader exit_duration_in_mins exit_interval manual_gc manual_gc_interval manual_gc_eval
eval_iters eval_interval iterations_to_skip skip_train max_steps phase_transition_iterations
""",
}
HARMLESS_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {section: frozenset(text.split()) for section, text in _HARMLESS.items()}
)
"""By the section: fields without effect on the mathematics of a step, its time and its memory, or that others say."""
OPTIMIZERS_OF_MUON = "muon_"
"""Prefix of the fields that only the optimizer Muon has."""


def is_unread_field(path: str) -> bool:
    """Return whether a field is of a section of which every field is known, and is none that changes no step."""
    section, _, key = path.partition(".")
    harmless = HARMLESS_FIELDS.get(section)
    return harmless is not None and key not in harmless and not key.startswith(OPTIMIZERS_OF_MUON)
