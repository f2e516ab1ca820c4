"""Check the arguments of a model's function by its signature: names, and types by annotation or default."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megaloom.dsl.errors import UserError

TRUTHS = {"true": True, "false": False}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


class Word(str):
    """A value as text without a type, as `--set` has it; it is converted to the type of its parameter."""

    __slots__ = ()


Arguments = Mapping[str, object]
"""Values of parameters by name: words, or values that a file or a reference has typed."""


class _MismatchError(ValueError):
    """A value that is not of the type of its parameter. The text says what the parameter takes."""


def words_as_arguments(words: Sequence[str]) -> dict[str, object]:
    """Return the arguments of `--set NAME=VALUE …`; a later value replaces an earlier one. Raise UserError."""
    arguments: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        outer, dot, inner = name.strip().partition(".")
        if equals and dot and outer.isidentifier():
            raise UserError(
                f"--set {word} names a field inside {outer}, and --set takes fields of the outermost level\n"
                f"give the object with all its fields: --set \"{outer}={{'{inner}': {value.strip()}, …}}\""
            )
        if not equals or not name.strip().isidentifier():
            raise UserError(f"--set {word} has no NAME=VALUE\ngive --set layers=24")
        arguments[name.strip()] = Word(value.strip())
    return arguments


def as_words(arguments: Arguments) -> tuple[str, ...]:
    """Return arguments as `--set` takes them, NAME=VALUE."""
    return tuple(f"{name}={_word(value)}" for name, value in arguments.items())


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_word, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def checked_arguments(
    function: Callable[..., object], arguments: Arguments, where: str, *, have: Collection[str] = ()
) -> dict[str, Any]:
    """Return arguments of a function, converted to the types of its parameters, in the order of its signature.

    `where` names the function in errors. have: parameters that have values from elsewhere. Raise UserError for an
    unknown name, a wrong type or a missing argument.
    """
    parameters = {name: p for name, p in signature(function).parameters.items() if p.kind in _NAMED}
    if not any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values()):
        for name in arguments:
            if name not in parameters:
                raise UserError(_unknown(name, parameters, where))
    if missing := [n for n, p in parameters.items() if p.default is Parameter.empty and n not in (*arguments, *have)]:
        raise UserError(
            f"{where} needs {', '.join(missing)}: give each argument of this function a default, or a value with "
            f"--set {missing[0]}=…"
        )
    hints = _hints(function, where) if arguments else {}
    converted = {}
    for name in sorted(arguments, key=[*parameters, *arguments].index):
        hint = hints.get(name, _hint_of_default(parameters.get(name)))
        try:
            converted[name] = _converted(arguments[name], hint)
        except _MismatchError as wrong:
            given = arguments[name]
            shown = str(given) if isinstance(given, Word) else given
            raise UserError(f"{where}: {name} must be {wrong}, got {shown!r}\ncorrect --set {name}=…") from None
    return converted


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def converted_like(value: object, example: object, where: str) -> object:
    """Return a value as the type of another one, which it is to replace; for None, what it looks like.

    where: names both in errors. Raise UserError for a value of another type.
    """
    kind: Any = type(example) if type(example) in (bool, int, float, str, list) else Any
    try:
        made = _converted(value, kind)
    except _MismatchError as wrong:
        shown = str(value) if isinstance(value, Word) else value
        raise UserError(f"{where} must be {wrong}, got {shown!r}") from None
    if isinstance(example, dict) and not isinstance(made, dict):
        raise UserError(f"{where} must be an object such as {{'factor': 2.0}}, got {str(value)!r}")
    return made


def _unknown(name: str, parameters: Mapping[str, Parameter], where: str) -> str:
    near = get_close_matches(name, parameters, 1)
    suggestion = f": did you mean {near[0]}?" if near else ""
    takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none: write a function with parameters"
    return f"{where} has no parameter {name!r}{suggestion}\n{takes}"


def _hints(function: Callable[..., object], where: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise UserError(
            f"{where}: cannot read its annotations: {error}\nimport that name outside TYPE_CHECKING"
        ) from None


def _hint_of_default(parameter: Parameter | None) -> Any:
    """Return the type of a default that is a number, a text or a truth value; Any for others."""
    kind = type(parameter.default) if parameter else NoneType
    return kind if kind in (bool, int, float, str) else Any


def _converted(value: object, hint: Any) -> Any:
    """Return a value as the annotated type. Raise _MismatchError with what the type takes."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any:
        return _literal(value) if isinstance(value, Word) else value
    if origin in (Union, UnionType):
        return _first_that_fits(value, choices)
    if origin is Literal:
        found = [c for c in choices if value == c or (isinstance(value, Word) and str(c) == value)]
        if not found:
            raise _MismatchError(f"one of {', '.join(map(str, choices))}")
        return found[0]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(value, hint)
    if (origin or hint) in (tuple, list) or origin is Sequence:
        return _items(value, hint)
    if hint in KINDS:
        return _plain(value, hint)
    raise _MismatchError(f"a {getattr(hint, '__name__', hint)}, which has no form as text: set it in the model's file")


def _literal(value: str) -> object:
    """Return the number, truth value, list or text that a word looks like."""
    try:
        return TRUTHS[value] if value in TRUTHS else ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return str(value)


def _plain(value: Any, kind: type) -> object:
    """Return a word as a number, text, truth value or None; a typed value as it is, if its type is right."""
    if not isinstance(value, Word):
        if type(value) is kind:
            return value
        if (type(value), kind) == (int, float):
            return kind(value)
        raise _MismatchError(KINDS[kind])
    if kind in (bool, NoneType):
        table: dict[str, bool | None] = {"none": None} if kind is NoneType else {**TRUTHS}
        if value.lower() not in table:
            raise _MismatchError(KINDS[kind])
        return table[value.lower()]
    try:
        made = kind(value)
    except ValueError:
        raise _MismatchError(KINDS[kind]) from None
    if isinstance(made, float) and not math.isfinite(made):
        raise _MismatchError(KINDS[kind])
    return str(value) if kind is str else made


def _first_that_fits(value: object, hints: Sequence[Any]) -> Any:
    """Return a value as the first type of a union that takes it; text comes last, since it takes every word."""
    refused = []
    for hint in sorted(hints, key=lambda h: (h is str, h is not NoneType)):
        try:
            return _converted(value, hint)
        except _MismatchError as wrong:
            refused.append((hint, str(wrong)))
    raise _MismatchError(" or ".join(text for hint, text in refused if hint in KINDS) or refused[0][1])


def _member(value: object, kind: type[Enum]) -> Enum:
    for member in kind:
        if value == member.value or (isinstance(value, Word) and value in (member.name, str(member.value))):
            return member
    raise _MismatchError(f"one of {', '.join(str(member.value) for member in kind)}")


def _items(value: object, hint: Any) -> list[Any] | tuple[Any, ...]:
    """Return a list or tuple; a word has its items between commas."""
    items: Sequence[object] = [Word(part.strip()) for part in value.split(",")] if isinstance(value, Word) else []
    if isinstance(value, list | tuple) and not items:
        items = value
    elif not isinstance(value, Word):
        raise _MismatchError("a list")
    inner = [argument for argument in get_args(hint) if argument is not Ellipsis]
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        if len(inner) != len(items):
            raise _MismatchError(f"a list of {len(inner)}")
        return tuple(_converted(item, kind) for item, kind in zip(items, inner, strict=True))
    made = [_converted(item, inner[0] if inner else Any) for item in items]
    return made if (get_origin(hint) or hint) is list else tuple(made)
