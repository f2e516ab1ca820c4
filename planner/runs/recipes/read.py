"""Reading of a Python file: the function that builds the configuration, and the program that it is for."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.overrides import check_overrides, override_tree
from megaloom.planner.runs.words import Origin, Word

from .bridge_recipe import bridge_recipe_run
from .evaluate import RecipeEvaluator, Scope
from .modules import ModuleFiles, PythonModule, parsed_module
from .nemo2 import LLM, follows_nemo, nemo2_run, nemo_module
from .release import bridge_release
from .titan import titan_run
from .values import Function, Instance, Known, Value

STARTING = frozenset({"pretrain", "finetune", "train", "run", "add"})
"""Functions that a script gives its configuration."""
NOT_FOLLOWED = ("mixed_precision", "torch", "transformers", "environment_utils")
SHOWN_RECIPES = 40


def recipe_run(
    text: str, path: str, environment: Mapping[str, str], overrides: Sequence[Word] = (), name: str | None = None
) -> SettingsRun:
    """Return the run of a Python file. overrides: words of the command line that count more than the file.

    name: the function that builds the configuration, where there are several.

    Raise UserError for a file that is of no known program, and for several functions without a name.
    """
    files = ModuleFiles(Path(path), nemo_module)
    module = parsed_module(text, path, files.name_of(Path(path)))
    program = _program(module)
    if program is None:
        raise UserError(
            f"{path} is a Python file which is not read: no recipe of Megatron-Bridge or NeMo 2, no configuration of "
            "torchtitan\n"
            "give a log of Megatron-LM, or the script or command line that starts it"
        )
    follows = FOLLOWS.get(program) or partial(_follows_recipes, Path(path).parent)
    evaluator = RecipeEvaluator(files, follows, environment)
    try:
        config = _configuration(module, name, evaluator, path)
    except RecursionError:
        raise UserError(f"{path}: the file is nested too deeply to be evaluated") from None
    if program == "torchtitan":
        return titan_run(config, path, overrides)
    check_overrides(overrides)
    if program == LLM:
        return nemo2_run(config, path, evaluator, override_tree(overrides), environment)
    run = bridge_recipe_run(config, path, override_tree(overrides), environment)
    return evolve(run, version=bridge_release(files))


def _program(module: PythonModule) -> str | None:
    """Return the program that a file configures, by what it imports."""
    sources = [source for node in ast.walk(module.tree) for source in _sources(node, module)]
    for mark in ("torchtitan", "megatron.bridge", LLM):
        if any(source == mark or source.startswith(f"{mark}.") for source in sources):
            return mark
    return None


def _sources(node: ast.AST, module: PythonModule) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
        return []
    return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]


def _follows_registries(source: str) -> bool:
    return source.endswith(("config_registry", ".configs"))


FOLLOWS = {"torchtitan": _follows_registries, LLM: follows_nemo}
"""Functions that say whether a module's file is read, by the program."""


def _follows_recipes(folder: Path, source: str) -> bool:
    """Return whether a module is one of recipes, or beside the script."""
    parts = source.split(".")
    if any(part in NOT_FOLLOWED for part in parts):
        return False
    return (
        bool({"recipes", "perf_recipes"} & {*parts})
        or (folder / parts[0]).is_dir()
        or (folder / f"{parts[0]}.py").is_file()
    )


def _configuration(module: PythonModule, name: str | None, evaluator: RecipeEvaluator, path: str) -> Value:
    """Return the configuration that the named function returns, or the only one, or that a script starts."""
    recipes = [one for one, node in module.functions.items() if _is_recipe(one, node)]
    aliases = [one for one, (source, _) in module.imports.items() if one.endswith("_config") and "recipes" in source]
    known = [*recipes, *aliases]
    if name is not None:
        if name not in (*module.functions, *module.imports):
            raise UserError(f"{printable(path)} has no function {printable(name)}\n{_listed(known)}")
        return _called(name, module, evaluator)
    if _starts(module):
        return _started(module, evaluator, path)
    if len(recipes) == 1:
        return _called(recipes[0], module, evaluator)
    if not known:
        raise UserError(f"{printable(path)} has no function that returns a configuration, and starts none")
    what = f"{printable(path)} has {len(known)} configurations\ngive the one to read: --command NAME"
    raise UserError(f"{what}\n{_listed(known)}")


def _listed(names: list[str]) -> str:
    more = f"\n  … and {len(names) - SHOWN_RECIPES} more" if len(names) > SHOWN_RECIPES else ""
    return "\n".join(f"  {name}" for name in names[:SHOWN_RECIPES]) + more


def _is_recipe(name: str, node: ast.FunctionDef) -> bool:
    needed = len(node.args.args) - len(node.args.defaults) + sum(one is None for one in node.args.kw_defaults)
    returned = ast.unparse(node.returns) if node.returns else ""
    builds = returned.endswith(("Config", "ConfigContainer")) or returned in ("run.Partial", "Partial")
    return not name.startswith("_") and needed <= 0 and builds


def _called(name: str, module: PythonModule, evaluator: RecipeEvaluator) -> Value:
    function = evaluator.named(name, module, Origin(module.path, 1))
    if not isinstance(function, Function):
        source = ".".join(filter(None, module.imports.get(name, ("", name))))
        raise UserError(f"{module.path}: the file of {source} is not there\nread it where its package is installed")
    return evaluator.call(function, (), {})


def _starts(module: PythonModule) -> bool:
    """Return whether a file calls a function that starts a training."""
    calls = [node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return bool({ast.unparse(one).rpartition(".")[2] for one in calls} & STARTING)


def _started(module: PythonModule, evaluator: RecipeEvaluator, path: str) -> Value:
    """Return the configuration that a script gives to a function that starts a training."""
    scope: Scope = {"__name__": Known("__main__", Origin(path, 1))}
    evaluator.body(module.tree.body, scope, module)
    for call in evaluator.calls:
        if call.last in STARTING:
            if {"model", "trainer"} <= call.fields.keys():
                return call
            for value in (*call.arguments, *call.fields.values()):
                if isinstance(value, Instance) and "model" in value.fields:
                    return value
    unknown = next((call.name for call in evaluator.calls if call.last.endswith(("_config", "_recipe"))), None)
    hint = f"\nthe file of {unknown} is not there: read it where its package is installed" if unknown else ""
    raise UserError(f"{printable(path)} starts no training with a configuration that is known{hint}")
