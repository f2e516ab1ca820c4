"""Training runs that others published: model, layout, cluster and practice to predict from, and what was measured.

Protocol: `read(path)` gives the runs of a file and, of the rows that are none, the reason. Three formats are known, by
their columns: JSON lines of published runs, the sweeps of vTrain, and the peak memory of Megatron-LM's own tests. A row
says what was run, never how quick it should be: nothing here depends on what was measured.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model

from .cluster import Cluster, cluster
from .decoder import Decoder
from .layout import Layout, Precision, Recompute, Workload
from .practice import DISPATCH_GRAPHED, MEGATRON, MEGATRON_2021, NANOTRON, PLAIN, Practice

Row = Mapping[str, Any]
KEYS = ("id", "source_group", "gpu", "precision_class")


@frozen(kw_only=True)
class Run:
    """One published run."""

    id: str
    source: str
    gpu: str
    sparse: bool  # a mixture of experts
    model: Model
    layout: Layout
    cluster: Cluster
    workload: Workload
    practice: Practice
    step_seconds: float | None
    memory_gib: float | None
    memory_kind: str  # "allocated", "reserved", "device" (as nvidia-smi shows it), "" if there is none
    last_rank: bool = False  # whether memory is that of the last pipeline rank, rather than of the fullest
    oom: bool = False  # it ran out of memory
    sweep: str = ""  # runs of one sweep differ in their layout alone


@frozen
class Skipped:
    """A row that is no run that can be predicted, and why."""

    id: str
    source: str
    gpu: str
    precision: str
    sparse: bool
    reason: str


class UnfitError(Exception):
    """Why a row is left out."""


def read(path: str | Path) -> tuple[list[Run], list[Skipped]]:
    """The runs of a file, and the rows that are left out. Raises UserError for a file that has none of the formats."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read runs from {path}: {error}") from error
    rows, reader = _rows(text, str(path))
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            runs.append(reader(row))
        except (UnfitError, UserError) as error:
            reason = str(error).partition("\n")[0]
            name, source, gpu, precision = (str(row.get(key) or "") for key in KEYS)
            skipped.append(Skipped(name, source, gpu, precision, bool(row.get("experts")), reason))
    return runs, skipped


def _rows(text: str, where: str) -> tuple[list[Row], Callable[[Row], Run]]:
    """The rows of a file, and what reads them."""
    head = text.partition("\n")[0]
    if head.startswith("{"):
        try:
            rows: list[Row] = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise UserError(f"{where} is not JSON lines: {error}") from error
        return [{"id": f"row {i + 1}", **row} for i, row in enumerate(rows)], published
    if head.startswith("params,gpus,"):
        source = {"source_group": "vtrain", "gpu": "A100-80GB", "precision_class": "fp16"}
        table = csv.DictReader(text.splitlines())
        return [{**source, "id": f"vtrain-{i + 1:03}", **r} for i, r in enumerate(table)], vtrain
    if head.startswith("suite\ttest\t"):
        table = csv.DictReader(text.splitlines(), delimiter="\t")
        source = {"source_group": "megatron-functional"}
        return [{**source, **r, "id": f"{r['test']}/{r['hw']}", "gpu": str(r["hw"])} for r in table], functional
    raise UserError(
        f"{where} holds no runs that are known\n"
        "known are JSON lines of published runs, and tables that begin with params,gpus,… or suite, test, …"
    )


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
    practice = _practice(row, note)
    made = decoder.model(0.0 if practice.flash else 0.1)
    said = (row[key] for key in ("source_group", "model", "gpu", "num_gpus", "gbs", "seq_len", "layers", "framework"))
    return Run(
        id=str(row["id"]),
        source=str(row["source_group"]),
        gpu=str(row["gpu"]),
        sparse=bool(row.get("experts")),
        model=made,
        layout=layout,
        cluster=machine,
        workload=Workload(seq=_whole(row, "seq_len"), batch=batch, precision=precision),
        practice=practice,
        step_seconds=float(seconds) if seconds else None,
        memory_gib=memory,
        memory_kind=kind,
        last_rank="last rank" in str(row.get("memory_kind")),
        oom=row.get("status") == "oom",
        sweep=" ".join(map(str, (*said, precision))),
    )


def vtrain(row: Row) -> Run:
    """A row of the sweeps on A100s of vTrain: GPT with full recompute, in sizes of billions of parameters."""
    layers, hidden, heads = (_whole(row, key) for key in ("layers", "hidden", "heads"))
    decoder = Decoder(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, gated=False, learned=True)
    layout = Layout(
        tp=_whole(row, "tp"),
        dp=_whole(row, "dp"),
        pp=_whole(row, "pp"),
        micro_batch=_whole(row, "mbs"),
        recompute=Recompute.FULL,
    )
    if layout.world != _whole(row, "gpus"):
        raise UnfitError(f"{layout.world} GPUs are laid out, and {row['gpus']} were used")
    return Run(
        id=str(row["id"]),
        source="vtrain",
        gpu="A100-80GB",
        sparse=False,
        model=decoder.model(0.1),
        layout=layout,
        cluster=cluster(f"{layout.world}xA100"),
        workload=Workload(seq=_whole(row, "seq"), batch=_whole(row, "gbs"), precision=Precision.FP16),
        practice=MEGATRON_2021,
        step_seconds=float(row["ms"]) / 1e3,
        memory_gib=None,
        memory_kind="",
        sweep=f"vtrain {row['params']}b on {row['gpus']}",
    )


TESTED = 8  # GPUs of each of Megatron-LM's functional tests: one node
VOCAB = 50257  # of those tests: GPT-2's tokenizer, padded to a multiple of 128 by each rank


def functional(row: Row) -> Run:
    """A row of Megatron-LM's functional tests: the peak memory of what was trained for a few steps."""
    if row["suite"] not in ("gpt", "moe"):
        raise UnfitError(f"tests of {row['suite']} are not described well enough")
    tp, pp, cp = (_whole(row, key, 1) for key in ("tp", "pp", "cp"))
    if row.get("experts"):
        raise UnfitError("the width of its experts is not said")
    hidden = _whole(row, "hidden")
    decoder = Decoder(
        layers=_whole(row, "layers"),
        hidden=hidden,
        heads=_whole(row, "heads"),
        ffn=4 * hidden,
        vocab=-(-VOCAB // (128 * tp)) * 128 * tp,
        gated=False,
        learned=True,
    )
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=_chunks(row, pp),
        dp=max(1, TESTED // (tp * pp * cp)),
        micro_batch=_whole(row, "mbs"),
        sequence_parallel=row.get("sp") == "true" and tp > 1,
        distributed_optimizer=row.get("distopt") == "true",
        recompute=_recompute(row.get("recompute")),
    )
    gpu = next((name for name in ("A100", "H100", "GB200") if name.lower() in str(row["hw"])), "")
    if not gpu:
        raise UnfitError(f"{row['hw']} names no known GPU")
    precision = Precision.BF16 if row.get("bf16") == "true" else Precision.FP32
    return Run(
        id=str(row["id"]),
        source="megatron-functional",
        gpu=gpu,
        sparse=False,
        model=decoder.model(0.1),
        layout=layout,
        cluster=cluster(f"{layout.world}x{gpu}"),
        workload=Workload(seq=_whole(row, "seq"), batch=_whole(row, "gbs"), precision=precision),
        practice=MEGATRON,
        step_seconds=None,
        memory_gib=_whole(row, "peak_bytes") / 2**30,
        last_rank=True,  # the one that logs
        memory_kind="allocated",
    )


def _chunks(row: Row, pp: int) -> int:
    """Model chunks a rank: said, or by the layers of each, which the name of a test has (vp1)."""
    each = re.search(r"_vp(\d+)_", f"{row['test']}_")
    return max(1, _whole(row, "layers") // pp // int(each[1])) if each and pp > 1 else _whole(row, "vp", 1)


def _decoder(row: Row) -> Decoder:
    arch = str(row.get("arch") or "")
    if "hybrid" in arch or "single" in arch:
        raise UnfitError(f"{arch} is not described well enough")
    needed = ("layers", "hidden", "heads", "seq_len")
    if missing := [key for key in needed if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    gpt = "GELU" in arch
    found = Decoder(
        layers=_whole(row, "layers"),
        hidden=_whole(row, "hidden"),
        heads=_whole(row, "heads"),
        kv_heads=row.get("kv_heads"),
        head_dim=None if row.get("mla") else row.get("head_dim"),
        ffn=_whole(row, "ffn", 4 * _whole(row, "hidden")),
        vocab=_whole(row, "vocab", 51200),
        gated=not gpt,
        learned=gpt,
        positions=_whole(row, "seq_len"),
        experts=row.get("experts") or 0,
        top_k=row.get("topk") or 0,
        expert_ffn=row.get("expert_ffn") or 0,
        shared_ffn=row.get("shared_expert_ffn") or 0,
        dense_layers=row.get("dense_layers") or 0,
        alternate="every 2nd" in arch,
        window=128 if "128-token sliding" in arch else None,
        latent=tuple(sorted((row.get("mla") or {}).items())),
        ahead=row.get("mtp_layers") or 0,
    )
    return found if gpt else found.nearest(row.get("params_b"))


def _layout(row: Row, note: str) -> tuple[Layout, int]:
    """The layout, and the sequences of a step."""
    if missing := [key for key in ("num_gpus", "tp", "pp", "mbs", "gbs") if not row.get(key)]:
        raise UnfitError(f"no {', '.join(missing)}")
    tp, pp, cp = (_whole(row, key, 1) for key in ("tp", "pp", "cp"))
    world = _whole(row, "num_gpus")
    if world % (tp * pp * cp):
        raise UnfitError(f"tp {tp} x pp {pp} x cp {cp} does not divide {world} GPUs")
    ep = _whole(row, "ep", 1) if row.get("experts") else 1
    whole = not row.get("experts") or ep > 1 or "expert_tensor_parallel_size=1" in note
    etp = _whole(row, "etp", 1 if whole else tp) if row.get("experts") else 1
    if world % (ep * etp * pp):
        raise UnfitError(f"ep {ep} x etp {etp} x pp {pp} does not divide {world} GPUs")
    dp, mbs, gbs = world // (tp * pp * cp), _whole(row, "mbs"), _whole(row, "gbs")
    if gbs % (dp * mbs):
        raise UnfitError(f"a batch of {gbs} does not divide over dp {dp} x micro-batch {mbs}")
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=_whole(row, "vpp", 1) if pp > 1 else 1,
        micro_batch=mbs,
        sequence_parallel=bool(row.get("sp")) and tp > 1,
        distributed_optimizer=row.get("dist_optimizer") is not False,
        recompute=_recompute(row.get("recompute")),
    )
    return layout, gbs


def _recompute(said: object) -> Recompute:
    """What is computed again; where nothing is said, nothing."""
    text = str(said or "none").lower()
    if text.startswith("full"):
        return Recompute.FULL
    if (text.startswith("selective") and ":" not in text) or "core_attn" in text:
        return Recompute.SELECTIVE
    return Recompute.NONE


def _precision(row: Row) -> Precision:
    try:
        return Precision(str(row.get("precision_class")))
    except ValueError:
        raise UnfitError(f"a precision of {row.get('precision_class')!r}") from None


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
    return evolve(made, inter=evolve(made.inter, name="Omni-Path", bandwidth=count * speed * 1e9 / 8 / gpus))


def _memory(row: Row) -> tuple[str, float | None]:
    """What was measured of memory: the kind, and GiB."""
    said, value = str(row.get("memory_kind") or ""), row.get("memory_gb")
    if not value or re.search("computed|estimated|one layer", said):
        return "", None
    kind = "device" if "smi" in said else "reserved" if "reserved" in said else "allocated"
    return kind, float(value)


def _practice(row: Row, note: str) -> Practice:
    """How that framework ran it then."""
    framework, when = str(row.get("framework")), str(row.get("framework_version") or "")
    old = re.search("DeepSpeed|zero bubble", framework) or (framework == "Megatron-LM" and re.search("202[0-2]", when))
    if old or row.get("gpu") == "V100-32GB":
        return MEGATRON_2021
    if "nanotron" in framework:
        return NANOTRON
    if "no TP/P2P/grad overlap" in note:
        return PLAIN
    found = MEGATRON
    if "Bridge" in framework:
        found = evolve(found, gradient_nbytes=2)
    if re.search(r"cuda_graph_impl=(?!none)|CUDA graph", note):
        found = evolve(found, graphed=True, dispatch_seconds=0.0 if "full" in note else DISPATCH_GRAPHED)
    if re.search(r"a2a_overlap=True|a2a overlap|EP overlap on", note):
        found = evolve(found, hidden_experts=HIDDEN_EXPERTS)
    return evolve(found, hidden_tensor=HIDDEN_TENSOR) if "NeMo" in framework or "Bridge" in framework else found


# Of tensor-parallel collectives, what Transformer Engine's overlap with products leaves unseen, and of the experts'
# all-to-all, what the overlap with another micro-batch does.
HIDDEN_TENSOR, HIDDEN_EXPERTS = 0.8, 0.5


def _whole(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of a row."""
    value = row.get(key)
    if value in (None, ""):
        if default is None:
            raise UnfitError(f"no {key}")
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UnfitError(f"{key} of {value!r} is no whole number") from None
