"""The check of a call against the parameters of its function, as Python makes it before the function runs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.words import Origin

from .values import Function, Lacking, Value


def check_call(
    node: ast.FunctionDef, arguments: Sequence[Value], keywords: Mapping[str, Value], origin: Origin
) -> None:
    """Raise UserError for a call with an argument that the function does not take, at which Python stops.

    origin: the line of the function.
    """
    positional = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    by_name = {*positional, *(one.arg for one in node.args.kwonlyargs), "**"}
    strange = [] if node.args.kwarg else [name for name in keywords if name not in by_name]
    if strange:
        at = _origin(keywords[strange[0]]) or origin
        several = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        what = f"{node.name} takes no argument {strange[0]:.40}{several}, so Python stops here"
        raise UserError(f"{at}: {what}\nit is defined at {origin}; the file is for another release")
    if len(arguments) > len(positional) and node.args.vararg is None:
        at = _origin(arguments[len(positional)]) or origin
        what = f"{node.name} takes {len(positional)} arguments, and is called with {len(arguments)}"
        raise UserError(f"{at}: {what}, so Python stops here\nit is defined at {origin}")


def _origin(value: Value) -> Origin | None:
    """Return the line of a value, if it has one."""
    if isinstance(value, list):
        return next(filter(None, map(_origin, value)), None)
    if isinstance(value, Lacking):
        return value.unknown.origin
    return None if isinstance(value, Function) else value.origin
