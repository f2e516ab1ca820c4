"""Print rich renderables on a terminal, or as plain text into a file or pipe."""

from __future__ import annotations

from io import StringIO
from typing import TextIO

from rich.console import Console, RenderableType


def show(what: RenderableType, file: TextIO) -> None:
    """Print with colours and wrapping on a terminal, else as plain lines of any length."""
    if file.isatty():
        Console(file=file, highlight=False).print(what)
        return
    text = StringIO()
    Console(file=text, width=10_000, color_system=None, force_terminal=False, highlight=False).print(what)
    for line in text.getvalue().splitlines():
        print(line.rstrip(), file=file)
