"""How a framework runs a layout: what it fuses, how much an overlap hides, in which numbers it sums gradients.

A layout says where a model goes, a profile how that is done. `OWN` is our runtime's, for which plans are made; the
others are those of published runs, so that what is predicted can be compared with what others measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from attrs import evolve, field, frozen

from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, Overlap
from megaloom.planner.contract.workload import Runtime

Passes = Mapping[str, tuple[float, float]]
"""How often memory-bound work passes memory where the facts count one kernel, forward and backward."""
ONCE = (1.0, 1.0)
# Measured on an H200 (Llama 3.2 1B, sequences of 4096: 0.685 s for 8 of them one at a time, 1.183 s for 16 four at a
# time): norms do so twice, rotary positions six times (a row of uncompiled kernels), other chains, which are compiled
# there, three times. To add a 16-bit gradient to the fp32 one takes 1.7 times as long as its bytes (47 ms, not 27,
# layers of Mixtral 8x7B).
_CHAIN = dict.fromkeys(("pointwise", "gate", "expert gate", "drop"), (3.0, 3.0))
TORCH: Passes = MappingProxyType({**_CHAIN, "normalize": (2.0, 2.0), "rope": (6.0, 6.0), "gradient": (1.0, 1.7)})
# Where norms, activations, rotary positions and residuals are one kernel each.
FUSED: Passes = MappingProxyType({})
# megatron-core's SwiGLU takes 1.57 to 1.63 times as long as one kernel ahead, both ways 2.46 to 2.66 times, on an H100
# (github.com/linkedin/Liger-Kernel/pull/1326, megatron-core 0.16.1): 5 tensors moved, not 3, and back 15.7, not 5.
GATE = (1.6, 3.5)
# That of experts is also weighted by the router, in fp32 (fusions/fused_bias_swiglu.py: weighted_swiglu, 11 tensors of
# 16 bits, and back, if the half of its operations is fused as there, 35).
EXPERT_GATE = (3.7, 7.8)
# megatron-core's all-to-all sorts what it has received by local experts, and back (transformer/moe/token_dispatcher.py:
# permute 1 + k, sort k + k, of k copies of a token, each way). The bias of the experts' second product is added in
# fp32 in pieces that are joined again (transformer/moe/experts.py, TEGroupedMLP._apply_bias: 28 bytes an element
# forward, where one kernel moves 4, and 40 backward), and before gates of such experts work both of their halves are
# clamped and joined by kernels of their own (fusions/fused_bias_geglu.py: 16 and 30 bytes, and 14 more both ways for
# what QuickGELU has more operations than SiLU).
TRANSFORMER_ENGINE: Passes = MappingProxyType(
    {"route": (2.6, 2.6), "combine": (2.6, 2.6), "gate": GATE, "expert gate": EXPERT_GATE, "expert bias": (14.0, 14.0)}
)
# What sends a token once sorts it by experts only where it has come: of 8 copies 7 come, between 32 devices and more,
# and are read to write 8, where the facts count 1 to 8 (megatron-core 0.16.1, transformer/moe/fused_a2a.py: dispatch
# with permutation); and back.
SENT_ONCE: Passes = MappingProxyType({"route": (1.7, 1.7), "combine": (1.7, 1.7)})
# From the NeMo container 26.06 on, products of 8 bits by several experts also gate, add biases, and cast what they give
# (cuDNN's CuTeDSL kernels, NVTE_CUTEDSL_FUSED_GROUPED_MLP: github.com/NVIDIA-NeMo/Megatron-Bridge/releases/tag/v0.5.1);
# the gradients of biases are summed apart (github.com/NVIDIA/TransformerEngine/pull/2885).
FUSED_EXPERTS: Passes = MappingProxyType({**TRANSFORMER_ENGINE, "expert gate": (0.0, 0.0), "expert bias": ONCE})
FUSED_CASTS = 0.5  # what comes to the first product, and the gradient that comes to the second, are cast before
# NVIDIA's software before Megatron-Bridge takes longer with what memory limits: fitted, on H100. It weights what
# experts have made, not their gates.
_SLOW = dict.fromkeys(("normalize", "pointwise", "rope"), (2.25, 2.25))
NEMO: Passes = MappingProxyType({**TRANSFORMER_ENGINE, **_SLOW, "expert gate": GATE})

# Bytes that a step moves for each element of the optimizer's share, beside the zeroing of gradients. The norm of the
# gradient reads 4, its scaling moves 8. AdamW as torch's foreach kernels do it, a pass for each operation: decay 8,
# first moment 12, second moment 8 + 12, root 8, division 8, epsilon 8, update 16. Fused, each of gradient, weight and
# two moments is read once, and all but the gradient written.
FOREACH, ONE_KERNEL = 4 + 8 + 80, 4 + 8 + 28


# Of tensor-parallel collectives, what Transformer Engine's overlap with products hides, less what it takes from these;
# and of the experts' all-to-all, what the overlap with another micro-batch does, which takes multiprocessors besides
# (`traffic.taken`). Fitted: published runs that overlap.
HIDDEN_TENSOR, HIDDEN_EXPERTS = 0.8, 0.55


# Without a fused kernel each score is kept thrice: softmaxed, its dropout's mask, dropped (Korthikanti et al.,
# arXiv:2205.05198, section 4.1).
SCORES = 2 + 1 + 2


class Way(StrEnum):
    """How attention over a divided sequence gets all keys and values: see `context`."""

    ALL_GATHER = "all-gather"
    P2P = "p2p"
    ALL_TO_ALL = "all-to-all"


@frozen(kw_only=True)
class FrameworkProfile:
    """What a framework does beside the layout. Shares are of the seconds that would be exposed otherwise."""

    name: str
    flash: bool = True  # attention is one kernel, which stores no scores
    score_nbytes: int = SCORES  # kept of each score, where it is not
    passes: Passes = field(default=FUSED, hash=False)
    adam_nbytes: int = ONE_KERNEL  # moved for each element of the optimizer's share
    gradient_nbytes: int = 4  # of an element of the main gradient
    loss_nbytes: int = 14  # moved for each logit by the loss and its gradient
    loss_copies: int = 4  # bytes that the loss keeps of each logit of 16 bits: an fp32 copy, in which it works
    context: Way = Way.ALL_GATHER
    inner: tuple[Overlap, ...] = ()  # what of a micro-batch's exchanges it can overlap with computation
    expert_casts: float = 1.0  # of the casts of experts' operands, the share that are kernels of their own
    hidden_tensor: float = HIDDEN_TENSOR  # of tensor-parallel collectives, where they overlap
    exchange_buffers: bool = True  # where these overlap, each product that exchanges has a buffer for it
    hidden_experts: float = HIDDEN_EXPERTS  # of the experts' all-to-all, where it does
    once: bool = False  # a token is sent once to each node with experts of its own, and copied there
    libraries: int = 2  # callers of cuBLAS, each with a workspace of its own: the threads of both passes
    engine: bool = False  # Transformer Engine, which has a workspace too
    streams: int = 0  # on which it multiplies by several experts at once, each with a workspace
    dummies: bool = False  # of each product's weight a tensor is held in place of its gradient, which is summed fused
    step_nbytes: int = 0  # of each element of the optimizer's share, held while it steps
    weight_nbytes: int = 0  # of an element of a weight, if not those of the precision
    moment_nbytes: int = 4  # of an element of each of Adam's two moments
    share_nbytes: int = 0  # and held throughout, beside its state
    beside_nbytes: int = 0  # of each element, held throughout beside weight and main gradient
    buffers_nbytes: int = 0  # held throughout, whatever is trained
    scattered: bool = False  # tensor-parallel ranks send each a part to the next stage, of what all have
    outputs: bool = False  # a micro-batch in flight keeps what its stage has put out as well
    copied: bool = False  # what attention gives of several sequences has them first, and is kept in our order as well
    joined: bool = False  # values stay a part of one tensor with queries and keys, all of which is kept for them
    eager: bool = False  # of gated units SwiGLU alone is one kernel
    graphed: bool = False  # CUDA graphs: small kernels wait for no host
    pools: float = 0.0  # of what is saved, that a graph of the whole iteration holds more
    blocking: bool = False  # a kernel is launched when the one before has ended
    padded: bool = False  # each expert gets as many tokens as any other: the host knows all numbers, and goes ahead
    launches: float = 1.0  # that the host could have made while the program of the layers makes one
    dispatch_seconds: float = 0.0  # that a layer of experts waits for the host, each way
    expert_seconds: float = 0.0  # that it waits for the host for each expert, forward; backward twice as long
    small_expert_seconds: float | None = None  # for each of those that are computed together, if small ones are


# torch's kernels one by one, as an H200 runs them (benchmarks/steps.py, benchmarks/kernels.py).
EAGER = FrameworkProfile(
    name="torch, kernel by kernel",
    passes=TORCH,
    launches=1.25,  # 18 us a kernel: steps of one short sequence
    adam_nbytes=FOREACH,
    loss_nbytes=70,  # megatron-core's, of logits that were cast to fp32: 8.7 ms for 4096 x 128256
    step_nbytes=4,  # the root of the second moment (torch.optim, _multi_tensor_adamw)
    eager=True,
    joined=True,  # megatron-core without Transformer Engine (transformer/attention.py: torch.split)
)
# By the profiles of steps of Llama 3.2 1B and GPT-3 1.3B there: gates and rotary positions are compiled, the former in
# fp32 back; of other chains residuals pass once, biases before a GELU twice.
COMPILED: Passes = MappingProxyType(
    {**TORCH, **dict.fromkeys(("gate", "expert gate"), (1.0, 2.0))}
    | {"pointwise": (1.5, 1.5), "normalize": (1.7, 2.6), "rope": (1.3, 1.4)}
)
OWN = evolve(
    EAGER,
    name="megaloom",
    passes=COMPILED,
    launches=1.75,  # those that are left wait longer: 24 us
    loss_nbytes=10,  # logits are read twice, and again as the gradient is written: 1.2 ms
    loss_copies=2,  # the gradient is there beside them
    expert_seconds=0.3e-3,  # each is a module of its own (layers of Mixtral 8x7B)
    small_expert_seconds=0.055e-3,  # of one kernel's products: four layers of Qwen3 30B A3B, 0.232 s for 8,192 tokens
)
# Not measured alone: what runs of models with experts took longer than their work, by layer and way, on H100 and GB300
# where no CUDA graph hides the host, and where one hides all but the counting of tokens (see `megaloom validate`).
DISPATCH, DISPATCH_GRAPHED = 1.1e-3, 0.2e-3
# Each expert's two products and the casts before them are launched by the host: four kernels ahead, eight back.
EACH_EXPERT = 4 * 5e-6
# With fused sums of gradients, which are Megatron-LM's default, a tensor stands for each of them
# (transformer_engine/pytorch/module/base.py: get_dummy_wgrad).
MEGATRON = FrameworkProfile(
    name="Megatron-core with Transformer Engine",
    passes=TRANSFORMER_ENGINE,
    dispatch_seconds=DISPATCH,
    expert_seconds=EACH_EXPERT,
    engine=True,
    streams=4,
    dummies=True,
    context=Way.P2P,
    inner=tuple(MICROBATCH_OVERLAPS),
)
PROFILES: Mapping[Runtime, FrameworkProfile] = MappingProxyType({Runtime.MEGALOOM: OWN, Runtime.MEGATRON: MEGATRON})
# Between stages each rank sends its part (Narayanan et al., arXiv:2104.04473, section 4.1; DeepSpeed's PipelineEngine
# likewise, runtime/pipe/engine.py: is_pipe_partitioned).
MEGATRON_2021 = FrameworkProfile(name="Megatron-LM before flash attention", flash=False, scattered=True)
# DeepSpeed's ZeRO 1 of early 2022: buckets of 5e8 elements to reduce and to gather; pipeline buffers keep outputs
# (runtime/config.py, runtime/pipe/engine.py). In fp16 gradients are of 16 bits, and the step makes a flat copy of its
# share in 16 bits and one in 32, for which no freed activation has room (runtime/zero/stage_1_and_2.py). In bf16 they
# are of 16 bits and summed in 32, and what weights were before they became one flat tensor stays with the allocator
# (runtime/bf16_optimizer.py).
DEEPSPEED_FP16 = evolve(
    MEGATRON_2021,
    name="Megatron-DeepSpeed, fp16",
    gradient_nbytes=2,
    share_nbytes=2 + 4,
    buffers_nbytes=2 * 2 * 500_000_000,
    outputs=True,
)
DEEPSPEED_BF16 = evolve(
    DEEPSPEED_FP16, name="Megatron-DeepSpeed, bf16", gradient_nbytes=4, share_nbytes=0, beside_nbytes=2 + 2
)
# Of each logit nanotron has an fp32 copy, that less its maximum, and its exponential (models/llama.py, cast_to_fp32;
# parallel/tensor_parallel/functional.py), and each gradient in 16 bits beside its sum in 32.
NANOTRON = evolve(EAGER, name="nanotron", loss_copies=3 * 4, beside_nbytes=2, joined=False)
