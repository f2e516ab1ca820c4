"""Printed names change no terminal: control characters are escaped."""

from __future__ import annotations

import os
import pty
from io import StringIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megaloom.dsl.show.printing import show

NAME = "x\x1b[31m\ud800y"
SHOWN = r"x\x1b[31m\ud800y"


def table() -> Group:
    rows = Table("name")
    rows.add_row(Text(NAME))
    return Group(Text(f"of {NAME}\nnext", style="bold"), rows)


def test_a_file_gets_escapes() -> None:
    show(table(), out := StringIO())
    assert out.getvalue().startswith(f"of {SHOWN}\nnext\n")
    assert out.getvalue().count(SHOWN) == 2


def test_a_terminal_gets_escapes() -> None:
    child, terminal = pty.fork()
    if not child:
        with open(1, "w") as screen:
            show(table(), screen)
        os._exit(0)
    out = b""
    while part := _read(terminal):
        out += part
    os.waitpid(child, 0)
    assert out.count(SHOWN.encode()) == 2
    assert b"\x1b[31m" not in out


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""
