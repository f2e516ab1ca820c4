"""This machine as a cluster: the preset of its GPUs or, without GPUs, figures that are measured once and kept.

A few seconds of matrix products, copies and collectives, by as many processes and threads as the ranks will have, give
the figures of one CPU process and of gloo. They are kept in the user's cache folder, by machine, torch and cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.calibrate.measure import Measurements, brief, measure_devices
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.agreement import from_first_rank
from megaloom.runtime.launch.rank_environment import threads_per_rank
from megaloom.runtime.launch.rendezvous import started_by_launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import usable_cores

from .printing import print_on_first_rank
from .profile import profile_of

MACHINE = "MEGALOOM_MACHINE"
"""Environment variable with a cluster that stands for this machine, such as 4xCPU. Then nothing is measured."""

BUSY_LOAD = 0.5  # load per core of other programs above which measurements are not kept


def this_machine(count: int | None, precision: str) -> Cluster:
    """Return `count` devices of this machine, by default all, or all ranks of the job of which this process is one.

    CPU processes are measured once, which prints a line. Under torchrun or srun every rank calls this.
    """
    if started_by_launcher():
        count = dist.get_world_size()
    elif count is not None:
        launcher.check(count)
    if named := given_machine():
        machine = cluster(named)
        return machine if count is None else cluster(f"{count}x{machine.kind}")
    if device.gpu_count():
        name = device.local_cluster()
        return cluster(name if count is None else f"{count}x{name.partition('x')[2]}")
    return _kept_or_measured(count or usable_cores(), Precision(precision).wide)  # CPUs multiply nothing narrower


def given_machine() -> str:
    """Return the cluster that stands for this machine by the environment; "" if none does."""
    return os.environ.get(MACHINE, "")


def kept(count: int, precision: str) -> Cluster | None:
    """Return `count` CPU processes of this machine as they were measured before; None if they were not."""
    try:
        return _read(_file(count, precision))
    except (OSError, UserError):  # none yet, or a damaged one
        return None


def busy_text() -> str:
    """Return the load of this machine if other programs use more than BUSY_LOAD of its cores; "" if not.

    Call it while no ranks run.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    return f"load {load:.1f} on {cores} {'cores' if cores > 1 else 'core'}" if load > BUSY_LOAD * cores else ""


def _kept_or_measured(count: int, precision: str) -> Cluster:
    found, when = _on_first_rank(lambda: kept(count, precision)), "kept from an earlier run"
    if found is None:
        busy = busy_text()  # before the measurement adds its own load
        measured = measure_devices(count, brief(precision, shared=count > usable_cores()))
        found = _on_first_rank(lambda: _fitted(measured, None if busy else _file(count, precision)))
        assert found is not None, "the first rank has fitted it"
        when = f"{measured.seconds:.0f} s"
        when += f"; not kept, because other programs are running: {busy}" if busy else ""
    print_on_first_rank(f"measured this machine: {_figures(found, precision)} ({when})\n")
    return found


def _on_first_rank(value: Callable[[], Cluster | None]) -> Cluster | None:
    """Return the first rank's value on all ranks; the value itself in a process that is no rank."""
    return from_first_rank(value) if started_by_launcher() else value()


def _fitted(measured: Measurements, file: Path | None) -> Cluster:
    """Return the cluster with measured figures. Keep them in a file, if one is given and can be written."""
    text = profile_of(measured).text
    with tempfile.TemporaryDirectory(prefix="megaloom-") as folder:
        written = Path(folder) / "profile.json"
        written.write_text(text)
        found = _read(written)
    if file:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(text)
            part.rename(file)  # whole or not at all
        except OSError:
            print_on_first_rank(f"cannot keep the measurement of this machine in {file.parent}")
    return found


def _read(file: Path) -> Cluster:
    """Return the cluster in a file under the name of its device, without the file's."""
    return evolve(cluster(str(file)), source="")


def _file(count: int, precision: str) -> Path:
    """Return the file for measurements of this machine with this torch, these cores, processes and threads."""
    threads = threads_per_rank(count)
    about = [platform.node(), _processor(), torch.__version__, usable_cores(), count, threads, precision]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "megaloom" / f"cpu-{count}x{threads}-{precision}-{digest}.json"


def _processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _figures(machine: Cluster, precision: str) -> str:
    """Return the measured figures in one line."""
    threads = threads_per_rank(machine.count)
    processes = f"{machine.count} process{'es' if machine.count > 1 else ''}"
    parts = [
        f"{processes} of {threads} thread{'s' if threads > 1 else ''}",
        f"{machine.device.flops[precision] / 1e9:.0f} GFLOP/s each in {precision}",
        f"memory {machine.device.moves / 1e9:.0f} GB/s",
    ]
    if machine.count > 1:
        parts.append(f"gloo {machine.intra.reached / 1e9:.1f} GB/s")
    return ", ".join(parts)
