"""Profiles of the frameworks of published runs. Plans are not made with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaloom.planner.cost.profiles.flag_features import (
    COMPILED_LOSS,
    DEEPSPEED_BF16_OPTIMIZER,
    DEEPSPEED_FP16_OPTIMIZER,
    DEEPSPEED_PIPELINE,
    FP16_GRADIENTS,
    FUSED_LOSS,
    NO_WGRAD_FUSION,
    UNFUSED_ATTENTION,
)
from megaloom.planner.cost.profiles.frameworks import EAGER, MEGATRON
from megaloom.planner.cost.profiles.groups import FrameworkProfile, compose

from .features import (
    NANOTRON_LOSS,
    NO_OVERLAP_BUFFERS,
    ONLY_TENSOR_OVERLAP,
    SCATTERED_SENDS,
    SLOW_MEMORY_KERNELS,
)
from .sharded_features import (
    COMPILED_BLOCKS,
    COMPOSER_KERNELS,
    FLASH_ATTENTION_2_HOPPER,
    FLAT_PARAMETERS,
    FUSED_STEP,
    REPEATED_KEYS,
    TITAN_LOSS,
    TORCH_TENSOR_PARALLEL,
)

MEGATRON_CORE = compose("megatron-core", [NO_OVERLAP_BUFFERS], MEGATRON)
MEGATRON_LM_TUNED = compose("megatron-lm-tuned", [SLOW_MEMORY_KERNELS, ONLY_TENSOR_OVERLAP], MEGATRON_CORE)
NEMO = compose("nemo", [COMPILED_LOSS], MEGATRON_LM_TUNED)  # NeMo 2, gpt/model/base.py: cross_entropy_loss_fusion
MEGATRON_BRIDGE = compose("megatron-bridge", [FUSED_LOSS], MEGATRON_CORE)
MEGATRON_LM_TESTS = compose("megatron-lm-tests", [NO_WGRAD_FUSION], MEGATRON)
MEGATRON_2021 = compose("megatron-lm-2021", [UNFUSED_ATTENTION, SCATTERED_SENDS])
DEEPSPEED_FP16 = compose("deepspeed-fp16", [DEEPSPEED_PIPELINE, DEEPSPEED_FP16_OPTIMIZER], MEGATRON_2021)
DEEPSPEED_BF16 = compose("deepspeed-bf16", [DEEPSPEED_PIPELINE, DEEPSPEED_BF16_OPTIMIZER], MEGATRON_2021)
NANOTRON = compose("nanotron", [NANOTRON_LOSS], EAGER)
LLM_FOUNDRY = compose("llm-foundry", [COMPOSER_KERNELS, FLAT_PARAMETERS], EAGER)
TORCHTITAN = compose("torchtitan", [FLASH_ATTENTION_2_HOPPER, REPEATED_KEYS, TITAN_LOSS, TORCH_TENSOR_PARALLEL], EAGER)
FMS_FSDP = compose("fms-fsdp", [TITAN_LOSS, FLAT_PARAMETERS], EAGER)
LLAMA_3 = compose("llama-3", [COMPILED_BLOCKS, FUSED_STEP], EAGER)
AUTOMODEL = compose("automodel", [NO_WGRAD_FUSION], MEGATRON_CORE)
METASEQ = compose("metaseq", [FP16_GRADIENTS], MEGATRON_2021)
# Frameworks with other kernels than Megatron's; a plan's interval is that of Megatron's.
OTHER_KERNELS = frozenset(p.name for p in (NANOTRON, LLM_FOUNDRY, TORCHTITAN, FMS_FSDP, LLAMA_3, AUTOMODEL, METASEQ))
PUBLISHED: Mapping[str, FrameworkProfile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            MEGATRON_CORE,
            MEGATRON_LM_TUNED,
            NEMO,
            MEGATRON_BRIDGE,
            MEGATRON_LM_TESTS,
            MEGATRON_2021,
            DEEPSPEED_FP16,
            DEEPSPEED_BF16,
            NANOTRON,
            LLM_FOUNDRY,
            TORCHTITAN,
            FMS_FSDP,
            LLAMA_3,
            AUTOMODEL,
            METASEQ,
        )
    }
)
