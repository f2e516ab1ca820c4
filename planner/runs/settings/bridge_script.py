"""Python scripts that build a ConfigContainer of Megatron-Bridge from literal values, as a tree of settings.

A script is parsed, never imported or run. A value that is no literal, list or name is kept as its text.
"""

from __future__ import annotations

import ast

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.tree import Setting, Tree, ValueKind
from megaloom.planner.runs.words import Origin, Word

_CONTAINER = "ConfigContainer"


def is_bridge_script(text: str) -> bool:
    """Return whether a Python text calls ConfigContainer with sections that it builds itself."""
    return f"{_CONTAINER}(" in text and "model=" in text


def bridge_script_tree(text: str, path: str) -> Tree:
    """Return the sections of the script's one ConfigContainer. A line that is not Python is named, never shown."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(f"{path}:{line}: this line is not Python") from None
    calls = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] == _CONTAINER and node.keywords
    ]
    if len(calls) != 1:
        raise UserError(f"{path} builds {len(calls)} configurations of Megatron-Bridge; one of literal values is read")
    return _tree(calls[0], path)


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _tree(node: ast.expr, path: str) -> Tree:
    if isinstance(node, ast.Call) and not node.args:
        return {one.arg: _tree(one.value, path) for one in node.keywords if one.arg is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_tree(item, path) for item in node.elts]
    return _setting(node, Origin(path, node.lineno))


def _setting(node: ast.expr, origin: Origin) -> Setting:
    value = node.value if isinstance(node, ast.Constant) else None
    kind: ValueKind = "text"
    if isinstance(value, bool):
        return Setting(Word(str(value).lower(), origin), "boolean")
    if isinstance(node, ast.Constant):
        kind = "null" if value is None else "number" if isinstance(value, int | float) else "text"
    text = str(value) if isinstance(node, ast.Constant) else ast.unparse(node)
    return Setting(Word(text, origin), kind)
