"""Rows of the table of vTrain's sweeps."""

from __future__ import annotations

from megaloom.planner.contract.choices import OverlapSet, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.profiles.frameworks import MEGATRON_2021
from megaloom.planner.hardware.cluster_names import cluster

from .decoder import Decoder
from .run import (
    LARGEST,
    Row,
    Run,
    UnfitError,
    figure,
    text,
    whole,
)


def vtrain(row: Row) -> Run:
    """A row of the sweeps on A100s of vTrain: GPT with full recompute, in sizes of billions of parameters."""
    layers, hidden, heads = whole(row, "layers", most=LARGEST), whole(row, "hidden"), whole(row, "heads")
    decoder = Decoder(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, gated=False, learned=True)
    layout = Layout(
        tp=whole(row, "tp"),
        dp=whole(row, "dp"),
        pp=whole(row, "pp"),
        micro_batch=whole(row, "mbs"),
        recompute=Recompute.FULL,
        overlaps=OverlapSet(),
    )
    if layout.world != (used := whole(row, "gpus")):
        raise UnfitError(f"{layout.world} GPUs are laid out, and {used} were used")
    milliseconds = figure(row, "ms")
    if milliseconds is None:
        raise UnfitError("no ms")
    name = f"{text(row, 'params')}b"
    return Run(
        id=text(row, "id"),
        source="vtrain",
        name=name,
        gpu="A100-80GB",
        sparse=False,
        model=decoder.model(0.1),
        layout=layout,
        cluster=cluster(f"{layout.world}xA100"),
        workload=Workload(seq=whole(row, "seq"), batch=whole(row, "gbs"), precision=Precision.FP16),
        profile=MEGATRON_2021,
        step_seconds=milliseconds / 1e3,
        memory_gib=None,
        memory_kind="",
        sweep=f"vtrain {name} on {used}",
    )
