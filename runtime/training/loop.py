"""The loop: train to the recipe's last step, evaluate and save on the way.

A `Run` is all that a rank must know, a `Summary` what it came to. Every rank goes through the same loop.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.megatron import device

from . import checkpoint
from .checkpoint import Checkpoint, Note
from .data import Corpus, Tokens
from .metrics import Display, Journal, Step
from .recipe import Recipe

if TYPE_CHECKING:  # it imports megatron-core, which `device.prepare` has to come before
    from .engine import Engine

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
