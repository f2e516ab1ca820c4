"""Defaults of a row of the older schema that names no framework profile, by framework, device and options."""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl.dims import MAX_LAYERS
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost.profiles.groups import FrameworkProfile

from .features import (
    DEDUPLICATED_DISPATCH,
    FUSED_EXPERTS,
    ITERATION_GRAPHS,
    LAYER_GRAPHS,
    MOMENTS_16,
)
from .frameworks import (
    DEEPSPEED_BF16,
    DEEPSPEED_FP16,
    MEGATRON_2021,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM_TUNED,
    NANOTRON,
    NEMO,
)
from .row_values import Row, row_flag, row_integer, row_text
from .training_run import UnfitError

# Default profile by a part of the framework's name, first match; any other framework runs as megatron-core.
FRAMEWORKS: tuple[tuple[str, FrameworkProfile], ...] = (
    ("Bridge", MEGATRON_BRIDGE),
    ("NeMo", NEMO),
    ("DeepSpeed", DEEPSPEED_FP16),
    ("zero bubble", MEGATRON_2021),
    ("nanotron", NANOTRON),
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
MLA_RECOMPUTE = "selective:mla_up_proj"  # of Megatron-Bridge's recipes of models with latent attention


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


def row_options(row: Row) -> list[str]:
    return [option.strip() for option in row_text(row, "other").split(";")]


def row_chunks(row: Row, pp: int, profile: str) -> int:
    """Return the model chunks of a rank. NVIDIA's recipes without a number of chunks interleave layer by layer."""
    layers = row_integer(row, "layers")
    interleaved = profile in (NEMO.name, MEGATRON_LM_TUNED.name) and layers % pp == 0
    return row_integer(row, "vpp", layers // pp if interleaved else 1, MAX_LAYERS)


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
    return (Overlap.GRADIENTS, *weights, *tensor, *experts)
