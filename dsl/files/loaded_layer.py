"""A layer that is not built in, as a model file gives it back: its name, its shard policies and its body, no code."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, NoReturn

from attrs import field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.layer import Layer
from megaloom.dsl.sharding_table import Sharded
from megaloom.dsl.value import Value


@frozen
class LoadedLayer(Layer):
    """A layer that was not built in, read from a file. Its body has been applied; its code is unknown."""

    shown: str
    number: int = field(repr=False)  # of the layer in its file: equal layers have one number
    held: tuple[Value, ...] = field(default=(), repr=False)  # weights and other values in its fields

    def __str__(self) -> str:
        return self.shown


class _WithModule(LoadedLayer):
    """A layer that was declared with a torch module of its own."""

    named_in_errors: ClassVar[bool] = True

    def module(self, context: object) -> NoReturn:
        """Raise UserError: the file has no torch module."""
        raise UserError(
            f"{self} was declared with a torch module of its own ({self.at}), which model.json does not hold\n"
            "give the model's source instead of the run folder: megaloom train file.py:name --out FOLDER"
        )


@cache
def loaded_kind(
    name: str, splits: tuple[tuple[str, str | Sharded], ...], transparent: bool, module: bool
) -> type[LoadedLayer]:
    """Return the class of loaded layers with this name and these shard policies."""
    body: dict[str, Any] = {"splits": dict(splits), "transparent": transparent, "__module__": "loaded"}
    return type(name, (_WithModule if module else LoadedLayer,), body)
