"""Fields of dataclasses with the values that their files state, those of their bases included, without running them."""

from __future__ import annotations

import ast

from megaloom.planner.runs.words import Origin

from .evaluate import RecipeEvaluator
from .modules import PythonModule
from .values import Foreign, Known, Value

DEEPEST_CLASS = 10
DEFAULTS_KNOWN = "megatron.core"
"""Package of bases that are not read, since their defaults are those of Megatron-LM's flags."""


def class_fields(name: str, evaluator: RecipeEvaluator) -> tuple[dict[str, Value], list[str]] | None:
    """Return the fields of a class and the names of its bases and itself, bases first; None if its file is not there.

    name: the class with its module. A field whose value is made by a call is left out.
    """
    source, _, own = name.rpartition(".")
    module = evaluator.files.module(source) if source else None
    if module is not None and own in module.imports and own not in module.classes:
        return class_fields(".".join(module.imports[own]), evaluator)
    if module is None or own not in module.classes:
        return None
    return _fields(module, own, evaluator, 0)


def overrides_method(name: str, method: str, evaluator: RecipeEvaluator) -> bool:
    """Return whether the file of a class gives it a method of this name itself."""
    source, _, own = name.rpartition(".")
    module = evaluator.files.module(source) if source else None
    node = module.classes.get(own) if module is not None else None
    return node is not None and any(isinstance(one, ast.FunctionDef) and one.name == method for one in node.body)


def _fields(
    module: PythonModule, own: str, evaluator: RecipeEvaluator, depth: int
) -> tuple[dict[str, Value], list[str]]:
    node, out, names = module.classes[own], dict[str, Value](), list[str]()
    for base in node.bases if depth < DEEPEST_CLASS else ():
        at = _base(base, module, evaluator)
        if at is not None:
            fields, above = _fields(*at, evaluator, depth + 1)
            out, names = {**out, **fields}, [*names, *above]
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            value = evaluator.value(one.value, {}, module)
            if isinstance(value, Known | Foreign | list):
                out[one.target.id] = value
    return out, [*names, f"{module.name}.{own}"]


def _base(node: ast.expr, module: PythonModule, evaluator: RecipeEvaluator) -> tuple[PythonModule, str] | None:
    """Return the module and the name of a base class; None if its file is not there."""
    name = ast.unparse(node)
    if name in module.classes:
        return module, name
    value = evaluator.named(name, module, Origin(module.path, node.lineno)) if name.isidentifier() else None
    if not isinstance(value, Foreign):
        return None
    source, _, own = value.name.rpartition(".")
    other = evaluator.files.module(source) if source and not source.startswith(DEFAULTS_KNOWN) else None
    return (other, own) if other is not None and own in other.classes else None
