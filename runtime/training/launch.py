"""The third phase of a run: its ranks are started, or are there, and train.

`megaloom train` starts the ranks; under torchrun or srun each process is one of them, and the first prepares the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.agreement import agreed, from_first_rank
from megaloom.runtime.launch.rendezvous import join, started_by_launcher

from .collected_signals import WHILE_TRAINING
from .failures import advice_if_rank_failed, errors_with_rank, memory_and_disk_advice
from .rank_inputs import check_same_data, check_same_plan, check_shared_folder
from .run_folder import locked
from .run_options import RunOptions
from .training_run import Summary, TrainingRun

SAVE_SECONDS = 300.0
"""Time that the ranks of an interrupted run have to finish their step and save."""


@contextmanager
def owned_folder(plan: Plan, options: RunOptions) -> Iterator[None]:
    """Hold the lock of the folder of a run, and name its last saved step in errors of its ranks.

    Ranks of torchrun or srun meet and compare plan and options before; the first of them holds the lock.
    """
    folder = options.folder
    if not started_by_launcher():
        with locked(folder), advice_if_rank_failed(folder):
            yield
        return
    join(plan.layout, options.start.distributed_timeout)
    check_same_plan(plan, options)
    with errors_with_rank(folder), ExitStack() as stack:
        agreed(lambda: stack.enter_context(locked(folder)) if dist.get_rank() == 0 else None, names_rank=False)
        check_shared_folder(folder)
        yield


def prepared_once(prepare: Callable[[], TrainingRun]) -> TrainingRun:
    """Return the run that this process prepares or, on ranks of torchrun or srun, the first of them for all."""
    if not started_by_launcher():
        return prepare()
    run = from_first_rank(prepare)
    check_same_data(run.corpus)
    return run


def launch_run(run: TrainingRun) -> Summary:
    """Train on all ranks, and return the summary, which is equal on all of them."""
    if started_by_launcher():
        return train_on_this_rank(run)
    return launcher.run(
        train_on_this_rank,
        (run,),
        run.plan.layout,
        grace=SAVE_SECONDS,
        collective_timeout=run.options.start.distributed_timeout,
        words=WHILE_TRAINING,
    )[0]


def train_on_this_rank(run: TrainingRun) -> Summary:
    """Train on this rank, and return the summary."""
    from .loop import train_on_rank  # imports megatron-core, which the process that only starts ranks does not need

    with memory_and_disk_advice(run):
        return train_on_rank(run)
