"""The device profile of a measurement: fitted figures, samples, and how they were measured, as a cluster file."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch
from attrs import evolve, frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.hardware.calibration import Sample, fitted_figures, profile_text
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.runtime.calibrate.measure import Measurements
from megaloom.runtime.megatron import device

MEMORY_TOLERANCE = 0.1  # by which a GPU's memory may differ from its preset's


@frozen
class Profile:
    """A measurement, its samples that the preset has figures for, the preset, and the text of the cluster file."""

    driver_name: str
    samples: list[Sample]
    preset: Cluster
    base: str
    text: str


def profile_of(measured: Measurements) -> Profile:
    """Return the profile of a measurement of this machine."""
    driver_name = device.gpu_name() if device.gpu_count() else "CPU"
    known = device.preset_of(driver_name) is not None
    base = device.preset_of(driver_name) or "A100" if device.gpu_count() else "CPU"
    preset = evolve(cluster(f"1x{base}"), count=measured.count, per_node=measured.per_node)
    samples = [s for s in measured.samples if s.precision in ("", *preset.device.flops)]
    usual_memory = abs(measured.nbytes / PRESETS[base].device.nbytes - 1) < MEMORY_TOLERANCE
    name = base if base == "CPU" or (known and usual_memory) else driver_name
    fields = _fields(measured, samples, preset, known)
    text = profile_text(samples, fields, base, name, measured.count, _environment(measured, driver_name))
    return Profile(driver_name, samples, preset, base, text)


def _fields(measured: Measurements, samples: list[Sample], preset: Cluster, known: bool) -> dict[str, Any]:
    """Return the fields of the profile that differ from the preset."""
    fields: dict[str, Any] = fitted_figures(samples, preset, known=known)
    fields["device"] |= {"nbytes": measured.nbytes, "units": measured.units}
    if measured.count > measured.per_node:
        fields["per_node"] = measured.per_node
    return fields


def _environment(measured: Measurements, driver_name: str) -> dict[str, Any]:
    """Return command, date, host and software of the measurement."""
    processor = platform.processor() or platform.machine()
    return {
        "command": shlex.join(["megaloom", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": f"{platform.node()}: {measured.count} x {driver_name}, {processor}",
        "software": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""},
    }
