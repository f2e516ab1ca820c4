"""Model, plan and options in a run folder: enough to load the run where its source file is missing.

    run/model.json  the model    run/plan.json  the plan    run/run.json  recipe, data and other options

`load_run` reads them and runs no code. `locked` is the context of the one run that writes the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, fields, frozen

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
from megaloom.runtime.data.folder_lock import locked_folder
from megaloom.runtime.metrics.metrics_file import METRICS_NAME
from megaloom.runtime.optimizer.recipe import Recipe, Schedule

from .run_options import OPTIONS, RunOptions

RUN_VERSION = 1
"""Version of run.json."""
MODEL_FILE, PLAN_NAME, OPTIONS_NAME = "model.json", "plan.json", "run.json"
TOKENIZER_NAME = "tokenizer"
"""Folder of the tokenizer of the run's data. Bytes have none."""
UNKNOWN_TOKENIZER = "unknown"
"""Stands in run.json for the tokenizer of data that nobody has named: of datasets that Megatron-LM has written."""
FOREIGN = (
    ("latest_checkpointed_iteration.txt", "a checkpoint of Megatron-LM", ""),
    ("model*.safetensors", "a Hugging Face folder", "start from its weights with --from, and "),
)
"""Files of folders that other programs write: their pattern, their owner, and advice."""


@frozen(kw_only=True)
class RunFile:
    """The contents of run.json: the options that a run keeps, and what else is known of its steps and tokenizer."""

    options: RunOptions
    steps_digest: str | None = None  # of the file of steps
    steps_object: str | None = None  # the class of steps that were given as an object
    tokenizer: str | None = None  # UNKNOWN_TOKENIZER, or None

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> RunFile:
        """Return the contents by name. Data that are not named are not known, other options have their defaults."""
        kept = {name: values[name] for name, option in OPTIONS.items() if option.kept and name in values}
        others = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(options=RunOptions().changed(**{"data": (), **kept}), **others)

    @property
    def values(self) -> dict[str, Any]:
        """Return the contents by name, without what is not given."""
        kept = {name: self.options.value(option) for name, option in OPTIONS.items() if option.kept}
        others = asdict(self, filter=lambda attribute, _: attribute.name != "options")
        values = {name: str(x) if isinstance(x, Path) else x for name, x in {**kept, **others}.items()}
        return {name: x for name, x in values.items() if not (x is None or x is False or x == ())}


@frozen
class LoadedRun:
    """A run as its folder describes it. The plan's model is model.json in the folder."""

    folder: Path
    model: Model
    plan: Plan
    options: RunOptions

    @property
    def recipe(self) -> Recipe:
        """Return the recipe."""
        return self.options.recipe

    @property
    def graph(self) -> Graph:
        """Return the graph of the model."""
        return graph(self.model)


def save_run(folder: Path, plan: Plan, model: Model, recipe: Recipe) -> None:
    """Write model, plan and recipe of a loop of one's own into a run folder, for commands that use a run.

    Its data are not known. One process calls it. A model that has no JSON form is left out.
    """
    write_run(folder, plan, model, RunFile(options=RunOptions(recipe=recipe).changed(data=())))


def write_run(folder: Path, plan: Plan, model: Model, file: RunFile) -> None:
    """Write model, plan and run.json into a run folder. One process calls it. A model without JSON form is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if Path(plan.model).resolve() != (folder / MODEL_FILE).resolve():
            unfinished = folder / f".{MODEL_FILE}.tmp"
            save_model(model, unfinished)
            os.replace(unfinished, folder / MODEL_FILE)
    except UserError:
        (folder / MODEL_FILE).unlink(missing_ok=True)
    save_plan(_with_source(plan, folder), folder / PLAN_NAME)
    raw = {"version": RUN_VERSION, "options": file.values}
    unfinished = folder / f".{OPTIONS_NAME}.tmp"
    unfinished.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / OPTIONS_NAME)


def _with_source(plan: Plan, folder: Path) -> Plan:
    """Return a plan whose model is the folder's own file with the reference that the plan in the folder has."""
    if Path(plan.model).resolve() != (folder / MODEL_FILE).resolve() or not (folder / PLAN_NAME).is_file():
        return plan
    before = load_plan(folder / PLAN_NAME)
    return evolve(plan, model=before.model) if before.fingerprint == plan.fingerprint else plan


def locked(folder: Path) -> AbstractContextManager[None]:
    """Return a context that holds the lock of a run folder, so that no second run writes there.

    Entering raises UserError if another run holds it, or the folder cannot be created. A run that is refused before
    its first step leaves nothing.
    """
    return locked_folder(folder, **lock_messages(folder), kept=(folder / METRICS_NAME).exists)


def lock_messages(folder: Path) -> dict[str, str]:
    """Return the messages for a run folder that another run holds or that cannot be written."""
    held = f"another run is training in {folder}\nwait until it ends, or choose another folder with --out"
    return {"held": held, "choose": "choose a writable folder with --out"}


def check_folder(folder: Path) -> None:
    """Raise UserError for the folder of another version's run, and for one with files of other programs."""
    if is_run(folder):
        read_run_file(folder)
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
    file = read_run_file(folder)
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
    return LoadedRun(folder, model, evolve(plan, model=str((folder / MODEL_FILE).resolve())), file.options)


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


def read_run_file(folder: Path) -> RunFile:
    """Return the contents of run.json. Raises UserError if it is damaged or of another version."""
    values = read_values(folder)
    try:
        return RunFile.of_values(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / OPTIONS_NAME} is damaged: {error}\ncopy the run folder again") from None


def file_of_run(folder: Path) -> RunFile | None:
    """Return the contents of run.json; None for a folder that has none. Raises UserError as `read_run_file`."""
    return read_run_file(folder) if is_run(folder) else None


def read_values(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json by name. Raises UserError if it is no JSON, or of another version."""
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
