"""`megaloom train` and `megaloom verify`: make a plan unless one is given, run it, and print the result."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from attrs import frozen

from megaloom.dsl.catalog import file_name, find
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import Content, content_of
from megaloom.dsl.files.outputs import check_output_folder
from megaloom.dsl.graph import graph
from megaloom.dsl.settings.arguments import Arguments, as_words
from megaloom.dsl.settings.reference import check_same
from megaloom.planner.cli.arguments import fixed_fields
from megaloom.planner.contract.capability import differences
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan, PlanError
from megaloom.planner.contract.workload import Backend, Precision, Workload
from megaloom.planner.report.chrome_trace import replay, write_file
from megaloom.planner.report.measured.measured_step import read_trace, with_prediction
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.search.search import plan as search
from megaloom.runtime.checkpoints.checkpoint_folder import checkpoint_folders
from megaloom.runtime.cli.defaults import DEFAULT_MODEL
from megaloom.runtime.cli.devices import devices_option, make_plan
from megaloom.runtime.cli.machine import busy_text, this_machine
from megaloom.runtime.cli.option_groups import PlanOptions
from megaloom.runtime.cli.outside import outside_text
from megaloom.runtime.cli.printing import fail, print_on_first_rank
from megaloom.runtime.cli.report import comparison_report, plan_report, summary_report
from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.launch.rendezvous import join, started_by_launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.environment import current_environment
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.training.artefact import opened
from megaloom.runtime.training.check import check_before_plan
from megaloom.runtime.training.run import train_run
from megaloom.runtime.training.run_folder import MODEL_FILE, PLAN_NAME, is_run, load_run, plan_of_run
from megaloom.runtime.training.run_options import RunOptions
from megaloom.runtime.training.training_run import Summary
from megaloom.runtime.training.verify import compare
from megaloom.runtime.weights.hugging_face_files import CONFIG

DEFAULT_SEQ, DEFAULT_BATCH = 128, 32
PEFT_CONFIG = "adapter_config.json"
"""File of a folder of adapters that PEFT has saved."""


def run_train(model: str | None, arguments: Arguments, plan_options: PlanOptions, options: RunOptions) -> int:
    """Train a model or a plan, and return the exit code. A packed run of `--from` is unpacked for as long.

    arguments: those of the model's function.
    """
    weights = options.start.weights
    with nullcontext() if weights is None else opened(weights) as folder:
        options, anew = options.changed(weights=folder), False
        if model is None and folder is not None and is_run(folder):
            anew = True
            options = options.changed(out=options.saving.out or Path("runs") / f"from-{folder.resolve().name}")
        return TrainCommand(chosen_model(model, folder), arguments, plan_options, options, anew).run()


@frozen
class TrainCommand:
    """A call of `megaloom train`: the argument MODEL, or the model that stands for it, and all options."""

    model: str
    arguments: Arguments  # of the model's function
    plan_options: PlanOptions
    options: RunOptions
    anew: bool  # the model is that of the run which `--from` names

    def run(self) -> int:
        """Plan the model unless there is a plan, train it, and return the exit code."""
        check_output_folder(self.options.saving.out, "--out")
        check_output_folder(self.options.monitoring.tensorboard_dir, "--tensorboard-dir")
        busy = busy_text()  # before this run adds its own load
        plan, folder = self._plan_and_folder()
        note = differences(plan.environment, current_environment())
        print_on_first_rank(plan_report(plan), *([note] if note else []))
        try:
            summary = train_run(plan, self.options.changed(out=folder))
        except KeyboardInterrupt:
            return fail(f"stopped; {_saved(folder)}", 130)
        except SystemExit as stop:  # a signal has ended the process
            return fail(f"stopped; {_saved(folder)}", int(stop.code or 0))
        if summary.stopped:  # this process is a rank and was sent the signal, or nobody reads its output
            return fail(f"stopped; {_saved(folder)}", 128 + summary.stopped)
        if summary.trace:
            _add_prediction(summary.trace, plan)
        outside = outside_text(plan, summary, busy)
        further = self._further(summary, folder)
        print_on_first_rank(summary_report(summary, plan), *([outside] if outside else []), *further)
        return 0

    def _plan_and_folder(self) -> tuple[Plan, Path]:
        """Return the plan and the folder of the run. Under torchrun or srun the ranks meet, and agree on them."""
        planned, machine = is_run(self.model) or _is_plan(self.model), None
        if not started_by_launcher():
            return self._existing() if planned else self._searched(None)
        layout = _planned_layout(self.model)
        ranks = layout or self.plan_options.workload.devices
        join(ranks, self.options.start.distributed_timeout)  # each rank reads files of its own: errors go to all
        if not all(gathered(planned)):
            machine = this_machine(None, self._precision)  # by all ranks, before one of them refuses something
        return agreed(self._existing if planned else lambda: self._searched(machine))

    def _existing(self) -> tuple[Plan, Path]:
        """Return the plan that MODEL is or that its run has, and the folder of the run."""
        model, out = self.model, self.options.saving.out
        if is_run(model):
            check_same(load(Path(model) / PLAN_NAME).model, self.arguments, model)
            return self._decided(load_run(model).plan), out or Path(model)
        plan = self._decided(load(model))
        check_same(plan.model, self.arguments, model)
        return plan, out or Path("runs") / file_name(plan.model)

    def _decided(self, plan: Plan) -> Plan:
        """Return the plan of MODEL. Raise UserError if options are given that it already decides."""
        check_plan(plan, planned_model(plan))
        if given := self.plan_options.given:
            has = "is" if self.model.endswith(".json") else "has"
            raise UserError(
                f"{self.model} {has} a plan, which decides {', '.join(given)}\n"
                "omit the option, or give the model instead of the plan"
            )
        return plan

    def _searched(self, machine: Cluster | None) -> tuple[Plan, Path]:
        """Return the fastest plan for the model, and the folder of the run. machine: that of a job of ranks."""
        declared, ref = find(self.model, self.arguments)
        declared = self.plan_options.adapters.added_to(declared, ref)
        folder = self.options.saving.out or Path("runs") / file_name(ref)
        given, fixed = self.plan_options.workload, self.plan_options.fixed
        workload = Workload(
            seq=DEFAULT_SEQ if given.seq is None else given.seq,
            batch=DEFAULT_BATCH if given.batch is None else given.batch,
            precision=self._precision,
        )
        check_before_plan(declared, ref, workload.seq, self.options.changed(out=folder))
        make = partial(search, declared, workload=workload, ref=ref, fixed=fixed_fields(fixed), advice=devices_option)
        return make_plan(make, given.devices, fixed, machine, workload.precision), folder

    @property
    def _precision(self) -> Precision:
        return Precision(self.plan_options.workload.precision or ("bf16" if device.gpu_count() else "fp32"))

    def _further(self, summary: Summary, folder: Path) -> list[str]:
        """Return the command that trains as long again, and what its schedule would need."""
        recipe, epochs = self.options.recipe, self.options.data.epochs
        steps = 2 * max(summary.step, recipe.steps if epochs is None else 0)
        if epochs is None:
            options = self.options.changed(steps=steps)
        else:
            options = self.options.changed(steps=Recipe().steps, epochs=2 * epochs)
        model, planned = self.model, list[str]()
        if self.anew:  # the new run has the model itself
            model, options = str(folder), options.changed(out=None)
        elif not (_is_plan(model) or is_run(model)):
            planned = [*self.plan_options.words, *(w for word in as_words(self.arguments) for w in ("--set", word))]
        words = [*planned, *options.words(*(["steps"] if epochs is None else []))]
        command = [*_program(), "train", *([] if model == DEFAULT_MODEL else [model]), *words]
        parts = [f"\nto train further: {shlex.join(command)}"]
        if recipe.schedule.has_end and recipe.decay_steps is None:
            lowest = f"the learning rate stays at {summary.lowest_lr:g}"
            parts.append(f"{lowest}; --decay-steps {steps} stretches its schedule")
        return parts


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


def _planned_layout(model: str) -> Layout | None:
    """Return the layout of the plan that the argument MODEL is or has; None if there is none, or it cannot be read."""
    try:
        if is_run(model):
            return load(Path(model) / PLAN_NAME).layout
        return load(model).layout if _is_plan(model) else None
    except UserError:
        return None  # raised on all ranks once they have met


def run_verify(path: Path, steps: int, seed: int, backend: Backend) -> int:
    """Compare a plan with a single process, and return exit code 1 if they differ."""
    plan = load(path)
    comparison = compare(plan, steps=steps, seed=seed, backend=backend)
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


def _program() -> list[str]:
    """Return the words with which the user starts `megaloom`."""
    if Path(sys.argv[0]).name == "__main__.py":
        return [sys.orig_argv[0], "-m", "megaloom.runtime.cli"]
    return ["megaloom"] if shutil.which("megaloom") else [os.path.relpath(sys.argv[0])]
