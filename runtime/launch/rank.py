"""The process of a rank: join the others, call the entry, write the outcome for the process that started it.

`launcher` starts `run_rank`. `initialize` sets up torch.distributed, also for ranks that torchrun or srun started.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import io
import multiprocessing.util
import os
import pickle
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.dsl.errors import UserError, full_message
from megaloom.runtime.megatron import device

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
"""Timeout of collectives: long enough for a checkpoint, short enough to notice a hang. Megatron-LM's is as long."""

EXIT_WAIT = datetime.timedelta(seconds=2)
"""Time that a finished rank waits for the others, whose last collectives may still read from it."""

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals from the parent, blocked until the rank has installed its handlers."""

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|failed to (recv|send)|communicator was aborted|ncclRemoteError|timed out|wait timeout",
    re.IGNORECASE,
)
"""Error messages of gloo, NCCL and the store on a rank that has lost a peer."""

TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
"""Words in the errors of ranks that waited too long for one."""


@frozen
class Returned:
    """The value that a rank's entry returned."""

    value: Any


@frozen
class Failure:
    """An error on a rank, or the end of its process."""

    rank: int
    when: float  # time.monotonic(): one clock for all processes of a machine
    text: str
    doubt: int  # that the error is this rank's own: 0 none, 1 an abort, 2 the message of a lost peer
    user: UserError | None = None  # the error, if it is a UserError
    signal: int | None = None  # that ended the process


@frozen
class RankContext:
    """Rank, world size, rendezvous port, and the folder for outcomes."""

    rank: int
    world: int
    port: int
    folder: str
    threads: int
    parent: int
    timeout: datetime.timedelta  # of collectives

    def file(self, suffix: str) -> Path:
        """Return the path of one of this rank's files."""
        return Path(self.folder) / f"{self.rank}.{suffix}"


def run_rank(context: RankContext, job: bytes) -> None:
    """Run a process that `launcher` started, to its exit. It does not return into the forked parent's code."""
    status = 1
    try:
        _die_with(context.parent)
        _set_up_signals_and_output(context)
        outcome, store = _call_entry(context, job)
        context.file("part").write_bytes(outcome)
        context.file("part").rename(context.file("outcome"))
        if store:
            _wait_for_others(store, context.world)
            status = 0
    except KeyboardInterrupt:
        _flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        _flush()
        # Release named semaphores and the like, which would be reported as leaked.
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
        os._exit(status)  # `launcher` ends what this process has started


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with(parent: int) -> None:
    """Make the kernel end this rank with its parent, even if that is killed; own a process group for what it starts."""
    os.setpgid(0, 0)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _set_up_signals_and_output(context: RankContext) -> None:
    """Install signal handlers, and redirect output to a log on all ranks but 0.

    Ctrl-C on a terminal reaches every process; only the parent acts on it, and sends SIGTERM. SIGUSR2 stays blocked: it
    arrives once a training loop unblocks it.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    stack = context.file("stack").open("w")
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
    if context.rank == 0:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # show progress at once in a pipe too
    else:
        with context.file("log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _raise_interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt, so that `finally` clauses run, such as the one that restores the cursor."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _call_entry(context: RankContext, job: bytes) -> tuple[bytes, dist.Store | None]:
    """Return the pickled outcome of the entry, and the store if there was no error."""
    try:
        torch.set_num_threads(context.threads)
        device.prepare()  # before the job is unpickled, which may import megatron-core
        gc.freeze()  # what is imported stays: collections need not visit it, nor copy the pages of a forked process
        _set_environment(context)
        store = dist.TCPStore("127.0.0.1", context.port, context.world, is_master=False, timeout=context.timeout)
        initialize(context.rank, context.world, context.rank, store, context.timeout)
        entry, args = pickle.loads(job)
        return pickle.dumps(Returned(entry(*args))), store
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a rank must not exit by itself
        return pickle.dumps(_failure(context.rank, error)), None


def _set_environment(context: RankContext) -> None:
    """Set the variables that torchrun sets, and gloo's interface, so that it need not resolve the host name."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), context.rank)
    worlds = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), context.world)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": context.port}
    os.environ.update({name: str(value) for name, value in {**ranks, **worlds, **meeting}.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def initialize(rank: int, world: int, local: int, store: dist.Store, timeout: datetime.timedelta) -> None:
    """Initialize torch.distributed on this rank's device, number `local`. Collectives fail after `timeout`."""
    if device.gpu_count():
        torch.cuda.set_device(local)
    connect(rank, world, store, timeout)


def connect(rank: int, world: int, store: dist.Store, timeout: datetime.timedelta) -> None:
    """Create the process group of all ranks, and return once every rank has connected to all others.

    store: one that no other process group uses. torch lets a rank go on while others still connect. If that rank then
    leaves, gloo fails on a rank that has not yet seen that it is connected: "connectFullMesh failed ... Connection
    closed by peer". On a busy machine one start in a hundred failed so. NCCL connects in the first collective.
    """
    dist.init_process_group(device.backend(), rank=rank, world_size=world, store=store, timeout=timeout)
    if device.backend() == "gloo":
        _meet(store, world, "connected", timeout)


def _meet(store: dist.Store, world: int, what: str, timeout: datetime.timedelta) -> None:
    """Return once all ranks have called this. Raise RuntimeError if they do not within the timeout."""
    if store.add(f"megaloom/{what}", 1) == world:
        store.set(f"megaloom/all {what}", "")
    store.wait([f"megaloom/all {what}"], timeout)


def _wait_for_others(store: dist.Store, world: int) -> None:
    """Exit together with the other ranks: their last collectives may still read from this process."""
    if device.gpu_count():
        torch.cuda.synchronize()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no `finally` clause is left to run
    with contextlib.suppress(RuntimeError):  # others have failed; the parent reports that
        _meet(store, world, "done", EXIT_WAIT)


def _failure(rank: int, error: BaseException) -> Failure:
    """Return the failure for an error, with its traceback without this module's frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    text = "failed:\n" + "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    user = _portable(error) if isinstance(error, UserError) else None
    doubt = 2 if is_lost_peer(error) else 0
    return Failure(rank, time.monotonic(), text, doubt, user)


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an error means that the rank lost its connection to another one, or timed out waiting for it."""
    return isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None


def _portable(error: UserError) -> UserError:
    """Return the error if it can be pickled, else a UserError with its message."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return UserError(full_message(error))
