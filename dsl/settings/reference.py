"""References to a model with arguments of its function, written as Python writes a call: `llama.py:llama(layers=24)`.

A plan names its model by such a reference, so that every process and every later command makes the same model.
"""

from __future__ import annotations

import ast
import hashlib
from enum import Enum
from typing import Any

from megaloom.dsl.errors import UserError

from .arguments import Arguments, Word, as_words

LONGEST_LABEL = 60  # characters of the arguments in the name of a folder


def split_reference(ref: str) -> tuple[str, dict[str, Any]]:
    """Return a reference without its arguments, and the arguments."""
    start = ref.find("(") if ref.endswith(")") else -1
    while start > 0:
        call = _call(ref[start:])
        if call is not None:
            return ref[:start], call
        start = ref.find("(", start + 1)
    return ref, {}


def _call(text: str) -> dict[str, Any] | None:
    """Return the arguments in `(layers=24, …)`, or None if the text is not of this form."""
    try:
        call = ast.parse(f"model{text}", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            return None if None in arguments else {str(name): value for name, value in arguments.items()}
    except (SyntaxError, ValueError):
        pass
    return None


def with_arguments(ref: str, arguments: Arguments) -> str:
    """Return a reference with these arguments. Raise UserError for a value that a reference cannot hold."""
    if not arguments:
        return ref
    whole = f"{ref}({', '.join(f'{name}={_plain(value)!r}' for name, value in arguments.items())})"
    if split_reference(whole)[0] != ref:
        raise UserError(f"{whole} cannot be written as a reference\ngive numbers, texts, lists, true, false or none")
    return whole


def _plain(value: object) -> object:
    """Return a value as Python's literals have it: an enum as its value."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return str(value) if isinstance(value, str) else value


def label(arguments: Arguments) -> str:
    """Return arguments as a part of a folder's name: `-layers-24`. A long one is shortened to a hash."""
    text = "".join(f"-{word}" for word in as_words(arguments))
    plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in text)
    return plain if len(plain) <= LONGEST_LABEL else f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def check_same(ref: str, arguments: Arguments, where: str) -> None:
    """Raise UserError unless the arguments are among those in a reference. `where` names the file that has it."""
    has = split_reference(ref)[1]
    for name, value in arguments.items():
        if name not in has or not _equal(value, has[name]):
            raise UserError(
                f"{where} is a plan of {ref}, which --set {name}={value} would change\n"
                "omit the setting, or plan the model again with it"
            )


def _equal(value: object, recorded: Any) -> bool:
    if not isinstance(value, Word):
        return bool(_plain(value) == recorded or (isinstance(value, list) and tuple(value) == recorded))
    if isinstance(recorded, list | tuple):
        parts = value.split(",")
        return len(parts) == len(recorded) and all(
            _equal(Word(p.strip()), r) for p, r in zip(parts, recorded, strict=True)
        )
    if isinstance(recorded, bool) or recorded is None:
        return value.lower() == str(recorded).lower()
    try:
        return bool(type(recorded)(value) == recorded)
    except ValueError:
        return False
