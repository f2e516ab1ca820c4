"""Values of a static evaluation of Python: constants, objects of classes that are not known, and what is not known."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from megaloom.planner.runs.settings.tree import Setting, Tree, ValueKind, not_known
from megaloom.planner.runs.words import Origin, Unknown, Word


@frozen
class Known:
    """A constant, or a text that was computed from constants, with the line that states it."""

    value: object
    origin: Origin


@frozen
class Lacking:
    """A value that cannot be known from the files."""

    unknown: Unknown


@frozen
class Foreign:
    """A name of a module that is not followed: `torch.bfloat16`, `TrainingConfig`."""

    name: str
    origin: Origin

    @property
    def last(self) -> str:
        """The name without its modules."""
        return self.name.rpartition(".")[2]


@define(eq=False)
class Instance:
    """The object that a call of an unknown name returns: its arguments are its fields, which statements change.

    base: the object of which a method was called.
    """

    name: str
    origin: Origin
    fields: dict[str, Value] = field(factory=dict)
    arguments: list[Value] = field(factory=list)
    base: Instance | None = None

    @property
    def last(self) -> str:
        """The name without its modules."""
        return self.name.rpartition(".")[2]


@frozen(eq=False)
class Function:
    """A function that a file defines, with the module whose names it sees."""

    node: ast.FunctionDef
    module: object


Value = Known | Lacking | Foreign | Instance | Function | list["Value"]


def item_key(value: Value) -> str:
    """Return the text that stands for a key of a dict: of a constant, or of a tuple of constants."""
    if isinstance(value, list):
        return f"({','.join(map(item_key, value))})"
    return str(value.value) if isinstance(value, Known) else ""


def truth(value: Value) -> bool | None:
    """Return whether a value counts as true; None if that is not known."""
    if isinstance(value, Known):
        return bool(value.value)
    if isinstance(value, list):
        return bool(value)
    return None if isinstance(value, Lacking | Foreign) else True


def as_tree(value: Value | None, seen: Sequence[Instance] = ()) -> Tree | None:
    """Return a value as a tree of settings: an object as its fields; `seen` are the objects around it."""
    if isinstance(value, Instance):
        if any(value is one for one in seen) or len(seen) > 20:
            return None
        fields = {name: as_tree(one, (*seen, value)) for name, one in value.fields.items()}
        return {name: one for name, one in fields.items() if one is not None}
    if isinstance(value, list):
        return [tree for one in value if (tree := as_tree(one, seen)) is not None]
    if isinstance(value, Foreign):
        return Setting(Word(value.last, value.origin))
    if isinstance(value, Lacking):
        return not_known(value.unknown)
    return _setting(value) if isinstance(value, Known) else None


def _setting(known: Known) -> Tree | None:
    value, kind = known.value, "text"
    if isinstance(value, Mapping):
        return {
            str(key): tree for key, one in value.items() if (tree := _setting(Known(one, known.origin))) is not None
        }
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # 10_000.0, where Megatron-LM's flag takes a whole number
    named: dict[type[object], ValueKind] = {bool: "boolean", int: "number", float: "number", type(None): "null"}
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Setting(Word(text, known.origin), named.get(type(value), kind))  # type: ignore[arg-type]
