"""Turns of programs that were started together and time their steps one after the other. Part of `against_others`.

A program reads a folder and its name from the environment. It writes `NAME.ready` when its kernels are compiled. It
begins turn 0 when the file `NAME.0.begin` is there, and writes `NAME.0.end` after it. Between its turns it is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

FOLDER, NAME = "AGAINST_OTHERS_FOLDER", "AGAINST_OTHERS_PROGRAM"  # environment variables
POLL = 0.02  # seconds


@frozen
class Turns:
    """The turns of one program. Without a folder it need not wait for others."""

    folder: Path | None
    name: str = ""

    @classmethod
    def given(cls) -> Turns:
        """Return the turns of this process, from its environment."""
        folder = os.environ.get(FOLDER)
        return cls(Path(folder) if folder else None, os.environ.get(NAME, ""))

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables from which the program reads this."""
        return {FOLDER: str(self.folder), NAME: self.name}

    def begin(self, turn: int) -> None:
        """On each rank of the program: wait for the devices."""
        if self.folder is not None:
            self.file("ready").touch()
            wait_until(self.file(f"{turn}.begin").exists)

    def end(self, turn: int) -> None:
        """Say that the program is idle again."""
        if self.folder is not None:
            self.file(f"{turn}.end").touch()

    def await_ready(self, alive: Callable[[], bool]) -> None:
        """Wait until the program is ready or no longer alive."""
        wait_until(lambda: self.file("ready").exists() or not alive())

    def give(self, turn: int, alive: Callable[[], bool]) -> None:
        """Let the program take a turn, and wait for the end of the turn or of the program."""
        self.file(f"{turn}.begin").touch()
        wait_until(lambda: self.file(f"{turn}.end").exists() or not alive())

    def file(self, kind: str) -> Path:
        """Return the file `NAME.kind` in the folder."""
        assert self.folder is not None
        return self.folder / f"{self.name}.{kind}"


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds; it is asked every `POLL` seconds."""
    while not condition():
        time.sleep(POLL)
