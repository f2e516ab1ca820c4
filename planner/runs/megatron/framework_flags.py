"""Flags that frameworks around Megatron-LM add: Pai-Megatron-Patch, FlagScale, Primus, and torch's.

Sources: their argument parsers and default settings, of 2025.
"""

from __future__ import annotations

from .flag import Effect, Flag, harmless, judged, switch_flag

_SWITCHES = """
disable-last-saving auto-continue-train disable-wandb disable-tensorboard disable-mlflow dump-pp-data
no-shared-fs pp-warmup use-rocm-mem-info use-wandb
"""
_VALUES = """
max-padding-length patch-tokenizer-type train-mode dataset eos-token-id epochs special-tokens-file extra-eos
patch-args norm-init-weight tokenizer-path wandb-mode wandb-log-model rdzv-backend hostfile
log-avg-skip-iterations log-avg-reset-interval stderr-sink-level sink-level file-sink-level
"""
_SEVERAL = "train-data-path valid-data-path test-data-path use-rocm-mem-info-iters skip-samples-range"
_LITTLE = """
enable-primus-turbo ; 0 ; - ; kernels of Primus-Turbo are not in the prediction
use-turbo-attention ; 0 ; - ; attention runs a kernel of Primus-Turbo
use-turbo-grouped-gemm|use-turbo-grouped-mlp ; 0 ; - ; experts run kernels of Primus-Turbo
use-turbo-parallel-linear ; 0 ; - ; matrix products run kernels of Primus-Turbo
use-turbo-rms-norm ; 0 ; - ; norms run a kernel of Primus-Turbo
use-turbo-deepep ; 0 ; - ; tokens are sent by another library
turbo-deepep-num-cu ; 1 ; - ; DeepEP takes another share of the device
turbo-deepep-use-comm-stream ; 0 ; - ; DeepEP runs on another stream
turbo-sync-free-moe-stage ; 1 ; 0 ; the host waits less often for the router
pack-sequences ; 0 ; - ; micro-batches hold packed sequences of other lengths; the prediction is for whole ones
fp8-dot-product-attention ; 0 ; - ; attention computes in 8 bits
fp8-multi-head-attention ; 0 ; - ; attention computes in 8 bits
defer-fp32-logits ; 0 ; - ; logits stay in 16 bits until the loss
enable-mtp-training ; 0 ; - ; layers for more tokens count where --mtp-num-layers states them
trains-a-value-model ; 0 ; - ; a model of values trains beside the policy; the prediction is for the policy
use-fused-kernels ; 0 ; - ; logits and their loss run a fused kernel of verl
use-tokenizer-vocab-size ; 0 ; - ; the vocabulary is that of the tokenizer; the prediction has the model's
moe-use-fused-router-with-aux-score ; 0 ; - ; the router takes fewer kernels
"""
_REFUSED = """
recompute-layer-ids ; + ; None ; recompute of single layers is not read
train-backend ; 1 ; megatron ; only training by Megatron is read
freeze-params-name-list ; + ; None ; weights that are not trained are not modelled
only-train-params-name-list ; + ; None ; weights that are not trained are not modelled
use-stateless-adam ; 0 ; - ; an optimizer without moments is not modelled
custom-model-provider-path ; 1 ; None ; a model that a program of its own builds is not read
megatron-config-path ; 1 ; None ; settings of Megatron in another file are not read
allgather-cp ; 0 ; - ; this exchange between context-parallel ranks is not modelled
lora-rank ; 1 ; 0 ; adapters are not modelled
"""
TORCH_FIELDS = (switch_flag("gathers-in-16-bits"),)
"""Flags of our own for what torch's fully_shard does and no flag of Megatron-LM states."""
FRAMEWORK_FLAGS: tuple[Flag, ...] = (
    *harmless("0", _SWITCHES),
    *harmless("1", _VALUES),
    *harmless("*", _SEVERAL),
    *judged(Effect.LITTLE, _LITTLE),
    *judged(Effect.REFUSED, _REFUSED),
    *TORCH_FIELDS,
)
