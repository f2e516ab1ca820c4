"""Rows of the older schema: settings of shipped runs, and defaults by framework."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.published import published_record
from benchmarks.accuracy.records import RunRecord
from benchmarks.accuracy.run_files import shipped_records
from benchmarks.accuracy.training_run import UnfitError
from megaloom.planner.contract.choices import Overlap, OverlapSet, Reshard, Shard
from tests.support.published import older_rows

ROWS = {row["id"]: row for row in older_rows()}
DENSE, SPARSE = ROWS["other-megatron-bridge-003"], ROWS["other-megatron-bridge-001"]


def default(row: dict[str, Any]) -> RunRecord:
    """Return the record of a row that no shipped run helps."""
    return published_record(row, {})


@pytest.mark.parametrize("id", ROWS)
def test_a_row_of_a_shipped_run_has_the_settings_of_that_run(id: str) -> None:
    shipped, record = shipped_records()[id], published_record(ROWS[id], shipped_records())
    assert isinstance(shipped, RunRecord)
    for name in ("profile", "features", "layout", "device", "precision", "measured", "decoder", "hybrid", "dropout"):
        assert getattr(record, name) == getattr(shipped, name), name


@pytest.mark.parametrize(
    ("change", "profile", "features"),
    [
        ({}, "megatron-bridge", ()),
        ({"framework": "NeMo (Megatron-core)"}, "nemo", ()),
        ({"framework": "Megatron-LM"}, "megatron-lm-tuned", ()),
        ({"framework": "Megatron-LM", "gpu": "A100"}, "megatron-lm-2021", ()),
        ({"framework": "Megatron-LM", "gpu": "B200"}, "megatron-core", ()),
        ({"framework": "Megatron-DeepSpeed", "precision_class": "fp16"}, "deepspeed-fp16", ()),
        ({"framework": "Megatron-DeepSpeed", "precision_class": "bf16"}, "deepspeed-bf16", ()),
        ({"framework": "nanotron"}, "nanotron", ()),
        ({"framework": None}, "megatron-core", ()),
        ({"other": "cuda_graph_impl=transformer_engine"}, "megatron-bridge", ("layer-graphs",)),
        ({"other": "words about CUDA graphs"}, "megatron-bridge", ()),
        (
            {
                "other": "cuda_graph_impl=full_iteration; moe_flex_dispatcher_backend=hybridep",
                "precision_class": "mxfp8",
            },
            "megatron-bridge",
            ("iteration-graphs", "deduplicated-dispatch", "fused-experts"),
        ),
        ({"profile": "nemo", "features": ["padded-experts"]}, "nemo", ("padded-experts",)),
    ],
)
def test_defaults_of_a_row_without_a_profile(change: dict[str, Any], profile: str, features: tuple[str, ...]) -> None:
    record = default({**DENSE, **change})
    assert (record.profile, record.features) == (profile, features)


def test_what_frameworks_overlap_by_default() -> None:
    assert Overlap.TENSOR in default(DENSE).layout.overlaps
    assert default({**DENSE, "framework": "Megatron-LM", "gpu": "A100"}).layout.overlaps == OverlapSet()
    assert default({**DENSE, "framework": "nanotron"}).layout.overlaps == OverlapSet([Overlap.GRADIENTS])
    assert default({**DENSE, "overlap": ["gradients"]}).layout.overlaps == OverlapSet([Overlap.GRADIENTS])
    assert Overlap.EXPERTS in default(SPARSE).layout.overlaps
    assert Overlap.EXPERTS not in default({**SPARSE, "other": None}).layout.overlaps


FSDP = next(row for row in ROWS.values() if row.get("fsdp"))


@pytest.mark.parametrize(
    ("change", "features"),
    [
        ({}, ("flash-attention-2-hopper",)),
        ({"gpu": "A100-80GB"}, ("triton-attention",)),
        ({"gpu": "H100", "source": "another table"}, ("triton-attention-hopper",)),
        ({"zero_stage": "FULL_SHARD (PURE)"}, ("flash-attention-2-hopper", "pure-16-bits")),
        ({"framework": "torchtitan", "other": "torch.compile"}, ("compiled-blocks", "fused-step")),
        (
            {"framework": "torchtitan", "other": "async TP", "recompute": "per-op SAC", "source": "h100_202412"},
            ("async-tensor-parallel", "kept-products"),
        ),
        ({"framework": "torchtitan", "precision": "FP8 tensorwise"}, ("fused-step", "float8-linear")),
        ({"framework": "torchtitan", "precision": "FP8 rowwise"}, ("fused-step", "float8-rowwise")),
    ],
)
def test_features_of_frameworks_that_shard_weights(change: dict[str, Any], features: tuple[str, ...]) -> None:
    assert default({**FSDP, **change}).features == features


@pytest.mark.parametrize(
    ("change", "shard", "reshard"),
    [
        ({}, Shard.WEIGHTS, Reshard.MICRO_BATCH),
        ({"zero_stage": "SHARD_GRAD_OP (DEFAULT)"}, Shard.GRADIENTS, Reshard.MICRO_BATCH),
        ({"fsdp": 256, "pp": 2}, Shard.WEIGHTS, Reshard.STEP),
        ({"fsdp": None, "zero_stage": None}, Shard.OPTIMIZER, Reshard.MICRO_BATCH),
        ({"fsdp": None, "zero_stage": None, "dist_optimizer": False}, Shard.NONE, Reshard.MICRO_BATCH),
    ],
)
def test_what_a_row_shards(change: dict[str, Any], shard: Shard, reshard: Reshard) -> None:
    layout = default({**FSDP, **change}).layout
    assert (layout.shard, layout.reshard) == (shard, reshard)
    assert layout.world == FSDP["num_gpus"]
    assert layout.replicas == 1


def test_groups_of_ranks_that_share_the_weights_are_replicas() -> None:
    layout = default({**FSDP, "fsdp": 8, "dp": 64}).layout
    assert (layout.dp, layout.replicas, layout.shard) == (512, 64, Shard.WEIGHTS)


def test_pipelines_of_torchtitan_have_as_many_micro_batches_as_stages() -> None:
    row = {**FSDP, "framework": "torchtitan", "pp": 8, "fsdp": 64, "gbs": 2048, "mbs": None, "grad_accum": None}
    assert default(row).layout.micro_batch == 4
    assert default({**row, "schedule": "Interleaved 1F1B"}).layout.vpp == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"profile": "megatron"}, "unknown framework profile or feature 'megatron'; known: megatron-core, "),
        ({"profile": "nemo", "features": ["graphs"]}, "unknown framework profile or feature 'graphs'; known: "),
        ({"profile": "nemo", "features": "graphs"}, "features must be a list, got 'graphs'"),
        ({"overlap": ["all"]}, r"overlap must be a list of gradients, weights, tensor, experts; got \['all'\]"),
    ],
)
def test_unknown_settings_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnfitError, match=reason):
        default({**DENSE, **change})
