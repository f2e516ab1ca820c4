"""The classes of megaloom.dsl by name: those that a model file may name."""

from __future__ import annotations

from enum import Enum
from functools import cache
from importlib import import_module
from sys import modules

from attrs import has

from megaloom.dsl.op import Op

from .json_form import BUILT_IN


@cache
def built_in_kinds() -> dict[str, type]:
    """Return the ops, layers and values of megaloom.dsl by class name."""
    found = [kind for kind in vars(import_module("megaloom.dsl")).values() if isinstance(kind, type)]
    todo: list[type] = [Op]
    while todo:
        subclasses: list[type] = todo.pop().__subclasses__()
        todo, found = todo + subclasses, found + subclasses
    known = {kind.__name__: kind for kind in found if kind.__module__.startswith(BUILT_IN) and _is_current(kind)}
    return {name: kind for name, kind in known.items() if has(kind) or issubclass(kind, Enum)}


def is_built_in(it: object) -> bool:
    """Return whether the class of a value is one of megaloom.dsl."""
    return type(it).__module__.startswith(BUILT_IN) and type(it).__name__ in built_in_kinds()


def _is_current(kind: type) -> bool:
    """Return False for a class that attrs has replaced by one with slots."""
    return getattr(modules.get(kind.__module__), kind.__name__, None) is kind
