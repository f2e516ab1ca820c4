"""Text of words between expansions and fields: home folders, words of an expansion, patterns of file names."""

from __future__ import annotations

import re

from attrs import evolve

from megaloom.planner.runs.shell.parse.syntax import LiteralPart, ParameterPart, Parts
from megaloom.planner.runs.shell.parse.text import Text, missing, quoted, shown, split_words
from megaloom.planner.runs.words import Unknown

LIST_ARITHMETIC = re.compile(
    r"\[[\d,]+\](?:\*\d+)?(?:\+\[[\d,]+\](?:\*\d+)?)*"
)  # Python's [0]*3+[1]*58 and [0]+[1]*45, as --moe-layer-freq takes it


def split_expansion(text: Text, separators: str) -> list[Text | None]:
    """Return the words of an unquoted expansion; None is a boundary between two of them."""
    result: list[Text | None] = []
    blank = "".join(c for c in separators if c in " \t\n")
    letters = "".join("?" if p.unknown or p.quoted else p.text for p in text)
    for word in split_words(text, separators):
        result += [None, word] if result or letters[:1] in set(blank) else [word]
    if not result and letters:
        return [None]
    return [*result, None] if letters[-1:] in set(blank) and letters else result


def without_last_newlines(text: Text) -> Text:
    """Return the output of commands as `$(…)` has it: without the ends of lines at its end."""
    pieces = list(text)
    while pieces and not pieces[-1].unknown:
        stripped = pieces[-1].text.rstrip("\n")
        last = pieces.pop()
        if stripped:
            return (*pieces, evolve(last, text=stripped))
    return tuple(pieces)


def as_item(text: Text, is_quoted: bool) -> Text:
    """Return an item of a list; a gap, which may stand for several items, stays unquoted."""
    return tuple(p if p.unknown and not p.quoted else evolve(p, quoted=is_quoted) for p in text)


def with_home(parts: Parts) -> Parts:
    """Return the parts of a word, with `$HOME` for a tilde at its beginning."""
    first = parts[0] if parts else None
    if not isinstance(first, LiteralPart) or first.quoted or not re.match(r"~(?:/|$)", shown(first.text)):
        return parts
    origin = first.text[0].origin
    rest = evolve(first, text=(evolve(first.text[0], text=first.text[0].text[1:]), *first.text[1:]))
    return (ParameterPart("HOME", origin, True), rest, *parts[1:])


def without_glob(text: Text) -> Text:
    """Return the word, or an unknown one if it names files by a pattern."""
    plain = shown(text)
    is_pattern = any(c in "*?" for p in text if not p.quoted for c in p.text)
    if is_pattern and not (
        set(plain) & set("()'\"") or LIST_ARITHMETIC.fullmatch(plain)
    ):  # no file has such a name: bash keeps it
        return quoted(missing(Unknown(plain, "file", text[0].origin)), False)
    return text
