"""How the framework of a published run ran it then."""

from __future__ import annotations

import re

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.cost.profiles.features import (
    BLOCKING_LAUNCHES,
    DEDUPLICATED_DISPATCH,
    FUSED_EXPERTS,
    FUSED_LOSS,
    ITERATION_GRAPHS,
    LAYER_GRAPHS,
    MOMENTS_16,
    PADDED_EXPERTS,
    ULYSSES,
    WEIGHTS_8,
)
from megaloom.planner.cost.profiles.frameworks import (
    DEEPSPEED_BF16,
    DEEPSPEED_FP16,
    MEGATRON_2021,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM_TUNED,
    NANOTRON,
    NEMO,
)
from megaloom.planner.cost.profiles.groups import Feature, FrameworkProfile, compose

from .run import Row, text, whole


def framework_profile(row: Row, note: str) -> FrameworkProfile:
    """How that framework ran it then."""
    base, features = parts(row, note)
    return compose(base.name, features, base) if features else base


def parts(row: Row, note: str) -> tuple[FrameworkProfile, list[Feature]]:
    """Return the base profile of a row, and its features."""
    framework, when = str(row.get("framework")), str(row.get("framework_version") or "")
    old = "zero bubble" in framework or (framework == "Megatron-LM" and re.search("202[0-2]", when))
    if "DeepSpeed" in framework:
        found = DEEPSPEED_BF16 if row.get("precision_class") == "bf16" else DEEPSPEED_FP16
        hung = "Omni-Path" in str(row.get("interconnect")) and whole(row, "num_gpus", 1) >= HANGS
        return found, [BLOCKING_LAUNCHES] if hung else []
    if old or row.get("gpu") == "V100":
        return MEGATRON_2021, []
    if "nanotron" in framework:
        return NANOTRON, []
    bridge, block = "Bridge" in framework, row.get("precision_class") in BLOCKS
    base = MEGATRON_BRIDGE if bridge else MEGATRON_CORE
    if tuned(row) and not bridge:  # before megatron-core 0.14 (transformer/moe/README.md)
        base = NEMO if "NeMo" in framework else MEGATRON_LM_TUNED
    narrow = row.get("precision_class") == "fp8" and row.get("gpu") in ALONE and (tuned(row) or bridge)
    fused_loss = "TE fused cross-entropy" in note and not bridge
    note = told(row, note)
    graphs = re.search(GRAPHS, note) and not re.search(r"cuda_graph_impl=none|no CUDA graph", note)
    fused = re.search(r"cutedsl|_full_iteration_|impl=full_iteration", note) and block
    switched = [
        (bridge and row.get("mla"), MOMENTS_16),
        (narrow, WEIGHTS_8),
        (fused_loss, FUSED_LOSS),
        (graphs and "full" not in note, LAYER_GRAPHS),
        (graphs and "full" in note, ITERATION_GRAPHS),
        (fused and base not in (NEMO, MEGATRON_LM_TUNED), FUSED_EXPERTS),
        (padded(row), PADDED_EXPERTS),
        ("a2a (Ulysses)" in note, ULYSSES),
        (once(row, note), DEDUPLICATED_DISPATCH),
    ]
    return base, [feature for on, feature in switched if on]


def once(row: Row, note: str) -> bool:
    """Whether a token was sent once to each node, by DeepEP or HybridEP.

    Of Megatron-Bridge's recipes that say nothing DeepSeek-V3's did, unless they padded (0.1 and 0.2,
    scripts/performance/configs, which name no such dispatcher for others).
    """
    silent = not note and "Bridge" in text(row, "framework") and row.get("mla")
    return bool(re.search(r"(?i)deepep|hybridep|_full_iteration_", note) or silent) and not padded(row)


def padded(row: Row) -> bool:
    """Whether each expert got as many tokens as any other, what is more being dropped and what is less padded.

    All of NeMo 2's recipes and of Megatron-Bridge 0.1's did, but DeepSeek-V3's on H100 (MegatronTokenDropCallback in
    NeMo 25.04's scripts/performance, apply_moe_token_drop in Megatron-Bridge's).
    """
    deepep = row.get("mla") and row.get("gpu") == "H100" and "Bridge" in text(row, "framework")
    return re.search(PADDED, text(row, "framework_version")) is not None and not deepep


def overlaps(row: Row, note: str, x: Layout, used: FrameworkProfile) -> tuple[Overlap, ...]:
    """What it overlapped then: before fused attention nothing. NVIDIA's recipes switch all on but the experts', which
    those say that do.
    """
    if "no TP/P2P/grad overlap" in note or not used.attention.fused:
        return ()
    if used is NANOTRON:
        return (Overlap.GRADIENTS,)
    found, note = [*x.overlaps], told(row, note)
    if x.sequence_parallel and (tuned(row) or "Bridge" in str(row.get("framework"))):
        found.append(Overlap.TENSOR)
    if x.ep > 1 and re.search(r"a2a_overlap=True|(?<!no )a2a overlap|EP overlap on|_full_iteration_", note):
        found.append(Overlap.EXPERTS)
    return tuple(found)


def told(row: Row, note: str) -> str:
    """What a row says, or else what the recipe does that it ran."""
    said = re.search(r"(\d\d)\.(\d\d)", str(row.get("framework_version")))
    if note or said is None or not row.get("experts") or "Bridge" not in str(row.get("framework")):
        return note
    container = int(said[1]), int(said[2])
    if container >= FUSED:
        return RECIPE
    parts = container >= PARTS and row.get("gpu") in RACKS and re.match("deepseek-v3|qwen3-", str(row.get("model")))
    return RECIPE_PARTS if parts else note


def again(row: Row) -> object:
    """What a row says is computed again, or else what its recipe does."""
    theirs = "Bridge" in str(row.get("framework")) or (tuned(row) and row.get("gpu") == "H100")
    said = row.get("recompute")
    return AGAIN if said in (None, "") and theirs and row.get("mla") else said


def tuned(row: Row) -> bool:
    """Whether NVIDIA's engineers set every switch: NeMo's recipes, and Megatron-LM's own benchmarks on H100.

    The latter hide the exchanges of tensor parallelism, of gradients and of pipelines (README of Megatron-LM, 2024).
    """
    framework = str(row.get("framework"))
    return "NeMo" in framework or (framework == "Megatron-LM" and row.get("gpu") == "H100")


# Containers of NeMo, and tags of the DGX Cloud recipes, of that time.
PADDED = r"(NeMo|container) 25\.0[4-9]|v25\.(0[5-9]|1)"
# From this container of NeMo on, the recipes of models with experts graph whole iterations where a row says no more.
FUSED, RECIPE = (26, 6), "cuda_graph_impl=full_iteration; moe_flex_dispatcher_backend=hybridep; moe_a2a_overlap=True"
# Before, from 25.11 on, those of DeepSeek-V3 and Qwen3 graph parts of a layer where 72 GPUs are one NVLink domain;
# those of gpt-oss on GB200 do not (Megatron-Bridge, scripts/performance/configs: deepseek, qwen, gpt_oss).
PARTS, RECIPE_PARTS = (25, 11), "cuda_graph_impl=transformer_engine; moe_flex_dispatcher_backend=hybridep"
RACKS = ("GB200", "GB300")
BLOCKS = ("mxfp8", "nvfp4")  # precisions for which experts' kernels are fused
# NVIDIA's recipes keep weights in the 8 bits that products take (fp8_param_gather), and Blackwell's products need no
# transposed copy beside (transformer_engine/pytorch/utils.py: is_non_tn_fp8_gemm_supported); blocks of 32 need one.
ALONE = ("B200", "GB200", "B300", "GB300")
# GPUs over Omni-Path from which on BLOOM's runs hung but with CUDA_LAUNCH_BLOCKING=1
# (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md and tr11-176B-ml.slurm).
HANGS = 320
# What says that kernels are launched as CUDA graphs, of parts of a layer or of the whole step.
GRAPHS = r"cuda_graph_impl=|CUDA graph|TE graph|full.iteration"
# NVIDIA's recipes of DeepSeek-V3: Megatron-Bridge's, of which others say so, and NeMo's on H100 (NeMo's
# scripts/performance/recommended_model_configs; NVIDIA/dgxc-benchmarking, deepseek_v3/pretraining/launch.sh).
AGAIN = "selective:mla_up_proj"
