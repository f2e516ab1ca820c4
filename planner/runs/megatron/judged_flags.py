"""Megatron-LM's flags that change a training step in a way that the prediction leaves out, or that it cannot model.

One flag a line: spellings and destination ; numbers of values ; values that change nothing ; what the others change.
"""

from __future__ import annotations

from .flag import Effect, Flag, judged

LITTLE = """
no-masked-softmax-fusion:masked_softmax_fusion ; 0 ; - ; only attention without flash or fused kernels has this softmax
no-bias-swiglu-fusion:bias_swiglu_fusion ; 0 ; - ; the activation takes more kernels
no-bias-dropout-fusion:bias_dropout_fusion ; 0 ; - ; dropout and residual take more kernels
no-rope-fusion:apply_rope_fusion ; 0 ; - ; rotary positions take more kernels
no-persist-layer-norm ; 0 ; - ; norms run another kernel
no-gradient-accumulation-fusion:gradient_accumulation_fusion ; 0 ; - ; \
weight gradients are added up by kernels of their own
disable-jit-fuser ; 0 ; - ; elementwise operations are not fused
transformer-impl ; 1 ; transformer_engine,None ; the prediction has the kernels of Transformer Engine
use-flash-attn ; 0 ; - ; the prediction has the fastest attention of the device anyway
attention-backend ; 1 ; auto,flash,fused,AttnBackend.auto,AttnBackend.flash,AttnBackend.fused,None ; \
attention takes more time and memory without a fused kernel
use-te-activation-func ; 0 ; - ; the activation runs another kernel
use-fused-weighted-squared-relu ; 0 ; - ; the activation runs another kernel
cross-entropy-loss-fusion ; 0 ; - ; the loss takes less memory
deterministic-mode ; 0 ; - ; deterministic kernels are slower
batch-invariant-mode ; 0 ; - ; invariant kernels are slower
disable-bf16-reduced-precision-matmul ; 0 ; - ; matrix products add up in fp32
fp32-residual-connection ; 0 ; - ; hidden states between layers take twice the memory
apply-query-key-layer-scaling ; 0 ; - ; scores are scaled in two steps
fp16-lm-cross-entropy ; 0 ; - ; the loss takes less memory
no-check-for-nan-in-loss-and-grad:check_for_nan_in_loss_and_grad ; 0 ; - ; one synchronization a step less
empty-unused-memory-level ; 1 ; 0 ; the allocator is emptied between steps
main-params-dtype ; 1 ; fp32,torch.float32 ; master weights take less memory
exp-avg-dtype ; 1 ; fp32,torch.float32 ; the first moment takes less memory
exp-avg-sq-dtype ; 1 ; fp32,torch.float32 ; the second moment takes less memory
use-precision-aware-optimizer ; 0 ; - ; the optimizer's state may take less memory
fp8-param-gather ; 0 ; - ; weights are held and gathered in 8 bits
fp4-param-gather:fp4_param ; 0 ; - ; weights are held and gathered in 4 bits
keep-fp8-transpose-cache ; 0 ; - ; transposed weights stay in memory
keep-fp8-transpose-cache-when-using-custom-fsdp ; 0 ; - ; transposed weights stay in memory
reuse-grad-buf-for-mxfp8-param-ag ; 0 ; - ; the gather of weights shares a buffer with gradients
first-last-layers-bf16 ; 0 ; - ; some layers stay in bf16
no-fp8-wgrad|disable-fp8-wgrad:fp8_wgrad ; 0 ; - ; weight gradients are computed in bf16
fp8-margin ; 1 ; 0 ; scales differ
fp8-interval ; 1 ; 1 ; scales are computed less often
fp8-amax-history-len ; 1 ; 1 ; scales differ, and their history is kept
fp8-amax-compute-algo ; 1 ; most_recent ; scales differ
moe-router-dtype ; 1 ; None,fp32 ; the router computes in another format
moe-router-padding-for-quantization ; 0 ; - ; tokens of experts are padded
moe-router-padding-for-fp8 ; 0 ; - ; tokens of experts are padded
moe-router-fusion ; 0 ; - ; the router takes fewer kernels
moe-permute-fusion ; 0 ; - ; the permutation of tokens takes fewer kernels
moe-router-force-load-balancing ; 0 ; - ; experts have equal loads, as in the prediction
moe-shared-expert-overlap ; 0 ; - ; shared experts hide a part of the all-to-all
moe-expert-capacity-factor ; 1 ; None,-1 ; tokens beyond the capacity are dropped; the prediction has equal loads
moe-pad-expert-input-to-capacity ; 0 ; - ; experts compute on padding
moe-token-drop-policy ; 1 ; probs ; tokens beyond the capacity are dropped
moe-use-legacy-grouped-gemm ; 0 ; - ; experts run other kernels
moe-apply-probs-on-input ; 0 ; - ; probabilities weight the experts' inputs
moe-flex-dispatcher-backend ; 1 ; deepep,None ; tokens are sent by another library
moe-deepep-num-sms ; 1 ; 20,None ; DeepEP takes another share of multiprocessors
moe-hybridep-num-sms ; 1 ; 16,None ; HybridEP takes another share of multiprocessors
moe-extended-tp ; 0 ; - ; tensor parallelism of experts extends over expert-parallel ranks
no-async-tensor-model-parallel-allreduce|\
disable-async-tensor-model-parallel-allreduce:async_tensor_model_parallel_allreduce ; 0 ; - ; \
gradients of inputs are reduced before weight gradients are computed
no-tp-comm-bulk-wgrad|disable-tp-comm-bulk-wgrad:tp_comm_bulk_wgrad ; 0 ; - ; fewer collectives overlap
no-tp-comm-bulk-dgrad|disable-tp-comm-bulk-dgrad:tp_comm_bulk_dgrad ; 0 ; - ; fewer collectives overlap
no-tp-comm-overlap-ag|disable-tp-comm-overlap-ag:tp_comm_overlap_ag ; 0 ; - ; fewer collectives overlap
no-tp-comm-overlap-rs|disable-tp-comm-overlap-rs:tp_comm_overlap_rs ; 0 ; - ; fewer collectives overlap
tp-comm-overlap-rs-dgrad ; 0 ; - ; another collective overlaps
no-tp-comm-split-ag|disable-tp-comm-split-ag:tp_comm_split_ag ; 0 ; - ; fewer collectives overlap
no-tp-comm-split-rs|disable-tp-comm-split-rs:tp_comm_split_rs ; 0 ; - ; fewer collectives overlap
delay-wgrad-compute ; 0 ; - ; weight gradients are computed later, to hide the all-to-all
ep-overlap-early-attn-memory-release ; 0 ; - ; memory is freed earlier
use-ring-exchange-p2p ; 0 ; - ; sends between stages run another kernel
no-overlap-p2p-communication:overlap_p2p_comm ; 0 ; - ; sends between stages are exposed
overlap-p2p-communication-warmup-flush:overlap_p2p_comm_warmup_flush ; 0 ; - ; \
sends between stages overlap in warm-up too
no-scatter-gather-tensors-in-pipeline:scatter_gather_tensors_in_pipeline ; 0 ; - ; \
sends between stages are whole on each tensor-parallel rank
defer-embedding-wgrad-compute ; 0 ; - ; the gradient of the logits' weight fills the pipeline's end
no-align-grad-reduce:align_grad_reduce ; 0 ; - ; pipeline ranks start their reductions at different times
no-align-param-gather:align_param_gather ; 0 ; - ; pipeline ranks start their gathers at different times
no-delay-grad-reduce:delay_grad_reduce ; 0 ; - ; pipeline ranks start their reductions at different times
delay-param-gather ; 0 ; - ; gathers of weights start later
overlap-param-gather-with-optimizer-step ; 0 ; - ; gathers of weights start during the optimizer step
ddp-num-buckets ; 1 ; None ; gradients have other buckets
ddp-bucket-size ; 1 ; None ; gradients have other buckets
ddp-pad-buckets-for-high-nccl-busbw ; 0 ; - ; buckets are padded
ddp-reduce-scatter-with-fp32-accumulation ; 0 ; - ; gradients are reduced in another order
ddp-average-in-collective ; 0 ; - ; gradients are averaged by the collective
no-gradient-reduce-div-fusion:gradient_reduce_div_fusion ; 0 ; - ; gradients are divided by a kernel of its own
use-nccl-ub:nccl_ub ; 0 ; - ; NCCL's buffers are registered
disable-symmetric-registration ; 0 ; - ; NCCL's buffers are registered otherwise
fsdp-manual-registration ; 0 ; - ; NCCL's buffers are registered
use-sharp ; 0 ; - ; switches reduce gradients
sharp-enabled-group ; 1 ; None ; switches reduce gradients
symmetric-ar-type ; 1 ; None ; all-reduce runs another kernel
fsdp-double-buffer ; 0 ; - ; gathered weights have two buffers
suggested-communication-unit-size ; 1 ; None ; weights are gathered in other units
no-clone-scatter-output-in-embedding|\
disable-clone-scatter-output-in-embedding:clone_scatter_output_in_embedding ; 0 ; - ; \
the embedding's output is freed later
enable-cuda-graph ; 0 ; - ; the host launches fewer kernels, and graphs take memory
external-cuda-graph ; 0 ; - ; the host launches fewer kernels, and graphs take memory
cuda-graph-impl ; 1 ; none,None ; the host launches fewer kernels, and graphs take memory
cuda-graph-scope ; + ; full,full_iteration,[] ; graphs hold other parts of a step
cp-comm-type ; + ; p2p,['p2p'],None ; context-parallel ranks exchange by other collectives
hierarchical-context-parallel-sizes ; + ; None ; context-parallel ranks exchange in two levels
reset-position-ids ; 0 ; - ; positions restart at each document
reset-attention-mask ; 0 ; - ; documents do not attend to each other, which takes a mask
rerun-mode ; 1 ; validate_results,disabled ; a step may run twice
sft ; 0 ; - ; sequences are padded or packed, so that a step has other tokens
glu-linear-offset ; 1 ; 0.0 ; the gated activation has an offset
activation-func-clamp-value ; 1 ; None ; the activation is clamped
"""
REFUSED = """
optimizer ; 1 ; adam,adamw,fusedadamw ; only Adam is modelled, with its two moments
batch-size ; 1 ; None ; Megatron-LM has dropped it: use --micro-batch-size
model-parallel-size ; 1 ; None ; Megatron-LM has dropped it: use --tensor-model-parallel-size
warmup ; 1 ; None ; Megatron-LM has dropped it: use --lr-warmup-fraction
decoder-num-layers ; 1 ; None ; an encoder-decoder is not read
pipeline-model-parallel-split-rank ; 1 ; None ; an encoder-decoder is not read
encoder-tensor-model-parallel-size ; 1 ; 0 ; an encoder-decoder is not read
encoder-pipeline-model-parallel-size ; 1 ; 0 ; an encoder-decoder is not read
use-legacy-models ; 0 ; - ; models from before megatron-core are not modelled
is-hybrid-model ; 0 ; - ; layers of Mamba among those of attention are not read
hybrid-override-pattern ; 1 ; None ; layers of Mamba among those of attention are not read
experimental-attention-variant ; 1 ; None ; this attention is not read
linear-attention-freq ; 1 ; None ; linear attention is not read
heterogeneous-layers-config-path ; 1 ; None ; layers of a file are not read
heterogeneous-layers-config-encoded-json ; 1 ; None ; layers of a file are not read
spec ; * ; None ; a module of its own builds the layers
mrope-section ; + ; None ; positions of images are not read
apply-residual-connection-post-layernorm ; 0 ; - ; residuals after the norm are not modelled
qk-l2-norm ; 0 ; - ; a norm of queries and keys without weights is not modelled
qk-clip ; 0 ; - ; clipping of queries and keys is not modelled
attention-output-gate ; 0 ; - ; a gate after attention is not read
moe-shared-expert-gate ; 0 ; - ; a gate of the shared expert is not read
moe-latent-size ; 1 ; None ; experts of another width than the hidden state are not read
moe-enable-routing-replay ; 0 ; - ; a replay of routing is not modelled
mtp-standalone ; 0 ; - ; a stage for multi-token prediction alone is read from --pipeline-model-parallel-layout only
distribute-saved-activations ; 0 ; - ; inputs of recomputed layers that tensor-parallel ranks share are not modelled
cpu-offloading-num-layers ; 1 ; 0 ; activations in the memory of the host are not modelled
fine-grained-activation-offloading ; 0 ; - ; activations in the memory of the host are not modelled
optimizer-cpu-offload ; 0 ; - ; an optimizer on the host is not modelled
use-torch-optimizer-for-cpu-offload ; 0 ; - ; an optimizer on the host is not modelled
no-pin-cpu-grads:pin_cpu_grads ; 0 ; - ; an optimizer on the host is not modelled
no-pin-cpu-params:pin_cpu_params ; 0 ; - ; an optimizer on the host is not modelled
use-torch-fsdp2 ; 0 ; - ; PyTorch's FSDP2 under Megatron-LM is not modelled
torch-fsdp2-no-reshard-after-forward:torch_fsdp2_reshard_after_forward ; 0 ; - ; \
PyTorch's FSDP2 under Megatron-LM is not modelled
outer-dp-sharding-strategy ; 1 ; no_shard ; optimizer state that replicas share is not modelled
enable-full-sharding-in-hsdp ; 0 ; - ; state that replicas share is not modelled
hybrid-context-parallel ; 0 ; - ; sequences of different context parallelism are not modelled
max-seqlen-per-dp-cp-rank ; 1 ; None ; sequences of different context parallelism are not modelled
use-kitchen-attention ; 0 ; - ; attention of an experimental library is not modelled
kitchen-config-file ; 1 ; None ; formats of an experimental library are not modelled
kitchen-recipe-number ; 1 ; None ; formats of an experimental library are not modelled
te-precision-config-file ; 1 ; None ; formats of a file are not read
fp8-quantizer-factory ; 1 ; None ; a format of its own is not modelled
fp4-quantizer-factory ; 1 ; None ; a format of its own is not modelled
perform-rl-step ; 0 ; - ; steps of reinforcement learning are not modelled
save-wgrads-interval ; 1 ; None ; gradients are written to files
save-dgrads-interval ; 1 ; None ; gradients are written to files
standalone-embedding-stage ; 0 ; - ; a stage for the embedding alone is not read
retro-add-retriever ; 0 ; - ; retrieval models are not read
"""
JUDGED: tuple[Flag, ...] = (*judged(Effect.LITTLE, LITTLE), *judged(Effect.REFUSED, REFUSED))
