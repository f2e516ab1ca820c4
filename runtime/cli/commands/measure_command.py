"""`megaloom measure`: measure this machine, and write a device profile that `plan` takes instead of a preset."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rich.console import Group
from rich.text import Text

from megaloom.dsl.errors import UserError
from megaloom.dsl.show.printing import show
from megaloom.planner.hardware.calibration import calibration_table
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.calibrate.measure import measure_devices
from megaloom.runtime.cli.machine import busy_text
from megaloom.runtime.cli.profile import profile_of
from megaloom.runtime.megatron import device


def run_measure(gpus: int | None, output: Path) -> None:
    """Measure this machine, write its device profile, and print the figures beside those of its preset."""
    if output.suffix != ".json" or not output.resolve().parent.is_dir():
        raise UserError(f"cannot write a profile to {output}\ngive a name that ends in .json, in an existing folder")
    busy = busy_text()  # before the measurement adds its own load
    measured = measure_devices(device.device_count() if gpus is None else gpus)
    if int(os.environ.get("RANK", 0)):
        return
    profile = profile_of(measured)
    try:
        output.write_text(profile.text)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}\nchoose another path with -o") from None
    what = f"{measured.count} x {profile.driver_name}, measured in {measured.seconds:.0f} s"
    title = f"{what}; preset {profile.base} and profile"
    if profile.base == "CPU" and busy:
        title += f"\nOther programs are running ({busy}): measure again on an idle machine."
    footer = f"\nwrote {output}. Next: `plan MODEL --gpus {shlex.quote(str(output))}`"
    table = calibration_table(profile.samples, profile.preset, cluster(str(output)))
    show(Group(Text(title + "\n"), table, Text(footer)), sys.stdout)
