"""TOML files as trees of settings, with the line of each value."""

from __future__ import annotations

import re
import tomllib

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.tree import Setting, Tree, ValueKind
from megaloom.planner.runs.words import Origin, Word

_SECTION = re.compile(r"\s*\[+\s*([\w.\-\" ]+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([\w.\-\"]+)\s*=")


def toml_tree(text: str, path: str) -> Tree:
    """Return the settings of a TOML text. A line that is not TOML is named, never shown."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise UserError(f"{path}:{line[1] if line else 1}: this line is not TOML") from None
    return _tree(data, "", _lines(text), Origin(path, 1))


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key by its path, as far as keys stand at the beginning of lines."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if match := _SECTION.match(line):
            section = match[1].replace('"', "").replace(" ", "") + "."
            lines.setdefault(section[:-1], number)
        elif match := _KEY.match(line):
            lines.setdefault(section + match[1].replace('"', ""), number)
    return lines


def _tree(data: object, path: str, lines: dict[str, int], origin: Origin) -> Tree:
    origin = Origin(origin.path, lines.get(path, origin.line_number))
    if isinstance(data, dict):
        return {key: _tree(value, f"{path}.{key}" if path else key, lines, origin) for key, value in data.items()}
    if isinstance(data, list):
        return [_tree(value, f"{path}.{n}", lines, origin) for n, value in enumerate(data)]
    kind: ValueKind = "boolean" if isinstance(data, bool) else "number" if isinstance(data, int | float) else "text"
    return Setting(Word(str(data).lower() if kind == "boolean" else str(data), origin), kind)
