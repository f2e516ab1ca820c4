"""Kinds of GPU that a log names, as nvidia-smi, torchtitan and others print them: "NVIDIA H100 80GB HBM3"."""

from __future__ import annotations

import re

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.hardware.presets import PRESETS

GPU_KINDS = sorted({name.partition("-")[0] for name in PRESETS if name != "CPU"}, key=len, reverse=True)
GPU_PATTERN = re.compile(rf"\b(?:NVIDIA|Tesla)\s+({'|'.join(GPU_KINDS)})\b")


def named_gpus(text: str) -> set[str]:
    """Return the kinds of GPU that a text names with their maker."""
    return set(GPU_PATTERN.findall(text))


def check_named_gpus(text: str, path: str, machine: Cluster) -> None:
    """Raise UserError if a log names one kind of GPU, and the cluster has another one."""
    found, kind = named_gpus(text), machine.device.name.partition("-")[0]
    if len(found) == 1 and kind in GPU_KINDS and found != {kind}:
        raise UserError(
            f"{path} ran on {min(found)}, not on {machine.device.name}\n"
            f"give the kind of GPU, --gpus {min(found)}, and logs of one cluster only"
        )
