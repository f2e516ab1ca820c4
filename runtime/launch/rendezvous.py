"""Rendezvous of ranks that torchrun or srun started, one per device, by environment variables."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.megatron import device

from . import rank
from .rank_environment import CONNECTIONS, connections, world_of
from .rank_errors import names_of

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets and torch.distributed reads."""

POLL_SECONDS = 0.02  # between looks at the store
SHOWN_RANKS = 8  # most missing ranks that a message names
ARRIVED = "megaloom/arrived/{}"
"""Key of a rank that has come."""

HOW_TO_START = "start all ranks with one torchrun or srun, or unset RANK to let this command start them"

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""srun's names of torchrun's variables."""


def started_by_launcher() -> bool:
    """Return whether torchrun or srun has started this process as a rank. Then call `join`, not `launcher.run`."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def join(ranks: int | Layout | None = None, timeout: timedelta = rank.COLLECTIVE_TIMEOUT) -> None:
    """Initialize torch.distributed from the environment. Collectives fail after `timeout`.

    ranks: the layout of the plan, which also says how many connections a rank has to its GPU; or their number.
    A rank of torchrun ends with its agent, even if that is killed. Raise UserError if variables are missing or do not
    fit together, the number of ranks is another, or ranks do not come within the timeout.
    """
    number, size, local = launched(None if ranks is None else world_of(ranks))
    if isinstance(ranks, Layout):
        os.environ.setdefault(CONNECTIONS, connections(ranks))  # before CUDA starts
    device.prepare()
    if not dist.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            rank.end_with_parent()
            store = _fresh_store(number, size, timeout)
        else:
            store = _own_store(number, size, timeout)
        rank.initialize(number, size, _own_gpu(local), store, timeout)


def launched(world: int | None = None) -> tuple[int, int, int]:
    """Return rank, number of ranks, and local rank, as the launcher states them. No other rank is needed.

    Raise UserError if variables are missing or do not fit together, or the number of ranks is not `world`.
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
    if size < 1:
        raise UserError(f"WORLD_SIZE={size} is no number of ranks\n{HOW_TO_START}")
    for name, value in (("RANK", number), ("LOCAL_RANK", local)):
        if not 0 <= value < size:
            what = f"{name}={value} is not a rank of WORLD_SIZE={size}, which are 0 to {size - 1}"
            raise UserError(f"{what}\n{HOW_TO_START}")
    if world is not None and size != world:
        raise UserError(f"the plan is for {world} ranks, but {size} were started; start {world}, or plan for {size}")
    return number, size, local


def _own_store(number: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store of rank 0, once all ranks have come to it.

    torch's own rendezvous waits in C++, where no signal is heard, and does not say which ranks are missing.
    """
    address, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT")
    deadline = time.monotonic() + timeout.total_seconds()
    if number:
        _wait_for_rank_0(address, port, deadline, timeout)
    try:
        store = dist.TCPStore(address, port, size, is_master=number == 0, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # DistNetworkError
        reason = "the port is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise UserError(
            f"ranks cannot meet at {address}:{port} (MASTER_ADDR, MASTER_PORT): {reason}\nchoose another MASTER_PORT"
        ) from None
    store.set(ARRIVED.format(number), "")
    waiting = set(range(size))
    while waiting := {other for other in waiting if not store.check([ARRIVED.format(other)])}:
        if time.monotonic() > deadline:
            raise UserError(_missing_text(sorted(waiting), size, timeout))
        time.sleep(POLL_SECONDS)
    return store


def _wait_for_rank_0(address: str, port: int, deadline: float, timeout: timedelta) -> None:
    """Return when rank 0 listens. Raise UserError if it does not by the deadline, or its host has no address."""
    while True:
        try:
            socket.create_connection((address, port), 1.0).close()
            return
        except socket.gaierror as error:
            raise UserError(
                f"MASTER_ADDR={address} has no address: {error.strerror}\ngive the host name of rank 0"
            ) from None
        except OSError:
            if time.monotonic() > deadline:
                where = f"nothing listens at {address}:{port} (MASTER_ADDR, MASTER_PORT)"
                raise UserError(f"rank 0 has not come within {_minutes(timeout)}: {where}\n{HOW_TO_START}") from None
        time.sleep(POLL_SECONDS)


def _missing_text(missing: Sequence[int], size: int, timeout: timedelta) -> str:
    """Return the message for ranks that have not come."""
    have = "have" if len(missing) > 1 else "has"
    which = f" ({names_of(missing)})" if len(missing) <= SHOWN_RANKS else ""
    return f"{len(missing)} of {size} ranks {have} not come within {_minutes(timeout)}{which}\n{HOW_TO_START}"


def _minutes(timeout: timedelta) -> str:
    return f"{timeout / timedelta(minutes=1):g} min (--distributed-timeout-minutes)"


def _fresh_store(number: int, size: int, timeout: timedelta) -> dist.Store:
    """Return torchrun's store under a prefix that these processes share and no earlier ones have used.

    The store outlives a restart (--max-restarts), and agents on several hosts count restarts differently: addresses of
    dead processes would be found. So each rank writes a word of its own, and rank 0 answers it with the prefix.
    """
    store, _, _ = next(dist.rendezvous("env://", number, size, timeout=timeout))  # the agent's: it is there
    own, names = secrets.token_hex(8), [ARRIVED.format(other) for other in range(size)]
    store.set(names[number], own)
    if number:
        store.wait([f"megaloom/prefix/{own}"], timeout)
        prefix = store.get(f"megaloom/prefix/{own}").decode()
        store.set(f"megaloom/joined/{prefix}/{number}", "")
        return dist.PrefixStore(prefix, store)
    waiting, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while waiting and time.monotonic() < deadline:
        for other in [other for other in waiting if store.check([names[other]])]:
            store.set(f"megaloom/prefix/{store.get(names[other]).decode()}", own)
        waiting = {other for other in waiting if not store.check([f"megaloom/joined/{own}/{other}"])}
        time.sleep(POLL_SECONDS)
    if waiting:
        raise UserError(_missing_text(sorted(waiting), size, timeout))
    return dist.PrefixStore(own, store)


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
