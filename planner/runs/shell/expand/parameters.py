"""Values of variables and arguments, and the operators of `${…}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import evolve

from megaloom.planner.runs.shell.expand.patterns import pattern_regex
from megaloom.planner.runs.shell.expand.state import Associative, Indexed, State, items_of
from megaloom.planner.runs.shell.parse.text import (
    Piece,
    Text,
    cause,
    cut,
    joined,
    literal,
    missing,
    quoted,
    shown,
    size,
)
from megaloom.planner.runs.words import Origin, Unknown

MACHINE = frozenset({"RANDOM", "SECONDS", "HOSTNAME", "PPID", "UID", "EUID", "HOSTTYPE", "OSTYPE", "BASHPID"})


def is_list(name: str, index: Text | None) -> bool:
    """Return True for `$@`, `$*`, `${A[@]}` and `${A[*]}`."""
    return name in ("@", "*") if index is None else shown(index) in ("@", "*")


def list_items(state: State, name: str) -> list[Text]:
    """Return the items of `$@` or of an array."""
    if name in ("@", "*"):
        return list(state.positional)
    if name == "BASH_SOURCE":
        return [literal(state.path, Origin(state.path, 1))]
    variable = state.variables.get(state.resolved(name))
    return items_of(variable.value) if variable else []


def has_gap(items: Sequence[Text]) -> bool:
    """Return True if an item may stand for several items, or for none."""
    return any(p.unknown and not p.quoted for item in items for p in item)


def scalar(state: State, name: str, index: Text | None, origin: Origin) -> Text | None:
    """Return the value of a variable or argument, empty if it was unset, or None if nothing ever set it."""
    if name.isdecimal():
        return _argument(state, int(name), origin)
    if name == "#":
        return _count(state, origin)
    if name == "?":
        code = state.status.code
        unknown = state.status.unknown or Unknown("?", "command", origin)
        return missing(unknown) if code is None else literal(str(code), origin)
    if name == "-":
        return literal("hB", origin)
    if name in ("$", "!", "_"):
        return missing(Unknown(name, "command", origin))
    if name == "BASH_SOURCE":
        return literal(state.path, Origin(state.path, 1))
    variable = state.variables.get(state.resolved(name))
    if variable is None:
        if name in ("PWD", "OLDPWD"):
            return state.folder
        if name in MACHINE:
            return missing(Unknown(name, "command", origin))
        return () if name in state.skipped else None
    return quoted(_item(variable.value, index), False)


def _argument(state: State, number: int, origin: Origin) -> Text | None:
    if number == 0:
        return state.script
    before = state.positional[: number - 1]
    if has_gap(before):
        return missing(next(u for u in map(cause, before) if u))
    if number <= len(state.positional):
        return quoted(state.positional[number - 1], False)
    return () if state.given else None


def _count(state: State, origin: Origin) -> Text:
    if has_gap(state.positional):
        return missing(next(u for u in map(cause, state.positional) if u))
    assumed = None if state.given else Unknown("#", "positional", origin)
    return (Piece(str(len(state.positional)), origin, assumed=assumed),)


def _item(value: Text | Indexed | Associative | None, index: Text | None) -> Text:
    if value is None:
        return ()
    if index is not None and (unknown := cause(index)):
        return missing(unknown)
    if isinstance(value, Associative):
        return value.items.get(shown(index) if index is not None else "0", ())
    number = int(shown(index) or 0) if index is not None else 0
    if not isinstance(value, Indexed):
        return value if number in (0, -1) else ()
    before = [t for i, t in sorted(value.items.items()) if i < number or number < 0]
    if has_gap(before):
        return missing(next(u for u in map(cause, before) if u))
    return value.items.get(number + max(value.items, default=-1) + 1 if number < 0 else number, ())


def keys_of(state: State, name: str, origin: Origin) -> list[Text]:
    """Return the indices of an array."""
    variable = state.variables.get(state.resolved(name))
    value = variable.value if variable else None
    if isinstance(value, Associative):
        return [literal(k, origin) for k in value.items]
    if isinstance(value, Indexed):
        return [literal(str(k), origin) for k in sorted(value.items)]
    return [literal("0", origin)] if value else []


def trimmed(text: Text, operator: str, pattern: Text) -> Text:
    """Return the text without the part that matches the pattern: `#` and `##` at the start, `%` and `%%` at the end."""
    if unknown := cause(text) or cause(pattern):
        return missing(unknown)
    letters = shown(text)
    lengths = range(len(letters) + 1)
    regex = re.compile(pattern_regex(pattern), re.DOTALL)
    for length in reversed(lengths) if len(operator) == 2 else lengths:
        part = letters[:length] if operator[0] == "#" else letters[len(letters) - length :]
        if regex.fullmatch(part):
            return cut(text, length) if operator[0] == "#" else cut(text, 0, len(letters) - length)
    return text


def replaced(text: Text, operator: str, pattern: Text, replacement: Text) -> Text:
    """Return the text with matches of the pattern replaced: the first, all (`//`), or one at an end (`/#`, `/%`)."""
    if unknown := cause(text) or cause(pattern):
        return missing(unknown)
    if not size(pattern):
        return {"/#": replacement + text, "/%": text + replacement}.get(operator, text)
    regex = pattern_regex(pattern)
    regex = rf"\A(?:{regex})" if operator == "/#" else rf"(?:{regex})\Z" if operator == "/%" else regex
    result: Text = ()
    end = 0
    for match in re.finditer(regex, shown(text), re.DOTALL):
        if match.end() == match.start():
            continue
        result += cut(text, end, match.start()) + replacement
        end = match.end()
        if operator != "//":
            break
    return result + cut(text, end)


def substring(text: Text, start: int, length: int | None) -> Text:
    """Return the characters from start on; negative numbers count from the end."""
    if unknown := cause(text):
        return missing(unknown)
    if start < -size(text):
        return ()
    start = start + size(text) if start < 0 else start
    end = size(text) if length is None else start + length if length >= 0 else size(text) + length
    return cut(text, start, max(start, end))


def in_case(text: Text, operator: str) -> Text:
    """Return the text in upper case (`^`) or lower case (`,`); once: the first character only."""
    change = str.upper if operator[0] == "^" else str.lower
    if len(operator) == 2:
        return tuple(evolve(p, text=change(p.text)) for p in text)
    first, rest = cut(text, 0, 1), cut(text, 1)
    return (*(evolve(p, text=change(p.text)) for p in first), *rest)


def one_text(items: Sequence[Text], is_quoted: bool, separator: str = " ") -> Text:
    """Return the items as one text, with a separator between them."""
    return quoted(joined(items, separator), is_quoted)
