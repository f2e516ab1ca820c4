"""Rows of the table of Megatron-LM's functional tests: the peak memory of what was trained for a few steps.

A row has the layout and the hidden sizes. What all tests have alike, or say by their names, is in the configurations in
NVIDIA/Megatron-LM, tests/functional_tests/test_cases/*/*/model_config.yaml: it is written here once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from megaloom.planner.contract.choices import ModuleSet, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.profiles.features import (
    COMPILED_LOSS,
    FLASH_ATTENTION,
    FP16_GRADIENTS,
    TORCH_SCORES,
    TWO_OPTIMIZER_INSTANCES,
    UNFUSED_ATTENTION,
    UNGROUPED_EXPERTS,
)
from megaloom.planner.cost.profiles.frameworks import MEGATRON_LM_TESTS
from megaloom.planner.cost.profiles.groups import FrameworkProfile, compose
from megaloom.planner.hardware.cluster_names import cluster

from .decoder import Decoder
from .run import (
    LARGEST,
    Row,
    Run,
    UnfitError,
    recompute,
    text,
    whole,
)

GPUS, FEWER = 8, 4  # of a node; those of GB200 have 4, on which the tests named 1node are
TUNED = 5  # --microbatch-group-size-per-virtual-pipeline-stage, of the tests whose name ends in tunable_overlap
# Of tokenizers, GPT-2's and BERT's, padded to a multiple of 128 on each rank. A BERT holds what a decoder of its sizes
# does, beside small heads.
VOCAB = {"gpt": 50257, "moe": 50257, "bert": 30522}
LARGE_VOCAB = 131072  # of the tests of 7 billion parameters, with 8 groups of keys and values
LIBRARY = 2**25  # CUBLAS_WORKSPACE_CONFIG=:4096:8, which makes cuBLAS deterministic on every GPU
# Layers and width of the tests that have experts as wide as a dense layer, of which a token goes to one, or two (top2).
SMALL = (12, 512)
SIZES: Mapping[str, Mapping[str, Any]] = {  # what a row does not say and the configuration does, likewise
    "top2": {"top_k": 2},
    "a2a_ovlp": {"top_k": 2},
    "qk_layernorm": {"normed": True},
    "gpt3_moe_mcore_te_ep8_resume": {"top_k": 2, "expert_ffn": 1024},
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume": {"top_k": 2, "expert_ffn": 1024, "shared_ffn": 512},
    "mla": {"latent": (("q_lora", 192), ("kv_lora", 64), ("qk_nope", 16), ("qk_rope", 8), ("v", 16))},
}
LOOSE = ("nondeterministic", "reshard", "te_tp2_pp2_cp2")  # tests without CUBLAS_WORKSPACE_CONFIG, by names
FIRST = "dracooci"  # the clusters of the first tests
UNSAID = {  # why a test is left out, by a part of its name
    "zp_z3": "weights are sharded (FSDP)",
    "grpo": "it is reinforcement learning",
    "distill": "a teacher is beside the model",
    "uneven": "its stages are not said",
    "account_for": "its stages are not said",
    "offloading": "activations are offloaded",
    "muon": "its optimizer is not Adam",
    "defer_embedding": "the gradients of its logits wait for the end of the step",
}


def hardware(row: Row) -> str:
    """The GPU of a test, by the name of its machines; the first tests had no other than A100."""
    return next((name for name in ("H100", "GB200") if name.lower() in text(row, "hw")), "A100")


def precision(row: Row) -> Precision:
    """What a test computes in: all of them in 16 bits."""
    return Precision.BF16 if text(row, "bf16") == "true" else Precision.FP16


def functional(row: Row) -> Run:
    """A row of the table."""
    test = text(row, "test")
    if (suite := text(row, "suite")) not in VOCAB:
        raise UnfitError(f"tests of {suite} are not described well enough")
    small = test.startswith("gpt3_mcore") and (whole(row, "layers"), whole(row, "hidden")) == SMALL
    if row.get("experts") and not (small or "expert_ffn" in _sizes(test)):
        raise UnfitError("the width of its experts is not said")
    if reason := next((said for part, said in UNSAID.items() if part in test), ""):
        raise UnfitError(reason)
    gpu = hardware(row)
    layout = _layout(row, FEWER if test.endswith("1node") and gpu == "GB200" else GPUS)
    machine = cluster(f"{layout.world}x{gpu}")
    if deterministic := not _loose(row):
        machine = evolve(machine, device=evolve(machine.device, library_nbytes=LIBRARY))
    computed = precision(row)
    return Run(
        id=text(row, "id"),
        source="megatron-functional",
        name=text(row, "test"),
        gpu=gpu,
        sparse=bool(row.get("experts")),
        model=_decoder(row).model(0.1 if layout.cp == 1 else 0.0),
        layout=layout,
        cluster=machine,
        workload=Workload(seq=whole(row, "seq"), batch=whole(row, "gbs"), precision=computed),
        profile=_framework_profile(row, gpu, deterministic, computed is Precision.FP16),
        step_seconds=None,
        memory_gib=whole(row, "peak_bytes", most=2**50) / 2**30,
        last_rank=True,  # the one that logs
        memory_kind="allocated",
    )


def _sizes(test: str) -> dict[str, Any]:
    """What is known of a model by the name of its test."""
    return {name: size for part, sizes in SIZES.items() if part in test for name, size in sizes.items()}


def _decoder(row: Row) -> Decoder:
    large, hidden, unit = text(row, "test").startswith("gpt3_7b"), whole(row, "hidden"), 128 * whole(row, "tp", 1)
    vocab = LARGE_VOCAB if large else VOCAB[text(row, "suite")]
    return Decoder(
        layers=whole(row, "layers", most=LARGEST),
        hidden=hidden,
        heads=whole(row, "heads"),
        kv_heads=8 if large else None,
        ffn=4 * hidden,
        vocab=-(-vocab // unit) * unit,
        gated=False,
        learned=True,
        positions=whole(row, "seq"),
        experts=whole(row, "experts", 0),
        **{"top_k": 1, **_sizes(text(row, "test"))},
    )


def _layout(row: Row, gpus: int) -> Layout:
    tp, pp, cp, ep = (whole(row, key, 1) for key in ("tp", "pp", "cp", "ep"))
    named = re.search(r"_vp(\d+)", text(row, "test"))
    again, modules = recompute(row.get("recompute"))
    each = whole(row, "vp", int(named[1]) if named else 0)  # layers of a model chunk
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep if row.get("experts") else 1,
        etp=whole(row, "etp", tp) if row.get("experts") else 1,
        vpp=max(1, whole(row, "layers") // pp // each) if each and pp > 1 else 1,
        dp=max(1, gpus // (tp * pp * cp)),
        micro_batch=whole(row, "mbs"),
        microbatch_group=TUNED if "tunable_overlap" in text(row, "test") else 0,
        sequence_parallel=row.get("sp") == "true" and tp > 1,
        shard=Shard(row.get("distopt") == "true"),
        recompute=again,
        recompute_modules=ModuleSet(modules),
    )


def _framework_profile(row: Row, gpu: str, deterministic: bool, half: bool) -> FrameworkProfile:
    """How Megatron-LM ran it. In fp16 gradients are summed in 16 bits, and stepped with in 32 (arguments.py).

    What is fused is flash-attn's, but cuDNN's on Hopper, which alone has a deterministic one with dropout, and, where
    it need not be deterministic, on Blackwell (transformer_engine, dot_product_attention/utils.py).
    """
    test = text(row, "test")
    flash = _flash(row) or not deterministic
    theirs = gpu == "A100" or (gpu != "H100" and deterministic)  # flash-attn's
    switched = [
        (not flash, UNFUSED_ATTENTION),
        (flash and theirs, FLASH_ATTENTION),
        ("optimizer_instances" in test, TWO_OPTIMIZER_INSTANCES),
        ("4experts" in test or "reshard" in test, UNGROUPED_EXPERTS),
        ("uninstall_te" in test, TORCH_SCORES),
        ("cross_entropy_loss_fusion" in test, COMPILED_LOSS),
        (half, FP16_GRADIENTS),
    ]
    return compose(MEGATRON_LM_TESTS.name, [feature for on, feature in switched if on], MEGATRON_LM_TESTS)


def _loose(row: Row) -> bool:
    """Whether a test need not repeat itself to the bit; those of the loss's fusion had to at first."""
    test, first = text(row, "test"), FIRST in text(row, "hw")
    return any(part in test for part in LOOSE) or ("cross_entropy_loss_fusion" in test and not first)


def _flash(row: Row) -> bool:
    """Whether attention is one kernel.

    Of the small tests those that resume have no --attention-backend, the others say that it is unfused; what is
    deterministic was so before there was that option (at first), and without Transformer Engine.
    Context parallelism has fused attention alone.
    """
    test, first = text(row, "test"), FIRST in text(row, "hw")
    said = test.startswith("gpt3_mcore") and "resume" not in test and "loss_fusion" not in test
    said = said or text(row, "suite") == "bert"
    return whole(row, "cp", 1) > 1 or not (said or first or "gpt3_mcore_tp" in test)
