"""Strict conversion of JSON to values of attrs classes: every field present, none unknown, each of its exact type.

`structured(raw, kind)` returns the value. A StructureError names the path of the first wrong field.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin

from attrs import fields, has
from cattrs import (
    AttributeValidationNote,
    ClassValidationError,
    Converter,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from megaloom.dsl.low_rank import LoRA

from .calibration import Calibration
from .layout import FIELDS, LEFT_OUT_OF_PLANS, Layout

T = TypeVar("T")
DUE = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class StructureError(ValueError):
    """Wrong JSON: the path of a field, and what is wrong with it."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path or 'the plan'}{'' if what.startswith(':') else ' '}{what}")
        self.path, self.what = path, what


def structured(raw: Any, kind: type[T]) -> T:
    """Return the value of a class that parsed JSON describes. Raises StructureError."""
    try:
        return _converter().structure(raw, kind)
    except (ClassValidationError, ValueError) as error:
        raise StructureError(*_first(error, "")) from None


def _first(error: BaseException, path: str) -> tuple[str, str]:
    """Return the path of the first field that cattrs refuses, and what is wrong with it."""
    if isinstance(error, ClassValidationError):
        noted, others = error.group_exceptions()
        return _first(noted[0][0], f"{path}.{noted[0][1].name}".lstrip(".")) if noted else _first(others[0], path)
    if isinstance(error, IterableValidationError):
        inner, note = error.group_exceptions()[0][0]
        return _first(inner, f"{path}[{note.index!r}]")
    return path, str(error) if str(error).startswith(("must", "has")) else f": {error}"


@cache
def _converter() -> Converter:
    """Return the converter of `structured`, with a hook for each type that a plan has."""
    converter = Converter()
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, partial(_exactly, accepted))
    converter.register_structure_hook_factory(partial(_made_of, tuple), partial(_items, converter, list))
    converter.register_structure_hook_factory(partial(_made_of, dict), partial(_items, converter, dict))
    converter.register_structure_hook_factory(has, partial(_fields, converter))
    converter.register_structure_hook(Layout, lambda value, _: _layout(value))
    number = converter.get_structure_hook(float)
    converter.register_structure_hook(float | None, lambda value, _: None if value is None else number(value, float))
    for part in (LoRA, Calibration):
        structure = converter.get_structure_hook(part)
        converter.register_structure_hook(part | None, partial(_unless_null, structure, part))
    return converter


def _unless_null(structure: Callable[[Any, Any], Any], kind: type, value: Any, _: Any) -> Any:
    return None if value is None else structure(value, kind)


def _made_of(container: type, kind: Any) -> bool:
    return get_origin(kind) is container


def _exactly(accepted: tuple[type, ...], value: Any, kind: type) -> Any:
    if issubclass(kind, StrEnum) and value not in list(kind):
        raise ValueError(f"must be one of {', '.join(kind)}; got {value!r:.40}")
    if type(value) not in accepted:
        raise ValueError(f"must be {DUE[kind]}, got {value!r:.40}")
    return kind(value)


def _fields(converter: Converter, kind: type) -> Callable[[Any, Any], Any]:
    structure: Callable[[Any, Any], Any] = make_dict_structure_fn(kind, converter)
    due = {attribute.name for attribute in fields(kind)}

    def checked(value: Any, _: Any) -> Any:
        _all_fields(kind, value, due)
        return structure(value, kind)

    return checked


def _all_fields(kind: type, value: Any, due: AbstractSet[str]) -> None:
    if type(value) is not dict:
        raise ValueError(f"must be an object with the fields of a {kind.__name__}, got {value!r:.40}")
    if due != value.keys():  # a plan says everything: what is left out is lost, not at its default
        missing, unknown = due - value.keys(), value.keys() - due
        raise ValueError(f"has {'no' if missing else 'an unknown'} field {min(missing or unknown)!r}")


def _length(kind: Any) -> int | None:
    """Return the length of a tuple of fixed length, such as `tuple[float, float]`; None for other types."""
    return None if get_origin(kind) is not tuple or Ellipsis in get_args(kind) else len(get_args(kind))


def _layout(value: Any) -> Layout:
    """Return the layout that these JSON fields describe: all but those that a plan may leave out, and no others."""
    absent = LEFT_OUT_OF_PLANS.keys() - value.keys() if type(value) is dict else set()
    _all_fields(Layout, value, FIELDS.keys() - absent)
    made = {}
    for name, spec in FIELDS.items():
        try:
            made[name] = LEFT_OUT_OF_PLANS[name] if name in absent else spec.parse(value[name])
        except ValueError as error:
            error.__notes__ = [AttributeValidationNote("", name, spec.kind)]
            raise ClassValidationError("", [error], Layout) from None
    return Layout(**made)


def _items(converter: Converter, container: Any, kind: Any) -> Callable[[Any, Any], Any]:
    """Return a hook that makes a tuple of a list, or a dict of a dict, and adds the index or key to an error."""
    item = get_args(kind)[0 if container is list else 1]

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not container:
            raise ValueError(f"must be {'a list' if container is list else 'an object'}, got {value!r:.40}")
        if (due := _length(kind)) is not None and len(value) != due:
            raise ValueError(f"must be a list of {due}, got {len(value)} entries")
        made = {}
        for index, one in value.items() if container is dict else enumerate(value):
            try:
                made[index] = converter.structure(one, item)
            except Exception as error:
                error.__notes__ = [*getattr(error, "__notes__", ()), IterableValidationNote("", index, item)]
                raise IterableValidationError("", [error], kind) from None
        return made if container is dict else tuple(made.values())

    return structure
