"""A whole run, called in the process that the user started: it starts the ranks or, under torchrun or srun, is one.

    run/plan.json  run/data/  run/metrics.jsonl  run/step-000100/  run/step-000200/

`on_rank` is what each rank does: it builds its part of the model, takes up what the run folder holds, and loops.
"""

from __future__ import annotations

import errno
import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, vocabulary
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.plans import save as save_plan
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import inside, join

from . import checkpoint, data
from .loop import Loop, Run, Summary
from .metrics import Journal, Screen, display
from .recipe import Recipe

GRACE = 300.0
"""Seconds that the ranks of an interrupted run have to finish their step and save."""


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
            launcher.check(plan.layout.world)
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
        return launcher.run(on_rank, (prepared(),), plan.layout.world, grace=GRACE)[0]


def fitting(plan: Plan) -> Model:
    """The plan's model, if it is still the one that was planned and knows all bytes. UserError otherwise."""
    model, _ = find(plan.model)
    check_plan(plan, model)
    check_trainable(plan, model)
    vocab = vocabulary(model)
    if vocab < data.VOCAB:
        raise UserError(
            f"{model.name} has a vocabulary of {vocab}, and text comes as {data.VOCAB} bytes\n"
            f'declare it with Dim("vocab", {data.VOCAB}) or more'
        )
    return model


def on_rank(run: Run) -> Summary:
    """What every rank does, from building its part of the model to the summary, which is the same on all."""
    from .engine import Engine

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
