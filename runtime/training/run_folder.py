"""Model, plan and options in a run folder: enough to load the run where its source file is missing.

    run/model.json  the model    run/plan.json  the plan    run/run.json  recipe, data and other options

`load_run` reads them and runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import evolve, fields, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.files.model_file import load_model, save_model
from megaloom.dsl.graph import Graph, Model, graph
from megaloom.planner.contract.plan_json import load as load_plan
from megaloom.planner.contract.plan_json import save as save_plan
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_plan
from megaloom.runtime.optimizer.recipe import Recipe, Schedule

RUN_VERSION = 1
"""Version of run.json."""
MODEL_FILE, PLAN_NAME, OPTIONS_NAME = "model.json", "plan.json", "run.json"
TOKENIZER_NAME = "tokenizer"
"""Folder of the tokenizer of the run's data. Bytes have none."""
TOKENIZER_OPTION, UNKNOWN_TOKENIZER = "tokenizer", "unknown"
"""Field of run.json for data whose tokenizer nobody has named: datasets that Megatron-LM has written."""
RECIPE_FIELDS = frozenset(f.name for f in fields(Recipe))
FOREIGN = (
    ("latest_checkpointed_iteration.txt", "a checkpoint of Megatron-LM", ""),
    ("model*.safetensors", "a Hugging Face folder", "start from its weights with --from, and "),
)
"""Files of folders that other programs write: their pattern, their owner, and advice."""

Options = Mapping[str, Any]
"""Options of `megaloom train` by name, without those that the plan decides."""
NO_OPTIONS: Options = MappingProxyType({})


@frozen
class LoadedRun:
    """A run as its folder describes it. The plan's model is model.json in the folder."""

    folder: Path
    model: Model
    plan: Plan
    recipe: Recipe
    options: Options  # of data and checkpoints

    @property
    def graph(self) -> Graph:
        """Return the graph of the model."""
        return graph(self.model)


def save_run(folder: Path, plan: Plan, model: Model, recipe: Recipe, options: Options = NO_OPTIONS) -> None:
    """Write model, plan and options into a run folder, for commands that use a run. One process calls it.

    A model that has no JSON form is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if Path(plan.model).resolve() != (folder / MODEL_FILE).resolve():
            unfinished = folder / f".{MODEL_FILE}.tmp"
            save_model(model, unfinished)
            os.replace(unfinished, folder / MODEL_FILE)
    except UserError:
        (folder / MODEL_FILE).unlink(missing_ok=True)
    save_plan(_with_source(plan, folder), folder / PLAN_NAME)
    given = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    raw = {"version": RUN_VERSION, "options": {n: v for n, v in {**given, **options}.items() if v is not None}}
    unfinished = folder / f".{OPTIONS_NAME}.tmp"
    unfinished.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / OPTIONS_NAME)


def _with_source(plan: Plan, folder: Path) -> Plan:
    """Return a plan whose model is the folder's own file with the reference that the plan in the folder has."""
    if Path(plan.model).resolve() != (folder / MODEL_FILE).resolve() or not (folder / PLAN_NAME).is_file():
        return plan
    before = load_plan(folder / PLAN_NAME)
    return evolve(plan, model=before.model) if before.fingerprint == plan.fingerprint else plan


def check_folder(folder: Path) -> None:
    """Raise UserError for the folder of another version's run, and for one with files of other programs."""
    if is_run(folder):
        load_options(folder)
    for pattern, owner, fix in FOREIGN:
        if any(folder.glob(pattern)):
            raise UserError(f"{folder} has {pattern}, a file of {owner}\n{fix}choose another folder with --out")


def is_run(path: str | Path) -> bool:
    """Return True for the folder of a run."""
    return (Path(path) / OPTIONS_NAME).is_file()


def load_run(folder: str | Path) -> LoadedRun:
    """Return the run in a folder. Raises UserError for a folder that is damaged or of another version."""
    folder = Path(folder)
    if not is_run(folder):
        fix = f"unpack it: megaloom unpack {folder}" if folder.is_file() else "give a run's folder, such as runs/NAME"
        raise UserError(f"{folder} is not the folder of a run: it has no {OPTIONS_NAME}\n{fix}")
    options = load_options(folder)
    if not (folder / MODEL_FILE).is_file():
        raise UserError(
            f"{folder} has no {MODEL_FILE}: its model has no JSON form\ngive the model's source: megaloom train FILE "
            f"--out {folder}"
        )
    model, plan = load_model(folder / MODEL_FILE), load_plan(folder / PLAN_NAME)
    if plan.fingerprint != fingerprint(model):
        raise UserError(
            f"{folder / PLAN_NAME} is the plan of another model than {MODEL_FILE}\ncopy the whole run folder again"
        )
    try:
        recipe = Recipe(**{name: value for name, value in options.items() if name in RECIPE_FIELDS})
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / OPTIONS_NAME} is damaged: {error}\ncopy the run folder again") from None
    others = {name: value for name, value in options.items() if name not in RECIPE_FIELDS}
    return LoadedRun(folder, model, evolve(plan, model=str((folder / MODEL_FILE).resolve())), recipe, others)


def plan_and_model(folder: Path) -> tuple[Plan, Model]:
    """Return the plan and the model of a run. A model without a JSON form is read from its source.

    Raises UserError for a folder that is no run, and for a model that is not the plan's.
    """
    if (folder / MODEL_FILE).is_file():
        run = load_run(folder)
        return run.plan, run.model
    plan = plan_of_run(folder)
    model = planned_model(plan)
    check_plan(plan, model)
    return plan, model


def plan_of_run(folder: Path) -> Plan:
    """Return the plan in a run folder, which names the source of its model. Raises UserError for another folder."""
    if not (folder / PLAN_NAME).is_file():
        raise UserError(
            f"{folder} is not a run folder: it has no {PLAN_NAME}\ngive the folder that `megaloom train` wrote"
        )
    return load_plan(folder / PLAN_NAME)


def no_checkpoint(folder: Path) -> UserError:
    """Return the error of a run that has no checkpoint."""
    words = str(folder) if is_run(folder) else f"{folder / PLAN_NAME} --out {folder}"
    return UserError(f"{folder} has no checkpoint\ntrain first: megaloom train {words}")


def load_options(folder: Path) -> dict[str, Any]:
    """Return the options in run.json. Raises UserError if it is damaged or of another version."""
    path = folder / OPTIONS_NAME
    try:
        raw = read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}\ngive the folder of a run") from None
    except ValueError:
        raw = None
    if not isinstance(raw, dict) or not isinstance(raw.get("options"), dict):
        raise UserError(f"{path} is damaged: it is not JSON with options\ncopy the run folder again")
    if raw.get("version") != RUN_VERSION:
        raise UserError(
            f"{path} has version {raw.get('version')!r}; this megaloom reads version {RUN_VERSION}\n"
            "install the megaloom that wrote it, or train anew from the model's source"
        )
    return _consistent(raw["options"])


def _consistent(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a lowest learning rate that has an effect and is not above the peak.

    Earlier versions wrote one that was above it, or for a constant schedule, and took the lower of the two.
    """
    peak, lowest = options.get("lr"), options.get("min_lr")
    if options.get("schedule") == Schedule.CONSTANT:
        return {name: value for name, value in options.items() if name != "min_lr"}
    clamped = isinstance(peak, float | int) and isinstance(lowest, float | int) and lowest > peak
    return {**options, "min_lr": peak} if clamped else dict(options)
