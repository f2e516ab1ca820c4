"""The cluster file of a calibration: a known device, the figures that were fitted, and the runs behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.hardware.cluster_file import read_cluster_file
from megaloom.planner.hardware.presets import PRESETS

from .calibrated import CalibratedRuns
from .factors import scaled

DIGITS = 6  # significant digits of a figure
KEPT = ("pod", "oversubscription", "failures", "storage")  # of the cluster file that was calibrated


def calibrated_toml(found: CalibratedRuns, like: Cluster, command: str, per_node: int | None = None) -> str:
    """Return the text of a cluster file. like: the cluster that the user named. per_node: what the runs state of it."""
    described = read_cluster_file(like.source) if like.source else None
    base = described.base if described else like.device.name
    if per_node is None and described and described.preset.tray != PRESETS[base].tray:
        per_node = described.preset.tray
    calibration = asdict(found.calibration)
    return "\n".join(
        (
            f"# Calibrated from {len(found.runs)} runs: {command}",
            f"base = {_value(base)}",
            *([f"name = {_value(like.device.name)}"] if like.device.name != base else []),
            *([f"per_node = {per_node}"] if per_node else []),
            *(f"{name} = {_value(getattr(like, name))}" for name in KEPT if like.source and getattr(like, name)),
            "",
            "[calibration]  # errors of each run, predicted from the others",
            *(f"{name} = {_value(value)}" for name, value in calibration.items() if value is not None),
            *_tables(scaled(like, [estimate.value for estimate in found.estimates]), base),
            *_measured(found),
            "",
        )
    )


def _tables(cluster: Cluster, base: str) -> Iterator[str]:
    """Yield the tables of a device and its links, with the figures that differ from the preset's."""
    preset = PRESETS[base]
    for name, value, usual in (
        ("device", cluster.device, preset.device),
        ("intra", cluster.intra, preset.intra),
        ("inter", cluster.inter, preset.inter),
    ):
        before = asdict(usual)
        different = {n: v for n, v in asdict(value).items() if v != before[n] and (name, n) != ("device", "name")}
        if different:
            yield f"\n[{name}]"
            yield from (f"{field} = {_value(v)}" for field, v in different.items())


def _measured(found: CalibratedRuns) -> Iterator[str]:
    """Yield a table for each run: its measured step, and predicted over measured seconds before, after and left out."""
    for run, *ratios in zip(found.runs, found.before, found.after, found.held_out, strict=True):
        yield "\n[[measured]]"
        yield f"log = {_value(run.name)}"
        yield f"step_seconds = {_value(run.seconds)}"
        for name, ratio in zip(("before", "after", "left_out"), ratios, strict=True):
            yield f"{name} = {_value(ratio)}"


def _value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(float(f"{value:.{DIGITS}g}"))
    return json.dumps(value, ensure_ascii=False)  # so quoted, a text is one of TOML too
