"""`megaloom` commands in processes that are forked from the test worker, which has imported the runtime already.

A command that starts a new Python imports torch and megatron-core for four processor seconds. A forked one has them.
Tests of the start itself, of --help and of launchers start a new Python all the same.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import NoReturn

from megaloom.runtime.cli.main import main
from megaloom.runtime.megatron import device
from tests.support.limits import LIMIT

POLL = 0.02  # seconds between looks at a process


class ForkedCommand:
    """A running command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, args: tuple[str, ...], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        device.prepare()
        import megaloom.runtime.training.loop  # noqa: F401 (here, once: the command inherits it)

        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(out)  # else the command would not notice that its reader leaves
            os.close(err)
            os.environ.update(env or {})
            become(run_command, args, cwd, to_out, to_err)
        os.close(to_out)
        os.close(to_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the command runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for the end, and return the exit code. Raise TimeoutExpired if it runs for longer."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutExpired(list(self.args), timeout)
            time.sleep(POLL)
        return code

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """Read what the command prints until its end. Return stdout and stderr."""
        texts = {"out": "", "err": ""}

        def read(name: str) -> None:
            texts[name] = (self.stdout if name == "out" else self.stderr).read()

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in texts]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts["out"], texts["err"]

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command and wait for its end."""
        self.send_signal(signal.SIGKILL)
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)


def run_forked(*args: object, cwd: Path) -> CompletedProcess[str]:
    """Run a command to its end in a folder."""
    command = ForkedCommand(tuple(map(str, args)), cwd)
    out, err = command.communicate()
    return CompletedProcess(command.args, command.returncode or 0, out, err)


def run_command(args: Sequence[str]) -> int:
    """Run `megaloom` with these arguments, and return its exit code."""
    sys.argv = ["megaloom", *args]
    return main()


def become(run: Callable[[Sequence[str]], int], args: Sequence[str], cwd: Path, out: int, err: int) -> NoReturn:
    """Run a command in this forked process with these streams, and exit with its code."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 (for good)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(cwd)
        code = run(args)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
