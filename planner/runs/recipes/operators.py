"""Operators of Python on values of a static evaluation: numbers, texts, lists and comparisons, each with a limit."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from megaloom.planner.runs.words import Origin

from .values import Instance, Known, Lacking, Value

MOST_NUMBER, MOST_TEXT, MOST_ITEMS = 2**63, 100_000, 10_000
PYTHON_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
SIZES = (int, float, bool)
"""Types of constants that are computed with; others are compared only."""


def operated(kind: ast.AST, left: Value, right: Value, origin: Origin) -> Value | None:
    """Return what an operator gives of two values; the unknown one of them, or None for what is not computed.

    origin: the line of a result that no constant states.
    """
    if isinstance(kind, ast.Is | ast.IsNot) and isinstance(left, Instance) and isinstance(right, Known):
        return Known(isinstance(kind, ast.IsNot), origin)
    if isinstance(left, list) and (joined := _lists(kind, left, right)) is not None:
        return joined
    one = [item.value for item in left if isinstance(item, Known)] if isinstance(left, list) else None
    other = [item.value for item in right if isinstance(item, Known)] if isinstance(right, list) else None
    a = left.value if isinstance(left, Known) else one
    b = right.value if isinstance(right, Known) else other
    if type(kind) not in PYTHON_OPERATORS or not isinstance(left, Known | list) or not isinstance(right, Known | list):
        return next((value for value in (left, right) if isinstance(value, Lacking)), None)
    value = _result(kind, a, b)
    return None if value is None else Known(value, left.origin if isinstance(left, Known) else origin)


def _result(kind: ast.AST, a: object, b: object) -> object | None:
    """Return the result of an operator on constants; None for types that it is not computed on, and for large ones."""
    numbers = isinstance(a, SIZES) and isinstance(b, SIZES)
    texts = isinstance(kind, ast.Add) and isinstance(a, str) and isinstance(b, str)
    if isinstance(kind, ast.operator) and not (numbers or texts):
        return None
    try:
        value = PYTHON_OPERATORS[type(kind)](a, b)
    except (TypeError, ArithmeticError, ValueError):
        return None
    large = (isinstance(value, int) and abs(value) > MOST_NUMBER) or (isinstance(value, str) and len(value) > MOST_TEXT)
    return None if large else value


def _lists(kind: ast.AST, left: list[Value], right: Value) -> list[Value] | None:
    """Return two lists as one, or a list several times; None for another operation."""
    if isinstance(kind, ast.Add) and isinstance(right, list):
        return [*left, *right]
    count = right.value if isinstance(kind, ast.Mult) and isinstance(right, Known) else None
    return left * count if isinstance(count, int) and 0 <= count * len(left) <= MOST_ITEMS else None
