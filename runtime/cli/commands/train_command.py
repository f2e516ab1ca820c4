"""`megaloom train` and `megaloom verify`: make a plan unless one is given, run it, and print the result."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from attrs import asdict

from megaloom.dsl.catalog import file_name, find
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import Content, content_of
from megaloom.dsl.files.outputs import check_output_folder
from megaloom.dsl.graph import graph
from megaloom.dsl.settings.arguments import Arguments, as_words
from megaloom.dsl.settings.reference import check_same
from megaloom.planner.cli.adapter_options import AdapterOptions
from megaloom.planner.cli.arguments import FixedLayout, fixed_fields
from megaloom.planner.contract.capability import differences
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layout import flag_of, switch
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan, PlanError
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.report.chrome_trace import replay, write_file
from megaloom.planner.report.measured.measured_step import read_trace, with_prediction
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.search.search import plan as search
from megaloom.runtime.checkpoints.checkpoint_folder import Retention, checkpoint_folders
from megaloom.runtime.cli.defaults import (
    DEFAULT_MODEL,
    DEFAULT_RECIPE,
    EVALUATE_EVERY,
    KEEP_BEST,
    KEEP_LAST,
    SAVE_EVERY,
    STANDARD_LIBRARY,
)
from megaloom.runtime.cli.devices import devices_option, make_plan
from megaloom.runtime.cli.machine import busy_text, this_machine
from megaloom.runtime.cli.outside import outside_text
from megaloom.runtime.cli.printing import fail, print_on_first_rank
from megaloom.runtime.cli.report import comparison_report, plan_report, summary_report
from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.launch.rendezvous import join, launched, started_by_launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.environment import current_environment
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.training.artefact import opened
from megaloom.runtime.training.run import check_start, train
from megaloom.runtime.training.run_data import DataOptions
from megaloom.runtime.training.run_folder import MODEL_FILE, PLAN_NAME, is_run, load_run, plan_of_run
from megaloom.runtime.training.verify import compare
from megaloom.runtime.weights.kept_files import CONFIG

DEFAULT_SEQ, DEFAULT_BATCH = 128, 32
PEFT_CONFIG = "adapter_config.json"
"""File of a folder of adapters that PEFT has saved."""


def run_train(
    model: str | None,
    arguments: Arguments,
    load_options: Mapping[str, Any],
    options: Mapping[str, Any],
    recipe: Recipe,
    fixed: FixedLayout,
    adapters: AdapterOptions,
) -> int:
    """Train a model or a plan, and return the exit code. A packed run of `--from` is unpacked for as long.

    arguments: those of the model's function. load_options: seq, batch, precision, devices; None if not given. options:
    data, split, epochs, out, save_every, evaluate_every, evaluate_batches, evaluate_all, keep_last, keep_best,
    async_save, distributed_timeout_minutes, weights, steps_from.
    """
    weights = options["weights"]
    with nullcontext() if weights is None else opened(weights) as folder:
        options, anew = {**options, "weights": folder}, False
        if model is None and folder is not None and is_run(folder):
            anew = True
            options["out"] = options["out"] or Path("runs") / f"from-{folder.resolve().name}"
        return _train(chosen_model(model, folder), arguments, load_options, options, recipe, fixed, adapters, anew=anew)


def _train(
    model: str,
    arguments: Arguments,
    load_options: Mapping[str, Any],
    options: Mapping[str, Any],
    recipe: Recipe,
    fixed: FixedLayout,
    adapters: AdapterOptions,
    *,
    anew: bool,
) -> int:
    """Train a model or a plan, and return the exit code. anew: the model is that of the run which `--from` names."""
    check_output_folder(options["out"], "--out")
    check_output_folder(options["watching"].tensorboard_dir, "--tensorboard-dir")
    minutes = options["distributed_timeout_minutes"]
    if not 0 < minutes < 1e6:
        raise UserError(f"--distributed-timeout-minutes {minutes:g} is out of range\ngive minutes above 0, such as 10")
    timeout = timedelta(minutes=minutes)
    given = {name: value for name, value in {**load_options, **fixed_fields(fixed)}.items() if value is not None}
    given |= adapters.given

    if started_by_launcher():
        launched(_planned_world(model) or load_options["devices"])  # before waiting for ranks that do not come
        join(timeout=timeout)  # each rank reads files of its own: an error of one is raised on all
    planned = is_run(model) or _is_plan(model)
    machine = None
    if started_by_launcher() and not all(gathered(planned)):
        machine = this_machine(None, _precision(load_options))  # by all ranks, before one of them refuses something

    def chosen() -> tuple[Plan, Path]:
        if planned:
            return _existing_plan(model, arguments, options["out"], given)
        declared, ref = find(model, arguments)
        declared, folder = adapters.added_to(declared, ref), options["out"] or Path("runs") / file_name(ref)
        workload = _workload(load_options)
        data = DataOptions(options["data"], options["split"], options["epochs"], options["ends"])
        check_start(declared, workload.seq, folder, data, options["weights"], options["steps_from"])
        make = partial(search, declared, workload=workload, ref=ref, fixed=fixed_fields(fixed), advice=devices_option)
        return make_plan(make, load_options["devices"], fixed, machine, workload.precision), folder

    busy = busy_text()  # before this run adds its own load
    plan, folder = agreed(chosen) if started_by_launcher() else chosen()
    note = differences(plan.environment, current_environment())
    print_on_first_rank(plan_report(plan), *([note] if note else []))
    every = {name: options[name] for name in ("save_every", "evaluate_every", "evaluate_batches", "evaluate_all")}
    try:
        data = {"source": options["data"], **{name: options[name] for name in ("split", "epochs", "ends")}}
        retention = Retention(options["keep_last"], options["keep_best"])
        saving = {"retention": retention, "asynchronous_saves": options["async_save"], "watching": options["watching"]}
        saving |= {"evaluation": options["evaluation"], "steps": options["steps_from"]}
        saving["distributed_timeout"] = timeout
        summary = train(plan, recipe, folder=folder, weights=options["weights"], **saving, **data, **every)
    except KeyboardInterrupt:
        return fail(f"stopped; {_saved(folder)}", 130)
    except SystemExit as stop:  # a signal has ended the process
        return fail(f"stopped; {_saved(folder)}", int(stop.code or 0))
    if summary.stopped:  # this process is a rank and was sent the signal, or nobody reads its output
        return fail(f"stopped; {_saved(folder)}", 128 + summary.stopped)
    if summary.trace:
        _add_prediction(summary.trace, plan)
    if anew:  # the new run has the model itself
        model, given, options = str(folder), {}, {**options, "out": None}
    resume = {**given, "data": options["data"], "split": options["split"], "out": options["out"], **asdict(recipe)}
    resume |= {**every, **{name: options[name] for name in ("keep_last", "keep_best", "async_save")}}
    resume["steps_from"] = options["steps_from"]
    resume["set"] = () if _is_plan(model) or is_run(model) else as_words(arguments)
    others = {
        **asdict(options["watching"]),
        **asdict(options["evaluation"]),
        **asdict(options["ends"]),
        "profile": None,
    }
    resume |= {name: value for name, value in others.items() if value is not None and value is not False}
    steps = 2 * max(summary.step, recipe.steps if options["epochs"] is None else 0)
    by_steps = options["epochs"] is None
    resume |= {"steps": steps} if by_steps else {"steps": None, "epochs": 2 * options["epochs"]}
    parts = [f"\nto train further: {_command(model, resume)}"]
    if recipe.schedule.has_end and recipe.decay_steps is None:
        parts.append(f"the learning rate stays at {summary.lowest_lr:g}; --decay-steps {steps} stretches its schedule")
    outside = outside_text(plan, summary, busy)
    print_on_first_rank(summary_report(summary, plan), *([outside] if outside else []), *parts)
    return 0


def chosen_model(model: str | None, weights: Path | None) -> str:
    """Return the argument MODEL or, without it, the model that --from names: that of a run, or of a config.json.

    Raise UserError for a folder that has none.
    """
    if model is not None:
        return model
    if weights is None:
        return DEFAULT_MODEL
    if is_run(weights):
        return str(weights / MODEL_FILE) if (weights / MODEL_FILE).is_file() else plan_of_run(weights).model
    if not (weights / CONFIG).is_file():
        if (weights / PEFT_CONFIG).is_file():
            raise UserError(
                f"--from {weights}: these are adapters of PEFT, which are not read\n"
                "merge them into their model with PEFT's merge_and_unload, and give its folder"
            )
        what = f"has no {CONFIG}" if weights.is_dir() else "no such folder"
        raise UserError(f"--from {weights}: {what}\ngive a folder with weights and {CONFIG}, or the model as MODEL")
    return str(weights)


def _is_plan(model: str) -> bool:
    """Return whether the argument MODEL names a plan.json."""
    content = content_of(model)
    return content is Content.PLAN or (content is Content.OTHER and model.endswith(".json"))


def _planned_world(model: str) -> int | None:
    """Return the ranks of the plan that the argument MODEL is or has; None if there is none, or it cannot be read."""
    try:
        if is_run(model):
            return load(Path(model) / PLAN_NAME).layout.world
        return load(model).layout.world if _is_plan(model) else None
    except UserError:
        return None  # raised on all ranks once they have met


def _existing_plan(model: str, arguments: Arguments, out: Path | None, given: Mapping[str, Any]) -> tuple[Plan, Path]:
    """Return the plan that MODEL is or that its run has, and the folder of the run."""
    if is_run(model):
        check_same(load(Path(model) / PLAN_NAME).model, arguments, model)
        return _decided(load_run(model).plan, model, given), out or Path(model)
    plan = _decided(load(model), model, given)
    check_same(plan.model, arguments, model)
    return plan, out or Path("runs") / file_name(plan.model)


def run_verify(path: Path, steps: int, seed: int) -> int:
    """Compare a plan with a single process, and return exit code 1 if they differ."""
    plan = load(path)
    comparison = compare(plan, steps=steps, seed=seed)
    print_on_first_rank(comparison_report(comparison, plan))
    return 0 if comparison.agrees else 1


def _add_prediction(path: Path, plan: Plan) -> None:
    """Add the predicted step to the trace of a measured one. A plan of another cost model cannot be simulated."""
    if int(os.environ.get("RANK", 0)):
        return
    g = graph(planned_model(plan))
    try:
        write_file(with_prediction(read_trace(path), plan, replay(plan, g), g), str(path))
    except PlanError as error:
        print_on_first_rank(f"{path} has no predicted step: {error}")


def _saved(folder: Path) -> str:
    """Return a text that names the last checkpoint of a stopped run."""
    last = checkpoint_folders(folder)[-1:]
    return f"{last[0]} is saved; the same command continues from it" if last else "no step is saved yet"


def _decided(plan: Plan, path: str, given: Mapping[str, Any]) -> Plan:
    """Return the plan in a file or a run folder. Raise UserError if options are given that it already decides."""
    check_plan(plan, planned_model(plan))
    if given:
        flags, has = ", ".join(flag_of(name) for name in given), "is" if path.endswith(".json") else "has"
        raise UserError(
            f"{path} {has} a plan, which decides {flags}\nomit the option, or give the model instead of the plan"
        )
    return plan


def _workload(load_options: Mapping[str, Any]) -> Workload:
    """Return the sequence length, batch and precision of the options --seq, --batch and --precision."""
    return Workload(
        seq=DEFAULT_SEQ if load_options["seq"] is None else load_options["seq"],
        batch=DEFAULT_BATCH if load_options["batch"] is None else load_options["batch"],
        precision=_precision(load_options),
    )


def _precision(load_options: Mapping[str, Any]) -> Precision:
    return Precision(load_options["precision"] or ("bf16" if device.gpu_count() else "fp32"))


def _command(model: str, options: Mapping[str, Any]) -> str:
    """Return the command line with the options that differ from the defaults."""
    defaults = {**asdict(DEFAULT_RECIPE), "data": (STANDARD_LIBRARY,), "split": None, "out": None, "steps": None}
    defaults["steps_from"] = None
    defaults |= {"epochs": None, "save_every": SAVE_EVERY, "evaluate_every": EVALUATE_EVERY}
    defaults |= {"evaluate_all": False, "keep_last": KEEP_LAST, "keep_best": KEEP_BEST, "set": ()}
    flags = [part for name, value in options.items() if value != defaults.get(name) for part in _flag(name, value)]
    return shlex.join([*_program(), "train", *([] if model == DEFAULT_MODEL else [model]), *flags])


def _program() -> list[str]:
    """Return the words with which the user starts `megaloom`."""
    if Path(sys.argv[0]).name == "__main__.py":
        return [sys.orig_argv[0], "-m", "megaloom.runtime.cli"]
    return ["megaloom"] if shutil.which("megaloom") else [os.path.relpath(sys.argv[0])]


def _flag(name: str, value: Any) -> tuple[str, ...]:
    """Return the command-line words of an option."""
    flag = flag_of(name)
    if name == "set":
        return tuple(part for word in value for part in (flag, word))
    if isinstance(value, bool | Shard):
        return (switch(name, value),)
    return (flag, *(value or ("none",))) if isinstance(value, tuple) else (flag, str(value))
