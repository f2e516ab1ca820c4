"""Joining the ranks that torchrun or srun started, one a device: the environment says who is who and where to meet."""

from __future__ import annotations

import os
import re

import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime.megatron import device

from . import rank

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets and torch.distributed reads."""

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""srun's names for torchrun's."""


def inside() -> bool:
    """Whether this process is already one of many, started by torchrun or srun: then `join`, don't `launch.run`."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def join(world: int | None = None) -> None:
    """Initialise torch.distributed as the environment says; UserError if that is incomplete or not of `world` ranks."""
    names = _from_slurm() if "RANK" not in os.environ else {}
    missing = [name for name in TORCHRUN if name not in os.environ and name not in names]
    if missing:
        raise UserError(
            f"started as one of many ranks, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set\n"
            "start with torchrun or srun, or unset RANK to let this process start the ranks itself"
        )
    os.environ.update(names)
    number, size, local = (_integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world is not None and size != world:
        raise UserError(f"the plan is for {world} ranks, and {size} were started; start {world}, or plan for {size}")
    device.prepare()
    if not dist.is_initialized():
        rank.initialise(number, size, _own_gpu(local), None)


def _integer(name: str) -> int:
    """The number that an environment variable holds; UserError if it is none."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise UserError(f"{name}={os.environ[name]!r} in the environment is no number") from None


def _own_gpu(local: int) -> int:
    """The index of this rank's GPU; 0 where each rank is shown only its own, as srun --gpus-per-task does."""
    if local < device.gpus() or not device.gpus():
        return local
    if device.gpus() == 1:
        return 0
    raise UserError(f"local rank {local} has no GPU, of {device.gpus()} here; start at most {device.gpus()} a node")


def _from_slurm() -> dict[str, str]:
    """torchrun's variables from srun's; the first node of the step is the meeting point, unless one is named."""
    given = {torchrun: os.environ[slurm] for torchrun, slurm in SLURM.items() if slurm in os.environ}
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    if first:
        given["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "".join(first.groups("")))
    if "SLURM_JOB_ID" in os.environ:  # the same on all nodes, another for each job
        port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 20000
        given["MASTER_PORT"] = os.environ.get("MASTER_PORT", str(port))
    return given
