"""A training run, started from the user's process: checked, prepared, and launched on its ranks.

run/model.json  run/plan.json  run/run.json  run/data/  run/tokenizer/  run/metrics.jsonl  run/step-000100/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaloom.planner.contract.plans import Plan
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.options.groups import STDLIB

from .check import check_run
from .chosen_backend import with_backend
from .launch import launch_run, owned_folder, prepared_once
from .prepare import prepare_run
from .run_options import RunOptions
from .training_run import Summary, TrainingRun


def train_run(plan: Plan, options: RunOptions) -> Summary:
    """Train the plan's model, starting from the last checkpoint in the folder of the run if there is one.

    Raise UserError for every problem that the user can solve, and RankError if a rank dies or hangs. A first SIGINT,
    SIGTERM or SIGUSR1 lets the ranks finish their step and save; then it is raised as KeyboardInterrupt or SystemExit.
    After SIGUSR2 they save and go on.
    """
    plan = with_backend(plan, options.kernels.backend)

    def prepared() -> TrainingRun:
        return prepare_run(plan, options, check_run(plan, options))

    with owned_folder(plan, options):
        return launch_run(prepared_once(prepared))


def train(
    plan: Plan,
    recipe: Recipe,
    *,
    folder: Path,
    source: str | Sequence[str] = STDLIB,
    steps: object = None,
    weights: Path | None = None,
    **options: Any,
) -> Summary:
    """Train the plan's model on the text of `source`, starting from the last checkpoint in `folder` if there is one.

    source: "stdlib", a file or folder of text, or prefixes of indexed datasets, each after its weight if they have any.
    steps: an object with any of the methods of `Steps`, of a class that every process can import; or a reference to
    such a class, "own.py:KeyTokens(alpha=0.5)", which the run keeps; None is that of the run, if it continues, and
    "none" are the steps of the declared objective. weights: another run, a Hugging Face folder or a checkpoint of
    Megatron-LM with the initial weights, of which each rank reads its shards. options: other options of `megaloom
    train`, with its names and defaults: `split="969,30,1"`, `epochs=2`, `save_every=50`, `keep_best=3`,
    `evaluate_all=True`, `profile=5`; or a whole group of them, `ends`, `evaluation` or `monitoring`.

    Raise UserError for every problem that the user can solve, and RankError if a rank dies or hangs. A first SIGINT,
    SIGTERM or SIGUSR1 lets the ranks finish their step and save; then it is raised as KeyboardInterrupt or SystemExit.
    After SIGUSR2 they save and go on.
    """
    given = {"out": folder, "data": source, "steps_from": steps, "weights": weights, **options}
    return train_run(plan, RunOptions(recipe=recipe).changed(**given))
