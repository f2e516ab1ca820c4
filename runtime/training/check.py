"""The first phase of a run: all that can be refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Model, graph
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint, latest, newest_intact
from megaloom.runtime.data.folder_lock import check_free
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import started_by_launcher
from megaloom.runtime.reference.declared_reads import check_graph
from megaloom.runtime.samples.samples import SampleMaker

from .host_memory import check_host_memory
from .initial_weights import check_other_folder, open_weights
from .run_data import check_data, check_labels, check_rampup
from .run_folder import check_folder, lock_messages
from .run_options import RunOptions
from .steps_reference import loaded_steps, steps_of_run


@frozen(eq=False)
class Start:
    """The start of a run: its model, the checkpoint that it continues, if there is one, and its steps."""

    model: Model
    saved: Checkpoint | None
    steps: object  # an object, a `StepsReference`, or None

    @property
    def done(self) -> int:
        """Return the steps that are done already."""
        return self.saved.manifest.step if self.saved else 0


def check_run(plan: Plan, options: RunOptions) -> Start:
    """Raise UserError unless plan, options, devices, folder, checkpoint, steps and weights fit each other."""
    model = planned_model(plan)
    check_plan(plan, model)
    check_trainable(plan, model)
    check_graph(graph(model))
    check_rampup(options.recipe, plan)
    options.recipe.check_layout(plan.layout)
    options.monitoring.check_packages()
    if not started_by_launcher():
        launcher.check(plan.layout.world)
        check_host_memory(plan)
    start = _start(model, plan.model, options, plan.fingerprint, newest_intact)
    if options.data.epochs is None:
        options.monitoring.check_steps(start.done, options.recipe.steps)
    return start


def check_before_plan(model: Model, ref: str, seq: int, options: RunOptions) -> None:
    """Raise UserError for what can be refused before there is a plan: the run's folder, checkpoints, data and steps.

    A search takes seconds. Nothing is written, and `check_run` and `prepare_run` check all of it again.
    """
    check_free(options.folder, **lock_messages(options.folder))
    _start(model, ref, options, fingerprint(model), latest)
    check_data(options.data, options.ends, SampleMaker.of(graph(model), seq))


def _start(
    model: Model, ref: str, options: RunOptions, fingerprint: str, find: Callable[..., Checkpoint | None]
) -> Start:
    """Return the start of a run. Raise UserError for a folder, checkpoint, steps or weights that do not fit it.

    ref: the full reference of the model. find: the function that returns the checkpoint of a run whose weights it
    starts from.
    """
    folder, weights = options.folder, options.start.weights
    if weights is not None:
        check_other_folder(weights, folder)
    check_folder(folder)
    saved = latest(folder, fingerprint=fingerprint)  # refuse another model's or a damaged one before any work
    steps = steps_of_run(folder, options.start.steps_from, continues=saved is not None)
    check_labels(graph(model), options.data.data, loaded_steps(steps), ref=ref)
    if weights is not None and saved is None:
        open_weights(weights, find).check(model)
    return Start(model, saved, steps)
