"""Output of the command: results to stdout from the first rank, errors to stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Group

from megaloom.dsl.quoting import shown_message
from megaloom.dsl.show.printing import show

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_on_first_rank(*parts: RenderableType) -> None:
    """Print to stdout, unless this process is a rank other than 0. The buffer is flushed, so no rank inherits it."""
    if not int(os.environ.get("RANK", 0)):
        show(Group(*parts), sys.stdout)
        sys.stdout.flush()


def fail(message: str, code: int = 2) -> int:
    """Print an error to stderr and return the exit code."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # show the cursor: a rank killed while it drew progress had hidden it
    print(f"megaloom: {shown_message(message)}", file=sys.stderr)
    return code
