"""Rows of the older schema of published runs: flat JSON objects with the fields of a table of runs.

A row may give `profile`, `features`, `overlap` and the other settings that a record has. Where it does not, they are
those of the shipped run with the same id, else the defaults of its framework (see `published_defaults`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from megaloom.dsl.dims import MAX_LAYERS
from megaloom.planner.contract.choices import ModuleSet, OverlapSet, Reshard, Shard
from megaloom.planner.contract.layout import Layout

from .device_words import row_device, row_precision
from .frameworks import MEGATRON_BRIDGE
from .models.catalog_models import named_example
from .models.decoder import Decoder, LatentDims
from .models.hybrid import Hybrid
from .published_defaults import (
    MLA_RECOMPUTE,
    NO_EXPERT_TP,
    row_chunks,
    row_grad_reduce,
    row_micro_batch,
    row_options,
    row_overlap,
    row_profile,
)
from .records import LeftOut, Measurement, MemoryKind, RunRecord, record_profile
from .row_values import (
    MAX_EXPERTS,
    Row,
    row_flag,
    row_integer,
    row_number,
    row_recompute,
    row_shard,
    row_text,
)
from .training_run import UnfitError

TASKS = ("", "pretrain", "pretraining", "pre-training", "sft", "memory only")  # "" is pre-training
# Heads and state size of Mamba-2 in hybrid models, from their configurations at Hugging Face.
MAMBA = {
    "nemotron-h-8b": (128, 128),
    "nemotron-h-47b": (256, 256),
    "nemotron-h-56b": (256, 256),
    "nemotron3-nano": (64, 128),
}
# Order of the layers of models whose rows do not give numbers of layers; from the configurations at Hugging Face.
ORDER = {"nemotron3-nano": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
LETTERS = {"mamba2": "M", "attention": "*", "mlp": "-"}
LATENT = {"q_lora": "q_rank", "kv_lora": "kv_rank", "qk_nope": "qk_nope", "qk_rope": "qk_rope", "v": "v"}
QK_NORM = ("qwen3", "hy3")  # models with norms of queries and keys: their configurations at Hugging Face


def published_record(row: Row, shipped: Mapping[str, RunRecord | LeftOut]) -> RunRecord:
    """Return the record of a row. Raises UnfitError for a row that cannot be predicted."""
    _check_supported(row)
    twin = shipped.get(row_text(row, "id"))
    if isinstance(twin, LeftOut) and "profile" not in row:
        raise UnfitError(twin.reason)
    row = {**(_settings(twin) if isinstance(twin, RunRecord) else {}), **row}
    model, device, precision = _model(row), row_device(row), row_precision(row)
    profile, features = row_profile(row, device, precision)
    if model.example:
        row |= {"layers": model.layers, "experts": model.experts}
    layout, batch = _layout(row, profile)
    seq = row_integer(row, "seq_len")
    return RunRecord(
        id=row_text(row, "id"),
        source=row_text(row, "source_group"),
        reference=row_text(row, "source"),
        model=row_text(row, "model"),
        decoder=model.decoder,
        hybrid=model.hybrid,
        example=model.example,
        dropout=0.0 if record_profile(profile, features).attention.fused else 0.1,
        gpu=row_text(row, "gpu"),
        device=device,
        devices=layout.world,
        network=twin.network if isinstance(twin, RunRecord) else None,
        framework=row_text(row, "framework"),
        framework_version=row_text(row, "framework_version"),
        profile=profile,
        features=features,
        precision=precision,
        sequence_length=seq,
        global_batch=batch,
        layout=layout,
        measured=_measurement(row, batch * seq / layout.world),
    )


def _check_supported(row: Row) -> None:
    """Raise UnfitError for a run that the planner does not model."""
    if (task := row_text(row, "task")).lower() not in TASKS:
        raise UnfitError(f"the task is {task}, not pre-training")
    if (schedule := row_text(row, "schedule")).startswith(("ZB", "DualPipe")):
        raise UnfitError(f"the schedule {schedule} is not megatron-core's")


def _settings(twin: RunRecord) -> dict[str, Any]:
    """Return the settings of a shipped run as fields of a row."""
    layout = twin.layout
    recompute = f"{layout.recompute}:{','.join(map(str, layout.recompute_modules))}"
    return {
        "profile": twin.profile,
        "features": list(twin.features),
        "overlap": list(map(str, layout.overlaps)),
        "recompute": recompute.rstrip(":"),
        "vpp": layout.vpp,
        "etp": layout.etp,
    }


@frozen(kw_only=True)
class _RowModel:
    """The model of a row in one of the three forms that a record has."""

    decoder: Decoder | None = None
    hybrid: Hybrid | None = None
    example: str = ""
    layers: int = 0
    experts: int = 0


def _model(row: Row) -> _RowModel:
    arch = row_text(row, "arch")
    if "hybrid" in arch:
        return _RowModel(hybrid=_hybrid(row))
    if "single" in arch:
        raise UnfitError(f"{arch} is not described well enough")
    if not any(row.get(key) for key in ("layers", "hidden", "heads")):
        example = named_example(row_text(row, "model"))
        return _RowModel(example=example.name, layers=example.layers, experts=example.experts)
    if missing := [key for key in ("layers", "hidden", "heads", "seq_len") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    gpt, hidden = "GELU" in arch, row_integer(row, "hidden")
    decoder = Decoder(
        layers=row_integer(row, "layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=row_integer(row, "heads"),
        kv_heads=row_integer(row, "kv_heads", 0) or None,
        head_dim=None if row.get("mla") else row_integer(row, "head_dim", 0) or None,
        ffn=row_integer(row, "ffn", 4 * hidden),
        vocab=row_integer(row, "vocab", 51200),
        gated=not gpt,
        gpt=gpt,
        max_positions=row_integer(row, "seq_len"),
        experts=row_integer(row, "experts", 0, MAX_EXPERTS),
        top_k=row_integer(row, "topk", 0),
        expert_ffn=row_integer(row, "expert_ffn", 0),
        shared_ffn=row_integer(row, "shared_expert_ffn", 0),
        dense_layers=row_integer(row, "dense_layers", 0, MAX_LAYERS),
        alternate_experts="every 2nd" in arch,
        sliding_window=128 if "128-token sliding" in arch else None,
        qk_norm=row_text(row, "model").startswith(QK_NORM),
        clamped_experts="gpt-oss" in row_text(row, "model"),
        latent_attention=_latent(row.get("mla")),
        mtp_layers=row_integer(row, "mtp_layers", 0, MAX_LAYERS),
    )
    return _RowModel(decoder=decoder if gpt else decoder.nearest(row_number(row, "params_b")))


def _latent(ranks: object) -> LatentDims | None:
    """Return ranks and channels of latent attention."""
    if not ranks:
        return None
    if not isinstance(ranks, dict):
        raise UnfitError(f"mla must be a table of {', '.join(LATENT)}, got {ranks!r:.40}")
    return LatentDims(**{name: row_integer(ranks, key, 0 if key == "q_lora" else None) for key, name in LATENT.items()})


def _layout(row: Row, profile: str) -> tuple[Layout, int]:
    """Return the layout, and the sequences of a step."""
    if missing := [key for key in ("tp", "pp") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    tp, pp, cp = (row_integer(row, key, 1) for key in ("tp", "pp", "cp"))
    world = row_integer(row, "num_gpus", tp * pp * cp * row_integer(row, "dp", 0))
    if not world:
        raise UnfitError("no num_gpus")
    if world % (tp * pp * cp):
        raise UnfitError(f"tp {tp} x pp {pp} x cp {cp} needs a multiple of {tp * pp * cp} GPUs, not {world}")
    sparse = row_integer(row, "experts", 0) > 0
    ep = row_integer(row, "ep", 1) if sparse else 1
    dp = world // (tp * pp * cp)
    micro_batch = row_integer(row, "mbs", row_micro_batch(row, dp, pp))
    batch = row_integer(row, "gbs", dp * micro_batch * row_integer(row, "grad_accum", 0))
    if not batch:
        raise UnfitError("no gbs")
    recipe = MLA_RECOMPUTE if profile == MEGATRON_BRIDGE.name and row.get("mla") else None
    recompute, modules = row_recompute(row.get("recompute", recipe))
    sequence_parallel, shard = row_flag(row, "sp") and tp > 1, row_shard(row)
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=row_integer(row, "etp", 1 if ep > 1 or NO_EXPERT_TP in row_options(row) else tp) if sparse else 1,
        vpp=row_chunks(row, pp, profile) if pp > 1 else 1,
        micro_batch=micro_batch,
        sequence_parallel=sequence_parallel,
        shard=shard,
        replicas=row_integer(row, "dp", 1) if row_integer(row, "fsdp", 1) > 1 else 1,
        reshard=Reshard.STEP if shard is Shard.WEIGHTS and pp > 1 else Reshard.MICRO_BATCH,
        grad_reduce=row_grad_reduce(row, profile),
        recompute=recompute,
        recompute_modules=ModuleSet(modules),
        overlaps=OverlapSet(row_overlap(row, profile, sequence_parallel)),
    )
    return layout, batch


def _measurement(row: Row, tokens_per_device: float) -> Measurement:
    """Return what was measured. Raises UnfitError for a row with neither time nor memory."""
    seconds, rate = row_number(row, "step_time_s"), row_number(row, "tokens_per_s_per_gpu")
    if seconds is None and rate:
        seconds = tokens_per_device / rate
    kind, memory = _memory(row)
    out_of_memory = row_text(row, "status").lower() == "oom"
    if seconds is None and memory is None and not out_of_memory:
        raise UnfitError("neither a step time nor memory was measured")
    return Measurement(
        step_seconds=seconds,
        memory_gib=memory,
        memory_kind=kind,
        last_rank="last rank" in row_text(row, "memory_kind"),
        out_of_memory=out_of_memory,
    )


def _memory(row: Row) -> tuple[MemoryKind | None, float | None]:
    """Return the kind of the measured memory, and its GiB. Computed values are not measurements."""
    words, value = row_text(row, "memory_kind"), row_number(row, "memory_gb")
    if value is None or any(word in words for word in ("computed", "estimated", "one layer")):
        return None, None
    if "smi" in words:
        return MemoryKind.DEVICE, value
    return MemoryKind.RESERVED if "reserved" in words or "torchtitan log" in words else MemoryKind.ALLOCATED, value


def _hybrid(row: Row) -> Hybrid:
    """Return the dimensions of a hybrid model from a row of the older schema."""
    name, arch = row_text(row, "model"), row_text(row, "arch")
    order = _order(name, arch)
    if name not in MAMBA or not order:
        raise UnfitError(f"the layers of {name} ({arch}) are not known")
    experts = row_integer(row, "experts", 0, MAX_EXPERTS)
    return Hybrid(
        order=order,
        hidden=row_integer(row, "hidden"),
        heads=row_integer(row, "heads"),
        kv_heads=row_integer(row, "kv_heads"),
        head_dim=row_integer(row, "head_dim", 0) or None,
        ffn=row_integer(row, "expert_ffn" if experts else "ffn"),
        vocab=row_integer(row, "vocab"),
        mamba_heads=MAMBA[name][0],
        mamba_state=MAMBA[name][1],
        experts=experts,
        top_k=row_integer(row, "topk", 0),
        shared_ffn=row_integer(row, "shared_expert_ffn", 0),
    )


def _order(name: str, arch: str) -> str:
    """Return the letter of every layer in order; kinds that are only counted are spread evenly."""
    counts = [(int(n), LETTERS[kind]) for n, kind in re.findall(r"(\d{1,4}) (mamba2|mlp|attention)", arch)]
    spread = sorted(((i + 0.5) / n, letter) for n, letter in counts for i in range(n))
    return "".join(letter for _, letter in spread) or ORDER.get(name, "")
