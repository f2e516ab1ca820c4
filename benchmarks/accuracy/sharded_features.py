"""Features of the frameworks whose published runs shard weights: torch's FSDP, its compiler and its checkpointing.

What was fitted was fitted to the runs of `sharded_halves.in_fitted_half`; the other half scores it.
"""

from __future__ import annotations

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.cost.profiles.figures import coded, fitted, measured
from megaloom.planner.cost.profiles.groups import Feature

_TITAN = "github.com/pytorch/torchtitan"
_FOUNDRY = "github.com/mosaicml/llm-foundry"
_FSDP1 = "torch 2.1, distributed/fsdp"

# llm-foundry, kernel by kernel.
COMPOSER_KERNELS = Feature(
    name="composer-kernels",
    kernels={
        "memory_passes": {
            **dict.fromkeys(
                ("pointwise", "normalize"),
                fitted((2.3, 2.3), f"{_FOUNDRY}: kernel by kernel, where one kernel of each chain is counted"),
            ),
            "gradient": coded(
                (1.0, 1.8),
                f"{_FSDP1}/_runtime_utils.py: gradients are gathered into the flat one (4 bytes an element), copied to "
                "fp32 (6) and divided (8), where adding to a main gradient moves 10",
            ),
        },
        "loss_moved_nbytes": coded(6, f"{_FOUNDRY}, fused_crossentropy: flash-attn's xentropy reads logits twice"),
        "loss_saved_nbytes": coded(2, "flash-attn, xentropy: the gradient is written beside the logits"),
    },
    optimizer={
        "step_moved_nbytes": coded(
            4 + 8 + 88,
            "clipping reads 4 and scales 8; Composer, optim/decoupled_weight_decay.py, tensor by tensor: moments 20 "
            "and 20, root, correction and epsilon 24, decay 8, update 16",
        ),
    },
)
FLAT_PARAMETERS = Feature(
    name="flat-parameters",
    sharded_weights={
        "gather_copies": coded(0, f"{_FSDP1}/_flat_param.py: gathers write the flat parameter, weights are views of it")
    },
)
PURE_16_BITS = Feature(
    name="pure-16-bits",
    kernels={
        "memory_passes": {
            "gradient": coded(
                (1.0, 8 / 6),
                f"{_FSDP1}/_runtime_utils.py: gradients are gathered into the flat one (4 bytes an element) and "
                "divided (4), where adding to a main gradient of 16 bits moves 6",
            )
        }
    },
)
TRITON_ATTENTION = Feature(
    name="triton-attention",
    attention={"speed": fitted(0.58, f"{_FOUNDRY}, llmfoundry/models/layers/flash_attn_triton.py on A100")},
)
TRITON_ATTENTION_HOPPER = Feature(
    name="triton-attention-hopper",
    attention={"speed": fitted(0.44, f"{_FOUNDRY}, llmfoundry/models/layers/flash_attn_triton.py on H100")},
)
FLASH_ATTENTION_2_HOPPER = Feature(
    name="flash-attention-2-hopper",
    attention={
        "speed": measured(0.35 / 0.52, "arXiv:2407.08608, abstract: FlashAttention-2 reaches 35 % of an H100's peak")
    },
)

# torchtitan.
TORCH_TENSOR_PARALLEL = Feature(
    name="torch-tensor-parallel",
    saved={"gathered_inputs": coded(True, "torch, distributed/tensor/parallel/style.py: autograd saves them")},
)
REPEATED_KEYS = Feature(
    name="repeated-keys",
    attention={"repeats_keys": coded(True, f"{_TITAN}, models/llama/model.py: repeat_kv before attention")},
)
TITAN_LOSS = Feature(
    name="titan-loss",
    kernels={
        "loss_moved_nbytes": coded(
            6 + 8 + 16 + 6,
            f"{_TITAN}, torchtitan/utils.py at the end of 2024: cross_entropy of logits.float(): cast 6, logarithm of "
            "the softmax 8, backward 16, cast 6",
        ),
        "loss_saved_nbytes": coded(
            3 * 4 - 2, "torch, cross_entropy in fp32, backward: the logarithm of the softmax, its gradient, the logits'"
        ),
    },
)
COMPILED_BLOCKS = Feature(
    name="compiled-blocks",
    kernels={
        "memory_passes": {
            **dict.fromkeys(
                ("pointwise", "gate", "expert gate", "normalize", "rope"),
                coded((1.0, 1.0), "torch.compile of each block: one kernel for each chain of pointwise operations"),
            )
        }
    },
)
FUSED_STEP = Feature(
    name="fused-step",
    kernels={
        "loss_moved_nbytes": coded(14, f"{_TITAN} of June 2025: the loss is compiled"),
        "loss_saved_nbytes": coded(2, f"{_TITAN} of June 2025: compiled, the gradient is written beside the logits"),
    },
    optimizer={
        "step_moved_nbytes": coded(4 + 8 + 28, f"{_TITAN} of June 2025: torch.optim.AdamW(fused=True)"),
        "step_held_nbytes": coded(0, "torch.optim, _fused_adamw: in place"),
    },
)
ASYNC_TENSOR_PARALLEL = Feature(
    name="async-tensor-parallel",
    overlap={
        "supported": coded((Overlap.TENSOR,), f"{_TITAN}: enable_async_tensor_parallel"),
        "tensor_hidden": fitted(0.3, "pairs of torchtitan's runs with and without it, of the fitted half"),
    },
    buffers={"tensor_overlap_buffers": coded(False, "torch, distributed/_symmetric_memory: of the collectives alone")},
)
KEPT_PRODUCTS = Feature(
    name="kept-products",
    saved={
        "every_second_product": coded(
            True, f"{_TITAN}, _apply_ac_to_transformer_block: attention and every second product keep their results"
        )
    },
)
FLOAT8_LINEAR = Feature(
    name="float8-linear",
    narrow={
        "cast_before_gathers": coded(True, "torchao, float8/float8_tensor_parallel.py: Float8ColwiseParallel"),
        "cast_moved_nbytes": coded(
            2 + 3 + 3, "torchao, float8: the largest number is found (2), then the operand is cast, twice (3 each)"
        ),
    },
)
FLOAT8_ROWWISE = Feature(
    name="float8-rowwise",
    narrow={
        "cast_moved_nbytes": coded(
            3 + 3, "torchao, float8: one kernel finds the largest number of each row and casts it, twice (3 each)"
        ),
    },
)
FLOAT8_GATHERS = Feature(
    name="float8-gathers",
    narrow={
        "gathers_8_bits": coded(
            True, f"{_TITAN}, quantize.linear.float8: enable_fsdp_float8_all_gather in the command of the runs"
        )
    },
)
