"""Megatron-LM's flags that change neither the mathematics of a training step nor its time nor its memory.

They are of data, learning rate, logging, checkpoints, evaluation, generation, and of programs other than pretrain_gpt.
"""

from __future__ import annotations

from .flag import Flag, harmless

SWITCHES = """
no-initialization:perform_initialization use-cpu-initialization init-model-with-meta-device mock-data
no-mmap-bin-files:mmap_bin_files eod-mask-loss
no-create-attention-mask-in-dataloader:create_attention_mask_in_dataloader
allow-ambiguous-pad-tokens fim-data legacy-tokenizer tokenizer-sentencepiece-legacy tokenizer-hf-use-fast
tokenizer-hf-include-special-tokens trust-remote-code dataloader-fast-cache-load dataloader-defer-npy-index-mmap
no-data-sharding:data_sharding use-one-sent-docs renormalize-blend-weights full-validation multiple-validation-sets

calculate-per-token-loss apply-wd-to-qk-layernorm muon-no-split-qkv:muon_split_qkv muon-use-nesterov
override-opt_param-scheduler|override-opt-param-scheduler te-rng-tracker inference-rng-tracker
use-checkpoint-opt_param-scheduler|use-checkpoint-opt-param-scheduler data-parallel-random-init
init-method-xavier-uniform overlap-cpu-optimizer-d2h-h2d
moe-use-upcycling decrease-batch-size-if-needed attention-softmax-in-fp32

profile use-pytorch-profiler record-memory-history log-params-norm log-throughput log-progress
log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-device-memory-used
no-log-loss-scale-to-tensorboard|disable-log-loss-scale-to-tensorboard:log_loss_scale_to_tensorboard
log-num-zeros-in-grad log-max-attention-logit no-barrier-with-level-1-timing:barrier_with_L1_time
log-world-size-to-tensorboard log-energy log-straggler disable-straggler-on-startup run-workload-inspector-server
no-one-logger:enable_one_logger one-logger-async enable-one-logger moe-per-layer-logging log-batch-size-to-tensorboard
no-log-learnig-rate-to-tensorboard:log_learning_rate_to_tensorboard log-learning-rate-to-tensorboard
check-for-spiky-loss check-for-large-grads adlr-autoresume exit-signal-handler exit-signal-handler-for-dataloader
manual-gc no-manual-gc-eval|disable-manual-gc-eval:manual_gc_eval inprocess-restart inprocess-empty-cuda-cache
enable-ft-package calc-ft-timeouts disable-msc:enable_msc disable-gloo-process-groups:enable_gloo_process_groups
create-all-gather-group use-tp-pp-dp-mapping fake-process-group enable-experimental
use-mcore-models:deprecated_use_mcore_models

finetune load-main-params-from-ckpt use-checkpoint-args use-mp-args-from-checkpoint-args exit-on-missing-checkpoint
no-use-tokenizer-model-from-checkpoint-args|\
disable-use-tokenizer-model-from-checkpoint-args:use_tokenizer_model_from_checkpoint_args
auto-detect-ckpt-format ckpt-convert-update-legacy-dist-opt-format async-save use-persistent-ckpt-worker
no-ckpt-fully-parallel-save|disable-ckpt-fully-parallel-save:ckpt_fully_parallel_save ckpt-fully-parallel-load
ckpt-assume-constant-structure no-strict-fsdp-dtensor-load|disable-strict-fsdp-dtensor-load:strict_fsdp_dtensor_load
dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
replication no-save-optim no-save-rng no-load-optim no-load-rng use-dist-ckpt:use_dist_ckpt_deprecated
ckpt-fully-parallel-save:ckpt_fully_parallel_save_deprecated load-model-opt-format

bert-no-binary-head:bert_binary_head biencoder-shared-query-context-model retriever-score-scaling vision-pretraining
dino-norm-last-layer output-bert-embeddings disable-mamba-mem-eff-path:use_mamba_mem_eff_path
flash-decode inference-fuse-tp-communication use-legacy-static-engine inference-dynamic-batching
inference-dynamic-batching-track-paused-request-events decode-only-cuda-graphs nccl-all-reduce-for-prefill
enable-chunked-prefill:disable_chunked_prefill disable-chunked-prefill
inference-wandb-logging|no-inference-wandb-logging cache-mla-latents moe-pad-experts-for-cuda-graph-inference
skip-train test-mode grpo-filter-groups-with-same-reward langrl-external-server|no-langrl-external-server
rl-offload-optimizer-during-inference rl-offload-kv-cache-during-training|no-rl-offload-kv-cache-during-training
rl-remove-kv-cache-during-training|no-rl-remove-kv-cache-during-training
rl-reset-cuda-graphs|no-rl-reset-cuda-graphs rl-partial-rollouts|no-rl-partial-rollouts
rl-inference-logprobs-is-correction|no-rl-inference-logprobs-is-correction
rl-use-sequence-packing|no-rl-use-sequence-packing rl-training-cuda-graphs|no-rl-training-cuda-graphs
rl-offload-inference-model-weights-when-idle|no-rl-offload-inference-model-weights-when-idle
rl-verify-model-weights-swap|no-rl-verify-model-weights-swap rl-skip-bos-token|no-rl-skip-bos-token
rl-calculate-intra-group-similarity dsa-indexer-use-sparse-loss
"""
VALUES = """
split data-args-path per-split-data-args-path per-dataset-sequences-path data-cache-path sample-rate mask-prob
short-seq-prob num-workers num-dataset-builder-threads object-storage-cache-path s3-cache-path mid-level-dataset-surplus
dataloader-type fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token
fim-middle-token fim-suffix-token fim-pad-token fim-eod-token vocab-file merge-file tokenizer-metadata
tiktoken-pattern tiktoken-num-special-tokens sft-tokenizer-prompt-format

weight-decay start-weight-decay end-weight-decay weight-decay-incr-style no-weight-decay-cond-type clip-grad
adam-beta1 adam-beta2 adam-eps sgd-momentum muon-momentum muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps
muon-tp-mode muon-extra-scale-factor seed lr min-lr decoupled-lr decoupled-min-lr lr-decay-style lr-wsd-decay-style
lr-decay-iters lr-decay-samples lr-wsd-decay-iters lr-wsd-decay-samples lr-warmup-fraction lr-warmup-iters
lr-warmup-samples lr-warmup-init loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
embedding-init-method-std moe-router-bias-update-rate moe-upcycling-granularity train-iters train-samples
phase-transition-iterations eval-iters eval-interval exit-interval exit-duration-in-mins exit-signal
optimizer-offload-fraction qk-clip-alpha qk-clip-threshold moe-input-jitter-eps moe-z-loss-coeff

save save-interval|persistent-save-interval save-retain-interval load pretrained-checkpoint ckpt-step ckpt-format
non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
non-persistent-local-ckpt-algo ckpt-convert-format ckpt-convert-save dist-ckpt-strictness replication-jump
replication-factor dist-ckpt-format:dist_ckpt_format_deprecated yaml-cfg config-logger-dir

profile-step-start profile-step-end memory-snapshot-path log-interval timing-log-level timing-log-option
tensorboard-dir tensorboard-log-interval tensorboard-queue-size log-memory-interval wandb-project wandb-exp-name
wandb-save-dir wandb-entity logging-level straggler-ctrlr-port straggler-minmax-count one-logger-project
one-logger-run-name one-logger-entity app-tag-run-name app-tag-run-version dump-param-to-param-group-map
manual-gc-interval adlr-autoresume-interval error-injection-rate error-injection-type ft-num-warmup-iters
inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval
inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout inprocess-hard-timeout
inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout inprocess-last-call-wait
inprocess-termination-grace-time inprocess-granularity inprocess-active-world-size result-rejected-tracker-filename
check-weight-hash-across-dp-replicas-interval train-sync-interval

pipeline-model-parallel-comm-backend tp-comm-bootstrap-backend distributed-backend distributed-timeout-minutes
distributed-timeout-seconds-after-init local-rank|local_rank lazy-mpu-init nccl-communicator-config-path
tp-comm-overlap-cfg cuda-graph-warmup-steps num-layers-at-start-in-bf16 num-layers-at-end-in-bf16
kitchen-attention-backend min-offloaded-tensor-size onnx-safe wgrad-deferral-limit

decoder-seq-length relative-attention-num-buckets relative-attention-max-distance mamba-state-dim mamba-head-dim
mamba-num-groups mamba-num-heads mlp-chunks-for-prefill dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
dsa-indexer-loss-coeff linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads
linear-num-value-heads hybrid-attention-ratio hybrid-mlp-ratio ict-head-size biencoder-projection-dim ict-load
bert-load titles-data-path query-in-block-prob evidence-data-path block-data-path embedding-path indexer-batch-size
indexer-log-interval num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
head-lr-mult vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch
dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer
dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs bert-embedder-type
inference-batch-times-seqlen-threshold max-tokens-to-oom inference-max-requests:inference_max_batch_size
inference-max-seq-length inference-max-batch-size inference-dynamic-batching-buffer-size-gb
inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-block-size
inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-unified-memory-level
inference-dynamic-batching-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-mixed-prefill-count
inference-logging-step-interval inference-coordinator-port rl-prompts-per-eval grpo-prompts-per-step grpo-group-size
grpo-iterations grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
langrl-inference-server-type langrl-inference-server-conversation-template langrl-env-config rl-default-temperature
rl-default-top-p rl-default-top-k rl-importance-sampling-truncation-coef rl-sequence-packing-max-sequences-per-bin
rl-sequence-packing-algo rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size
rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
rl-inference-model-unified-memory-level refit-method rl-parallel-generation-tasks grpo-default-temperature
grpo-default-top-p rl-sequence-packing-bin-size
"""
SEVERAL = """
profile-ranks iterations-to-skip tokenizer-special-tokens tiktoken-special-tokens retriever-report-topk-accuracies
offload-modules
"""
ANY = "data-path train-data-path valid-data-path test-data-path high-priority-stream-groups"

HARMLESS: tuple[Flag, ...] = (
    *harmless("0", SWITCHES),
    *harmless("1", VALUES),
    *harmless("+", SEVERAL),
    *harmless("*", ANY),
)
