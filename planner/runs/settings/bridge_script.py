"""Python scripts that build a ConfigContainer of Megatron-Bridge from literal values, as a tree of settings.

A script is parsed, never imported or run. A value that is no literal, list or name is kept as its text.
"""

from __future__ import annotations

import ast

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.python_text import parsed_python
from megaloom.planner.runs.settings.tree import Setting, Tree, ValueKind
from megaloom.planner.runs.words import Origin, Word

_CONTAINER = "ConfigContainer"
OF_NEWER_RELEASES = "megatron_fsdp_main_grads_dtype"
"""Field that an exported script sets where the installed release has it, to what older releases do anyway."""


def is_bridge_script(text: str) -> bool:
    """Return whether a Python text builds the sections of ConfigContainer in its call, and changes none later."""
    if f"{_CONTAINER}(" not in text or "model=" not in text:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # which is refused with its line
    changed = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr != OF_NEWER_RELEASES)
    sections = [one.value for node in nodes if _is_container(node) for one in node.keywords]  # type: ignore[attr-defined]
    return not any(isinstance(node.ctx, ast.Store) for node in changed) and not any(
        isinstance(section, ast.Name) for section in sections
    )


def _is_container(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] == _CONTAINER


def bridge_script_tree(text: str, path: str) -> Tree:
    """Return the sections of the script's one ConfigContainer. A line that is not Python is named, never shown."""
    module = parsed_python(text, path)
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _is_container(node) and node.keywords]
    if len(calls) != 1:
        raise UserError(f"{path} builds {len(calls)} configurations of Megatron-Bridge; one of literal values is read")
    return _tree(calls[0], path)


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _tree(node: ast.expr, path: str) -> Tree:
    if isinstance(node, ast.Call) and (unnamed := next((one for one in node.keywords if one.arg is None), None)):
        raise UserError(f"{Origin(path, unnamed.value.lineno)}: arguments of a dict are not read here")
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
