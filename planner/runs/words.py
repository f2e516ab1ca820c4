"""Words of commands with the place that each comes from: what readers of scripts give, and readers of flags take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

UnknownKind = Literal["variable", "file", "positional", "command", "condition", "placeholder"]
"""A variable that is not set, a file that is not there, a positional argument that is not given, the output of another
program, a condition that depends on one of them, or `<…>` that a reader of the file is to replace."""


@frozen(order=True)
class Origin:
    """A line of a file. A literal value that stands there can be changed there."""

    path: str
    line_number: int  # counted from 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line_number}"


@frozen
class Unknown:
    """Something that a reader cannot know: its name, its kind, and the line that needs it."""

    name: str
    kind: UnknownKind
    origin: Origin


@frozen
class Word:
    """One word of a command, after expansion, and where its text stands.

    The origin of a value that a variable holds is the line that set the variable. A word with unknown parts has only
    its known characters as text, and may stand for several words or none. `either` then has the words that it stands
    for under each outcome of a condition, if that is what is not known.
    """

    text: str
    origin: Origin
    unknown: tuple[Unknown, ...] = ()
    either: tuple[tuple[Word, ...], ...] = ()


@frozen
class Command:
    """One command: its words, the variables of its environment, and what is not known of it."""

    words: tuple[Word, ...]
    environment: Mapping[str, Word] = field(factory=dict, hash=False)
    unknown: tuple[Unknown, ...] = ()


@frozen
class Script:
    """The commands of a script in the order in which they would run, options of `#SBATCH` lines, and what is unknown.

    A script is evaluated, never run. `assumed` names the variables and arguments that were taken as not given, so that
    their defaults hold; `files` has the text of the files that the script writes from here-documents.
    """

    commands: tuple[Command, ...]
    sbatch: Mapping[str, Word] = field(factory=dict, hash=False)  # by the option's long name: nodes, gpus-per-node
    unknown: tuple[Unknown, ...] = ()
    assumed: tuple[Unknown, ...] = ()
    files: Mapping[str, str] = field(factory=dict, hash=False)
    repeated: tuple[Word, ...] = ()  # options of `#SBATCH` lines that stand again with another value
    left: Origin | None = None  # the `exit` at which the script stops
    defined: tuple[str, ...] = ()  # names of the variables that hold at least two flags in the end
