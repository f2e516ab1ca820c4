"""Commands that name a Python configuration: `--recipe` of Megatron-Bridge, `--module` and `--config` of torchtitan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.overrides import is_override
from megaloom.planner.runs.shell.folders import MOST_BYTES
from megaloom.planner.runs.words import Command, Word

from .read import recipe_run

RECIPES = "megatron/bridge/recipes"
REGISTRIES = "torchtitan/models/{}/config_registry.py"
RECIPE_FLAGS = ("--recipe", "--recipe-name", "--recipe_name")


def recipe_command(command: Command, script: str, environment: Mapping[str, str]) -> SettingsRun | None:
    """Return the run of a command that names a Python configuration; None for another one.

    Raise UserError if the file of the configuration is not there.
    """
    values = {name.text: value for name, value in pairwise(command.words) if not value.text.startswith("--")}
    module, config = values.get("--module"), values.get("--config")
    known = {name: word.text for name, word in command.environment.items() if not word.unknown} | dict(environment)
    if module and config and any(word.text.startswith("torchtitan") for word in command.words):
        at = [str(path) for path in _below(script, REGISTRIES.format(module.text.rpartition(".")[2]))]
        return _read(at, config, known, _after(command.words, config), "torchtitan")
    recipe = next((values[flag] for flag in RECIPE_FLAGS if flag in values), None)
    if recipe is None or not recipe.text.isidentifier():
        return None
    files = [str(path) for folder in _below(script, RECIPES) for path in _defining(folder, recipe.text)]
    run = _read(files, recipe, known, [word for word in command.words if is_override(word)], "Megatron-Bridge")
    beside = [word for word in command.words if word.text.startswith("--") and word.text not in RECIPE_FLAGS]
    if adapts := next((word for word in beside if word.text.startswith("--peft")), None):
        raise UserError(f"{adapts.origin}: adapters of Megatron-Bridge are not modelled")
    return evolve(run, left_out=(*run.left_out, *beside))


def _read(
    files: Sequence[str], name: Word, environment: Mapping[str, str], words: Sequence[Word], program: str
) -> SettingsRun:
    if not files:
        raise UserError(
            f"{name.origin}: the file of the configuration {printable(name.text)} of {program} is not there\n"
            f"run this beside a clone of {program}, or where it is installed"
        )
    text = Path(files[0]).read_bytes().decode(errors="replace")
    return recipe_run(text, files[0], environment, words, name.text)


def _after(words: Sequence[Word], last: Word) -> Sequence[Word]:
    return words[max(position for position, word in enumerate(words) if word is last) + 1 :]


def _below(script: str, name: str) -> Iterator[Path]:
    """Yield what stands at a relative path in the script's folder, one above it, the working folder, or installed."""
    here = Path.cwd()
    installed = (Path(one) for one in sys.path if one)
    for folder in dict.fromkeys((*Path(script).absolute().parents, here, *here.parents, *installed)):
        yield from (at for at in (folder / name, folder / "src" / name) if at.exists())


def _defining(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a folder that define a function."""
    for path in sorted(folder.rglob("*.py")):
        if path.stat().st_size <= MOST_BYTES and f"def {name}(" in path.read_bytes().decode(errors="replace"):
            yield path
    for path in sorted(folder.rglob("*.py")):
        if path.stat().st_size <= MOST_BYTES and f" as {name}," in path.read_bytes().decode(errors="replace"):
            yield path
