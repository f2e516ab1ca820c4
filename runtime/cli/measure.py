"""`megaloom measure`: this machine's own figures, as a profile that `plan` takes instead of a preset."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from megaloom.runtime.calibrate.measure import Machine

BUSY = 0.5  # of the cores that others use, from which on that is said
NEAR = 0.1  # of the memory that a GPU of this name has


def measure(
    *,
    gpus: int | None = None,
    output: Annotated[Path, Parameter(name=["-o", "--output"])] = Path("profile.json"),
) -> None:
    """Measure products, attention, memory and collectives on this machine, and write what follows as a profile.

    `plan MODEL --gpus profile.json` plans by it, and 64xprofile.json is so many such devices.

    Parameters
    ----------
    gpus
        How many devices, all of which work at once. [default: all GPUs; 4 processes without]
    output
        Where the profile is written.
    """
    from attrs import evolve
    from rich.console import Group
    from rich.text import Text

    from megaloom.dsl.errors import UserError
    from megaloom.dsl.show.printing import show
    from megaloom.planner.hardware.calibration import calibration_table, fitted_figures, profile_text
    from megaloom.planner.hardware.cluster_names import cluster
    from megaloom.planner.hardware.presets import PRESETS
    from megaloom.runtime.calibrate.measure import measured
    from megaloom.runtime.megatron import device

    if output.suffix != ".json" or not output.resolve().parent.is_dir():
        raise UserError(f"cannot write a profile to {output}\ngive a name that ends in .json, in a folder that exists")
    driver = device.gpu_name() if device.gpus() else "CPU"
    base = device.preset(driver) or "A100" if device.gpus() else "CPU"
    load = os.getloadavg()[0]
    found = measured(device.available() if gpus is None else gpus)
    if int(os.environ.get("RANK", 0)):
        return
    usual = abs(found.nbytes / PRESETS[base].device.nbytes - 1) < NEAR
    known = device.preset(driver) is not None
    preset = evolve(cluster(f"1x{base}"), count=found.count, per_node=found.per_node)
    samples = [s for s in found.samples if s.precision in ("", *preset.device.flops)]
    fields: dict[str, Any] = fitted_figures(samples, preset, known=known)
    fields["device"] |= {"nbytes": found.nbytes, "units": found.units}
    if found.count > found.per_node:
        fields["per_node"] = found.per_node
    name = base if base == "CPU" or (known and usual) else driver
    try:
        output.write_text(profile_text(samples, fields, base, name, found.count, _report(found, driver)))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}\ngive another path with -o") from None
    written = cluster(str(output))
    head = f"{found.count} x {driver}, measured in {found.seconds:.0f} s; what the preset {base} and the profile say"
    if base == "CPU" and load > BUSY * (cores := len(os.sched_getaffinity(0))):
        head += f"\nOthers are at work here (load {load:.1f} on {cores} cores): these are a busy machine's figures."
    foot = f"\nwrote {output}; `plan MODEL --gpus {shlex.quote(str(output))}` plans by it"
    show(Group(Text(head + "\n"), calibration_table(samples, preset, written), Text(foot)), sys.stdout)


def _report(found: Machine, driver: str) -> dict[str, Any]:
    """Where, when and with what it was measured."""
    import torch

    return {
        "command": shlex.join(["megaloom", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": f"{platform.node()}: {found.count} x {driver}, {platform.processor() or platform.machine()}",
        "software": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""},
    }
