"""Names of the variables that commands may set, found without evaluating them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import has

from megaloom.planner.runs.shell.parse.syntax import (
    ArithmeticClause,
    ArithmeticPart,
    Assignment,
    ForEach,
    LiteralPart,
    Node,
    ParameterPart,
    Parts,
    Simple,
)
from megaloom.planner.runs.shell.parse.text import shown

READING = frozenset({"read", "mapfile", "readarray", "getopts", "let", "printf"})
_NAME = re.compile(r"[A-Za-z_]\w*")


def assigned_names(node: Node) -> set[str]:
    """Return the names of all variables that the commands may set; functions that they call are not followed."""
    return set(_names(node))


def _plain(parts: Parts) -> str:
    return "".join(shown(p.text) for p in parts if isinstance(p, LiteralPart))


def _names(node: object) -> Iterator[str]:
    if isinstance(node, tuple):
        for item in node:
            yield from _names(item)
        return
    if not has(type(node)):
        return
    if isinstance(node, Assignment | ForEach):
        yield node.name
    if isinstance(node, ParameterPart) and node.operator in ("=", ":="):
        yield node.name
    if isinstance(node, ArithmeticClause | ArithmeticPart):
        text = _plain(node.expression)
        yield from (m[0] for m in _NAME.finditer(text)) if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", text) else ()
    if isinstance(node, Simple) and node.words and not isinstance(node.words[0], Assignment):
        words = [_plain(w) for w in node.words if isinstance(w, tuple)]
        if words[0] in READING:
            yield from (m[0] for w in words[1:] if (m := _NAME.match(w)))
    for value in (getattr(node, name) for name in getattr(type(node), "__match_args__", ())):
        if isinstance(value, tuple) or has(type(value)):
            yield from _names(value)
