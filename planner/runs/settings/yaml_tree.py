"""YAML files as trees of settings. Only plain YAML is read: a tag that would build an object is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.yaml_file import pyyaml
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.settings.tree import Setting, Tree, ValueKind, leaves, overlaid
from megaloom.planner.runs.words import Origin, Word

_TAG = "tag:yaml.org,2002:"
_KINDS: dict[str, ValueKind] = {"bool": "boolean", "null": "null", "int": "number", "float": "number"}
_SCALARS = frozenset({*_KINDS, "str", "timestamp", "value", "merge"})
_DEEPEST = 60
_OTHER_BASE = re.compile(r"[-+]?(0[0-9_xXob].*|.*:.*)")


def yaml_tree(text: str, path: str) -> Tree | None:
    """Return the settings of a YAML text; None if it is empty. A line that is not YAML is named, never shown."""
    yaml = pyyaml(Path(path), "the command line")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{path}:{mark.line + 1 if mark else 1}: this line is not YAML") from None
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{path} is not YAML") from None
    if len(nodes) > 1:
        raise UserError(f"{path} has several YAML documents\ngive a file of one")
    return _tree(nodes[0], path, 0) if nodes and nodes[0] else None


def _tree(node: Any, path: str, depth: int) -> Tree:
    origin = Origin(path, node.start_mark.line + 1)
    if depth > _DEEPEST:
        raise UserError(f"{origin}: the settings are nested too deeply")
    tag = node.tag.removeprefix(_TAG)
    if node.id == "scalar":
        if tag not in _SCALARS:
            raise UserError(f"{origin}: a YAML tag that is not read")
        if tag in ("int", "float") and _OTHER_BASE.fullmatch(node.value):
            raise UserError(f"{origin}: YAML takes this number as one of base 2, 8, 16 or 60\nwrite it in base 10")
        return Setting(Word(node.value, origin), _KINDS.get(tag, "text"))
    if tag not in ("seq", "map"):
        raise UserError(f"{origin}: a YAML tag that is not read")
    if node.id == "sequence":
        return [_tree(item, path, depth + 1) for item in node.value]
    result: dict[str, Tree] = {}
    merged: Tree | None = None
    for key, value in node.value:
        if key.id != "scalar":
            raise UserError(f"{origin}: a key that is no text")
        if key.tag == f"{_TAG}merge":
            for one in value.value if value.id == "sequence" else [value]:
                merged = overlaid(_tree(one, path, depth + 1), merged)
        else:
            read = _tree(value, path, depth + 1)
            if key.value in result and _plain(result[key.value]) != _plain(read):
                at = Origin(path, key.start_mark.line + 1)
                raise UserError(f"{at}: the key {shortened(key.value, 40)} stands here again with another value")
            result[key.value] = read
    return overlaid(merged, result) or {}


def _plain(tree: Tree | None) -> object:
    """Return the keys and values of a tree without their lines."""
    return [
        (path, one.text if isinstance(one, Setting) else [_plain(item) for item in one]) for path, one in leaves(tree)
    ]
