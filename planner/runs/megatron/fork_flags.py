"""Flags of programs made from Megatron-LM: Megatron-DeepSpeed, of Microsoft and of BigScience, and forks of labs.

Their names do not occur in Megatron-LM. Flags of Megatron-LM have the meaning that they have there.
"""

from __future__ import annotations

from .flag import Effect, Flag, harmless, judged, size_or_none, switch_flag, value_flag

DEEPSPEED_FIELDS = (
    switch_flag("deepspeed"),
    size_or_none("zero-stage"),
    switch_flag("checkpoint-activations"),
    value_flag("pad-vocab-size-to", int),
    switch_flag("embed-layernorm"),
    value_flag("pp-partition-method", str),
    value_flag("tokenizer-name-or-path", str),
    value_flag("num-key-value-heads", int),
    value_flag("rotary-position-embeddings-theta", int),
)
FORK_SWITCHES = """
deepspeed-activation-checkpointing abort-on-unmet-fused-kernel-constraints universal-checkpoint
use-checkpoint-lr-scheduler
override-lr-scheduler deepspeed_mpi|deepspeed-mpi no-pipeline-parallel create-moe-param-group profile-backward
sync-tp-duplicated-parameters log-optimizer-states-to-tensorboard use-mpi no-load-lr-state reset-iteration
no-query-key-layer-scaling:apply_query_key_layer_scaling reproduce use-hip-profiler verify-checkpoint
enable-hf2mg-convert no-shared-storage is-instruction-dataset tokenizer-not-use-fast
repeated-dataloader mask_user_turn
"""
FORK_VALUES = """
deepspeed_config|deepspeed-config data-impl valid-num-workers kill-switch-path codecarbon-dir train-tokens
lr-decay-tokens lr-warmup-tokens checkpoint-num-layers DDP-impl:DDP_impl moe-eval-capacity-factor moe-min-capacity
train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path log-level
log-level-replica trigger-path max-padding-length patch-tokenizer-type dataset train-mode extra-vocab-size
inference-batch-size wandb-name wandb-id handler-name model-type-hf prompt-type goldfish-k goldfish-h ademamix-alpha
ademamix-beta3 ademamix-beta3-warmup ademamix-alpha-warmup kd-beta-ce kd-alpha-ce kd-temp load-teacher
num-layers-teacher hidden-size-teacher num-attention-heads-teacher rank world-size dist-url wandb-group-name
router-aux-loss-coef verify-checkpoint-model-type save-distrib-optimizer-method
load-distrib-optimizer-method
"""
FORK_SEVERAL = "train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths"
FORK_LITTLE = """
step-batch-size-schedule ; 1 ; None ; the batch changes between steps; the prediction is for --global-batch-size
synchronize-each-layer ; 0 ; - ; the host waits after each layer
scattered-embeddings ; 0 ; - ; embeddings are scattered
use-z-loss ; 0 ; - ; the loss has one more term
norm-target-loss ; 0 ; - ; sequences have other weights in the loss
goldfish-loss ; 0 ; - ; some tokens are left out of the loss
qknorm-impl ; 1 ; te ; norms of queries and keys run another kernel
use-flash-attn-v1 ; 0 ; - ; the prediction has the fastest attention of the device anyway
use-flash-attn-v2 ; 0 ; - ; the prediction has the fastest attention of the device anyway
use-flash-attn-builder ; 0 ; - ; the prediction has the fastest attention of the device anyway
use-flash-attn-triton ; 0 ; - ; attention runs another kernel
use-fused-rmsnorm ; ? ; 0 ; norms run a kernel of the fork
overlap-ep-comm-with-split-attn ; 0 ; - ; attention in two parts hides more of the all-to-all
use-fused-swiglu ; 0 ; - ; the activation runs a kernel of MindSpeed
use-fused-rotary-pos-emb ; 0 ; - ; rotary positions run a kernel of MindSpeed
moe-permutation-async-comm ; 0 ; - ; MindSpeed hides a part of the all-to-all
moe-alltoall-overlap-comm ; 0 ; - ; MindSpeed hides a part of the all-to-all
gemm-gradient-accumulation-fusion ; 0 ; - ; experts add up weight gradients in their products
"""
FORK_REFUSED = """
moe-expert-parallel-size ; 1 ; 1 ; experts of DeepSpeed are not modelled
moe-loss-coeff ; 1 ; 0.1,0.01 ; experts of DeepSpeed are not modelled
moe-train-capacity-factor ; 1 ; 1.0 ; experts of DeepSpeed are not modelled
disable-moe-token-dropping ; 0 ; - ; experts of DeepSpeed are not modelled
moe-type ; 1 ; None ; experts of this fork are not modelled
qk-nope-head-dim ; 1 ; 128 ; Pai-Megatron-Patch does not use it, so --qk-head-dim stays 128
qk-rope-head-dim ; 1 ; 64 ; Pai-Megatron-Patch does not use it, so --qk-pos-emb-head-dim stays 64
distribute-checkpointed-activations ; 0 ; - ; \
inputs of recomputed layers that tensor-parallel ranks share are not modelled
partition-activations ; 0 ; - ; saved activations that tensor-parallel ranks share are not modelled
split-transformers ; 0 ; - ; recompute of halves of layers is not modelled
contigious-checkpointing ; 0 ; - ; saved activations in one buffer are not modelled
checkpoint-in-cpu ; 0 ; - ; activations in the memory of the host are not modelled
cpu-optimizer ; 0 ; - ; an optimizer on the host is not modelled
cpu_torch_adam ; 0 ; - ; an optimizer on the host is not modelled
use-bnb-optimizer ; 0 ; - ; an optimizer of 8 bits is not modelled
curriculum-learning ; 0 ; - ; sequences of changing length are not modelled
random-ltd ; 0 ; - ; layers that drop tokens are not modelled
multiple-of ; 1 ; None ; the width of the MLP that it gives is not read: state --ffn-hidden-size
hidden-dim-multiplier ; 1 ; None ; the width of the MLP that it gives is not read: state --ffn-hidden-size
ds-sequence-parallel-size ; 1 ; 1 ; sequence parallelism of DeepSpeed is not modelled
glu-activation ; 1 ; None ; gated activations of this name are not read; Megatron-LM has --swiglu
use-tutel ; 0 ; - ; experts of Tutel are not modelled
moe-num-experts ; 1 ; None ; experts of MegaBlocks are not modelled
moe-top-k ; 1 ; None ; experts of MegaBlocks are not modelled
moe-capacity-factor ; 1 ; None ; experts of MegaBlocks are not modelled
moe-loss-weight ; 1 ; None ; experts of MegaBlocks are not modelled
moe-expert-model-parallelism ; 0 ; - ; experts of MegaBlocks are not modelled
xielu ; 0 ; - ; this activation, which has weights of its own, is not read
bitfit ; 0 ; - ; weights that are not trained are not read
kd ; 0 ; - ; a teacher beside the model is not modelled
activations-checkpoint-method ; 1 ; None ; dropped by Megatron-LM: use --recompute-granularity and --recompute-method
swap-optimizer ; 0 ; - ; an optimizer on the host is not modelled
context-parallel-algo ; 1 ; megatron_cp_algo ; other exchanges of context parallelism of MindSpeed are not modelled
noop-layers ; 1 ; None ; layers that do nothing are not read
"""
FORK_FLAGS: tuple[Flag, ...] = (
    *DEEPSPEED_FIELDS,
    *harmless("0", FORK_SWITCHES),
    *harmless("1", FORK_VALUES),
    *harmless("*", FORK_SEVERAL),
    *judged(Effect.LITTLE, FORK_LITTLE),
    *judged(Effect.REFUSED, FORK_REFUSED),
)
