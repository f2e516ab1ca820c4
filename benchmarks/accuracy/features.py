"""Features: named parts of a framework's behaviour, each with its figures.

A framework profile is a base with features applied in order. Published runs name their base and their features.
`FEATURES` has all of them by name, with those of `kernel_features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.cost.profiles import flag_features
from megaloom.planner.cost.profiles.figures import Figure, coded, fitted
from megaloom.planner.cost.profiles.groups import ONE_PASS, Feature
from megaloom.planner.cost.profiles.kernel_features import (
    ENGINE_KERNELS,
    MEGALOOM_KERNELS,
    SWIGLU_PASSES,
    TORCH_KERNELS,
)

from . import sharded_features

# Software before Megatron-Bridge.
SLOW_MEMORY_KERNELS = Feature(
    name="slow-memory-kernels",
    kernels={
        "memory_passes": {
            **dict.fromkeys(
                ("normalize", "pointwise", "rope"), fitted((2.25, 2.25), "NeMo and Megatron-LM on H100 before 2025")
            ),
            "expert gate": Figure(
                SWIGLU_PASSES.value,
                SWIGLU_PASSES.kind,
                f"{SWIGLU_PASSES.source}; the router weights the experts' outputs, not their gates",
            ),
        }
    },
)
ONLY_TENSOR_OVERLAP = Feature(
    name="only-tensor-overlap",
    overlap={
        "supported": coded(
            (Overlap.TENSOR,), "megatron-core before 0.14, transformer/moe/README.md: no overlap of experts' all-to-all"
        )
    },
)
NO_OVERLAP_BUFFERS = Feature(
    name="no-overlap-buffers",
    buffers={
        "tensor_overlap_buffers": fitted(
            False,
            "published runs do not say which GEMMs overlap; with buffers for all of them, two layouts that ran would "
            "exceed the memory by 1 %",
        )
    },
)

# CUDA graphs.
BLOCKING_LAUNCHES = Feature(
    name="blocking-launches",
    host={
        "blocking_launches": coded(
            True,
            "CUDA_LAUNCH_BLOCKING=1 in BLOOM's runs on 320 GPUs and more (github.com/bigscience-workshop/bigscience, "
            "train/tr11-176B-ml/tr11-176B-ml.slurm)",
        )
    },
)

# Experts and attention.
FUSED_EXPERTS = Feature(
    name="fused-experts",
    kernels={
        "memory_passes": {
            "expert gate": coded(
                (0.0, 0.0),
                "NVTE_CUTEDSL_FUSED_GROUPED_MLP: grouped GEMMs also gate, add biases and cast "
                "(github.com/NVIDIA-NeMo/Megatron-Bridge/releases/tag/v0.5.1)",
            ),
            "expert bias": coded(
                ONE_PASS, "github.com/NVIDIA/TransformerEngine/pull/2885: bias gradients are summed by another kernel"
            ),
        }
    },
    experts={
        "separate_casts": coded(
            0.5, "the input of the first GEMM and the gradient into the second are cast by kernels of their own"
        )
    },
)

# Megatron-LM's functional tests.
FLASH_ATTENTION = Feature(
    name="flash-attention",
    attention={"output_copied": coded(True, "flash-attn: the output has the batch first and is copied to our order")},
)
TWO_OPTIMIZER_INSTANCES = Feature(
    name="two-optimizer-instances",
    optimizer={
        "extra_shard_nbytes": coded(
            12, "--num-distributed-optimizer-instances 2: the state is sharded over half of the copies"
        )
    },
)

# Megatron-LM of 2021, DeepSpeed and nanotron.
SCATTERED_SENDS = Feature(
    name="scattered-sends",
    overlap={
        "scattered_sends": coded(
            True,
            "Narayanan et al., arXiv:2104.04473, section 4.1; DeepSpeed, runtime/pipe/engine.py: is_pipe_partitioned",
        )
    },
)
NANOTRON_LOSS = Feature(
    name="nanotron-loss",
    kernels={
        "loss_saved_nbytes": coded(
            3 * 4,
            "nanotron, models/llama.py: cast_to_fp32, and parallel/tensor_parallel/functional.py: an fp32 copy, less "
            "its maximum, and its exponential",
        )
    },
    attention={"values_share_qkv": coded(False, "nanotron, models/llama.py")},
    optimizer={"extra_weight_nbytes": coded(2, "nanotron: 16-bit gradients beside their fp32 sums")},
)

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        feature.name: feature
        for feature in (
            *(TORCH_KERNELS, MEGALOOM_KERNELS, ENGINE_KERNELS),
            *vars(flag_features).values(),
            *globals().copy().values(),
            *vars(sharded_features).values(),
        )
        if isinstance(feature, Feature)
    }
)
