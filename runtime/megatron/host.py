"""Cores and memory of this host that its processes may use, within the limits of their container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Return the number of CPU cores that this process may use: its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    for words in _limits(cgroups, "cpu.max"):  # quota and period, in microseconds
        if len(words) == 2 and words[0].isdigit():
            cores = min(cores, max(1, int(words[0]) // int(words[1])))
    quotas, periods = (_limits(cgroups / "cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    for quota, period in zip(quotas, periods, strict=False):
        if quota[0].isdigit():  # -1 without a limit
            cores = min(cores, max(1, int(quota[0]) // int(period[0])))
    return cores


def host_memory(cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that the processes of this host or container may use together."""
    words = (*_limits(cgroups, "memory.max"), *_limits(cgroups / "memory", "memory.limit_in_bytes"))
    return min([psutil.virtual_memory().total, *(int(word[0]) for word in words if word[0].isdigit())])


def _limits(root: Path, name: str) -> Iterator[list[str]]:
    """Yield the words of a file of limits: of this process's control group and of those above it, up to `root`."""
    group = root
    if root == CGROUPS and Path("/proc/self/cgroup").is_file():
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            group = root / path.lstrip("/") if number == "0" else group
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        if (folder / name).is_file() and (words := (folder / name).read_text().split()):
            yield words
