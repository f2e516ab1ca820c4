"""Features: named parts of a framework's behaviour, each with its figures.

A framework profile is a base with features applied in order. Published runs name their base and their features.
`FEATURES` has all of them by name, with those of `kernel_features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.cost.profiles.figures import Figure, coded, fitted
from megaloom.planner.cost.profiles.groups import ONE_PASS, ContextCommunication, Feature
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
FUSED_LOSS = Feature(
    name="fused-loss",
    kernels={
        "loss_saved_nbytes": coded(0, "transformer_engine, triton/cross_entropy.py: computes in place of the logits")
    },
)

# Numbers of gradients, weights and moments.
GRADIENTS_16 = Feature(
    name="16-bit-gradients",
    optimizer={
        "gradient_nbytes": coded(2, "grad_sync_dtype and grad_reduce_in_fp32 of NeMo's and Megatron-Bridge's recipes")
    },
)
WEIGHTS_8 = Feature(
    name="8-bit-weights",
    optimizer={
        "weight_nbytes": coded(
            1,
            "fp8_param_gather of NVIDIA's recipes; Blackwell needs no transposed copy beside "
            "(transformer_engine/pytorch/utils.py: is_non_tn_fp8_gemm_supported)",
        )
    },
)
MOMENTS_16 = Feature(
    name="16-bit-moments",
    optimizer={
        "moment_nbytes": coded(
            2,
            "Megatron-Bridge, recipes/deepseek/deepseek_v3.py: exp_avg_dtype and exp_avg_sq_dtype are bfloat16",
        ),
        "copies_bf16_gradients": coded(
            False,
            "megatron-core 0.16.1, optimizer/distrib_optimizer.py:2417: the optimizer of such moments reads them as is",
        ),
    },
)

# CUDA graphs.
LAYER_GRAPHS = Feature(
    name="layer-graphs",
    kernels={"cuda_graphs": coded(True, "--cuda-graph-impl of parts of a layer")},
    experts={"dispatch_seconds": fitted(0.2e-3, "published MoE runs with CUDA graphs: the host still counts tokens")},
)
ITERATION_GRAPHS = Feature(
    name="iteration-graphs",
    kernels={"cuda_graphs": coded(True, "--cuda-graph-impl of the whole iteration")},
    buffers={
        "graph_pool_share": fitted(
            32 / 77,
            "Hy3 in bf16 took 187 GB without graphs and 219 GB with a graph of the iteration, 77 GB of them saved "
            "activations; shares up to 0.43 let every published run with such a graph fit",
        )
    },
    experts={
        "dispatch_seconds": coded(0.0, "the host does not run between graph launches"),
        "launch_seconds": coded(0.0, "the host does not run between graph launches"),
    },
)
BLOCKING_LAUNCHES = Feature(
    name="blocking-launches",
    kernels={
        "blocking_launches": coded(
            True,
            "CUDA_LAUNCH_BLOCKING=1 in BLOOM's runs on 320 GPUs and more (github.com/bigscience-workshop/bigscience, "
            "train/tr11-176B-ml/tr11-176B-ml.slurm)",
        )
    },
)

# Experts and attention.
_ONE_PERMUTE = coded(
    (1.7, 1.7), "megatron-core 0.16.1, transformer/moe/fused_a2a.py: tokens are sorted by expert only on arrival"
)
DEDUPLICATED_DISPATCH = Feature(
    name="deduplicated-dispatch",
    kernels={"memory_passes": dict.fromkeys(("route", "combine"), _ONE_PERMUTE)},
    experts={"deduplicated_dispatch": coded(True, "--moe-flex-dispatcher-backend deepep or hybridep")},
)
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
PADDED_EXPERTS = Feature(
    name="padded-experts",
    experts={
        "padded_tokens": coded(
            True,
            "MegatronTokenDropCallback (NeMo 25.04 to 25.09, scripts/performance), apply_moe_token_drop "
            "(Megatron-Bridge 0.1)",
        )
    },
)
ULYSSES = Feature(
    name="ulysses",
    attention={"context_communication": coded(ContextCommunication.ALL_TO_ALL, "--cp-comm-type a2a")},
)

# Megatron-LM's functional tests.
NO_WGRAD_FUSION = Feature(
    name="no-wgrad-fusion",
    kernels={"wgrad_fusion": coded(False, "tests/functional_tests: --no-gradient-accumulation-fusion")},
)
UNFUSED_ATTENTION = Feature(
    name="unfused-attention",
    attention={
        "fused": coded(
            False,
            "Megatron-LM before FlashAttention; --attention-backend unfused; deterministic runs with dropout, for "
            "which only cuDNN on Hopper has a fused kernel (transformer_engine, dot_product_attention/utils.py)",
        )
    },
)
FLASH_ATTENTION = Feature(
    name="flash-attention",
    attention={"output_copied": coded(True, "flash-attn: the output has the batch first and is copied to our order")},
)
TORCH_SCORES = Feature(
    name="torch-scores",
    attention={
        "score_nbytes": coded(
            4 + 1 + 2, "--no-masked-softmax-fusion: fp32 softmax (megatron-core, fusions/fused_softmax.py)"
        )
    },
)
COMPILED_LOSS = Feature(
    name="compiled-loss",
    kernels={
        "loss_saved_nbytes": coded(
            4 + 4, "megatron-core, fusions/fused_cross_entropy.py: logits in fp32 and their exponentials"
        )
    },
)
UNGROUPED_EXPERTS = Feature(
    name="ungrouped-experts", buffers={"grouped_streams": coded(0, "without --moe-grouped-gemm")}
)
TWO_OPTIMIZER_INSTANCES = Feature(
    name="two-optimizer-instances",
    optimizer={
        "extra_shard_nbytes": coded(
            12, "--num-distributed-optimizer-instances 2: the state is sharded over half of the copies"
        )
    },
)
FP16_GRADIENTS = Feature(
    name="fp16-gradients",
    optimizer={
        "gradient_nbytes": coded(2, "Megatron-LM, arguments.py: gradients of --fp16 are summed in 16 bits"),
        "step_held_nbytes": coded(4, "Megatron-LM: the optimizer steps with an fp32 copy of the gradient"),
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
DEEPSPEED_PIPELINE = Feature(
    name="deepspeed-pipeline",
    buffers={
        "bucket_nbytes": coded(
            2 * 2 * 500_000_000, "DeepSpeed ZeRO 1 of early 2022, runtime/config.py: buckets of 5e8 elements"
        ),
    },
    saved={"stage_output": coded(True, "DeepSpeed, runtime/pipe/engine.py: pipeline buffers keep the outputs")},
)
DEEPSPEED_FP16_OPTIMIZER = Feature(
    name="deepspeed-fp16-optimizer",
    optimizer={
        "gradient_nbytes": coded(2, "DeepSpeed, runtime/zero/stage_1_and_2.py: gradients in 16 bits"),
        "extra_shard_nbytes": coded(
            2 + 4, "DeepSpeed, runtime/zero/stage_1_and_2.py: flat copies of the shard in 16 and 32 bits"
        ),
    },
)
DEEPSPEED_BF16_OPTIMIZER = Feature(
    name="deepspeed-bf16-optimizer",
    optimizer={
        "extra_weight_nbytes": coded(
            2 + 2,
            "DeepSpeed, runtime/bf16_optimizer.py: 16-bit gradients beside their fp32 sums, and the memory of the "
            "weights before they became one flat tensor",
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
            *globals().copy().values(),
            *vars(sharded_features).values(),
        )
        if isinstance(feature, Feature)
    }
)
