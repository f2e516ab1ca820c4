"""Flags that releases of Megatron-LM after 0.16.1 add and drop.

Compared over the argument parsers of core_v0.16.1, core_v0.17.1, core_v0.18.2 and core_v0.19.0. Most are of generation,
reinforcement learning, tokenizers, logging and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from attrs import frozen

from .flag import Effect, Flag, harmless, judged, value_flag


@frozen(kw_only=True)
class ReleaseFlags:
    """Flags that a release adds, as texts of `harmless` and `judged`, by their number of values and their effect."""

    switches: str
    values: str
    several: str = ""
    lists: str = ""  # which may be empty
    little: str
    refused: str
    fields: tuple[Flag, ...] = ()  # of a run

    def flags(self) -> Iterator[Flag]:
        """Yield the flags."""
        for nargs, text in (("0", self.switches), ("1", self.values), ("+", self.several), ("*", self.lists)):
            yield from harmless(nargs, text)
        yield from judged(Effect.LITTLE, self.little)
        yield from judged(Effect.REFUSED, self.refused)
        yield from self.fields


NEWER_FIELDS = (
    value_flag("megatron-fsdp-main-grads-dtype", str),
    value_flag("megatron-fsdp-grad-comm-dtype", str),
)
RELEASE_17 = ReleaseFlags(
    fields=NEWER_FIELDS,
    switches="""
inference-dynamic-batching-track-generated-token-events
inference-dynamic-batching-prefix-caching|\
no-inference-dynamic-batching-prefix-caching:inference_dynamic_batching_enable_prefix_caching
inference-text-gen-server-logging|no-inference-text-gen-server-logging
inference-use-synchronous-zmq-collectives|no-inference-use-synchronous-zmq-collectives
inference-disable-triton-nvls-kernels inference-moe-disable-fused-quant-kernels
rl-persist-cuda-graphs|no-rl-persist-cuda-graphs cpu-offloading-retain-pinned-cpu-buffers
pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
exit-signal-handler-for-training verify-integrity flight-recorder-include-stack-trace
no-flight-recorder-dump-on-timeout|disable-flight-recorder-dump-on-timeout:flight_recorder_dump_on_timeout
no-flight-recorder-include-only-active|\
disable-flight-recorder-include-only-active:flight_recorder_include_only_active
no-flight-recorder-extra-dump-on-exec|disable-flight-recorder-extra-dump-on-exec:flight_recorder_extra_dump_on_exec
tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens
""",
    values="""
inference-dynamic-batching-mamba-memory-ratio num-speculative-tokens
inference-dynamic-batching-prefix-caching-eviction-policy
inference-dynamic-batching-prefix-caching-coordinator-policy
inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-prefix-caching-mamba-gb
mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype inference-grouped-gemm-backend
muon-coefficient-type muon-scalar-optimizer lion-beta1 lion-beta2 rl-num-parallel-generations
rl-num-parallel-generation-batches rl-generation-batch-size rl-kv-cache-management-mode async-strategy
async-ckpt-cpu-priority async-ckpt-io-priority ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group dist-ckpt-workers
flight-recorder-dump-path flight-recorder-trace-buffer-size mup-width-mult mup-base-hidden-size mup-embedding-mult
mup-output-mult mup-base-head-dim mup-attn-scale-power
""",
    lists="rl-inference-parsers",
    little="""
use-mup ; 0 ; - ; widths scale initial weights, learning rates and scores
fused-residual-rmsnorm ; 0 ; - ; residual and norm take fewer kernels
mla-down-proj-fusion ; 0 ; - ; two projections of latent attention are one product
moe-router-force-biased ; 1 ; None ; experts have unequal loads
moe-permute-fusion-into-hybridep ; 0 ; - ; the permutation of tokens takes fewer kernels
moe-hybridep-num-blocks-permute ; 1 ; None ; HybridEP takes another share of multiprocessors
moe-hybridep-num-blocks-unpermute ; 1 ; None ; HybridEP takes another share of multiprocessors
optimizer-cuda-graph ; 0 ; - ; the host launches fewer kernels, and graphs take memory
disable-align-grad-reduce:align_grad_reduce ; 0 ; - ; pipeline ranks start their reductions at different times
ddp-param-name-patterns-for-fp32-local-accumulation ; + ; [],None ; some gradients are added up in fp32
megatron-fsdp-main-params-dtype ; 1 ; fp32,torch.float32,auto ; master weights take less memory
""",
    refused="""
mtp-use-repeated-layer ; 0 ; - ; one layer for all predicted tokens is not read
mtp-hybrid-override-pattern ; 1 ; None ; layers of Mamba among those of attention are not read
hybrid-layer-pattern ; 1 ; None ; layers of Mamba among those of attention are not read
""",
)
RELEASE_18 = ReleaseFlags(
    switches="""
inference-cuda-graph-all-prefills inference-disable-ep-consensus|no-inference-disable-ep-consensus muon-nesterov
record-shapes nvtx-ranges async-ckpt-use-cpu-shm enable-msc no-use-layer-wise-param-layout:use_layer_wise_param_layout
no-ckpt-load-validate-sharding-integrity|\
disable-ckpt-load-validate-sharding-integrity:ckpt_load_validate_sharding_integrity
no-tokenizer-sentencepiece-ignore-extra-whitespaces|\
disable-tokenizer-sentencepiece-ignore-extra-whitespaces:tokenizer_sentencepiece_ignore_extra_whitespaces
""",
    values="""
inference-dynamic-batching-sampling-backend inference-cuda-graph-scope inference-moe-token-dispatcher-type
moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu
fine-grained-offloading-max-inflight-offloads gpu-sniff-test-interval start-eval-at-iter eval-global-batch-size
eval-micro-batch-size null-tokenizer-eod-id null-tokenizer-pad-id chat-template
""",
    several="validation-set-names",
    little="""
cuda-graph-modules ; + ; [],None ; graphs hold other parts of a step
overlap-dispatch-backward-with-experts-wgrad ; 0 ; - ; weight gradients of experts hide a part of the all-to-all
use-transformer-engine-op-fuser ; 0 ; - ; layers run fewer kernels
fp8-output-proj ; 0 ; - ; the logits are computed in 8 bits
high-priority-a2a-comm-stream ; 0 ; - ; the all-to-all runs before other kernels
use-grouped-gemm-for-dense-mlp ; 0 ; - ; dense layers run kernels of experts
moe-single-grouped-weight ; 0 ; - ; weights of experts are one tensor
moe-single-grouped-bias ; 0 ; - ; biases of experts are one tensor
moe-hybridep-num-sms-preprocessing ; 1 ; 108 ; HybridEP takes another share of multiprocessors
moe-mlp-glu-interleave-size ; 1 ; None ; gates and values are interleaved
moe-expert-rank-capacity-factor ; 1 ; None ; tokens beyond the capacity are dropped; the prediction has equal loads
megatron-fsdp-enable-fine-grained-param-gather ; 0 ; - ; weights are gathered in smaller units
""",
    refused="""
mlp-chunks-for-training ; 1 ; 1 ; parts of a sequence one by one are not modelled
moe-paged-stash ; 0 ; - ; saved activations in pages are not modelled
save-params-interval ; 1 ; None ; weights are written to files
save-activations-interval ; 1 ; None ; activations are written to files
save-tokens-per-expert-interval ; 1 ; None ; loads of experts are written to files
no-pad-vocab-size|disable-pad-vocab-size:pad_vocab_size ; 0 ; - ; a vocabulary without padding is not read
""",
)
RELEASE_19 = ReleaseFlags(
    switches="""
use-same-sampling-seed-across-dp-ranks:offset_sampling_seed_by_dp_rank rl-profile dsa-indexer-rope-interleaved
no-dsa-indexer-rotate-activation|disable-dsa-indexer-rotate-activation:dsa_indexer_rotate_activation
no-dsa-indexer-scoring-relu|disable-dsa-indexer-scoring-relu:dsa_indexer_scoring_relu dsa-indexer-k-norm-fp32
delay-offload-until-cuda-graph yarn-correction-range-round-to-int
no-yarn-correction-range-round-to-int:yarn_correction_range_round_to_int
moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights
no-stream-ckpt-dequant|disable-stream-ckpt-dequant:stream_ckpt_dequant logits-load-ignore-errors
""",
    values="""
inference-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-sizing-distribution
inference-dynamic-batching-async-sched-mode inference-dynamic-batching-logprobs-mode inference-shards
dsa-indexer-topk-freq dsa-indexer-skip-topk-offset dsa-kernel-backend dsa-indexer-k-norm-epsilon
moe-router-quantile-balancing-ema delta-offload-bytes-across-pp-ranks activation-offload-fraction yarn-beta-fast
yarn-beta-slow moe-routing-trace-max-training-iters rl-generation-lag rl-submission-granularity
rl-consumption-granularity rl-profile-dir override-ckpt-iteration mamba-training-ssm-states-dtype logits-save-top-k
logits-save-top-p logits-save-top-p-min-k logits-save-dtype logits-load-decode-threads logits-load-prefetch-factor
logits-load-msc-prefetch-depth logits-load-kd-loss-alpha
""",
    little="""
mtp-detach-heads ; 0 ; - ; gradients of predicted tokens stop before the model
flash-attention-version ; 1 ; None ; attention runs this kernel
use-grouped-gemm-for-shared-expert ; 0 ; - ; the shared expert runs kernels of the others
moe-shared-expert-glu-interleave-size ; 1 ; None ; gates and values are interleaved
moe-hybridep-pad-uneven-dispatch-inputs ; 0 ; - ; tokens are padded before they are sent
moe-flex-dispatcher-num-sms ; 1 ; None ; the dispatcher takes another share of multiprocessors
moe-ncclep-static-shape ; 0 ; - ; tokens are sent in buffers of one size
moe-ncclep-zero-copy ; 0 ; - ; tokens are sent without a copy
moe-routing-trace-path ; 1 ; None ; routes of tokens are written to files
dataloader-inter-document-masking ; 0 ; - ; documents do not attend to each other, which takes a mask
megatron-fsdp-max-pool-double-buffer ; 0 ; - ; gathered weights have two buffers
fsdp-db-use-persist-buf-on-alloc-fail ; 0 ; - ; gathered weights have other buffers
""",
    refused="""
tensor-parallel-num-weight-shards ; 1 ; None,1 ; weights that tensor-parallel ranks gather are not modelled
expert-tensor-parallel-num-weight-shards ; 1 ; None,1 ; weights that tensor-parallel ranks gather are not modelled
yarn-original-max-position-embeddings ; 1 ; None ; YaRN is read for latent attention only
freeze-all-layers ; 0 ; - ; weights that are not trained are not read
logits-save-dir ; 1 ; None ; logits are written to files
logits-load-dir ; 1 ; None ; logits of another model are read from files
""",
)
ADDED: Mapping[str, ReleaseFlags] = MappingProxyType({"0.17": RELEASE_17, "0.18": RELEASE_18, "0.19": RELEASE_19})
DROPPED: Mapping[str, str] = MappingProxyType(
    {
        "0.17": "moe-extended-tp no-async-tensor-model-parallel-allreduce "
        "disable-async-tensor-model-parallel-allreduce moe-use-legacy-grouped-gemm "
        "disable-ckpt-fully-parallel-save legacy-tokenizer hybrid-attention-ratio hybrid-mlp-ratio "
        "inference-max-batch-size disable-chunked-prefill langrl-inference-server-type "
        "langrl-inference-server-conversation-template langrl-external-server no-langrl-external-server "
        "rl-offload-kv-cache-during-training no-rl-offload-kv-cache-during-training "
        "rl-remove-kv-cache-during-training no-rl-remove-kv-cache-during-training rl-reset-cuda-graphs "
        "no-rl-reset-cuda-graphs",
        "0.18": "muon-use-nesterov use-legacy-models no-scatter-gather-tensors-in-pipeline tiktoken-special-tokens "
        "tokenizer-hf-use-fast tokenizer-hf-include-special-tokens inference-dynamic-batching-cuda-graph-max-tokens",
        "0.19": "rl-num-parallel-generations rl-num-parallel-generation-batches rl-generation-batch-size "
        "rl-parallel-generation-tasks",
    }
)
"""Flags of older releases that a release has no more, without dashes."""
NEWER_FLAGS: tuple[Flag, ...] = tuple(flag for release in ADDED.values() for flag in release.flags())
SINCE: Mapping[str, str] = MappingProxyType(
    {name: release for release, added in ADDED.items() for flag in added.flags() for name in flag.names}
)
"""The release that added a flag, by each of its spellings."""
UNTIL: Mapping[str, str] = MappingProxyType(
    {f"--{name}": release for release, names in DROPPED.items() for name in names.split()}
)
"""The first release without a flag, by its spelling."""
