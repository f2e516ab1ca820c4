"""The types of the fields of layers and ops, checked in one place, by their annotations.

A number is finite, and a flag is True or False. A default always passes. Fields with other annotations, such as tuples,
functions and choices, are the layer's own to check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from attrs import fields, has

from .errors import ShapeError, safe_repr

Fits = Callable[[Any], bool]
WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", NoneType: "None"}


def check_fields(it: object) -> None:
    """Raise ShapeError for a field of an attrs value whose value does not fit its annotation."""
    for name, default, fits, words in _checks(type(it)):  # type: ignore[arg-type] # classes are hashable
        value = getattr(it, name)
        if value is not default and not fits(value):
            raise ShapeError(f"{type(it).__name__}: {name} must be {words}, got {safe_repr(value)}")


@cache
def _checks(kind: type) -> tuple[tuple[str, object, Fits, str], ...]:
    """Return (name, default, check, words) of each field whose annotation is understood."""
    found = []
    for f in fields(kind) if has(kind) else ():
        if f.init and (checked := _understood(_evaluated(kind, f.type))) is not None:
            found.append((f.name, f.default, *checked))
    return tuple(found)


def _evaluated(kind: type, annotation: Any) -> Any:
    """Return the type that an annotation names; None for one that cannot be found, as of an import for types only."""
    if not isinstance(annotation, str):
        return annotation
    for owner in kind.__mro__:
        if annotation in map(str, vars(owner).get("__annotations__", {}).values()):
            try:
                return eval(annotation, vars(sys.modules.get(owner.__module__)) | {"Union": Union})
            except Exception:
                continue
    return None


def _understood(annotation: Any) -> tuple[Fits, str] | None:
    """Return a check and its words; None for an annotation that is not understood."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_understood(part) for part in get_args(annotation)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return (lambda value: any(fits(value) for fits, _ in known)), " or ".join(words for _, words in known)
    if annotation in (None, NoneType):
        return (lambda value: value is None), WORDS[NoneType]
    if annotation is bool:
        return (lambda value: isinstance(value, bool)), WORDS[bool]
    if annotation is int:
        return (lambda value: isinstance(value, Integral) and not isinstance(value, bool)), WORDS[int]
    if annotation is float:
        return _is_finite, WORDS[float]
    if annotation is str:
        return (lambda value: isinstance(value, str)), WORDS[str]
    return None


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
