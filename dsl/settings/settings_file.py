"""Settings files, TOML or YAML: a table of the model's arguments, and one for each command's options.

[model]            # arguments of the model's function, as --set gives them
layers = 24

[train]            # options of `megaloom train`, by their names on the command line
lr = 1e-3
steps = 2000
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.yaml_file import YAML, pyyaml

from .arguments import Word

MODEL_TABLE = "model"
TABLES = (MODEL_TABLE, "plan", "train", "show")
_EXAMPLE = "a settings file looks like\n  [model]\n  layers = 24\n  [train]\n  lr = 1e-3"

Settings = dict[str, dict[str, Any]]
"""Values by table and name."""


def read_settings(path: str | Path) -> Settings:
    """Return the tables of a settings file. Raise UserError if it cannot be read or has other tables."""
    path = Path(path)
    raw = _parsed(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path} has no tables\n{_EXAMPLE}")
    raw = {name: {} if table is None else table for name, table in raw.items()}
    for name, table in raw.items():
        if not isinstance(table, dict) and name not in TABLES:
            raise UserError(f"{path}: {name} stands outside of a table\nput it below [{MODEL_TABLE}] or [train]")
        if name not in TABLES:
            near = get_close_matches(str(name), TABLES, 1)
            suggestion = f": did you mean [{near[0]}]?" if near else ""
            raise UserError(f"{path} has an unknown table [{name}]{suggestion}\nthe tables are {', '.join(TABLES)}")
        if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
            raise UserError(f"{path}: {name} must be a table of names and values\n{_EXAMPLE}")
    return raw


def _parsed(path: Path) -> object:
    yaml = pyyaml(path, "TOML") if path.suffix in YAML else None
    if yaml is None and path.suffix != ".toml":
        raise UserError(f"{path} is not a settings file: its name must end in .toml, .yaml or .yml\n{_EXAMPLE}")
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if yaml is None else _untyped(yaml.safe_load(text))
    except OSError as error:
        raise UserError(f"cannot read the settings in {path}: {error.strerror}\ngive an existing file") from None
    except (ValueError, RecursionError) as error:  # bad UTF-8 is one
        raise UserError(f"{path} is not TOML: {error}\n{_EXAMPLE}") from None
    except Exception as error:  # yaml's own class, which is not imported above
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}\ncorrect it, or write TOML") from None


def _untyped(value: Any) -> Any:
    """Return YAML with its texts as words: it reads 1e-3 as a text, which a parameter may take as a number."""
    if isinstance(value, dict):
        return {key: _untyped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untyped(item) for item in value]
    return Word(value) if isinstance(value, str) else value
