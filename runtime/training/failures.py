"""Failures of ranks in a run, with what is saved and how to go on."""

from __future__ import annotations

import errno
import faulthandler
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.checkpoints.checkpoint_folder import cannot_save, saved_step
from megaloom.runtime.launch.rank import is_lost_peer
from megaloom.runtime.launch.rank_errors import RankError
from megaloom.runtime.launch.rendezvous import started_by_launcher

from .training_run import TrainingRun

STUCK = 1.5
"""Timeouts of a collective after which a rank is stuck: the others have given up after one."""


@contextmanager
def advice_if_rank_failed(folder: Path) -> Iterator[None]:
    """Add to the error of a rank which step is saved, and that the same command continues from it."""
    try:
        yield
    except RankError as error:
        first, _, rest = error.text.partition("\n")
        if error.signal == signal.SIGKILL:
            text = f"{first}. {how_to_go_on(folder)} Try a smaller --micro-batch or --recompute full\n{rest}".rstrip()
        else:
            text = f"{error.text}\n{how_to_go_on(folder)}"
        raise RankError(error.rank, text, error.signal) from None


@contextmanager
def errors_with_rank(folder: Path) -> Iterator[None]:
    """On a rank that torchrun or srun has started, raise RankError for all but a UserError, with rank and host."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        host = socket.gethostname()
        if is_lost_peer(error):
            reason = str(error).strip().splitlines()[0].partition(". ")[0]
            text = f"({host}) has lost another rank, whose error is the cause: {reason}"
        else:
            text = f"({host}) failed:\n" + traceback.format_exc().rstrip()
        raise RankError(dist.get_rank(), f"{text}\n{how_to_go_on(folder)}") from error


def how_to_go_on(folder: Path) -> str:
    """Return a sentence that names the last saved step of a run, and what continues it."""
    saved = saved_step(folder)
    return f"{saved}; the same command continues from it." if saved.endswith("is saved") else f"{saved}."


@contextmanager
def ended_if_stuck() -> Iterator[None]:
    """End a rank of torchrun or srun, with its stack, if it is inside the context longer than others wait for it.

    Other hosts do not notice a rank that hangs; `launcher` ends the ranks that it has started.
    """
    if not started_by_launcher():
        yield
        return
    from megaloom.runtime.megatron.process_groups import collective_timeout  # imports megatron-core

    faulthandler.dump_traceback_later(STUCK * collective_timeout().total_seconds(), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def memory_and_disk_advice(run: TrainingRun) -> Iterator[None]:
    """Turn a lack of device memory or of disk space into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        on_device = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not on_device and "can't allocate memory" not in str(error):
            raise
        raise UserError(_out_of_memory(run.plan, error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(cannot_save("metrics", run.folder, error)) from error


def _out_of_memory(plan: Plan, error: BaseException) -> str:
    workload, device = plan.workload, plan.cluster.device
    predicted = max(sum(holders.values()) for holders in plan.predicted.nbytes)
    return (
        f"out of memory with {workload.batch} sequences of {workload.seq} tokens under {plan.layout}: "
        f"{str(error).splitlines()[0]}\n"
        f"the plan predicts {predicted / 2**30:.1f} of the {device.nbytes / 2**30:.1f} GiB of a {device.name}; "
        "try a smaller --batch or --seq, --micro-batch 1, --recompute full, or more devices"
    )
