"""Features of the kernels that plans are made for: torch's, those of our runtime, and Transformer Engine's."""

from __future__ import annotations

from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS

from .figures import coded, fitted, measured
from .groups import ContextCommunication, Feature

_H200 = "benchmarks/steps.py and benchmarks/kernels.py on an H200"
_H100 = "profiles of DeepSeek-V3 and GPT-OSS layers on an H100, torch 2.11, 2026-11-23"
_HOST = "GPT-2 and eight layers of 512 channels on an H200, torch 2.11, megatron-core 0.19.2, 2026-11-28"
_BESIDE = "two H100, torch 2.11 (cuBLAS 13), NCCL 2.28 with 24 channels, 2026-11-27"
_SUMS = "one kernel reads all copies of tokens once and writes their sums"


# Kernels of torch.
NATIVE_LOSS = measured(70, f"{_H200}: megatron-core's loss on logits cast to fp32, 8.7 ms for 4096 x 128256")
TORCH_KERNELS = Feature(
    name="torch-kernels",
    kernels={
        "memory_passes": {
            **dict.fromkeys(
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
        "loss_moved_nbytes": NATIVE_LOSS,
        "only_swiglu_fused": coded(True, "megatron-core without Transformer Engine, fusions/"),
    },
    host={"launch_factor": measured(1.25, f"{_H200}: 18 us a kernel in steps of one short sequence")},
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
            **dict.fromkeys(
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
            "route": coded((1.8, 0.7), f"{_H100}: tokens are gathered; runtime/modules/permutation.py: {_SUMS}"),
            "combine": coded((1.0, 1.2), f"runtime/modules/permutation.py: {_SUMS}; {_H100}: gradients are gathered"),
        },
        "loss_moved_nbytes": measured(
            10,
            f"{_H200}: 1.2 ms for 4096 x 128256; logits are read twice, and once more as their gradient is written",
        ),
        "loss_saved_nbytes": coded(2, "the gradient is written beside the logits"),
        "wgrad_fusion": coded(True, "runtime/megatron/fused_gradients.py"),
    },
    host={
        "launch_factor": measured(3.5, f"{_HOST}: 46 us a kernel, which takes 13.2 us alone"),
        "step_launches": measured(
            600, f"{_HOST}: 13.5 ms of a step of such models; 9.5 ms of one of four layers of Llama 3 8B are idle"
        ),
    },
    narrow={
        "keeps_weight_copies": coded(
            True, "Transformer Engine 2.12, module/base.py, get_weight_workspace: cached for `is_first_microbatch`"
        )
    },
    buffers={"kept_stand_ins": coded(False, "runtime/megatron/fused_gradients.py: a stand-in is freed at once")},
    experts={
        "launch_seconds": measured(0.3e-3, f"{_H200}: layers of Mixtral 8x7B, where each expert is a module"),
        "grouped_launch_seconds": measured(
            0.055e-3, f"{_H200}: four layers of Qwen3 30B A3B with grouped GEMMs, 0.232 s for 8,192 tokens"
        ),
    },
    optimizer={
        "step_moved_nbytes": coded(4 + 8 + 28, "gradient norm reads 4, scaling moves 8; torch.optim.AdamW(fused=True)"),
        "step_held_nbytes": coded(0, "torch.optim, _fused_adamw: in place"),
    },
    sharded_weights={
        "lost_speed": measured(
            1 / 3,
            f"{_BESIDE}: products of Llama 3 8B beside all-gathers and reduce-scatters reach 0.67 of their speed with "
            "2,048 tokens (they take 1.25 to 1.9 times as long), 0.76 with 4,096, and 0.82 with 8,192, where a "
            "collective waits longer for the end of a product, so that it delays them as much in all",
        ),
        "stretch": measured(
            1.5,
            f"{_BESIDE}, a step of Llama 3 8B with 2,048 tokens: an all-gather of 436 MB takes 1.29 ms and a "
            "reduce-scatter of 872 MB 2.55; alone they take 0.87 and 1.66",
        ),
        "frees_gradients": coded(
            True, "runtime/optimizer/sharded_chunk.py; torch 2.13, fully_shard/_fsdp_collectives.py: foreach_reduce"
        ),
        "holds_first_unit": measured(
            True, f"{_BESIDE}: Llama 3 8B with 29 of 32 blocks recomputed, 62.83 GiB allocated; 59.9 GiB are state"
        ),
    },
)

# Transformer Engine.
SWIGLU_PASSES = measured(
    (1.6, 3.5),
    "github.com/linkedin/Liger-Kernel/pull/1326: megatron-core 0.16.1 on H100 takes 1.57 to 1.63 times a fused SwiGLU "
    "in the forward pass, 2.46 to 2.66 times in both: 5 tensors are moved instead of 3, and 15.7 instead of 5 in the "
    "backward pass, where one pass counts 1.5 x 3",
)
_PERMUTE = coded(
    (2.6, 2.6),
    "megatron-core, transformer/moe/token_dispatcher.py: tokens are sorted by local expert after the all-to-all",
)
ENGINE_KERNELS = Feature(
    name="transformer-engine",
    kernels={
        "memory_passes": {
            **dict.fromkeys(("route", "combine"), _PERMUTE),
            "gate": SWIGLU_PASSES,
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
        "loss_moved_nbytes": NATIVE_LOSS,
        "wgrad_fusion": coded(
            True, "transformer_engine/pytorch/module/base.py: get_dummy_wgrad; Megatron-LM's default"
        ),
    },
    host={"step_launches": measured(600, f"{_HOST}: megatron-core's optimizer and schedule, as in our runtime")},
    attention={"context_communication": coded(ContextCommunication.P2P, "Megatron-LM's default of --cp-comm-type")},
    sharded_weights={
        "keeps_gradients": coded(
            True, "megatron-core 0.16.1, megatron_fsdp/param_and_grad_buffer.py: main_grad_buffer"
        ),
    },
    narrow={
        "narrow_shard_nbytes": coded(
            2, "megatron-core 0.16.1, megatron_fsdp/param_and_grad_buffer.py: model_weight_buffer, main_weight_buffer"
        ),
        "gathers_8_bits": coded(
            True,
            "megatron-core 0.16.1, megatron_fsdp/param_and_grad_buffer.py: param_dtype of --fp8-param-gather; in MXFP8 "
            "transpose_weight_buffer for the backward pass",
        ),
    },
    buffers={
        "engine_workspace": coded(
            True, "transformer_engine/pytorch/module/base.py, get_workspace: 32 MiB since Hopper, 4 MiB before"
        ),
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
