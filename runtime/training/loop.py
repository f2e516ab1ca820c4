"""The training loop: optimizer steps up to the recipe's last one, with evaluations and checkpoints on the way.

`train_on_rank` builds the engine, loads the last checkpoint, and runs `Loop.run`. Every rank runs the same loop.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import Attribute, asdict, define, evolve, field
from rich.console import Console

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import speed_of
from megaloom.runtime.checkpoints import checkpoint
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint, Retention
from megaloom.runtime.checkpoints.saver import Saver
from megaloom.runtime.data.data_split import DataSplit
from megaloom.runtime.data.synthetic import NOTE, is_synthetic
from megaloom.runtime.engine.engine import Engine
from megaloom.runtime.engine.results import EvaluationResult
from megaloom.runtime.launch.agreement import agreed, largest
from megaloom.runtime.megatron import device
from megaloom.runtime.metrics.display import InterruptibleConsole, ProgressDisplay, loss_text, progress_display
from megaloom.runtime.metrics.metrics_file import METRICS_NAME, MetricsFile, StepMetrics
from megaloom.runtime.metrics.monitoring import Monitoring
from megaloom.runtime.metrics.recorded_steps import RecordedSteps
from megaloom.runtime.metrics.trackers import open_trackers
from megaloom.runtime.optimizer.weight_update import NonFiniteError
from megaloom.runtime.samples.samples import Sample, SampleMaker

from .collected_signals import collected_signals
from .failures import ended_if_stuck
from .frozen_objects import existing_objects_frozen
from .initial_weights import not_finite_note, open_weights, starting_notes
from .resuming import resume_notes
from .run_data import empty_validation, held_out_sample, of_corpus, training_sample
from .run_folder import write_run
from .start_notes import start_notes
from .steps_reference import loaded_steps
from .training_run import RECENT_STEPS, Summary, TrainingRun


def train_on_rank(run: TrainingRun) -> Summary:
    """Build this rank's part of the model, load the last checkpoint, train, and return the summary."""
    signals: list[int] = []
    model = planned_model(run.plan)
    resumed = checkpoint.newest_on_ranks(run.folder, fingerprint=run.plan.fingerprint)
    recipe = run.recipe.continuing(resumed.manifest.recipe) if resumed else run.recipe
    weights = run.options.start.weights
    given = open_weights(weights, checkpoint.newest_on_ranks) if weights and not resumed else None
    own = agreed(lambda: loaded_steps(run.steps))
    engine = Engine.build(run.plan, model, recipe, own, weights=given.of(model) if given else None)
    not_finite = not_finite_note(given) if given else None
    if resumed:
        checkpoint.load(engine.state, resumed)
    first = dist.get_rank() == 0
    if resumed and first:
        write_run(run.folder, run.plan, model, run.file)
    console = InterruptibleConsole(signals) if first else Console(quiet=True)
    monitoring = run.options.monitoring if first else Monitoring()
    about = {**recipe.as_saved(), "layout": str(run.plan.layout)}
    with (
        open_trackers(monitoring, run.folder, done=engine.done, options=about) as trackers,
        progress_display(console, run.plan, steps=run.recipe.steps) as display,
    ):
        path = run.folder / METRICS_NAME if first else None
        metrics = MetricsFile(path, last_step=engine.done, trackers=trackers)
        for note in starting_notes(run.plan, model, given, recipe) if not resumed else ():
            display.print(note)
        if not_finite:
            display.print(not_finite)
        if is_synthetic(run.corpus):
            display.print(NOTE)
        if empty := empty_validation(run.corpus, run.options.data.split):
            display.print(f"no held-out loss: {empty}; give it a larger share, such as --split 90,10")
        with existing_objects_frozen(), collected_signals(signals):
            return Loop(run, engine, resumed, metrics, display, signals).run_to_end()


@define
class Loop:
    """A run in progress on one rank.

    All ranks take the same decisions: they depend on step counts, or are agreed on by an all-reduce.
    """

    run: TrainingRun
    engine: Engine
    resumed: Checkpoint | None
    metrics: MetricsFile
    display: ProgressDisplay
    signals: list[int]
    maker: SampleMaker = field(init=False)
    samples: int = field(init=False)  # training samples consumed
    epochs: int = field(init=False)  # that have ended
    saved: Path | None = field(init=False)  # the last whole checkpoint
    saver: Saver = field(init=False)
    stopped: int = field(default=0, init=False)  # the signal that asked any rank to stop
    save_asked: bool = field(default=False, init=False)  # by SIGUSR2, on any rank
    steps: list[StepMetrics] = field(factory=list, init=False)
    start: float = field(factory=time.monotonic, init=False)
    recorded: RecordedSteps = field(init=False)

    @maker.default
    def _maker(self) -> SampleMaker:
        maker = SampleMaker.of(self.engine.graph, self.run.plan.workload.seq)
        return of_corpus(maker, self.run.corpus, self.run.options.ends)

    @samples.default
    def _samples(self) -> int:
        """Return the samples that were consumed before this run."""
        return self.resumed.manifest.samples if self.resumed else 0

    @epochs.default
    def _epochs(self) -> int:
        """Return the number of whole passes over the training text."""
        return self.samples // self.run.corpus.train.windows(self.maker.length - 1)

    @recorded.default
    def _recorded(self) -> RecordedSteps:
        run = self.run
        return RecordedSteps(
            self.engine, run.folder, last_step=run.recipe.steps, profile=run.options.monitoring.profile
        )

    @saver.default
    def _saver(self) -> Saver:
        saving = self.run.options.saving
        in_background = bool(device.gpu_count()) if saving.async_save is None else saving.async_save
        return Saver(self.run.folder, Retention(saving.keep_last, saving.keep_best), in_background)

    @saved.default
    def _saved(self) -> Path | None:
        return self.resumed.folder if self.resumed else None

    def run_to_end(self) -> Summary:
        """Train to the last step, or until a signal asks to stop."""
        run, engine = self.run, self.engine
        for line in resume_notes(self.resumed, run, engine.recipe) if self.resumed else ():
            self.display.print(line)
        for line in start_notes(run, self.engine.graph, self.maker):
            self.display.print(line)
        self.saver.remove_unfinished()
        while engine.done < run.recipe.steps and not self.stopped:
            with ended_if_stuck():
                self._train_step()
            self._look_at_signals()
            self._evaluate_and_save()
        self._finish_save()  # before the evaluation at the end, which may be stopped
        self.saver.close()
        held_out = self._evaluate(run.corpus.validation, "held-out", last=True)
        test = self._evaluate(run.corpus.test, "test", last=True)
        return self._summary(held_out, test)

    def _evaluate_and_save(self) -> None:
        """Evaluate and save after a step, where it is time for that or a signal asks for it."""
        run, done, last = self.run, self.engine.done, self.engine.done == self.run.recipe.steps
        saving, evaluation = run.options.saving, run.options.evaluation
        ends_epoch, self.epochs = self._epochs() > self.epochs, self._epochs()
        epoch = self.epochs if ends_epoch and saving.save_every_epoch else None
        due = done % saving.save_every == 0 or last or epoch is not None
        at_epoch = ends_epoch and evaluation.evaluate_every_epoch
        evaluates = (done % evaluation.evaluate_every == 0 or at_epoch) and not last
        evaluates |= bool(saving.keep_best and (due or self.save_asked))
        result = self._evaluate(run.corpus.validation, "held-out") if evaluates else None
        if due or self.save_asked or self.stopped:
            self._save(result, epoch)
        if self.save_asked:
            self.display.print(f"step {done}  saving a checkpoint, as SIGUSR2 asks")
            self.save_asked = False

    def _train_step(self) -> None:
        workload, first = self.run.plan.workload, self.samples
        batch = self.run.recipe.batch_at(first, workload.batch)
        recorder = self.recorded.recorder()
        with recorder.recording() if recorder else nullcontext():
            start = time.monotonic()
            try:
                result = self.engine.step(lambda i: self._training_sample(first + i), batch)
            except NonFiniteError as error:  # on all ranks
                self._finish_save()
                raise UserError(f"{error}\n{self._diverged()}") from None
            seconds = time.monotonic() - start
        for line in self.recorded.take(recorder) if recorder else ():
            self.display.print(line)
        self.samples += batch
        speed = speed_of(self.run.plan, seconds, batch)
        step = StepMetrics(
            step=self.engine.done,
            **asdict(result),
            tokens=self.samples * workload.seq,
            seconds=seconds,
            tokens_per_second_per_device=speed.tokens_per_second,
            flops_per_second_per_device=speed.flops_per_second,
            mfu=speed.mfu,
            peak_nbytes=self._largest_peak(),
        )
        self.steps.append(step)
        self.metrics.write("step", **asdict(step, filter=_is_written))
        self.display.show_step(step)

    def _largest_peak(self) -> int:
        """Return the peak memory of the rank with the most, until now."""
        return largest(device.peak_memory())[0]

    def _diverged(self) -> str:
        """Return the last checkpoint and what to try after a loss or gradient that is not finite."""
        saved = f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
        lr = self.engine.recipe.peak_lr
        advice = f"try a --lr below {lr:g}, another --seed, or skip such steps with --skip-non-finite"
        return f"this step is not saved ({saved}); {advice}"

    def _evaluate(self, data: DataSplit | None, name: str, *, last: bool = False) -> EvaluationResult | None:
        """Return the loss on a split of the data, or on samples of it, which are the same in each evaluation.

        None if there is no such split, or a signal has asked to stop. last: at the end of the run. That evaluation runs
        the user's test_step: on the test split, or on the held-out data if there is no test split. The others run
        validation_step.
        """
        if not data or self.stopped:
            return None
        seq = self.maker.length - 1
        available, samples = data.held_out_samples(seq), self.run.evaluation_samples(data, seq)
        if last:
            samples = self.run.last_evaluation_samples(data, seq, trained=self.samples)
            self.display.print(self.run.extent_text(data, seq, samples))
        is_last = name == "test" or (last and not self.run.corpus.test)
        result = self.engine.evaluate_samples(
            lambda i: held_out_sample(data, self.maker, self.engine.steps, i),
            samples,
            step="test" if is_last else "validation",
            micro_batch=self.run.options.evaluation.evaluate_micro_batch,
            stops=lambda done: self._stops_evaluation(name, done * seq, samples * seq),
        )
        if self.stopped:
            return None
        event = "test" if name == "test" else "evaluation"
        values = asdict(result, filter=_is_written)
        self.metrics.write(event, step=self.engine.done, **values, perplexity=result.perplexity)
        count = f"{'all ' if last and samples == available else ''}{result.tokens:,} {self.maker.counted_word}"
        self.display.print(f"step {self.engine.done}  {name} {loss_text(result, self.maker.unit)} ({count})")
        return result

    def _stops_evaluation(self, name: str, done: int, tokens: int) -> bool:
        """Show the progress of an evaluation, and return whether a signal has asked to stop."""
        self._look_at_signals()
        self.display.show_evaluation(self.engine.done, name, done, tokens)
        if self.stopped:
            self.display.print(f"step {self.engine.done}  stopped after {done:,} of {tokens:,} {name} tokens")
        return bool(self.stopped)

    def _training_sample(self, i: int) -> Sample:
        """Return sample i of training."""
        return training_sample(self.run.corpus.train, self.maker, self.engine.steps, i, self.run.recipe.seed)

    def _save(self, validation: EvaluationResult | None, epoch: int | None) -> None:
        """Save a checkpoint, or begin to. Where the best are kept, its folder is named after the validation loss.

        epoch: the one that has ended, if the folder is to be named after it.
        """
        self._finish_save()
        manifest = evolve(
            self.engine.manifest(),
            samples=self.samples,
            data=self.run.corpus.digest,
            epoch=epoch,
            validation_loss=validation.loss if validation and self.run.options.saving.keep_best else None,
        )
        self.saver.start(self.engine.state, manifest)
        if not self.saver.asynchronous:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is whole on disk."""
        if saved := self.saver.finish():
            self.saved = saved.folder
            seconds, stall = saved.seconds, saved.stall_seconds
            self.metrics.write("checkpoint", step=saved.manifest.step, seconds=seconds, stall_seconds=stall)

    def _look_at_signals(self) -> None:
        """Note a signal that asked any rank to stop, and whether SIGUSR2 asked any rank to save. All ranks agree.

        Signals may reach ranks at different steps, or not. A checkpoint that all ranks have written meanwhile is
        finished.
        """
        stop = max((number for number in self.signals if number != signal.SIGUSR2), default=0)
        save = self.signals.count(signal.SIGUSR2)
        numbers = largest(stop, save, int(self.saver.is_writing))
        while signal.SIGUSR2 in self.signals:
            self.signals.remove(signal.SIGUSR2)
        if not numbers[2]:
            self._finish_save()
        self.stopped, self.save_asked = numbers[0], self.save_asked or bool(numbers[1])

    def _summary(self, held_out: EvaluationResult | None, test: EvaluationResult | None) -> Summary:
        assert self.saved, "a run ends with a checkpoint"
        predicts_tokens = self.maker.objective.predicts_text and self.maker.unit
        validation = self.run.corpus.validation if predicts_tokens else None
        entropy = validation.unigram_entropy() if validation else None
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, device.peak_memory())
        recent = [step for step in self.steps[-RECENT_STEPS:] if not step.skipped]
        return Summary(
            step=self.engine.done,
            resumed=self.resumed.manifest.step if self.resumed else None,
            stopped=self.stopped,
            skipped=sum(step.skipped for step in self.steps),
            tokens=(self.samples - self._samples()) * self.run.plan.workload.seq,
            seconds=time.monotonic() - self.start,
            step_seconds=statistics.median(step.seconds for step in self.steps) if self.steps else None,
            train_loss=statistics.mean(step.loss for step in recent) if recent else None,
            train_terms=_means([step.terms for step in recent]),
            train_report=_means([step.report for step in recent]),
            held_out=held_out,
            test=test,
            unigram_entropy=entropy,
            unit=self.maker.unit,
            counted=self.maker.counted_word,
            peak_nbytes=tuple(peaks),
            checkpoint=self.saved,
            stage_times=self.recorded.stage_times,
            trace=self.recorded.trace,
            synthetic=is_synthetic(self.run.corpus),
            lowest_lr=self.engine.recipe.lowest_lr,
        )


def _is_written(attribute: Attribute[Any], value: object) -> bool:
    """Return whether a field of a result is written to metrics.jsonl: scores and reports only where there are any."""
    return bool(value) or attribute.name not in ("scores", "report")


def _means(rows: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each term of some steps."""
    return {name: statistics.mean(row[name] for row in rows) for name in (rows[0] if rows else {})}
