"""Print rich renderables on a terminal, or as plain text into a file or pipe."""

from __future__ import annotations

from io import StringIO
from typing import TextIO

from attrs import frozen
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from megaloom.dsl.quoting import is_printable, printable


@frozen
class _Escaped:
    """A renderable in whose text control characters are escaped: names of models and files come from elsewhere."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            if segment.control or is_printable(segment.text.replace("\n", "")):
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)


def show(what: RenderableType, file: TextIO) -> None:
    """Print with colours and wrapping on a terminal, else as plain lines of any length."""
    if file.isatty():
        Console(file=file, highlight=False).print(_Escaped(what))
        return
    text = StringIO()
    Console(file=text, width=10_000, color_system=None, force_terminal=False, highlight=False).print(_Escaped(what))
    for line in text.getvalue().removesuffix("\n").split("\n"):
        print(line.rstrip(), file=file)
