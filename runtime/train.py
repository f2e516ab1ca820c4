"""The loop: train to the recipe's last step, evaluate and save on the way, go on from what the run folder holds.

    run/plan.json  run/data/  run/metrics.jsonl  run/step-000100/  run/step-000200/

`train` is a whole run, called in the process that the user started: it starts the ranks or, under torchrun or srun,
is one of them. `on_rank` is what each of them does, and a `Run` is all that they must know.
"""

from __future__ import annotations

import errno
import fcntl
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen
from rich.console import Console

from megaloom.dsl.errors import UserError
from megaloom.dsl.find import find
from megaloom.dsl.graph import Model, vocabulary
from megaloom.planner.plan import Plan, check
from megaloom.planner.plan import save as save_plan

from . import checkpoint, data, device, launch
from .checkpoint import Checkpoint, Note
from .data import Corpus, Tokens
from .join import inside, join
from .metrics import Display, Journal, Screen, Step, display
from .recipe import Recipe

if TYPE_CHECKING:  # it imports megatron-core, which `device.prepare` has to come before
    from .step import Engine

GRACE = 300.0
"""Seconds that the ranks of an interrupted run have to finish their step and save."""

EVALUATION = 65536
"""Tokens of held-out text that one evaluation reads, about."""


@frozen(kw_only=True)
class Run:
    """All that a rank must know: what is computed (plan, recipe, corpus), and what is kept and told of it."""

    plan: Plan
    recipe: Recipe
    corpus: Corpus
    folder: Path
    save_every: int  # steps
    evaluate_every: int  # steps

    @property
    def evaluate_batches(self) -> int:
        """Global batches of one evaluation; never more than the held-out text has."""
        load = self.plan.workload
        return max(1, min(EVALUATION // load.tokens, self.corpus.held_out.windows(load.seq) // load.batch))


@frozen(kw_only=True)
class Summary:
    """What a run came to."""

    step: int  # reached
    resumed: int | None  # the step it went on from
    stopped: int  # the number of the signal that stopped it before the recipe's last step; 0 if none did
    tokens: int  # trained on since it went on
    seconds: float  # since it went on, all in all
    step_seconds: float | None  # median
    train_loss: float | None  # mean of the last steps, nats a token
    held_out_loss: float | None  # nats a token; None if stopped
    unigram_entropy: float  # of the held-out text
    peak_nbytes: tuple[int, ...]  # by rank
    checkpoint: Path


def train(
    plan: Plan,
    recipe: Recipe,
    *,
    folder: Path,
    source: str = data.STDLIB,
    save_every: int = 100,
    evaluate_every: int = 100,
) -> Summary:
    """Train the plan's model on the text of `source`, going on from the last checkpoint in `folder`.

    UserError for whatever the user can mend. A first SIGINT or SIGTERM stops after a step and saves; it then
    passes on as KeyboardInterrupt or SystemExit.
    """

    def prepared() -> Run:
        fitting(plan)
        for name, every in (("save-every", save_every), ("evaluate-every", evaluate_every)):
            if every < 1:
                raise UserError(f"{name} {every}: give at least 1 step")
        if not inside():
            launch.check(plan.layout.world)
        checkpoint.latest(folder, fingerprint=plan.fingerprint)  # refuse a foreign or damaged one before the work
        corpus = data.gather(source, folder / "data")
        for text in (corpus.train, corpus.held_out):
            text.windows(plan.workload.seq)
        save_plan(plan, folder / "plan.json")
        return Run(
            plan=plan,
            recipe=recipe,
            corpus=corpus,
            folder=folder,
            save_every=save_every,
            evaluate_every=evaluate_every,
        )

    if inside():
        join(plan.layout.world)
        with claimed(folder) if dist.get_rank() == 0 else nullcontext():
            return on_rank(_from_first(prepared))
    with claimed(folder):
        return launch.run(on_rank, (prepared(),), plan.layout.world, grace=GRACE)[0]


def fitting(plan: Plan) -> Model:
    """The plan's model, if it is still the one that was planned and knows all bytes. UserError otherwise."""
    model, _ = find(plan.model)
    check(plan, model)
    vocab = vocabulary(model)
    if vocab < data.VOCAB:
        raise UserError(
            f"{model.name} has a vocabulary of {vocab}, and text comes as {data.VOCAB} bytes\n"
            f'declare it with Dim("vocab", {data.VOCAB}) or more'
        )
    return model


def on_rank(run: Run) -> Summary:
    """What every rank does, from building its part of the model to the summary, which is the same on all."""
    from .step import Engine

    with _signals() as caught, _room(run):
        model, _ = find(run.plan.model)
        engine = Engine.build(run.plan, model, run.recipe)
        found = checkpoint.latest(run.folder, fingerprint=run.plan.fingerprint)
        if found:
            checkpoint.load(engine, found)
        first = dist.get_rank() == 0
        journal = Journal(run.folder / "metrics.jsonl" if first else None, step=engine.done)
        console = Screen(caught) if first else Console(quiet=True)
        with display(console, steps=run.recipe.steps, done=engine.done, step_tokens=run.plan.workload.tokens) as shown:
            return Loop(run, engine, found, journal, shown, caught).go()


@define
class Loop:
    """The state of a run on one rank. Every rank takes the same decisions: from counts of steps, or by agreement."""

    run: Run
    engine: Engine
    found: Checkpoint | None
    journal: Journal
    shown: Display
    caught: list[int]  # signals
    samples: int = field(init=False)  # consumed, of training text
    saved: Path | None = field(init=False)
    steps: list[Step] = field(factory=list, init=False)
    start: float = field(factory=time.monotonic, init=False)

    @samples.default
    def _samples(self) -> int:
        return self.found.note.samples if self.found else 0

    @saved.default
    def _saved(self) -> Path | None:
        return self.found.folder if self.found else None

    def go(self) -> Summary:
        """Train, evaluating and saving on the way; stop early on a signal."""
        run, engine = self.run, self.engine
        self._greet()
        loss, stopped = None, 0
        while engine.done < run.recipe.steps and not stopped:
            self._step()
            last = engine.done == run.recipe.steps
            stopped = 0 if last else self._asked_to_stop()
            if engine.done % run.save_every == 0 or last or stopped:
                self._save()
            if engine.done % run.evaluate_every == 0 and not last and not stopped:
                self._evaluate()
        if not stopped:
            loss = self._evaluate()
        return self._summary(loss, stopped)

    def _greet(self) -> None:
        if not self.found:
            return
        note, steps = self.found.note, self.run.recipe.steps
        done = "the finished run" if note.step >= steps else f"step {note.step} of {steps}"
        self.shown.say(f"resumed from {done} ({self.found.folder})")
        if note.layout != str(self.run.plan.layout):
            self.shown.say(f"saved under the layout {note.layout}, loaded into {self.run.plan.layout}")
        recipe = asdict(self.run.recipe)
        changed = [
            f"{name.replace('_', '-')} {was:g}, now {recipe[name]:g}"
            for name, was in note.recipe.items()
            if name != "steps" and name in recipe and was != recipe[name]
        ]
        if changed:
            self.shown.say(f"saved with {', '.join(changed)}")
        if note.data != self.run.corpus.digest:
            self.shown.say(f"the text has changed since step {note.step}, or is another")

    def _step(self) -> None:
        load, text, first = self.run.plan.workload, self.run.corpus.train, self.samples
        begun = time.monotonic()
        result = self.engine.step(lambda i: _tensor(text, first + i, load.seq, self.run.recipe.seed))
        seconds = time.monotonic() - begun
        self.samples += load.batch
        step = Step(step=self.engine.done, **asdict(result), tokens=self.samples * load.seq, seconds=seconds)
        if not math.isfinite(step.loss + step.grad_norm):
            raise UserError(
                f"step {step.step}: the loss is {step.loss} and the gradient norm {step.grad_norm}, no longer finite\n"
                f"nothing of it was saved ({self._where()}); try a smaller --lr than {self.run.recipe.lr:g}, "
                "or another --seed"
            )
        self.steps.append(step)
        self.journal.write("step", **asdict(step))
        self.shown.step(step)

    def _evaluate(self) -> float:
        """The mean loss on the held-out text: the same samples each time."""
        seq, text = self.run.plan.workload.seq, self.run.corpus.held_out
        loss = self.engine.evaluate(lambda i: _tensor(text, i, seq, 0), self.run.evaluate_batches)
        self.journal.write("evaluation", step=self.engine.done, loss=loss)
        self.shown.say(f"step {self.engine.done}: held-out loss {loss:.4f} nats a byte")
        return loss

    def _save(self) -> None:
        plan, corpus = self.run.plan, self.run.corpus
        begun = time.monotonic()
        note = Note(
            step=self.engine.done,
            samples=self.samples,
            model=plan.model,
            fingerprint=plan.fingerprint,
            data=corpus.digest,
            recipe=asdict(self.run.recipe),
            layout=str(plan.layout),
        )
        self.saved = checkpoint.save(self.engine, self.run.folder, note)
        self.journal.write("checkpoint", step=self.engine.done, seconds=time.monotonic() - begun)

    def _asked_to_stop(self) -> int:
        """By which signal any rank was, or 0: they need not reach all of them, nor in the same step."""
        number = torch.tensor(max(self.caught, default=0), device=device.current())
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def _where(self) -> str:
        return f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"

    def _summary(self, held_out_loss: float | None, stopped: int) -> Summary:
        assert self.saved, "a run ends with a checkpoint"
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, self.engine.peak_memory())
        tail = [step.loss for step in self.steps[-20:]]
        return Summary(
            step=self.engine.done,
            resumed=self.found.note.step if self.found else None,
            stopped=stopped,
            tokens=len(self.steps) * self.run.plan.workload.tokens,
            seconds=time.monotonic() - self.start,
            step_seconds=statistics.median(step.seconds for step in self.steps) if self.steps else None,
            train_loss=statistics.mean(tail) if tail else None,
            held_out_loss=held_out_loss,
            unigram_entropy=self.run.corpus.held_out.unigram_entropy(),
            peak_nbytes=tuple(peaks),
            checkpoint=self.saved,
        )


def _tensor(text: Tokens, i: int, seq: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(text.sample(i, seq=seq, seed=seed))


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """No two runs in one folder: the second is refused. The claim ends with the process. UserError also if the folder
    cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"cannot write in {folder}: {error.strerror}\ngive --out a folder that can be written"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is training in {folder}\nwait for its end, or give --out another") from None
        yield


def _from_first(make: Callable[[], Run]) -> Run:
    """What rank 0 makes, or its UserError, on all ranks."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except UserError as error:
            made[0] = error
    dist.broadcast_object_list(made)
    if isinstance(made[0], UserError):
        raise made[0]
    return made[0]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that ask this rank to stop, as they come; nothing is broken off."""
    caught: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT) if inside() else (signal.SIGTERM,)
    before = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _room(run: Run) -> Iterator[None]:
    """Running out of memory, or of disk, is the user's to mend."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "can't allocate memory" not in str(error):
            raise
        plan = run.plan
        load, device_ = plan.workload, plan.cluster.device
        predicted = max(sum(holders.values()) for holders in plan.predicted.nbytes)
        raise UserError(
            f"{load.batch} sequences of {load.seq} tokens, under {plan.layout}, do not fit in this device's memory: "
            f"{str(error).splitlines()[0]}\n"
            f"the plan predicts {predicted / 2**30:.1f} of the {device_.nbytes / 2**30:.1f} GiB of a {device_.name}; "
            "give it a smaller --batch or --seq, --micro-batch 1, --recompute full, or more devices"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"cannot write in {run.folder}, or what is shown: {error.strerror}\n{checkpoint.remains(run.folder)}"
        ) from error
