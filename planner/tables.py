"""Rows of two tables of runs: the sweeps of vTrain, and the peak memory of Megatron-LM's own tests."""

from __future__ import annotations

import re

from .cluster import cluster
from .decoder import Decoder
from .layout import Layout, Precision, Recompute, Workload
from .practice import MEGATRON, MEGATRON_2021
from .run import Row, Run, UnfitError, recompute, whole


def vtrain(row: Row) -> Run:
    """A row of the sweeps on A100s of vTrain: GPT with full recompute, in sizes of billions of parameters."""
    layers, hidden, heads = (whole(row, key) for key in ("layers", "hidden", "heads"))
    decoder = Decoder(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, gated=False, learned=True)
    layout = Layout(
        tp=whole(row, "tp"),
        dp=whole(row, "dp"),
        pp=whole(row, "pp"),
        micro_batch=whole(row, "mbs"),
        recompute=Recompute.FULL,
    )
    if layout.world != whole(row, "gpus"):
        raise UnfitError(f"{layout.world} GPUs are laid out, and {row['gpus']} were used")
    return Run(
        id=str(row["id"]),
        source="vtrain",
        gpu="A100-80GB",
        sparse=False,
        model=decoder.model(0.1),
        layout=layout,
        cluster=cluster(f"{layout.world}xA100"),
        workload=Workload(seq=whole(row, "seq"), batch=whole(row, "gbs"), precision=Precision.FP16),
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
    tp, pp, cp = (whole(row, key, 1) for key in ("tp", "pp", "cp"))
    if row.get("experts"):
        raise UnfitError("the width of its experts is not said")
    hidden = whole(row, "hidden")
    decoder = Decoder(
        layers=whole(row, "layers"),
        hidden=hidden,
        heads=whole(row, "heads"),
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
        micro_batch=whole(row, "mbs"),
        sequence_parallel=row.get("sp") == "true" and tp > 1,
        distributed_optimizer=row.get("distopt") == "true",
        recompute=recompute(row.get("recompute")),
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
        workload=Workload(seq=whole(row, "seq"), batch=whole(row, "gbs"), precision=precision),
        practice=MEGATRON,
        step_seconds=None,
        memory_gib=whole(row, "peak_bytes") / 2**30,
        last_rank=True,  # the one that logs
        memory_kind="allocated",
    )


def _chunks(row: Row, pp: int) -> int:
    """Model chunks a rank: said, or by the layers of each, which the name of a test has (vp1)."""
    each = re.search(r"_vp(\d+)_", f"{row['test']}_")
    return max(1, whole(row, "layers") // pp // int(each[1])) if each and pp > 1 else whole(row, "vp", 1)
