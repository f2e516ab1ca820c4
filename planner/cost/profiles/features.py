"""Features: named parts of a framework's behaviour, each with its figures.

A framework profile is a base with features applied in order. Published runs name their base and their features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, Overlap

from .figures import Figure, coded, fitted, measured
from .groups import ONE_PASS, ContextCommunication, Feature

_H200 = "benchmarks/steps.py and benchmarks/kernels.py on an H200"


def _each(names: Iterable[str], figure: Figure) -> dict[str, Figure]:
    return dict.fromkeys(names, figure)


# Kernels of torch.
TORCH_KERNELS = Feature(
    name="torch-kernels",
    kernels={
        "memory_passes": {
            **_each(
                ("pointwise", "gate", "expert gate", "drop"),
                measured((3.0, 3.0), f"{_H200}: compiled chains of pointwise kernels"),
            ),
            "normalize": measured((2.0, 2.0), f"{_H200}: Llama 3.2 1B, 4096 tokens a sequence"),
            "rope": measured((6.0, 6.0), f"{_H200}: a row of uncompiled kernels"),
            "gradient": measured(
                (1.0, 1.7),
                f"{_H200}: adding a 16-bit gradient to the fp32 one takes 47 ms, its bytes 27 ms (Mixtral 8x7B layers)",
            ),
        },
        "launch_factor": measured(1.25, f"{_H200}: 18 us a kernel in steps of one short sequence"),
        "loss_moved_nbytes": measured(
            70, f"{_H200}: megatron-core's loss on logits cast to fp32, 8.7 ms for 4096 x 128256"
        ),
        "only_swiglu_fused": coded(True, "megatron-core without Transformer Engine, fusions/"),
    },
    attention={
        "values_share_qkv": coded(
            True, "megatron-core without Transformer Engine, transformer/attention.py: torch.split of the QKV tensor"
        )
    },
    optimizer={
        "step_moved_nbytes": coded(
            4 + 8 + 80,
            "gradient norm reads 4, scaling moves 8; AdamW in torch's foreach kernels: decay 8, first moment 12, "
            "second moment 8 + 12, root 8, division 8, epsilon 8, update 16",
        ),
        "step_held_nbytes": coded(4, "torch.optim, _multi_tensor_adamw: the root of the second moment"),
    },
)
MEGALOOM_KERNELS = Feature(
    name="megaloom-kernels",
    kernels={
        "memory_passes": {
            **_each(
                ("gate", "expert gate"),
                measured(
                    (1.0, 2.0), f"{_H200}: profiles of Llama 3.2 1B and GPT-3 1.3B; compiled, fp32 in the backward"
                ),
            ),
            "pointwise": measured(
                (1.5, 1.5), f"{_H200}: residuals pass once, biases before a GELU twice (Llama 3.2 1B, GPT-3 1.3B)"
            ),
            "normalize": measured((1.7, 2.6), f"{_H200}: profiles of Llama 3.2 1B and GPT-3 1.3B"),
            "rope": measured((1.3, 1.4), f"{_H200}: compiled; profiles of Llama 3.2 1B and GPT-3 1.3B"),
        },
        "launch_factor": measured(1.75, f"{_H200}: 24 us a kernel; the kernels that remain wait longer"),
        "loss_moved_nbytes": measured(10, f"{_H200}: logits are read twice and their gradient is written, 1.2 ms"),
        "loss_saved_nbytes": coded(2, "the gradient is written beside the logits"),
    },
    experts={
        "launch_seconds": measured(0.3e-3, f"{_H200}: layers of Mixtral 8x7B, where each expert is a module"),
        "grouped_launch_seconds": measured(
            0.055e-3, f"{_H200}: four layers of Qwen3 30B A3B with grouped GEMMs, 0.232 s for 8,192 tokens"
        ),
    },
)

# Transformer Engine.
_GATE = measured(
    (1.6, 3.5),
    "github.com/linkedin/Liger-Kernel/pull/1326: megatron-core 0.16.1 on H100 takes 1.57 to 1.63 times a fused SwiGLU "
    "in the forward pass, 2.46 to 2.66 times in both",
)
_PERMUTE = coded(
    (2.6, 2.6),
    "megatron-core, transformer/moe/token_dispatcher.py: tokens are sorted by local expert after the all-to-all",
)
ENGINE_KERNELS = Feature(
    name="transformer-engine",
    kernels={
        "memory_passes": {
            **_each(("route", "combine"), _PERMUTE),
            "gate": _GATE,
            "expert gate": coded(
                (3.7, 7.8),
                "megatron-core, fusions/fused_bias_swiglu.py: weighted_swiglu moves 11 tensors of 16 bits in the "
                "forward pass and 35 in the backward pass",
            ),
            "expert bias": coded(
                (14.0, 14.0),
                "megatron-core, transformer/moe/experts.py, TEGroupedMLP._apply_bias: 28 bytes an element forward and "
                "40 backward, where a fused kernel moves 4; fusions/fused_bias_geglu.py: 16 and 30 bytes for clamps",
            ),
        },
        "wgrad_fusion": coded(
            True, "transformer_engine/pytorch/module/base.py: get_dummy_wgrad; Megatron-LM's default"
        ),
    },
    attention={"context_communication": coded(ContextCommunication.P2P, "Megatron-LM's default of --cp-comm-type")},
    buffers={
        "engine_workspace": coded(True, "transformer_engine/pytorch/module/base.py: get_workspace"),
        "grouped_streams": coded(4, "transformer_engine/pytorch/module/base.py: get_multi_stream_cublas_workspace"),
    },
    experts={
        "dispatch_seconds": fitted(
            1.1e-3, "published MoE runs on H100 and GB300 without CUDA graphs; not measured alone"
        ),
        "launch_seconds": coded(
            4 * 5e-6, "two GEMMs and the casts before them: four kernels forward and eight backward, 5 us each"
        ),
    },
    overlap={
        "supported": coded(
            tuple(MICROBATCH_OVERLAPS), "Megatron-LM: --tp-comm-overlap, --overlap-moe-expert-parallel-comm"
        )
    },
)
# Software before Megatron-Bridge.
SLOW_MEMORY_KERNELS = Feature(
    name="slow-memory-kernels",
    kernels={
        "memory_passes": {
            **_each(
                ("normalize", "pointwise", "rope"), fitted((2.25, 2.25), "NeMo and Megatron-LM on H100 before 2025")
            ),
            "expert gate": Figure(
                _GATE.value, _GATE.kind, f"{_GATE.source}; the router weights the experts' outputs, not their gates"
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
    optimizer={"moment_nbytes": coded(2, "Megatron-Bridge's recipes of DeepSeek-V3: exp_avg_dtype, exp_avg_sq_dtype")},
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
    kernels={"memory_passes": _each(("route", "combine"), _ONE_PERMUTE)},
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
    attention={"fused": coded(False, "--attention-backend unfused, or no deterministic fused kernel with dropout")},
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
        "stage_output_saved": coded(True, "DeepSpeed, runtime/pipe/engine.py: pipeline buffers keep the outputs"),
    },
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
    {value.name: value for value in list(globals().values()) if isinstance(value, Feature)}
)
