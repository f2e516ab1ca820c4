"""Findings of independent trials, each with a reproduction that tells whether it is still there.

A module of this folder has the findings of one part of the system. Its reproductions are functions of an empty folder:

    @finding("parity P1", "A microbatch group that leaves a remainder trains on wrong gradients", Verdict.MENDED)
    def remainder(folder: Path) -> str:
        return passes(megaloom(folder, "verify", plan), "agrees")

A reproduction raises AssertionError while the finding is still there. It returns what was seen, in a few words.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from attrs import field, frozen

LIMIT = 300  # seconds for one command
TAIL = 600  # characters of output that an error shows


class Verdict(Enum):
    """The answer to a finding."""

    MENDED = "mended"
    REFUSED = "refused"
    LEFT = "left"  # with the reason


@frozen
class Finding:
    """One numbered finding. `trial` and `number` are those of its report, such as "parity" and "P1"."""

    trial: str
    number: str
    text: str
    verdict: Verdict
    reproduce: Callable[[Path], str] | None = None
    why: str = ""  # of a finding that is left

    @property
    def name(self) -> str:
        """Return the trial and the number."""
        return f"{self.trial} {self.number}"


FINDINGS: dict[str, Finding] = {}


def finding(name: str, text: str, verdict: Verdict) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    """Register the decorated function as the reproduction of a finding."""

    def register(reproduce: Callable[[Path], str]) -> Callable[[Path], str]:
        _add(Finding(*name.split(" ", 1), text, verdict, reproduce))
        return reproduce

    return register


def left(name: str, text: str, why: str) -> None:
    """Register a finding that is left as it is, with the reason."""
    _add(Finding(*name.split(" ", 1), text, Verdict.LEFT, None, why))


def _add(found: Finding) -> None:
    if found.name in FINDINGS:
        raise ValueError(f"finding {found.name} is registered twice")
    FINDINGS[found.name] = found


@frozen
class Ended:
    """A command that has ended."""

    command: str
    code: int
    text: str = field(repr=False)  # stdout and stderr

    @property
    def end(self) -> str:
        """Return the command and the end of its output, for an error."""
        return f"{self.command} ended with {self.code}:\n{self.text[-TAIL:]}"


def megaloom(folder: Path, *arguments: str, seconds: float = LIMIT, **environment: str) -> Ended:
    """Run `megaloom` in a folder."""
    return _run("megaloom.runtime.cli", folder, arguments, seconds, environment)


def plan(folder: Path, *arguments: str, seconds: float = LIMIT, **environment: str) -> Ended:
    """Run `plan` in a folder."""
    return _run("megaloom.planner.cli", folder, arguments, seconds, environment)


def _run(module: str, folder: Path, arguments: tuple[str, ...], seconds: float, environment: dict[str, str]) -> Ended:
    name = "plan" if module.startswith("megaloom.planner") else "megaloom"
    command = [sys.executable, "-m", module, *arguments]
    own = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "MEGALOOM_MACHINE": "4xCPU"} | environment
    try:
        done = subprocess.run(
            command, cwd=folder, env=own, timeout=seconds, text=True, errors="replace", capture_output=True, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{name} {' '.join(arguments)} still ran after {seconds:.0f} s") from late
    return Ended(f"{name} {' '.join(arguments)}"[:200], done.returncode, done.stdout + done.stderr)


def passes(ended: Ended, *words: str) -> str:
    """Assert that a command succeeded and printed the words. Return the last line that has the first of them."""
    assert ended.code == 0, ended.end
    return _said(ended, words)


def refuses(ended: Ended, *words: str) -> str:
    """Assert that a command refused its input with one message, code 2 and the words. Return their line."""
    assert ended.code == 2 and "Traceback" not in ended.text, ended.end
    return _said(ended, words)


def _said(ended: Ended, words: tuple[str, ...]) -> str:
    for word in words:
        assert word in ended.text, f"no {word!r} in what {ended.end}"
    lines = [line.strip() for line in ended.text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if words and words[0] in line), lines[-1] if lines else "")
