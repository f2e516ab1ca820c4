"""Rendezvous of ranks that torchrun or srun started, one per device, by environment variables."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime.megatron import device

from . import rank

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets and torch.distributed reads."""

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""srun's names of torchrun's variables."""


def started_by_launcher() -> bool:
    """Return whether torchrun or srun has started this process as a rank. Then call `join`, not `launcher.run`."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def join(world: int | None = None, timeout: timedelta = rank.COLLECTIVE_TIMEOUT) -> None:
    """Initialize torch.distributed from the environment. Collectives fail after `timeout`.

    A rank of torchrun ends with its agent, even if that is killed. Raise UserError if variables are missing, or the
    number of ranks is not `world`.
    """
    names = _from_slurm() if "RANK" not in os.environ else {}
    missing = [name for name in TORCHRUN if name not in os.environ and name not in names]
    if missing:
        raise UserError(
            f"this process is a rank, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set\n"
            "start it with torchrun or srun, or unset RANK to let it start the ranks"
        )
    os.environ.update(names)
    number, size, local = (_integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world is not None and size != world:
        raise UserError(f"the plan is for {world} ranks, but {size} were started; start {world}, or plan for {size}")
    device.prepare()
    if not dist.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            rank.end_with_parent()
        rank.initialize(number, size, _own_gpu(local), None, timeout)


def _integer(name: str) -> int:
    """Return the integer value of an environment variable. Raise UserError if it is not an integer."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise UserError(f"environment variable {name}={os.environ[name]!r} is not an integer") from None


def _own_gpu(local: int) -> int:
    """Return the index of this rank's GPU; 0 if each rank sees only its own, as with srun --gpus-per-task."""
    if local < device.gpu_count() or not device.gpu_count():
        return local
    if device.gpu_count() == 1:
        return 0
    raise UserError(
        f"no GPU for local rank {local}: this node has {device.gpu_count()}; start at most that many ranks on it"
    )


def _from_slurm() -> dict[str, str]:
    """Return torchrun's variables from srun's. The master is MASTER_ADDR if set, else the first node of the step."""
    given = {torchrun: os.environ[slurm] for torchrun, slurm in SLURM.items() if slurm in os.environ}
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    if first:
        given["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "".join(first.groups("")))
    if "SLURM_JOB_ID" in os.environ:  # equal on all nodes, different for each job
        port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 20000
        given["MASTER_PORT"] = os.environ.get("MASTER_PORT", str(port))
    return given
