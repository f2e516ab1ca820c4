"""`megaloom measure`: measure this machine, and write a device profile that `plan` takes instead of a preset."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from rich.console import Group
from rich.text import Text

from megaloom.dsl.errors import UserError
from megaloom.dsl.show.printing import show
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.hardware.calibration import Sample, calibration_table, fitted_figures, profile_text
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.runtime.calibrate.measure import Measurements, measure_devices
from megaloom.runtime.megatron import device

BUSY_LOAD = 0.5  # load per core above which the result names the load
MEMORY_TOLERANCE = 0.1  # by which a GPU's memory may differ from its preset's


def run_measure(gpus: int | None, output: Path) -> None:
    """Measure this machine, write its device profile, and print the figures beside those of its preset."""
    if output.suffix != ".json" or not output.resolve().parent.is_dir():
        raise UserError(f"cannot write a profile to {output}\ngive a name that ends in .json, in an existing folder")
    driver_name = device.gpu_name() if device.gpu_count() else "CPU"
    known = device.preset_of(driver_name) is not None
    base = device.preset_of(driver_name) or "A100" if device.gpu_count() else "CPU"
    load = os.getloadavg()[0]  # before the measurement adds its own
    measured = measure_devices(device.device_count() if gpus is None else gpus)
    if int(os.environ.get("RANK", 0)):
        return
    preset = evolve(cluster(f"1x{base}"), count=measured.count, per_node=measured.per_node)
    samples = [s for s in measured.samples if s.precision in ("", *preset.device.flops)]
    usual_memory = abs(measured.nbytes / PRESETS[base].device.nbytes - 1) < MEMORY_TOLERANCE
    name = base if base == "CPU" or (known and usual_memory) else driver_name
    fields = _fields(measured, samples, preset, known)
    try:
        output.write_text(
            profile_text(samples, fields, base, name, measured.count, _environment(measured, driver_name))
        )
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}\nchoose another path with -o") from None
    title = f"{measured.count} x {driver_name}, measured in {measured.seconds:.0f} s; preset {base} and profile"
    if base == "CPU" and load > BUSY_LOAD * (cores := len(os.sched_getaffinity(0))):
        title += f"\nOther programs are running (load {load:.1f} on {cores} cores): measure again on an idle machine."
    footer = f"\nwrote {output}. Next: `plan MODEL --gpus {shlex.quote(str(output))}`"
    show(Group(Text(title + "\n"), calibration_table(samples, preset, cluster(str(output))), Text(footer)), sys.stdout)


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
