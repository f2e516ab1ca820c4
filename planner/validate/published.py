"""Rows of published runs, in the JSON lines whose fields their README describes."""

from __future__ import annotations

import re

from attrs import evolve

from megaloom.planner.contract.choices import ModuleSet, OverlapSet, Shard
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster

from .catalog_models import Named, named
from .decoder import Decoder
from .framework_history import (
    again,
    framework_profile,
    overlaps,
    tuned,
)
from .hybrid import Hybrid, hybrid
from .run import (
    LARGEST,
    Row,
    Run,
    UnfitError,
    figure,
    recompute,
    text,
    whole,
    yes,
)
from .vocabulary import device, precision

TRAINED = ("", "pretrain", "pretraining", "pre-training", "sft", "memory only")  # a row's task; nothing is pre-training
SWEEP = (
    "source_group",
    "model",
    "gpu",
    "num_gpus",
    "gbs",
    "seq_len",
    "layers",
    "framework",
)  # what its runs have alike
LATENT = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v")


def published(row: Row) -> Run:
    """A row of published runs, whose fields its README describes."""
    if whole(row, "fsdp", 1) > 1 or "FSDP" in text(row, "zero_stage"):
        raise UnfitError("weights are sharded (FSDP)")
    if (task := text(row, "task")).lower() not in TRAINED:
        raise UnfitError(f"{task} is no pre-training")
    if (schedule := text(row, "schedule")).startswith(("ZB", "DualPipe")):
        raise UnfitError(f"the schedule {schedule} is not megatron-core's")
    note = text(row, "other")
    if "offload" in note:
        raise UnfitError("activations are offloaded")
    decoder, gpu, computed = _decoder(row), text(row, "gpu"), precision(row)
    row = {**row, "gpu": device(row), "precision_class": computed}
    if isinstance(decoder, Named):
        row |= {"layers": decoder.layers, "experts": decoder.experts}
    layout, batch = _layout(row, note)
    kind, memory = _memory(row)
    seq, oom = whole(row, "seq_len"), text(row, "status").lower() == "oom"
    seconds = figure(row, "step_time_s")
    if seconds is None and (rate := figure(row, "tokens_per_s_per_gpu")):
        seconds = batch * seq / (rate * layout.world)
    if seconds is None and memory is None and not oom:
        raise UnfitError("neither a step time nor memory was measured")
    machine = _cluster(row, layout.world)
    used = framework_profile(row, note)
    said = (text(row, key) for key in SWEEP)
    return Run(
        id=text(row, "id"),
        source=text(row, "source_group"),
        name=text(row, "model"),
        gpu=gpu,
        sparse=bool(decoder.experts),
        model=decoder.model(0.0 if used.attention.fused else 0.1),
        layout=evolve(layout, overlaps=OverlapSet(overlaps(row, note, layout, used))),
        cluster=machine,
        workload=Workload(seq=seq, batch=batch, precision=computed),
        profile=used,
        step_seconds=seconds,
        memory_gib=memory,
        memory_kind=kind,
        last_rank="last rank" in text(row, "memory_kind"),
        oom=oom,
        sweep=" ".join((*said, computed)),
    )


# Models whose queries and keys pass norms of their own: their configurations at Hugging Face, NeMo AutoModel's hy_v3.
NORMED = r"qwen3|hy3"


def _decoder(row: Row) -> Decoder | Hybrid | Named:
    arch = text(row, "arch")
    if "hybrid" in arch:
        return hybrid(row)
    if "single" in arch:
        raise UnfitError(f"{arch} is not described well enough")
    if known := named(row):
        return known
    if missing := [key for key in ("layers", "hidden", "heads", "seq_len") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    gpt, hidden = "GELU" in arch, whole(row, "hidden")
    found = Decoder(
        layers=whole(row, "layers", most=LARGEST),
        hidden=hidden,
        heads=whole(row, "heads"),
        kv_heads=whole(row, "kv_heads", 0) or None,
        head_dim=None if row.get("mla") else whole(row, "head_dim", 0) or None,
        ffn=whole(row, "ffn", 4 * hidden),
        vocab=whole(row, "vocab", 51200),
        gated=not gpt,
        learned=gpt,
        positions=whole(row, "seq_len"),
        experts=whole(row, "experts", 0, LARGEST),
        top_k=whole(row, "topk", 0),
        expert_ffn=whole(row, "expert_ffn", 0),
        shared_ffn=whole(row, "shared_expert_ffn", 0),
        dense_layers=whole(row, "dense_layers", 0, LARGEST),
        alternate="every 2nd" in arch,
        window=128 if "128-token sliding" in arch else None,
        normed=bool(re.match(NORMED, text(row, "model"))),
        clamped="gpt-oss" in text(row, "model"),
        latent=_latent(row.get("mla")),
        ahead=whole(row, "mtp_layers", 0, LARGEST),
    )
    return found if gpt else found.nearest(figure(row, "params_b"))


def _latent(said: object) -> tuple[tuple[str, int], ...]:
    """Ranks and channels of latent attention; without a rank of its own a query is not compressed."""
    if not said:
        return ()
    if not isinstance(said, dict):
        raise UnfitError(f"mla of {said!r:.40} is no table of {', '.join(LATENT)}")
    return tuple((key, whole(said, key, 0 if key == "q_lora" else None)) for key in LATENT)


def _layout(row: Row, note: str) -> tuple[Layout, int]:
    """The layout, and the sequences of a step."""
    if missing := [key for key in ("tp", "pp") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    tp, pp, cp = (whole(row, key, 1) for key in ("tp", "pp", "cp"))
    world = whole(row, "num_gpus", tp * pp * cp * whole(row, "dp", 0))
    if not world:
        raise UnfitError("no num_gpus")
    if world % (tp * pp * cp):
        raise UnfitError(f"tp {tp} x pp {pp} x cp {cp} needs a multiple of {tp * pp * cp} GPUs, not {world}")
    sparse = whole(row, "experts", 0) > 0
    ep = whole(row, "ep", 1) if sparse else 1
    undivided = not sparse or ep > 1 or "expert_tensor_parallel_size=1" in note
    etp = whole(row, "etp", 1 if undivided else tp) if sparse else 1
    dp, mbs = world // (tp * pp * cp), whole(row, "mbs", 1)
    gbs = whole(row, "gbs", dp * mbs * whole(row, "grad_accum", 0))
    if not gbs:
        raise UnfitError("no gbs")
    mode, modules = recompute(again(row))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=_chunks(row, pp) if pp > 1 else 1,
        micro_batch=mbs,
        sequence_parallel=yes(row, "sp") and tp > 1,
        shard=Shard(yes(row, "dist_optimizer", default=True)),
        recompute=mode,
        recompute_modules=ModuleSet(modules),
    )
    return layout, gbs


def _chunks(row: Row, pp: int) -> int:
    """Model chunks a rank. NVIDIA's own recipes interleave layer by layer where they name no number of chunks."""
    layers = whole(row, "layers")
    return whole(row, "vpp", layers // pp if tuned(row) and layers % pp == 0 else 1, LARGEST)


# Of Omni-Path's 100 Gb/s NCCL gets 40.5 in an all-reduce of 4 GB over four nodes. It uses two of the four ports of a
# node, by its log one for GPUs 0 to 3 and one for GPU 7 (github.com/bigscience-workshop/bigscience,
# experiments/bandwidth: n4_a100_all_reduce_bench.txt, all_reduce_bench-a100-n4.txt).
OMNI_PATH, PORTS = 0.4, 2


def _cluster(row: Row, world: int) -> Cluster:
    """The cluster, with the network that the row names if that is slower than a GPU of this kind usually has."""
    made = cluster(f"{world}x{text(row, 'gpu')}")
    port = re.search(r"Omni-Path (\d+)Gb/s per (\d+)-GPU node", text(row, "interconnect"))
    if not port:
        return made
    speed, gpus = map(int, port.groups())
    return evolve(
        made, inter=evolve(made.inter, name="Omni-Path", bandwidth=PORTS * speed * 1e9 / 8 / gpus, efficiency=OMNI_PATH)
    )


def _memory(row: Row) -> tuple[str, float | None]:
    """What was measured of memory: the kind, and GiB."""
    said, value = text(row, "memory_kind"), figure(row, "memory_gb")
    if value is None or re.search("computed|estimated|one layer", said):
        return "", None
    kind = "device" if "smi" in said else "reserved" if "reserved" in said else "allocated"
    return kind, value
