"""Evaluation of a trained model on data: the loss of each source, under the layout of the run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_trainable
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint, latest
from megaloom.runtime.engine.results import EvaluationResult
from megaloom.runtime.engine.steps import HeldOut
from megaloom.runtime.launch import launcher
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.end_of_document import NO_ENDS
from megaloom.runtime.samples.samples import Sample, SampleMaker

from .artefact import opened
from .chosen_backend import precision_note
from .evaluated_text import ALL, EvaluatedText, evaluated_data, open_texts
from .run_data import check_labels, held_out_sample, of_corpus
from .run_folder import file_of_run, no_checkpoint, plan_and_model
from .steps_reference import loaded_steps, steps_note, steps_of_run

_CHANGED = "the data of the run are not those of step {step}: their files have changed since"


@frozen
class SourceLoss:
    """The result of an evaluation on one source of text."""

    name: str
    result: EvaluationResult
    unit: str  # of the loss, such as nats per token


@frozen
class RunEvaluation:
    """Losses of the newest checkpoint of a run that is not damaged."""

    step: int
    notes: tuple[str, ...]  # about newer ones that are
    losses: tuple[SourceLoss, ...]
    part: str = ALL
    split: str | None = None  # of indexed datasets
    counted: str = "tokens"  # what each loss is a mean over: tokens or samples


def evaluate_run(
    folder: Path,
    sources: Sequence[str] = (),
    *,
    part: str | None = None,
    split: str | None = None,
    batches: int | None = None,
    micro_batch: int | None = None,
    averaged: bool = False,
    steps: object = None,
    timeout: float | None = None,
) -> RunEvaluation:
    """Return the losses of a run's last checkpoint on each source: a file or folder of text, or an indexed dataset.

    folder: of the run, or a packed run. sources: without any, those of the run. part: "all", or the training,
    validation or test part by `split`; None is validation of the run's own data, and all of others. split: None is that
    of the run. batches: global batches that are read of each source, from everywhere in it; None for all. micro_batch:
    sequences per micro-batch; None for that of training. averaged: evaluate the averaged weights. steps: as in `train`,
    by default those of the run; `test_step` runs on the test part, `validation_step` on others.

    Raise UserError for a folder that is no run, bad data, or a machine without the devices of the plan.
    """
    for name, count in (("batches", batches), ("micro-batch", micro_batch)):
        if count is not None and count < 1:
            raise UserError(f"--{name} must be at least 1, got {count}")
    reading = Reading(batches, micro_batch, averaged=averaged)
    with opened(folder) as run:
        return _evaluate(run, sources, part, split, reading, steps, timeout)


@frozen
class Reading:
    """The extent of an evaluation, and the weights and the step that are evaluated."""

    batches: int | None  # global batches; None for all
    micro_batch: int | None  # sequences per micro-batch; None for that of training
    averaged: bool = False
    step: HeldOut = "validation"  # the user's


def _evaluate(
    folder: Path,
    sources: Sequence[str],
    part: str | None,
    split: str | None,
    reading: Reading,
    steps: object,
    timeout: float | None,
) -> RunEvaluation:
    """Return the losses of the last checkpoint in the folder of a run."""
    plan, model, found = _trained(folder, averaged=reading.averaged)
    check_trainable(plan, model)
    launcher.check(plan.layout.world)
    maker = SampleMaker.of(graph(model), plan.workload.seq)
    asked = evaluated_data(folder, sources, part, split)
    reading = evolve(reading, step="test" if asked.part == "test" else "validation")
    steps = steps_of_run(folder, steps)
    for source in asked.sources:
        check_labels(maker.graph, [source], loaded_steps(steps), ref=plan.model)
    with TemporaryDirectory(prefix="megaloom-") as temporary:
        texts, digest = open_texts(asked, folder, maker, Path(temporary))
        done = launcher.run(_evaluate_on_rank, (plan, folder, texts, reading, steps), plan.layout, timeout=timeout)[0]
    changed = [] if sources or digest == found.manifest.data else [_CHANGED.format(step=found.manifest.step)]
    notes = (*done.notes, *changed, precision_note(plan), steps_note(steps, file_of_run(folder)))
    return evolve(done, notes=tuple(filter(None, notes)), part=asked.part, split=asked.split)


def _trained(folder: Path, *, averaged: bool) -> tuple[Plan, Model, Checkpoint]:
    """Return plan, model and checkpoint of a run folder, with averaged weights if they are asked for."""
    plan, model = plan_and_model(folder)
    found = latest(folder, fingerprint=plan.fingerprint)
    if found is None:
        raise no_checkpoint(folder)
    if averaged:
        found.check_averaged()
    return plan, model, found


def _evaluate_on_rank(
    plan: Plan, folder: Path, texts: list[EvaluatedText], reading: Reading, steps: object
) -> RunEvaluation:
    """Return step and losses of the newest checkpoint that is not damaged. They are equal on all ranks."""
    from megaloom.runtime.checkpoints import checkpoint  # imports megatron-core, as does the next
    from megaloom.runtime.engine.engine import Engine

    found = checkpoint.newest_on_ranks(folder, fingerprint=plan.fingerprint)
    assert found, f"{folder} had a checkpoint"
    averaged = reading.averaged
    if averaged:
        found.check_averaged()
    engine = Engine.build(plan, planned_model(plan), Recipe(), loaded_steps(steps), average=0.0 if averaged else None)
    engine.state.loads_average = averaged
    file = file_of_run(folder)
    ends = file.options.ends if file else NO_ENDS
    checkpoint.load(engine.state, found)
    losses = []
    for text in texts:
        maker = of_corpus(SampleMaker.of(engine.graph, plan.workload.seq), text.corpus, ends)

        def sample(i: int, text: EvaluatedText = text, maker: SampleMaker = maker) -> Sample:
            return held_out_sample(text.part, maker, engine.steps, i)

        samples = text.part.held_out_samples(maker.length - 1)
        if reading.batches is not None:
            samples = min(samples, reading.batches * plan.workload.batch)
        with engine.averaged_weights() if averaged else nullcontext():
            result = engine.evaluate_samples(sample, samples, step=reading.step, micro_batch=reading.micro_batch)
        losses.append(SourceLoss(text.name, result, maker.unit))
    return RunEvaluation(found.manifest.step, tuple(found.notes), tuple(losses), counted=maker.counted_word)
