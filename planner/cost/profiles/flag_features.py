"""Features of Megatron-core that a run's flags switch on, and of DeepSpeed under Megatron-LM, each with its figures.

`planner/runs` adds them to the profile of a run that it reads; published runs name them.
"""

from __future__ import annotations

from .figures import coded, fitted
from .groups import ContextCommunication, Feature

_ONE_PERMUTE = coded(
    (1.7, 1.7), "megatron-core 0.16.1, transformer/moe/fused_a2a.py: tokens are sorted by expert only on arrival"
)
FUSED_LOSS = Feature(
    name="fused-loss",
    kernels={
        "loss_moved_nbytes": coded(
            10,
            "transformer_engine, triton/cross_entropy.py: logits are read twice, their gradient is written and scaled",
        ),
        "loss_saved_nbytes": coded(0, "transformer_engine, triton/cross_entropy.py: computes in place of the logits"),
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
GATHERS_16 = Feature(
    name="16-bit-gathers",
    narrow={
        "gathers_8_bits": coded(
            False,
            "torchtitan 0.2.2, components/quantization/float8.py: without enable_fsdp_float8_all_gather, and by rows",
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
LAYER_GRAPHS = Feature(
    name="layer-graphs",
    host={"cuda_graphs": coded(True, "--cuda-graph-impl of parts of a layer")},
    experts={"dispatch_seconds": fitted(0.2e-3, "published MoE runs with CUDA graphs: the host still counts tokens")},
)
ITERATION_GRAPHS = Feature(
    name="iteration-graphs",
    host={"cuda_graphs": coded(True, "--cuda-graph-impl of the whole iteration")},
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
DEDUPLICATED_DISPATCH = Feature(
    name="deduplicated-dispatch",
    kernels={"memory_passes": dict.fromkeys(("route", "combine"), _ONE_PERMUTE)},
    experts={"deduplicated_dispatch": coded(True, "--moe-flex-dispatcher-backend deepep or hybridep")},
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
        "loss_moved_nbytes": coded(
            28,
            "megatron-core, fusions/fused_cross_entropy.py: 6 to cast, 4 for the maximum, 8 for exponentials, 4 for "
            "their sum, 6 for the gradient",
        ),
        "loss_saved_nbytes": coded(
            4 + 4, "megatron-core, fusions/fused_cross_entropy.py: logits in fp32 and their exponentials"
        ),
    },
)
UNGROUPED_EXPERTS = Feature(
    name="ungrouped-experts", buffers={"grouped_streams": coded(0, "without --moe-grouped-gemm")}
)
FP16_GRADIENTS = Feature(
    name="fp16-gradients",
    optimizer={
        "gradient_nbytes": coded(2, "Megatron-LM, arguments.py, and DeepSpeed, fused_optimizer.py: summed in 16 bits"),
        "step_held_nbytes": coded(4, "Megatron-LM, DeepSpeed: the optimizer steps with an fp32 copy of the gradient"),
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
