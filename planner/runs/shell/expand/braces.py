"""Brace expansion: the words that `{a,b}` and `{1..3}` make of a word."""

from __future__ import annotations

import re

from megaloom.planner.runs.shell.parse.syntax import LiteralPart, Part, Parts
from megaloom.planner.runs.shell.parse.text import Piece, shown
from megaloom.planner.runs.words import Origin

MOST_WORDS = 100_000


def braced(parts: Parts) -> list[Parts]:
    """Return the words that `{a,b}` and `{1..3}` make of a word; only unquoted braces count."""
    for number, part in enumerate(parts):
        if isinstance(part, LiteralPart) and not part.quoted and "{" in shown(part.text):
            return _brace_group(parts, number)
    return [parts]


def _brace_group(parts: Parts, number: int) -> list[Parts]:
    atoms: list[Part | Piece] = []
    for part in parts:
        if isinstance(part, LiteralPart) and not part.quoted:
            atoms += [p if p.unknown else Piece(c, p.origin) for p in part.text for c in (p.text or " ")]
        else:
            atoms.append(part)
    return [_parts(a) for a in _alternatives(atoms)]


def _letter(atom: Part | Piece) -> str:
    return atom.text if isinstance(atom, Piece) and not atom.unknown else ""


def _alternatives(atoms: list[Part | Piece]) -> list[list[Part | Piece]]:
    for start, atom in enumerate(atoms):
        if _letter(atom) == "{" and (group := _group(atoms, start)):
            end, choices = group
            rests = _alternatives(atoms[end + 1 :])
            return [[*atoms[:start], *c, *r] for choice in choices for c in _alternatives(choice) for r in rests]
    return [atoms]


def _group(atoms: list[Part | Piece], start: int) -> tuple[int, list[list[Part | Piece]]] | None:
    depth, commas = 0, [start]
    for position in range(start, len(atoms)):
        letter = _letter(atoms[position])
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 1:
            commas.append(position)
        if depth == 0:
            inside = atoms[start + 1 : position]
            if len(commas) > 1:
                bounds = zip(commas, [*commas[1:], position], strict=True)
                return position, [atoms[a + 1 : b] for a, b in bounds]
            if all(_letter(a) for a in inside) and (found := _counted("".join(map(_letter, inside)))):
                origin = inside[0].origin if isinstance(inside[0], Piece) else Origin("", 1)
                return position, [[Piece(c, origin) for c in word] for word in found]
            return None
    return None


def _counted(text: str) -> list[str]:
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)
    if match:
        numbers = _range(int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1)
        padded = any(re.match(r"-?0\d", m) for m in (match[1], match[2]))
        width = max(len(match[1]), len(match[2])) if padded else 0
        return [str(n).zfill(width) for n in numbers]
    letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", text)
    return [chr(c) for c in _range(ord(letters[1]), ord(letters[2]), 1)] if letters else []


def _range(first: int, last: int, step: int) -> range:
    if abs(last - first) // step > MOST_WORDS:
        return range(0)
    return range(first, last + 1, step) if last >= first else range(first, last - 1, -step)


def _parts(atoms: list[Part | Piece]) -> Parts:
    return tuple(LiteralPart((a,), False) if isinstance(a, Piece) else a for a in atoms)
