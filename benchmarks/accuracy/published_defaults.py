"""Defaults of a row of the older schema that names no framework profile, by framework, device and options."""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl.dims import MAX_LAYERS
from megaloom.planner.contract.choices import GradReduce, Overlap
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost.profiles.flag_features import (
    DEDUPLICATED_DISPATCH,
    ITERATION_GRAPHS,
    LAYER_GRAPHS,
    MOMENTS_16,
)
from megaloom.planner.cost.profiles.groups import Feature, FrameworkProfile

from .features import FUSED_EXPERTS
from .frameworks import (
    AUTOMODEL,
    DEEPSPEED_BF16,
    DEEPSPEED_FP16,
    FMS_FSDP,
    LLAMA_3,
    LLM_FOUNDRY,
    MEGATRON_2021,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM_TUNED,
    METASEQ,
    NANOTRON,
    NEMO,
    TORCHTITAN,
)
from .row_values import OP_CHECKPOINTING, PURE, Row, row_flag, row_integer, row_text
from .sharded_features import (
    ASYNC_TENSOR_PARALLEL,
    COMPILED_BLOCKS,
    FLASH_ATTENTION_2_HOPPER,
    FLOAT8_LINEAR,
    FLOAT8_ROWWISE,
    FUSED_STEP,
    KEPT_PRODUCTS,
    PURE_16_BITS,
    TRITON_ATTENTION,
    TRITON_ATTENTION_HOPPER,
)
from .training_run import UnfitError

# Default profile by a part of the framework's name, first match; any other framework runs as megatron-core.
FRAMEWORKS: tuple[tuple[str, FrameworkProfile], ...] = (
    ("Bridge", MEGATRON_BRIDGE),
    ("AutoModel", AUTOMODEL),
    ("NeMo", NEMO),
    ("DeepSpeed", DEEPSPEED_FP16),
    ("zero bubble", MEGATRON_2021),
    ("nanotron", NANOTRON),
    ("llm-foundry", LLM_FOUNDRY),
    ("torchtitan", TORCHTITAN),
    ("fms-fsdp", FMS_FSDP),
    ("metaseq", METASEQ),
    ("Meta internal", LLAMA_3),
)
# Default profile of "Megatron-LM" without a version in its name, by device: published before and after flash attention.
MEGATRON_LM = {"V100": MEGATRON_2021, "A100": MEGATRON_2021, "H100": MEGATRON_LM_TUNED}
# Features by an option that `other` names, as Megatron-Bridge writes it; options are separated by semicolons.
OPTIONS = {
    "cuda_graph_impl=local": LAYER_GRAPHS,
    "cuda_graph_impl=transformer_engine": LAYER_GRAPHS,
    "cuda_graph_impl=full_iteration": ITERATION_GRAPHS,
    "moe_flex_dispatcher_backend=deepep": DEDUPLICATED_DISPATCH,
    "moe_flex_dispatcher_backend=hybridep": DEDUPLICATED_DISPATCH,
}
EXPERT_OVERLAP, NO_EXPERT_TP = "moe_a2a_overlap=True", "expert_tensor_parallel_size=1"
TUNED = (
    NEMO.name,
    MEGATRON_LM_TUNED.name,
    MEGATRON_BRIDGE.name,
)  # NVIDIA's recipes: they overlap tensor-parallel communication
LARGE_SCALE = "Large Scale"  # a table of llm-foundry
LAST_YEAR = "202412"  # tables of torchtitan at the end of 2024
TITAN_CHUNKS = 2  # of a rank (torchtitan of 2024, parallelisms/pipelining_utils.py: num_stages_per_rank)
MLA_RECOMPUTE = "selective:mla_up_proj"  # of Megatron-Bridge's recipes of models with latent attention


def row_micro_batch(row: Row, dp: int, pp: int) -> int:
    """Return the sequences of a micro-batch where a row does not say. torchtitan's pipelines run pp micro-batches."""
    if pp == 1 or "torchtitan" not in row_text(row, "framework"):
        return 1
    return max(1, row_integer(row, "gbs", 1) // (dp * pp))


def row_profile(row: Row, device: str, precision: Precision) -> tuple[str, tuple[str, ...]]:
    """Return the names of profile and features: those of the row, else the defaults of its framework."""
    if name := row_text(row, "profile"):
        features = row.get("features") or ()
        if not isinstance(features, list | tuple):
            raise UnfitError(f"features must be a list, got {features!r:.40}")
        return name, tuple(map(str, features))
    framework = row_text(row, "framework")
    profile = next((known for part, known in FRAMEWORKS if part in framework), MEGATRON_CORE)
    if framework == "Megatron-LM":
        profile = MEGATRON_LM.get(device, MEGATRON_CORE)
    if profile is DEEPSPEED_FP16 and precision is not Precision.FP16:
        profile = DEEPSPEED_BF16
    return profile.name, tuple(dict.fromkeys(_default_features(row, profile, precision)))


def _default_features(row: Row, profile: FrameworkProfile, precision: Precision) -> Iterator[str]:
    """Yield the features that the options of a row name, and those of Megatron-Bridge's recipes."""
    named = [OPTIONS[option] for option in row_options(row) if option in OPTIONS]
    latent = profile is MEGATRON_BRIDGE and row.get("mla")
    yield from (feature.name for feature in (*((MOMENTS_16, DEDUPLICATED_DISPATCH) if latent else ()), *named))
    if ITERATION_GRAPHS in named and precision in (Precision.MXFP8, Precision.NVFP4):
        yield FUSED_EXPERTS.name
    if profile is LLM_FOUNDRY:
        yield from (feature.name for feature in _foundry_features(row))
    elif profile is TORCHTITAN:
        yield from (feature.name for feature in _titan_features(row))


def _foundry_features(row: Row) -> Iterator[Feature]:
    """Yield the attention kernel and the precision of a row of llm-foundry's tables.

    Those of runs on 128 H100 and more were made in January 2024 by a script that names FlashAttention-2, all others
    with Triton's kernel.
    """
    if row_text(row, "gpu") != "H100":
        yield TRITON_ATTENTION
    else:
        yield FLASH_ATTENTION_2_HOPPER if LARGE_SCALE in row_text(row, "source") else TRITON_ATTENTION_HOPPER
    if PURE in row_text(row, "zero_stage"):
        yield PURE_16_BITS


def _titan_features(row: Row) -> Iterator[Feature]:
    """Yield the features of a row of torchtitan's tables. Tables of June 2025 have a fused optimizer."""
    options, precision = row_text(row, "other"), row_text(row, "precision")
    if "torch.compile" in options:
        yield COMPILED_BLOCKS
    if LAST_YEAR not in row_text(row, "source"):
        yield FUSED_STEP
    if "async TP" in options:
        yield ASYNC_TENSOR_PARALLEL
    if OP_CHECKPOINTING in row_text(row, "recompute"):
        yield KEPT_PRODUCTS
    if "fp8" in precision.lower():
        yield FLOAT8_ROWWISE if "rowwise" in precision else FLOAT8_LINEAR


def row_options(row: Row) -> list[str]:
    return [option.strip() for option in row_text(row, "other").split(";")]


def row_chunks(row: Row, pp: int, profile: str) -> int:
    """Return the model chunks of a rank. NVIDIA's recipes without a number of chunks interleave layer by layer."""
    layers = row_integer(row, "layers")
    interleaved = profile in (NEMO.name, MEGATRON_LM_TUNED.name) and layers % pp == 0
    if profile == TORCHTITAN.name and "Interleaved" in row_text(row, "schedule"):
        return row_integer(row, "vpp", TITAN_CHUNKS)
    return row_integer(row, "vpp", layers // pp if interleaved else 1, MAX_LAYERS)


def row_grad_reduce(row: Row, profile: str) -> GradReduce:
    """Return the format in which gradients are reduced: bf16 in NVIDIA's recipes of NeMo and Megatron-Bridge.

    Source: grad_sync_dtype and grad_reduce_in_fp32 of these recipes.
    """
    narrow = profile in (NEMO.name, MEGATRON_BRIDGE.name) or PURE in row_text(row, "zero_stage")
    return GradReduce.BF16 if narrow else GradReduce.FP32


def row_overlap(row: Row, profile: str, sequence_parallel: bool) -> tuple[Overlap, ...]:
    """Return the overlapped communication: that of the row, else what the framework's recipes overlap."""
    if "overlap" in row:
        names = row["overlap"]
        if not isinstance(names, list) or not set(map(str, names)) <= set(Overlap):
            raise UnfitError(f"overlap must be a list of {', '.join(Overlap)}; got {names!r:.40}")
        return tuple(map(Overlap, names))
    if profile in (MEGATRON_2021.name, DEEPSPEED_FP16.name, DEEPSPEED_BF16.name):
        return ()
    if profile == NANOTRON.name:
        return (Overlap.GRADIENTS,)
    weights = (Overlap.WEIGHTS,) if row_flag(row, "dist_optimizer", default=True) else ()
    tensor = (Overlap.TENSOR,) if profile in TUNED and sequence_parallel else ()
    experts = (Overlap.EXPERTS,) if EXPERT_OVERLAP in row_options(row) and row_integer(row, "ep", 1) > 1 else ()
    tensor = (Overlap.TENSOR,) if "async TP" in row_text(row, "other") else tensor
    return (Overlap.GRADIENTS, *weights, *tensor, *experts)
