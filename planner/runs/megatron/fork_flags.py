"""Flags of programs made from Megatron-LM: Megatron-DeepSpeed, of Microsoft and of BigScience, and forks of labs.

Their names do not occur in Megatron-LM. Flags of Megatron-LM have the meaning that they have there.
"""

from __future__ import annotations

from .flag import Effect, Flag, harmless, judged, switch_flag, value_flag

DEEPSPEED_FIELDS = (
    switch_flag("deepspeed"),
    value_flag("zero-stage", int, dest="zero_stage"),
    switch_flag("checkpoint-activations"),
    value_flag("pad-vocab-size-to", int),
    switch_flag("embed-layernorm"),
    value_flag("pp-partition-method", str),
    value_flag("tokenizer-name-or-path", str),
)
FORK_SWITCHES = """
deepspeed-activation-checkpointing abort-on-unmet-fused-kernel-constraints universal-checkpoint
use-checkpoint-lr-scheduler
override-lr-scheduler deepspeed_mpi|deepspeed-mpi no-pipeline-parallel create-moe-param-group profile-backward
sync-tp-duplicated-parameters log-optimizer-states-to-tensorboard
"""
FORK_VALUES = """
deepspeed_config|deepspeed-config data-impl valid-num-workers kill-switch-path codecarbon-dir train-tokens
lr-decay-tokens lr-warmup-tokens checkpoint-num-layers DDP-impl:DDP_impl moe-eval-capacity-factor moe-min-capacity
train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path log-level
log-level-replica trigger-path max-padding-length patch-tokenizer-type dataset train-mode extra-vocab-size
inference-batch-size
"""
FORK_SEVERAL = "train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths"
FORK_LITTLE = """
step-batch-size-schedule ; 1 ; None ; the batch changes between steps; the prediction is for --global-batch-size
synchronize-each-layer ; 0 ; - ; the host waits after each layer
scattered-embeddings ; 0 ; - ; embeddings are scattered
"""
FORK_REFUSED = """
moe-expert-parallel-size ; 1 ; 1 ; experts of DeepSpeed are not modelled
moe-loss-coeff ; 1 ; 0.1,0.01 ; experts of DeepSpeed are not modelled
moe-train-capacity-factor ; 1 ; 1.0 ; experts of DeepSpeed are not modelled
disable-moe-token-dropping ; 0 ; - ; experts of DeepSpeed are not modelled
partition-activations ; 0 ; - ; saved activations that tensor-parallel ranks share are not modelled
split-transformers ; 0 ; - ; recompute of halves of layers is not modelled
contigious-checkpointing ; 0 ; - ; saved activations in one buffer are not modelled
checkpoint-in-cpu ; 0 ; - ; activations in the memory of the host are not modelled
cpu-optimizer ; 0 ; - ; an optimizer on the host is not modelled
cpu_torch_adam ; 0 ; - ; an optimizer on the host is not modelled
use-bnb-optimizer ; 0 ; - ; an optimizer of 8 bits is not modelled
curriculum-learning ; 0 ; - ; sequences of changing length are not modelled
random-ltd ; 0 ; - ; layers that drop tokens are not modelled
ds-sequence-parallel-size ; 1 ; 1 ; sequence parallelism of DeepSpeed is not modelled
glu-activation ; 1 ; None ; gated activations of this name are not read; Megatron-LM has --swiglu
use-tutel ; 0 ; - ; experts of Tutel are not modelled
"""
FORK_FLAGS: tuple[Flag, ...] = (
    *DEEPSPEED_FIELDS,
    *harmless("0", FORK_SWITCHES),
    *harmless("1", FORK_VALUES),
    *harmless("*", FORK_SEVERAL),
    *judged(Effect.LITTLE, FORK_LITTLE),
    *judged(Effect.REFUSED, FORK_REFUSED),
)
