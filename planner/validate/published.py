"""Rows of published runs, in the JSON lines whose fields their README describes."""

from __future__ import annotations

import re

from attrs import evolve

from megaloom.planner.cluster import Cluster, cluster
from megaloom.planner.layout import Layout, Precision, Workload

from .decoder import Decoder
from .eras import practice, tuned
from .run import Row, Run, UnfitError, recompute, whole


def published(row: Row) -> Run:
    """A row of published runs, whose fields its README describes."""
    if row.get("fsdp") or "FSDP" in str(row.get("zero_stage")):
        raise UnfitError("weights are sharded (FSDP)")
    if (task := str(row.get("task"))) not in ("pretrain", "SFT", "memory only"):
        raise UnfitError(f"{task} is no pre-training")
    if str(row.get("schedule") or "").startswith(("ZB", "DualPipe")):
        raise UnfitError(f"the schedule {row['schedule']} is not megatron-core's")
    note = str(row.get("other") or "")
    if "offload" in note:
        raise UnfitError("activations are offloaded")
    decoder = _decoder(row)
    layout, batch = _layout(row, note)
    precision = _precision(row)
    kind, memory = _memory(row)
    seconds = row.get("step_time_s")
    if not seconds and memory is None and row.get("status") != "oom":
        raise UnfitError("neither a step time nor memory was measured")
    machine = _cluster(row, layout.world)
    used = practice(row, note)
    made = decoder.model(0.0 if used.flash else 0.1)
    said = (row[key] for key in ("source_group", "model", "gpu", "num_gpus", "gbs", "seq_len", "layers", "framework"))
    return Run(
        id=str(row["id"]),
        source=str(row["source_group"]),
        name=str(row["model"]),
        gpu=str(row["gpu"]),
        sparse=bool(row.get("experts")),
        model=made,
        layout=layout,
        cluster=machine,
        workload=Workload(seq=whole(row, "seq_len"), batch=batch, precision=precision),
        practice=used,
        step_seconds=float(seconds) if seconds else None,
        memory_gib=memory,
        memory_kind=kind,
        last_rank="last rank" in str(row.get("memory_kind")),
        oom=row.get("status") == "oom",
        sweep=" ".join(map(str, (*said, precision))),
    )


def _decoder(row: Row) -> Decoder:
    arch = str(row.get("arch") or "")
    if "hybrid" in arch or "single" in arch:
        raise UnfitError(f"{arch} is not described well enough")
    needed = ("layers", "hidden", "heads", "seq_len")
    if missing := [key for key in needed if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    gpt = "GELU" in arch
    found = Decoder(
        layers=whole(row, "layers"),
        hidden=whole(row, "hidden"),
        heads=whole(row, "heads"),
        kv_heads=row.get("kv_heads"),
        head_dim=None if row.get("mla") else row.get("head_dim"),
        ffn=whole(row, "ffn", 4 * whole(row, "hidden")),
        vocab=whole(row, "vocab", 51200),
        gated=not gpt,
        learned=gpt,
        positions=whole(row, "seq_len"),
        experts=row.get("experts") or 0,
        top_k=row.get("topk") or 0,
        expert_ffn=row.get("expert_ffn") or 0,
        shared_ffn=row.get("shared_expert_ffn") or 0,
        dense_layers=row.get("dense_layers") or 0,
        alternate="every 2nd" in arch,
        window=128 if "128-token sliding" in arch else None,
        clamped="gpt-oss" in str(row["model"]),
        latent=tuple(sorted((row.get("mla") or {}).items())),
        ahead=row.get("mtp_layers") or 0,
    )
    return found if gpt else found.nearest(row.get("params_b"))


def _layout(row: Row, note: str) -> tuple[Layout, int]:
    """The layout, and the sequences of a step."""
    if missing := [key for key in ("num_gpus", "tp", "pp", "gbs") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    tp, pp, cp = (whole(row, key, 1) for key in ("tp", "pp", "cp"))
    world = whole(row, "num_gpus")
    if world % (tp * pp * cp):
        raise UnfitError(f"tp {tp} x pp {pp} x cp {cp} does not divide {world} GPUs")
    ep = whole(row, "ep", 1) if row.get("experts") else 1
    undivided = not row.get("experts") or ep > 1 or "expert_tensor_parallel_size=1" in note
    etp = whole(row, "etp", 1 if undivided else tp) if row.get("experts") else 1
    if world % (ep * etp * pp):
        raise UnfitError(f"ep {ep} x etp {etp} x pp {pp} does not divide {world} GPUs")
    dp, mbs, gbs = world // (tp * pp * cp), whole(row, "mbs", 1), whole(row, "gbs")
    if gbs % (dp * mbs):
        raise UnfitError(f"a batch of {gbs} does not divide over dp {dp} x micro-batch {mbs}")
    again, modules = recompute(row.get("recompute"))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=_chunks(row, pp) if pp > 1 else 1,
        micro_batch=mbs,
        sequence_parallel=bool(row.get("sp")) and tp > 1,
        distributed_optimizer=row.get("dist_optimizer") is not False,
        recompute=again,
        recompute_modules=modules,
    )
    return layout, gbs


def _chunks(row: Row, pp: int) -> int:
    """Model chunks a rank. NVIDIA's own recipes interleave layer by layer where they name no number of chunks."""
    layers = whole(row, "layers")
    return whole(row, "vpp", layers // pp if tuned(row) and layers % pp == 0 else 1)


def _precision(row: Row) -> Precision:
    try:
        return Precision(str(row.get("precision_class")))
    except ValueError:
        raise UnfitError(f"a precision of {row.get('precision_class')!r}") from None


# Of Omni-Path's 100 Gb/s NCCL gets 39.9 in an all-reduce of 4 GB over four nodes
# (github.com/bigscience-workshop/bigscience, experiments/bandwidth/n4_a100_all_reduce_bench.txt).
OMNI_PATH = 0.4
DEVICES = {"A100-80GB": "A100", "A800-80GB": "A800", "A100-80GB-PCIe": "A100-PCIe", "V100-32GB": "V100"}


def _device(gpu: str) -> str:
    """Our name of a GPU."""
    name = gpu.partition(" (")[0]
    return DEVICES.get(name, name)


def _cluster(row: Row, world: int) -> Cluster:
    """The cluster, with the network that the row names if that is slower than a GPU of this kind usually has."""
    made = cluster(f"{world}x{_device(str(row['gpu']))}")
    ports = re.search(r"(\d+)x Omni-Path (\d+)Gb/s per (\d+)-GPU node", str(row.get("interconnect")))
    if not ports:
        return made
    count, speed, gpus = map(int, ports.groups())
    return evolve(
        made, inter=evolve(made.inter, name="Omni-Path", bandwidth=count * speed * 1e9 / 8 / gpus, efficiency=OMNI_PATH)
    )


def _memory(row: Row) -> tuple[str, float | None]:
    """What was measured of memory: the kind, and GiB."""
    said, value = str(row.get("memory_kind") or ""), row.get("memory_gb")
    if not value or re.search("computed|estimated|one layer", said):
        return "", None
    kind = "device" if "smi" in said else "reserved" if "reserved" in said else "allocated"
    return kind, float(value)
