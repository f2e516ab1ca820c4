"""A case of the campaign: one call of the command line on changed input, with what must come of it.

The label is fixed before the command runs, by whoever makes the change:
LEGAL input succeeds; ILLEGAL input is refused with one message; EITHER may happen where only the program can know, such
as a layout that fits or not. In none of them is a traceback, a hang, or a file left by a refused command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from attrs import frozen


class Label(StrEnum):
    """The result that a case must have."""

    LEGAL = "legal"
    ILLEGAL = "illegal"
    EITHER = "either"


@frozen
class Drawn:
    """The command of a case, whose files are in its folder already."""

    words: tuple[str, ...]  # of the command line, without `megaloom`
    label: Label
    what: str  # the change, in words


Kind = Callable[[Random, Path, Path], Drawn]
"""Draws a case of one kind: from the random numbers, the folder of the case and the folder of the unchanged inputs."""

JSON = Any
Change = tuple[str, Label]


def places(it: JSON, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], JSON]]:
    """Yield each value inside of JSON with its path, objects and lists included."""
    if path:
        yield path, it
    for key, value in it.items() if isinstance(it, Mapping) else enumerate(it) if isinstance(it, list) else ():
        yield from places(value, (*path, key))


def changed(raw: JSON, path: tuple[Any, ...], value: JSON) -> None:
    """Set the value at a path."""
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = value


def removed(raw: JSON, path: tuple[Any, ...]) -> None:
    """Remove the value at a path."""
    for key in path[:-1]:
        raw = raw[key]
    del raw[path[-1]]


def shown(path: tuple[Any, ...]) -> str:
    """Return a path in words."""
    return ".".join(map(str, path))


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**30, -(2**63), 1e-300, 1e308, 0.5, -0.0),
    *("", "x", "\x1b[31m", "\ud800", "a\nb", "x" * 100_000, "../../etc/passwd", "$(touch PWNED)"),
    *([], {}, [[]], {"x": {}}, [None], list(range(1000))),
)
"""Values that replace others."""


def same_type(new: Any, old: Any) -> bool:
    """Return True if JSON gives both values one type; a whole number is a number too."""
    if isinstance(old, bool) or isinstance(new, bool) or old is None or new is None:
        return type(new) is type(old)
    if isinstance(old, float):
        return isinstance(new, int | float)
    return isinstance(new, type(old))


def of_another_type(draw: Random, value: Any) -> Any:
    """Return an odd value of another type than this one."""
    return draw.choice([odd for odd in ODD if not same_type(odd, value)])


def nested(depth: int) -> str:
    """Return JSON that is nested so deeply."""
    return "[" * depth + "]" * depth


def damaged_text(draw: Random, text: str) -> tuple[str | bytes, str]:
    """Return JSON text that is none any more, and what was done to it."""
    cut = draw.randrange(1, max(2, len(text.rstrip()) - 1))
    return draw.choice(
        [
            (text[:cut], f"cut after {cut} characters"),
            (text.encode()[:cut] + b"\xff\xfe" + text.encode()[cut:], f"bytes ff fe at {cut}"),
            ("", "empty"),
            (nested(100_000), "nested 100,000 deep"),
            ("null", "null"),
            (text.encode("utf-16"), "as UTF-16"),
            (text + "]", "one bracket more"),
            ("\0" + text, "a null byte first"),
            (text.replace(":", "=", 1), "an = for a colon"),
        ]
    )
