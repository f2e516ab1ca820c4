"""A rank's own side: joining the others, calling its entry, leaving its outcome for the process that started it.

`main` is what `launch` starts, `initialise` is what every rank goes through, whoever started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
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

COLLECTIVE = datetime.timedelta(minutes=10)
"""How long a collective waits for its slowest rank: long enough for a checkpoint, short enough to notice a hang."""

PARTING = datetime.timedelta(seconds=2)
"""How long a rank that is done stays for the others, whose last collectives may still read from it."""

HEEDED = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which the parent asks something of a rank; they wait until it listens."""

CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|failed to (recv|send)|communicator was aborted|ncclRemoteError|timed out|wait timeout",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say on a rank whose peer is gone or does not come."""


@frozen
class Returned:
    """The value that a rank's entry returned."""

    value: Any


@frozen
class Failure:
    """What went wrong on a rank, and when; `user` is the UserError it was, if it was one."""

    rank: int
    when: float  # time.monotonic(): one clock for all processes of a machine
    text: str
    doubt: int  # that it is an error of its own: 0 none, 1 an abort, 2 the words of one whose peer is gone
    user: UserError | None = None


@frozen
class Place:
    """Where a rank finds its job and the others, and leaves its outcome."""

    rank: int
    world: int
    port: int
    folder: str
    threads: int
    parent: int

    def file(self, what: str) -> Path:
        return Path(self.folder) / f"{self.rank}.{what}"


def main(place: Place, job: bytes) -> None:
    """The whole life of a process that `launch` started. Does not return: what it forked from is not its own."""
    status = 1
    try:
        _belong_to(place.parent)
        _listen(place)
        outcome, store = _work(place, job)
        place.file("part").write_bytes(outcome)
        place.file("part").rename(place.file("outcome"))
        if store:
            _part(store, place.world)
            status = 0
    except KeyboardInterrupt:
        _flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        _flush()
        # What libraries hold under a name, such as semaphores, which would be reported as leaked.
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
        os._exit(status)  # `launch` sees to what this process may have started


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _belong_to(parent: int) -> None:
    """No rank outlives the process that started it, even one that was killed; nor does what a rank starts."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _listen(place: Place) -> None:
    """Signals and output: the terminal's Ctrl-C reaches every process, but only the parent decides what it means."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _unwind)
    stack = place.file("stack").open("w")
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
    if place.rank == 0:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, progress is seen when it is made
    else:
        with place.file("log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _unwind(number: int, frame: Any) -> None:
    """End by way of the `finally` clauses, such as the one that gives the terminal its cursor back."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _work(place: Place, job: bytes) -> tuple[bytes, dist.Store | None]:
    """The pickled outcome, and the store through which to part from the others if all went well."""
    try:
        torch.set_num_threads(place.threads)
        device.prepare()  # before the job is unpickled, which may import megatron-core
        _environment(place)
        store = dist.TCPStore("127.0.0.1", place.port, place.world, is_master=False, timeout=COLLECTIVE)
        initialise(place.rank, place.world, place.rank, store)
        entry, args = pickle.loads(job)
        return pickle.dumps(Returned(entry(*args))), store
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a rank has no business leaving by itself
        return pickle.dumps(_failure(place.rank, error)), None


def _environment(place: Place) -> None:
    """What torchrun would set, for libraries that look there; and gloo needs no name of this machine to find it."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), place.rank)
    worlds = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), place.world)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.port}
    os.environ.update({name: str(value) for name, value in {**ranks, **worlds, **meeting}.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def initialise(rank: int, world: int, local: int, store: dist.Store | None) -> None:
    """torch.distributed on this rank's own device, the `local`-th; without a store the environment says where."""
    if device.gpus():
        torch.cuda.set_device(local)
    dist.init_process_group(device.backend(), rank=rank, world_size=world, store=store, timeout=COLLECTIVE)


def _part(store: dist.Store, world: int) -> None:
    """Leave together: a peer's last collective may still be reading from this process."""
    if device.gpus():
        torch.cuda.synchronize()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to unwind
    if store.add("megaloom/done", 1) == world:
        store.set("megaloom/all done", "")
    with contextlib.suppress(RuntimeError):  # the others don't come; what that means is for the parent to say
        store.wait(["megaloom/all done"], PARTING)


def _failure(rank: int, error: BaseException) -> Failure:
    """What there is to tell of an error, without this module's own frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    text = "failed:\n" + "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    user = _portable(error) if isinstance(error, UserError) else None
    doubt = 2 if isinstance(error, RuntimeError) and CONSEQUENCE.search(str(error)) else 0
    return Failure(rank, time.monotonic(), text, doubt, user)


def _portable(error: UserError) -> UserError:
    """The error itself if it survives pickling, else its message."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return UserError(full_message(error))
