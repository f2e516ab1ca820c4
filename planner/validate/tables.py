"""Rows of the table of vTrain's sweeps."""

from __future__ import annotations

from megaloom.planner.cluster import cluster
from megaloom.planner.cost.practice import MEGATRON_2021
from megaloom.planner.layout import Layout, Precision, Recompute, Workload

from .decoder import Decoder
from .run import Row, Run, UnfitError, whole


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
        name=f"{row['params']}b",
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
