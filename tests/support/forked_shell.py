"""Shell scripts whose `megaloom` and `python -m` commands are forked from the test worker.

`run_script(words, cwd, env)` runs a script to its end. MEGALOOM and PYTHON name small programs that send their
arguments, folder and streams to this process over a socket, pass SIGUSR1 on, and exit with the code of the command.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from megaloom.runtime.megatron import device
from tests.support.forked_command import POLL, become, run_command
from tests.support.limits import LIMIT

CLIENT = """#!{python} -ISE
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
socket.send_fds(link, [json.dumps([{name!r}, os.getcwd(), sys.argv[1:]]).encode()], [1, 2])
pid = int(link.recv(64))
signal.signal(signal.SIGUSR1, lambda *_: os.kill(pid, signal.SIGUSR1))
code = int(link.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""


def run_module(args: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS`."""
    option, module, *words = args
    assert option == "-m", args
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


PROGRAMS: Mapping[str, Callable[[Sequence[str]], int]] = {"MEGALOOM": run_command, "PYTHON": run_module}


def run_script(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> CompletedProcess[str]:
    """Run a script to its end. Return its exit code and what it and its commands printed."""
    device.prepare()
    import megaloom.runtime.training.loop  # noqa: F401 (here, once: the commands inherit it)

    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as server:
        folder = Path(name)
        server.bind(str(folder / "socket"))
        server.listen()
        server.settimeout(POLL)
        for program in PROGRAMS:
            client = CLIENT.format(python=sys.executable, address=str(folder / "socket"), name=program)
            (folder / program).write_text(client)
            (folder / program).chmod(0o700)
        with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
            own = {**os.environ, **env, **{program: str(folder / program) for program in PROGRAMS}}
            script = subprocess.Popen(list(words), cwd=cwd, env=own, stdout=out, stderr=err)
            try:
                _serve(server, script)
            finally:
                script.kill()
                script.wait()
            return CompletedProcess(words, script.returncode, *(Path(f.name).read_text() for f in (out, err)))


def _serve(server: socket.socket, script: subprocess.Popen[bytes]) -> None:
    """Fork each command that the script calls, and tell its caller the exit code, until the script ends."""
    running: dict[int, socket.socket] = {}
    end = time.monotonic() + LIMIT
    while script.poll() is None:
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(script.args, LIMIT)
        try:
            link, _ = server.accept()
        except TimeoutError:
            pass
        else:
            message, (out, err), _, _ = socket.recv_fds(link, 1 << 16, 2)
            program, cwd, args = json.loads(message)
            pid = os.fork()
            if pid == 0:
                become(PROGRAMS[program], args, Path(cwd), out, err)
            os.close(out)
            os.close(err)
            link.send(str(pid).encode())
            running[pid] = link
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as link:
                    link.send(str(os.waitstatus_to_exitcode(status)).encode())
