"""YAML files: the endings of their names, and PyYAML, which reads them and need not be installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError

YAML = (".yaml", ".yml")


def pyyaml(path: Path, instead: str) -> Any:
    """Return the module `yaml`. Raise UserError if it is not installed. path: the file; instead: a format without."""
    if find_spec("yaml") is None:
        raise UserError(f"{path} is YAML, which needs PyYAML\ninstall it with: pip install pyyaml; or write {instead}")
    return import_module("yaml")
