"""Interpolation of settings: `${a.b}`, `${.a}`, `${oc.env:NAME,default}`, `${NAME:default}`, and simple arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from megaloom.planner.runs.settings.tree import Setting, Tree, found, not_known, plain_setting
from megaloom.planner.runs.words import Origin, Unknown, Word

_DEEPEST = 40
_ENVIRONMENT = ("oc.env", "env")
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "mul": lambda a, b: a * b,
    "multiply": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "subtract": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "divide": lambda a, b: a / b,
    "int_div": lambda a, b: a // b,
    "floor_div": lambda a, b: a // b,
    "ceil_div": lambda a, b: -(-a // b),
    "max": max,
    "min": min,
}


@frozen
class Interpolation:
    """The trees and the variables that an interpolation may refer to; `assumed` gathers variables with defaults."""

    root: Tree | None
    environment: Mapping[str, str]
    prefixes: Sequence[str] = ()  # names of the group that the file is in: `training` of `${training.model.x}`
    assumed: dict[Unknown, None] = field(factory=dict)

    def resolved(self, tree: Tree | None, path: str = "", depth: int = 0) -> Tree | None:
        """Return a tree without interpolations. A value that is not known is an unknown one."""
        if isinstance(tree, Setting):
            return self.value(tree, path, depth)
        if isinstance(tree, Mapping):
            resolved = {k: self.resolved(v, f"{path}.{k}" if path else k, depth) for k, v in tree.items()}
            return {k: v for k, v in resolved.items() if v is not None}
        if tree is None:
            return None
        return [r for n, v in enumerate(tree) if (r := self.resolved(v, f"{path}.{n}", depth)) is not None]

    def value(self, value: Setting, path: str, depth: int = 0) -> Tree:
        """Return a value without interpolations; an interpolation that is the whole value may give a tree."""
        text, origin = value.text, value.word.origin
        if "${" not in text:
            return value
        parts = _parts(text)
        if parts is None or depth > _DEEPEST:
            return not_known(Unknown(text if len(text) < _DEEPEST else "${…}", "variable", origin))
        if len(parts) == 1 and isinstance(parts[0], tuple):
            return self._expression(parts[0][0], path, origin, depth)
        result, unknown = "", list(value.word.unknown)
        for part in parts:
            inner = self._expression(part[0], path, origin, depth) if isinstance(part, tuple) else None
            if inner is None:
                result += str(part)
            elif isinstance(inner, Setting):
                result += inner.text
                unknown += inner.word.unknown
            else:
                unknown.append(Unknown(part[0], "variable", origin))
        return Setting(Word(result, origin, tuple(unknown)), plain_setting(result, origin).kind)

    def _expression(self, text: str, path: str, origin: Origin, depth: int) -> Tree:
        name, colon, rest = text.partition(":")
        name = name.strip()
        if not colon:
            return self._reference(name, path, origin, depth)
        if name in _ENVIRONMENT:
            variable, comma, default = rest.partition(",")
            if comma and "${" in default and variable.strip() not in self.environment:
                self.assumed.setdefault(Unknown(variable.strip(), "variable", origin))
                return self.value(Setting(Word(default.strip(), origin)), path, depth + 1)
            return self._variable(variable.strip(), default.strip() if comma else None, origin)
        if name == "oc.decode":
            return self._decoded(rest.strip(), path, origin, depth)
        if name in _ARITHMETIC:
            return self._calculated(name, rest, path, origin, depth)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and rest != "??":
            if name.isupper():
                return self._variable(name, rest, origin)
            return not_known(Unknown(f"${{{name}:…}}", "variable", origin))
        return self._variable(name, None, origin)

    def _variable(self, name: str, default: str | None, origin: Origin) -> Setting:
        if name in self.environment:
            return plain_setting(self.environment[name], Origin("--env", 1))
        unknown = Unknown(name, "variable", origin)
        if default is None:
            return not_known(unknown)
        self.assumed.setdefault(unknown)
        return plain_setting(default.strip("'\""), origin)

    def _decoded(self, text: str, path: str, origin: Origin, depth: int) -> Tree:
        """Return a text as YAML takes it; one of a list or a mapping is not known."""
        inner = self.value(Setting(Word(text, origin)), path, depth + 1)
        if not isinstance(inner, Setting) or inner.word.unknown:
            return inner
        if inner.text.lstrip().startswith(("[", "{")):
            return not_known(Unknown("${oc.decode:…}", "variable", origin))
        return plain_setting(inner.text.strip("'\""), inner.word.origin)

    def _reference(self, name: str, path: str, origin: Origin, depth: int) -> Tree:
        if name.endswith("??"):
            return self._variable(name.removesuffix("??"), None, origin)
        target = _absolute(name, path)
        at = found(self.root, target)
        first, _, rest = target.partition(".")
        if at is None and first in self.prefixes:
            at, target = found(self.root, rest), rest
        if at is None:
            return not_known(Unknown(name, "variable", origin))
        resolved = self.resolved(at, target, depth + 1)
        return resolved if resolved is not None else not_known(Unknown(name, "variable", origin))

    def _calculated(self, name: str, rest: str, path: str, origin: Origin, depth: int) -> Setting:
        operands = [self.value(plain_setting(a.strip(), origin), path, depth + 1) for a in _arguments(rest)]
        numbers = []
        for operand in operands:
            if not isinstance(operand, Setting) or operand.word.unknown:
                unknown = operand.word.unknown if isinstance(operand, Setting) else ()
                return not_known(evolve(unknown[0], origin=origin) if unknown else Unknown(name, "variable", origin))
            try:
                numbers.append(float(operand.text))
            except ValueError:
                return not_known(Unknown(f"${{{name}:…}}", "variable", origin))
        if not numbers or (name.endswith(("div", "divide")) and 0 in numbers[1:]):
            return not_known(Unknown(f"${{{name}:…}}", "variable", origin))
        total = numbers[0]
        for number in numbers[1:]:
            total = _ARITHMETIC[name](total, number)
        return Setting(Word(str(int(total)) if total == int(total) else repr(total), origin), "number")


def _absolute(name: str, path: str) -> str:
    """Return the path that `.a` and `..a` mean, seen from a key."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    keys = path.split(".")
    return ".".join([*keys[: max(len(keys) - dots, 0)], name.lstrip(".")])


def _parts(text: str) -> list[str | tuple[str]] | None:
    """Return the plain parts of a text as strings, and the insides of its interpolations as tuples."""
    parts: list[str | tuple[str]] = []
    position = 0
    while position < len(text):
        start = text.find("${", position)
        if start < 0:
            parts.append(text[position:])
            break
        if start > position:
            parts.append(text[position:start])
        end = _closing(text, start + 2)
        if end < 0:
            return None
        parts.append((text[start + 2 : end],))
        position = end + 1
    return parts


def _closing(text: str, position: int) -> int:
    depth = 1
    for at in range(position, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def _arguments(text: str) -> list[str]:
    """Return the arguments between commas; commas inside of braces do not count."""
    arguments, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += letter
    return arguments
