"""One process a device: start ranks on this machine. `join` is for those that torchrun or srun started.

`run` is the whole life of a group of ranks. They are forked from this process on CPU (megatron-core is imported
once, here) and spawned where there are GPUs; each calls the entry and leaves its outcome in a file (see `rank`).
When one fails the others are ended, and of everything that went wrong the first real error is raised here: ranks
that only saw a peer vanish are never the news. Whatever happens to this process (an error, a timeout, Ctrl-C,
SIGTERM, SIGKILL), no rank outlives it.

torch's own `start_processes` are not used: they wait up to 30 s for ranks that are stuck in a collective, report
the first process to exit rather than the first to fail, keep this process's signals, and lose the ranks already
started if starting the next one fails.
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
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import define, field

from megaloom.dsl.errors import UserError
from megaloom.runtime.megatron import device

from . import rank
from .rank import Failure, Place, Returned
from .rendezvous import inside

GRACE = 2.0
"""Seconds that ranks get to end by themselves: to tell of the real error, or to leave the terminal in order."""

PER_CORE = 16
"""Ranks that a core may have to itself where there are no GPUs: a rehearsal is slow, but must not bury the machine."""


class RankError(RuntimeError):
    """A rank failed: which one, and the text of its traceback, or how its process ended."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank, self.text = rank, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.text)


def run(
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    world: int,
    *,
    timeout: float | None = None,
    grace: float = GRACE,
) -> list[Any]:
    """Each rank's `entry(*args)`, of `world` ranks on this machine, in the order of ranks.

    `entry` is importable, `args` and the returned values are small and picklable. Rank 0 writes to this process's
    stdout and stderr; the others' output is shown if they die without a traceback. `timeout`: seconds for it all.
    `grace`: seconds from a first SIGINT or SIGTERM, which ranks get as SIGTERM, to their end; a second one ends them
    at once. Raises the first real error of any rank: its UserError, or else a RankError.
    """
    check(world)
    if not device.gpus():
        device.prepare()  # here, once: forked ranks have it already
    job = pickle.dumps((entry, args))
    with (
        tempfile.TemporaryDirectory(prefix="megaloom-") as folder,
        _deferred_signals() as caught,
        socket.create_server(("127.0.0.1", 0), backlog=4 * world) as server,
        ThreadPoolExecutor(1) as starter,
    ):
        ranks = Ranks(world, Path(folder))
        try:
            # By a thread that never computed: OpenMP's workers belong to the thread that made them, and a forked copy
            # of that thread waits for them forever. It stays until the end, as ranks die with what started them.
            starter.submit(ranks.start, server.getsockname()[1], job).result()
            # The ranks' meeting point, on a socket that listens already. Its thread starts only now: a forked
            # process would have inherited no thread, but the locks that it held.
            store = dist.TCPStore(
                *server.getsockname(), is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            ranks.watch(caught, None if timeout is None else time.monotonic() + timeout, grace)
            return ranks.values()
        finally:
            ranks.end()
            store = None  # noqa: F841 # else an error's traceback would keep it, and its thread, for the next fork


def check(world: int) -> None:
    """Nothing, if this process can start that many ranks here. UserError otherwise."""
    most = PER_CORE * len(os.sched_getaffinity(0))
    if world < 1:
        raise UserError(f"cannot start {world} ranks; 1 or more would work")
    if device.gpus() and world > device.gpus():
        raise UserError(f"{world} ranks need a GPU each, and this machine has {device.gpus()}: plan for those")
    if not device.gpus() and world > most:
        raise UserError(f"{world} ranks are too many for this machine, which has no GPU: plan for at most {most}")
    if inside():
        raise UserError("already one of many ranks (RANK is set), where no more are started; unset RANK to start some")


@contextlib.contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """The signals that came, for the loop to act upon: an exception in the midst of a start would lose ranks."""
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers, nor runs them
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # such as under nohup
                before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _defaults(**variables: object) -> Iterator[None]:
    """Environment variables, where they are unset, for the processes that start meanwhile."""
    unset = {name: str(value) for name, value in variables.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


def _threads(world: int) -> int:
    """Threads for each of `world` ranks, so that together they don't exceed this process's cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // world))


@define(eq=False)
class Ranks:
    """The processes of one run, and the folder in which they leave their outcomes."""

    world: int
    folder: Path
    processes: list[Any] = field(factory=list, init=False)
    ended: dict[int, float] = field(factory=dict, init=False)  # rank -> when that was seen, in monotonic seconds

    def start(self, port: int, job: bytes) -> None:
        """Start them all, each on the list before the next one starts."""
        context: Any = multiprocessing.get_context("spawn" if device.gpus() else "fork")
        threads = _threads(self.world)
        # What OpenMP and CUDA read when a spawned rank loads them, before it runs a line of ours.
        with _defaults(OMP_NUM_THREADS=threads, CUDA_DEVICE_MAX_CONNECTIONS=1), warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads: the one of ours only waits.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            # Held back until a rank has handlers of its own: those that it forks with would swallow them.
            signal.pthread_sigmask(signal.SIG_BLOCK, rank.HEEDED)
            for number in range(self.world):
                place = Place(number, self.world, port, str(self.folder), threads, os.getpid())
                process = context.Process(target=rank.main, args=(place, job))
                process.start()
                self.processes.append(process)

    def running(self) -> list[int]:
        """The ranks that have not ended; of the others that is noted, and what they had started is ended too."""
        alive = [number for number, process in enumerate(self.processes) if process.is_alive()]
        for number in set(range(len(self.processes))).difference(alive, self.ended):
            self.ended[number] = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[number].pid, signal.SIGKILL)
        return alive

    def watch(self, caught: Sequence[int], deadline: float | None, grace: float) -> None:
        """Return when all have ended well; raise at the first failure, a signal or the deadline."""
        while self.running():
            if caught:
                # A rank that failed, or ended before it could save, leaves the others nothing to wait for.
                self.ask_to_end(grace, unless=lambda: len(caught) > 1 or bool(self.failures()))
                if self.failures() and isinstance(error := self.first_error(), UserError):
                    raise error  # such as no room for what they wanted to save
                raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])
            if self.failures():
                break
            if deadline is not None and time.monotonic() > deadline:
                raise self.too_late()
            self.wait(0.1)
        if self.failures():
            raise self.first_error()

    def wait(self, seconds: float) -> None:
        """Until another rank ends, but no longer than that."""
        wait([process.sentinel for process in self.processes if process.is_alive()], timeout=seconds)

    def outcome(self, number: int) -> Returned | Failure:
        """What a rank that has ended left; if it left nothing, how its process ended."""
        try:
            return pickle.loads((self.folder / f"{number}.outcome").read_bytes())  # type: ignore[no-any-return]
        except FileNotFoundError:
            code = self.processes[number].exitcode
            # NCCL and gloo may abort a process whose peer is gone.
            doubt = 1 if code == -signal.SIGABRT else 0
            return Failure(number, self.ended[number], _ending(code) + self.remains(number), doubt)

    def values(self) -> list[Any]:
        """What the ranks returned, all of them having done so."""
        outcomes = [self.outcome(number) for number in range(self.world)]
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def failures(self) -> list[Failure]:
        """Those of the ranks that have ended so far."""
        outcomes = [self.outcome(number) for number in self.ended]
        return [outcome for outcome in outcomes if isinstance(outcome, Failure)]

    def remains(self, number: int) -> str:
        """Where a rank was when it died, and its last lines if they are not on the terminal already."""
        log = self.folder / f"{number}.log"
        lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        output = "".join(f"\n  | {line}" for line in lines)
        stack = self.stack(number)
        return (f"\nit was here:\n{stack}" if stack else "") + ("\nthe end of its output:" + output if output else "")

    def stack(self, number: int) -> str:
        """What faulthandler wrote of a rank, innermost call first, as far out as its entry."""
        stack = self.folder / f"{number}.stack"
        lines = stack.read_text().splitlines() if stack.exists() else []
        calls = itertools.takewhile(lambda line: f'"{rank.__file__}"' not in line, lines)
        return "\n".join(line for line in calls if line.startswith("  File"))

    def first_error(self) -> Exception:
        """The earliest of those least in doubt, waiting a little for one that is in none."""
        deadline = time.monotonic() + GRACE
        while self.running() and all(failure.doubt for failure in self.failures()) and time.monotonic() < deadline:
            self.wait(0.05)
        first = min(self.failures(), key=lambda failure: (failure.doubt, failure.when))
        done = sorted(self.ended.keys() - {failure.rank for failure in self.failures()})
        text = first.text
        if first.doubt and done:
            text += f"\n{_names(done)} had already returned: not all ranks take part in the same collectives"
        return first.user or RankError(first.rank, text)

    def too_late(self) -> RankError:
        """Who was still at work, and where."""
        late = [number for number in range(self.world) if not (self.folder / f"{number}.outcome").exists()]
        late = late or self.running()
        self.signal(signal.SIGUSR1)  # a rank answers with its stack, also from inside a collective
        time.sleep(0.2)
        who = f"ran out of time ({_names(late)} of {self.world} had not returned); it was here:\n"
        return RankError(late[0], who + self.stack(late[0]))

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def ask_to_end(self, grace: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Give the ranks that many seconds to end, unless something else comes."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.running() and time.monotonic() < deadline and not unless():
            self.wait(0.05)

    def end(self) -> None:
        """No rank is left after this: first asked to stop, then made to."""
        self.ask_to_end(GRACE)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(GRACE)  # longer only if the kernel itself is stuck with it
        self.running()


def _names(ranks: Sequence[int]) -> str:
    """As in "rank 1", "ranks 1 and 2", "ranks 1, 2 and 4"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _ending(code: int) -> str:
    """How a process ended that had no time to say why, and what may help."""
    if code >= 0:
        return f"left with exit status {code}, without an error of its own"
    died = f"died of signal {-code} ({signal.Signals(-code).name})"
    if code == -signal.SIGKILL:
        return died + ": often the kernel, out of memory; a smaller micro-batch or more recomputation needs less"
    return died
