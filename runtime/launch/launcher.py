"""Start ranks on this machine, one process per device, and collect their results.

`run` starts the ranks, waits for them, and returns their values. On CPU ranks are forked, so that megatron-core is
imported once, in this process; with GPUs they are spawned. Each rank calls the entry and writes its outcome to a file
(see `rank`). When one fails, the others are ended, and the first real error is raised here, not the errors of ranks
that only lost a peer. No rank outlives this process, whatever ends it: an error, a timeout, Ctrl-C, SIGTERM, SIGKILL.

torch's `start_processes` is not used. It waits up to 30 s for ranks stuck in a collective, reports the first process to
exit instead of the first to fail, inherits this process's signal handlers, and leaves ranks behind if starting the next
one fails.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import define, field

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import usable_cores

from . import rank
from .rank import Failure, RankContext, Returned
from .rank_environment import rank_environment, threads_per_rank, world_of
from .rank_errors import RankError, ending_of, hang_text, names_of, only_waited
from .rendezvous import started_by_launcher
from .stop_signals import STOPPING, SignalWords, handled, say

END_SECONDS = 2.0
"""Time that ranks have to end by themselves: to report the real error, or to restore the terminal."""

RANKS_PER_CORE = 16
"""Most ranks per CPU core on a machine without GPUs."""


Result = TypeVar("Result")


def run(
    entry: Callable[..., Result],
    args: tuple[Any, ...],
    ranks: int | Layout,
    *,
    timeout: float | None = None,
    grace: float = END_SECONDS,
    collective_timeout: timedelta = rank.COLLECTIVE_TIMEOUT,
    words: SignalWords = SignalWords(),  # noqa: B008 (frozen)
) -> list[Result]:
    """Call `entry(*args)` on each rank of this machine, and return the values in the order of ranks.

    ranks: their layout, if they have one, which says what their environment should be; or their number.
    `entry` must be importable; `args` and values must be small and picklable. Rank 0 writes to this process's stdout
    and stderr. The output of another rank is shown only if it dies without a traceback.

    timeout: seconds for the whole call. collective_timeout: time that ranks wait for one another. grace: seconds from a
    first SIGINT, SIGTERM or SIGUSR1, which ranks receive as SIGTERM, to their end; a second signal ends them at once.
    Ranks receive SIGUSR2 as it is; they have it blocked until they unblock it. words: what is said at once to signals.
    Raise the first real error of any rank: its UserError, else a RankError.
    """
    world = world_of(ranks)
    check(world)
    if not device.gpu_count():
        device.prepare()  # once, here: forked ranks inherit it
    job = pickle.dumps((entry, args))
    with (
        tempfile.TemporaryDirectory(prefix="megaloom-") as folder,
        _deferred_signals(words) as caught,
        socket.create_server(("127.0.0.1", 0), backlog=4 * world) as server,
        ThreadPoolExecutor(1) as starter,
    ):
        started = Ranks(world, Path(folder), collective_timeout, None if isinstance(ranks, int) else ranks)
        try:
            # Fork from a thread that has not computed: OpenMP's workers belong to the thread that created them, and a
            # forked copy of that thread would wait for them forever. The thread must live on: ranks die with it.
            starter.submit(started.start, server.getsockname()[1], job).result()
            # The ranks' rendezvous, on a socket that already listens. Its thread starts after the forks: a forked
            # process would inherit the thread's locks without the thread.
            store = dist.TCPStore(
                *server.getsockname(), is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            started.watch(caught, None if timeout is None else time.monotonic() + timeout, grace)
            return started.values()
        finally:
            started.end()
            store = None  # noqa: F841 # an error's traceback would keep the store and its thread alive


def most_ranks() -> int:
    """Return the most ranks that a machine without GPUs starts."""
    return RANKS_PER_CORE * usable_cores()


def check(world: int) -> None:
    """Raise UserError if this process cannot start that many ranks on this machine."""
    most = most_ranks()
    if world < 1:
        raise UserError(f"the number of devices must be at least 1, got {world}")
    if device.gpu_count() and world > device.gpu_count():
        raise UserError(f"{world} ranks need a GPU each, but this machine has {device.gpu_count()}; plan for those")
    if not device.gpu_count() and world > most:
        raise UserError(f"{world} ranks are too many for this machine without GPUs; plan for at most {most}")
    if started_by_launcher():
        raise UserError("this process is already a rank (RANK is set); unset RANK to let it start ranks")


@contextlib.contextmanager
def _deferred_signals(words: SignalWords) -> Iterator[list[int]]:
    """Collect signals for `watch`, instead of raising: an exception while ranks start would leave some behind."""
    caught: list[int] = []

    def collect(number: int) -> None:
        stops = any(each != signal.SIGUSR2 for each in caught)
        say(number, words.save if number == signal.SIGUSR2 else words.second if stops else words.stop)
        caught.append(number)

    with handled((*STOPPING, signal.SIGUSR2), collect):
        yield caught


@define(eq=False)
class Ranks:
    """The processes of one run, and the folder to which they write their outcomes."""

    world: int
    folder: Path
    collective_timeout: timedelta
    layout: Layout | None = None
    began: float = field(factory=time.monotonic, init=False)
    processes: list[Any] = field(factory=list, init=False)
    ended: dict[int, float] = field(factory=dict, init=False)  # rank -> time.monotonic() when its end was seen
    outcomes: dict[int, Returned | Failure] = field(factory=dict, init=False)  # of ranks that have ended, once read

    def start(self, port: int, job: bytes) -> None:
        """Start all processes. Each is on the list before the next one starts."""
        context: Any = multiprocessing.get_context("spawn" if device.gpu_count() else "fork")
        threads = threads_per_rank(self.world)
        with rank_environment(threads, self.layout), warnings.catch_warnings():
            # Python 3.12 warns about forking with other threads; our main thread only waits.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            # Block these until a rank has installed its own handlers; the inherited ones would swallow them.
            signal.pthread_sigmask(signal.SIG_BLOCK, rank.HANDLED_SIGNALS)
            for number in range(self.world):
                rank_context = RankContext(
                    number, self.world, port, str(self.folder), threads, os.getpid(), self.collective_timeout
                )
                process = context.Process(target=rank.run_rank, args=(rank_context, job))
                process.start()
                self.processes.append(process)

    def running(self) -> list[int]:
        """Return the ranks that run. Note the end of the others, and kill the processes that they had started."""
        alive = [number for number, process in enumerate(self.processes) if process.is_alive()]
        for number in set(range(len(self.processes))).difference(alive, self.ended):
            self.ended[number] = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[number].pid, signal.SIGKILL)
        return alive

    def watch(self, caught: list[int], deadline: float | None, grace: float) -> None:
        """Return when all ranks have returned. Raise at the first failure, a signal or the deadline."""
        while self.running():
            while signal.SIGUSR2 in caught:  # ranks that train save and go on
                caught.remove(signal.SIGUSR2)
                self.signal(signal.SIGUSR2)
            if caught:
                # Once a rank has failed, the others cannot finish: stop waiting.
                self.ask_to_end(grace, unless=lambda: len(caught) > 1 or bool(self.failures()))
                if self.failures() and isinstance(error := self.first_error(), UserError):
                    raise error  # such as a full disk when saving
                raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])
            if self.failures():
                break
            if deadline is not None and time.monotonic() > deadline:
                raise self.timeout_error()
            self.wait(0.1)
        if self.failures():
            raise self.first_error()

    def wait(self, seconds: float) -> None:
        """Wait until a rank ends, at most `seconds`."""
        wait([process.sentinel for process in self.processes if process.is_alive()], timeout=seconds)

    def outcome(self, number: int) -> Returned | Failure:
        """Return the outcome of a rank that has ended. It is read once: `watch` asks for it ten times a second."""
        if number not in self.outcomes:
            self.outcomes[number] = self._written(number)
        return self.outcomes[number]

    def _written(self, number: int) -> Returned | Failure:
        """Return the outcome that a rank has written, or a failure that says how its process ended."""
        try:
            return pickle.loads((self.folder / f"{number}.outcome").read_bytes())  # type: ignore[no-any-return]
        except FileNotFoundError:
            code = self.processes[number].exitcode
            # NCCL and gloo may abort a process after a peer has ended.
            doubt = 1 if code == -signal.SIGABRT else 0
            text = ending_of(code) + self.last_output(number)
            return Failure(number, self.ended[number], text, doubt, signal=-code if code < 0 else None)

    def values(self) -> list[Any]:
        """Return the values of all ranks, which must have returned."""
        outcomes = [self.outcome(number) for number in range(self.world)]
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def failures(self) -> list[Failure]:
        """Return the failures of the ranks that have ended so far."""
        outcomes = [self.outcome(number) for number in self.ended]
        return [outcome for outcome in outcomes if isinstance(outcome, Failure)]

    def last_output(self, number: int) -> str:
        """Return the stack of a rank that died, and its last lines of output if they were not printed already."""
        log = self.folder / f"{number}.log"
        lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        output = "".join(f"\n  | {line}" for line in lines)
        stack = self.stack(number)
        return (f"\nstack:\n{stack}" if stack else "") + ("\nlast lines of its output:" + output if output else "")

    def stack(self, number: int) -> str:
        """Return the stack that faulthandler wrote for a rank, innermost call first, up to its entry."""
        stack = self.folder / f"{number}.stack"
        lines = stack.read_text().splitlines() if stack.exists() else []
        calls = itertools.takewhile(lambda line: f'"{rank.__file__}"' not in line, lines)
        return "\n".join(line for line in calls if line.startswith("  File"))

    def first_error(self) -> Exception:
        """Return the earliest failure among the most certain ones, after a short wait for a certain one."""
        deadline = time.monotonic() + END_SECONDS
        while self.running() and all(failure.doubt for failure in self.failures()) and time.monotonic() < deadline:
            self.wait(0.05)
        timeout = self.collective_timeout.total_seconds()
        if (hanging := self.running()) and only_waited(self.failures(), self.began + timeout):
            return self.hang_error(hanging)
        first = min(self.failures(), key=lambda failure: (failure.doubt, failure.when))
        returned = sorted(self.ended.keys() - {failure.rank for failure in self.failures()})
        text = first.text
        if first.doubt and returned:
            text += f"\n{names_of(returned)} had already returned: not all ranks call the same collectives"
        return first.user or RankError(first.rank, text, first.signal)

    def timeout_error(self) -> RankError:
        """Return an error that names the ranks still running, with the stack of the first."""
        late = [number for number in range(self.world) if not (self.folder / f"{number}.outcome").exists()]
        late = late or self.running()
        self.signal(signal.SIGUSR1)  # a rank writes its stack, even from inside a collective
        time.sleep(0.2)
        text = f"timed out ({names_of(late)} of {self.world} had not returned); stack:\n"
        return RankError(late[0], text + self.stack(late[0]))

    def hang_error(self, hanging: list[int]) -> RankError:
        """End ranks that the others have waited for, and return an error with the stack of the first."""
        self.signal(signal.SIGABRT)  # a rank writes its stack, even if it handles other signals itself
        self.wait(END_SECONDS)
        return RankError(hanging[0], hang_text(hanging, self.collective_timeout, self.stack(hanging[0])))

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that run."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def ask_to_end(self, grace: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Ask the ranks to end, and wait up to `grace` seconds, or until `unless` is true."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.running() and time.monotonic() < deadline and not unless():
            self.wait(0.05)

    def end(self) -> None:
        """End all ranks: first with SIGTERM, then with SIGKILL."""
        self.ask_to_end(END_SECONDS)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(END_SECONDS)  # takes longer only if the kernel cannot end it
        self.running()
