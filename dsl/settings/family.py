"""Arguments for a model of a family: a function without parameters that calls one with parameters.

    def bert_large() -> Model:
        return bert("bert-large", 24, 16, 1024, 4096)

Arguments for `bert_large` are those of `bert`, and replace what `bert_large` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction, signature
from types import FunctionType
from typing import Any

from megaloom.dsl.graph import Model

from .arguments import Arguments, checked_arguments


def family_of(model: Callable[[], Model]) -> Callable[..., Model] | None:
    """Return the function `-> Model` that a function without parameters calls; None if there is none, or several."""
    if not isfunction(model) or signature(model).parameters:
        return None
    called = (model.__globals__.get(name) for name in model.__code__.co_names)
    found = [it for it in called if isfunction(it) and it.__annotations__.get("return") in (Model, "Model")]
    return found[0] if len(found) == 1 else None


def with_arguments_of_family(
    model: Callable[[], Model], family: Callable[..., Model], arguments: Arguments, where: str
) -> tuple[Callable[[], Model], dict[str, Any]]:
    """Return a function of the model with other arguments of its family, and these arguments, converted.

    where: the name of the model, for errors. Raise UserError for an unknown name or a wrong type.
    """
    given = checked_arguments(family, arguments, where, have=signature(family).parameters)

    def changed(*args: Any, **options: Any) -> Model:
        bound = signature(family).bind(*args, **options)
        bound.arguments.update(given)
        return family(*bound.args, **bound.kwargs)

    assert isinstance(model, FunctionType)
    names = {**model.__globals__, family.__name__: changed}
    return FunctionType(model.__code__, names, model.__name__), given
