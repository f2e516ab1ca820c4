"""The profile of the framework as a run's flags set it: graphs, kernels, formats of weights and moments.

`FEATURES_OF_FLAGS` has for each feature the arguments that switch it on. These flags are then part of the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megaloom.planner.contract.workload import Runtime
from megaloom.planner.cost.profiles.flag_features import (
    COMPILED_LOSS,
    DEDUPLICATED_DISPATCH,
    DEEPSPEED_BF16_OPTIMIZER,
    DEEPSPEED_FP16_OPTIMIZER,
    DEEPSPEED_PIPELINE,
    FP16_GRADIENTS,
    FUSED_LOSS,
    GATHERS_16,
    ITERATION_GRAPHS,
    LAYER_GRAPHS,
    MOMENTS_16,
    NO_WGRAD_FUSION,
    PADDED_EXPERTS,
    TORCH_SCORES,
    ULYSSES,
    UNFUSED_ATTENTION,
    UNGROUPED_EXPERTS,
    WEIGHTS_8,
)
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.cost.profiles.groups import Feature, FrameworkProfile, compose

from .layers import has_experts
from .parser import Arguments

FlagCondition = Callable[[Arguments], bool]
WIDE = frozenset({"fp16", "bf16", "torch.float16", "torch.bfloat16"})


def _value(a: Arguments, dest: str) -> object:
    """Return the value of an argument that is no field of a run; None where it is not given."""
    return a.given[dest].value if dest in a.given else None


def _is(dest: str, *values: object) -> FlagCondition:
    return lambda a: _value(a, dest) in values


def _words(a: Arguments, dest: str) -> str:
    value = _value(a, dest)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _graphs(a: Arguments) -> bool:
    named = _value(a, "cuda_graph_impl") in ("local", "transformer_engine")
    return named or bool(_value(a, "enable_cuda_graph")) or bool(_value(a, "external_cuda_graph"))


def _whole_graph(a: Arguments) -> bool:
    return _graphs(a) and "full_iteration" in _words(a, "cuda_graph_scope")


def fp16_gradients(a: Arguments) -> bool:
    """Return whether gradients are as wide as fp16 weights; DeepSpeed's own optimizer has them so without ZeRO."""
    if a["deepspeed"]:
        return bool(a["fp16"]) and not a["zero_stage"]
    return bool(a["fp16"]) and not a["accumulate_allreduce_grads_in_fp32"]


_GRAPH_FLAGS = ("cuda_graph_impl", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph")
_DISPATCH_FLAGS = ("moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend")
_MOMENT_FLAGS = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
_PADDING_FLAGS = ("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor")
FEATURES_OF_FLAGS: tuple[tuple[Feature, tuple[str, ...], FlagCondition], ...] = (
    (LAYER_GRAPHS, _GRAPH_FLAGS, lambda a: _graphs(a) and not _whole_graph(a)),
    (ITERATION_GRAPHS, _GRAPH_FLAGS, _whole_graph),
    (
        COMPILED_LOSS,
        ("cross_entropy_loss_fusion",),
        lambda a: bool(_value(a, "cross_entropy_loss_fusion")) and _value(a, "cross_entropy_fusion_impl") != "te",
    ),
    (
        FUSED_LOSS,
        ("cross_entropy_loss_fusion",),
        lambda a: bool(_value(a, "cross_entropy_loss_fusion")) and _value(a, "cross_entropy_fusion_impl") == "te",
    ),
    (WEIGHTS_8, ("fp8_param_gather",), lambda a: bool(a["fp8"]) and bool(_value(a, "fp8_param_gather"))),
    (GATHERS_16, ("gathers_in_16_bits",), lambda a: bool(a["gathers_in_16_bits"])),
    (
        MOMENTS_16,
        _MOMENT_FLAGS,
        lambda a: (
            bool(_value(a, "use_precision_aware_optimizer"))
            and _value(a, "exp_avg_dtype") in WIDE
            and _value(a, "exp_avg_sq_dtype") in WIDE
        ),
    ),
    (FP16_GRADIENTS, ("fp16",), fp16_gradients),
    (NO_WGRAD_FUSION, ("gradient_accumulation_fusion",), _is("gradient_accumulation_fusion", False)),
    (
        UNFUSED_ATTENTION,
        ("attention_backend",),
        _is("attention_backend", "unfused", "local", "AttnBackend.unfused", "AttnBackend.local"),
    ),
    (
        TORCH_SCORES,
        ("masked_softmax_fusion",),
        lambda a: UNFUSED_ATTENTION in features(a, 9) and _value(a, "masked_softmax_fusion") is False,
    ),
    (ULYSSES, ("cp_comm_type",), lambda a: a["context_parallel_size"] > 1 and _words(a, "cp_comm_type") == "a2a"),
    (
        DEDUPLICATED_DISPATCH,
        _DISPATCH_FLAGS,
        lambda a: has_experts(a) and a["moe_token_dispatcher_type"] == "flex",
    ),
    (
        PADDED_EXPERTS,
        _PADDING_FLAGS,
        lambda a: (
            has_experts(a)
            and bool(_value(a, "moe_pad_expert_input_to_capacity"))
            and _words(a, "moe_expert_capacity_factor") in ("1", "1.0")
        ),
    ),
    (UNGROUPED_EXPERTS, ("moe_grouped_gemm",), lambda a: has_experts(a) and not a["moe_grouped_gemm"]),
    (DEEPSPEED_PIPELINE, ("deepspeed",), lambda a: bool(a["deepspeed"])),
    (DEEPSPEED_FP16_OPTIMIZER, ("deepspeed",), lambda a: bool(a["deepspeed"] and a["fp16"] and a["zero_stage"])),
    (DEEPSPEED_BF16_OPTIMIZER, ("deepspeed",), lambda a: bool(a["deepspeed"] and a["bf16"])),
)


def features(a: Arguments, first: int | None = None) -> tuple[Feature, ...]:
    """Return the features that the flags switch on. first: only so many rows of the table are looked at."""
    return tuple(feature for feature, _, holds in FEATURES_OF_FLAGS[:first] if holds(a))


def predicted_flags(a: Arguments) -> Iterator[str]:
    """Yield the arguments that the profile has, which a prediction therefore does not leave out."""
    on = features(a)
    for feature, dests, _ in FEATURES_OF_FLAGS:
        if feature in on:
            yield from dests


def framework_profile(a: Arguments) -> FrameworkProfile:
    """Return the profile of Megatron-core with Transformer Engine with the features of the flags."""
    usual, on = PROFILES[Runtime.MEGATRON], features(a)
    return compose(usual.name, on, usual) if on else usual
