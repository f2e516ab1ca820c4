"""A training run, started from the user's process: it launches the ranks or, under torchrun or srun, is one of them.

    run/model.json  run/plan.json  run/run.json  run/data/  run/tokenizer/  run/metrics.jsonl  run/step-000100/

`train` checks everything that can be checked without training, then runs `loop.train_on_rank` on every rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from attrs import asdict, evolve

from megaloom.dsl.catalog import config_fields, config_of
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Model, graph
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime.checkpoints.checkpoint_folder import Retention, latest
from megaloom.runtime.data.folder_lock import check_free, locked_folder, named_write_errors
from megaloom.runtime.data.text_files import STDLIB
from megaloom.runtime.data.token_ids import BYTE_IDS
from megaloom.runtime.data.tokenizer import tokenizer_of
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.agreement import agreed
from megaloom.runtime.launch.rank import COLLECTIVE_TIMEOUT
from megaloom.runtime.launch.rendezvous import join, started_by_launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.metrics.metrics_file import METRICS_NAME
from megaloom.runtime.metrics.watching import Watching
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.end_of_document import NO_ENDS, EndOfDocument, saved_ends
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.weights.kept_files import keep_files

from .collected_signals import WHILE_TRAINING
from .evaluation_options import DEFAULT_EVALUATION, EvaluationOptions
from .failures import advice_if_rank_failed, errors_with_rank, memory_and_disk_advice
from .host_memory import check_host_memory
from .initial_weights import check_other_folder, config_beside, open_weights, tokenizer_folder
from .rank_inputs import check_same_data, check_same_plan, check_shared_folder
from .run_data import (
    DataOptions,
    as_sources,
    check_data,
    check_keep_best,
    check_labels,
    check_rampup,
    check_tokenizer,
    of_corpus,
    open_data,
    steps_of,
)
from .run_folder import (
    TOKENIZER_NAME,
    TOKENIZER_OPTION,
    UNKNOWN_TOKENIZER,
    check_folder,
    is_run,
    load_options,
    save_run,
)
from .steps_reference import STEPS_OPTION, loaded_steps, options_of_steps, steps_of_run
from .training_run import Summary, TrainingRun

SAVE_SECONDS = 300.0
"""Time that the ranks of an interrupted run have to finish their step and save."""


def train(
    plan: Plan,
    recipe: Recipe,
    *,
    folder: Path,
    source: str | Sequence[str] = STDLIB,
    split: str | None = None,
    epochs: float | None = None,
    ends: EndOfDocument = NO_ENDS,
    save_every: int = 100,
    evaluate_every: int = 100,
    evaluate_batches: int | None = None,
    evaluate_all: bool = False,
    retention: Retention = Retention(),  # noqa: B008 (frozen)
    asynchronous_saves: bool | None = None,
    steps: object = None,
    weights: Path | None = None,
    evaluation: EvaluationOptions = DEFAULT_EVALUATION,
    watching: Watching = Watching(),  # noqa: B008 (frozen)
    distributed_timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Summary:
    """Train the plan's model on the text of `source`, starting from the last checkpoint in `folder` if there is one.

    source: "stdlib", a file or folder of text, or prefixes of indexed datasets, each after its weight if they have any.
    split: shares of training, validation and test of indexed datasets, such as "969,30,1". epochs: train for as many
    steps as visit the training text so often, instead of the recipe's. ends: what happens at end-of-document tokens.
    steps: an object with any of the methods of `Steps`, of a class that every process can import; or a reference to
    such a class, "own.py:KeyTokens(alpha=0.5)", which the run keeps; None is that of the run, if it continues, and
    "none" are the steps of the declared objective. weights: another run, a Hugging Face folder or a checkpoint of
    Megatron-LM with the initial weights, of which each rank reads its shards.

    evaluate_batches: global batches of held-out text that each evaluation reads. By default 65,536 tokens, and at the
    end as many as the run has trained on. evaluate_all: at the end all of it. evaluation: what is evaluated and saved
    at the ends of epochs, and the micro-batch.

    retention: the checkpoints that are kept. asynchronous_saves: copy the state to host memory and train on while it is
    written. By default on GPUs only: on CPU the copy would be in the memory that the plan counts. watching: the step
    whose trace is written, and trackers.

    distributed_timeout: time that ranks wait for one another before the run ends with an error.

    Raise UserError for every problem that the user can solve, and RankError if a rank dies or hangs. A first SIGINT,
    SIGTERM or SIGUSR1 lets the ranks finish their step and save; then it is raised as KeyboardInterrupt or SystemExit.
    After SIGUSR2 they save and go on.
    """

    def prepared() -> TrainingRun:
        data, every = (
            DataOptions(as_sources(source), split, epochs, ends),
            (save_every, evaluate_every, evaluate_batches, evaluate_all),
        )
        with named_write_errors(folder, "free some space, or choose another folder with --out"):
            return prepare_run(
                plan, recipe, folder, data, *every, retention, steps, weights, asynchronous_saves, evaluation, watching
            )

    if started_by_launcher():
        join(plan.layout.world, distributed_timeout)
        given = {"data": as_sources(source), "split": split, "epochs": epochs, "out": folder, "from": weights}
        given |= {STEPS_OPTION: steps if isinstance(steps, str) else None}
        given |= {"save_every": save_every, "evaluate_every": evaluate_every, "async_save": asynchronous_saves}
        given |= {
            "evaluate_batches": evaluate_batches,
            "evaluate_all": evaluate_all,
            "keep_last": retention.last,
            "keep_best": retention.best,
            **asdict(evaluation),
            **asdict(ends),
            **asdict(watching),
        }
        check_same_plan(plan, recipe, given, weights)
        with errors_with_rank(folder):
            return _train_as_rank(prepared, folder)
    with locked(folder), advice_if_rank_failed(folder):
        return launcher.run(
            on_rank,
            (prepared(),),
            plan.layout.world,
            grace=SAVE_SECONDS,
            collective_timeout=distributed_timeout,
            words=WHILE_TRAINING,
        )[0]


def check_start(
    model: Model, seq: int, folder: Path, data: DataOptions, weights: Path | None, steps: object = None
) -> None:
    """Raise UserError for what can be refused before there is a plan: the run's folder, checkpoints, data and steps.

    A search takes seconds, and prints a plan. Nothing is written, and `prepare_run` checks all of it again.
    """
    if weights is not None:
        check_other_folder(weights, folder)
    check_free(folder, **lock_messages(folder))
    check_folder(folder)
    saved = latest(folder, fingerprint=fingerprint(model))
    if weights is not None and saved is None:
        open_weights(weights, latest).check(model)
    check_labels(graph(model), data.sources, loaded_steps(steps_of_run(folder, steps, continues=saved is not None)))
    maker = SampleMaker.of(graph(model), seq)
    check_data(data, maker)


def prepare_run(
    plan: Plan,
    recipe: Recipe,
    folder: Path,
    data: DataOptions,
    save_every: int,
    evaluate_every: int,
    evaluate_batches: int | None,
    evaluate_all: bool,
    retention: Retention,
    steps: object = None,
    weights: Path | None = None,
    asynchronous_saves: bool | None = None,
    evaluation: EvaluationOptions = DEFAULT_EVALUATION,
    watching: Watching = Watching(),  # noqa: B008 (frozen)
) -> TrainingRun:
    """Check plan, options, weights, checkpoint and text, and write data, model, plan and options into the folder.

    The model, plan and options of a run that is continued stay as they are until its checkpoint is loaded.
    """
    model = check_model(plan)
    maker = SampleMaker.of(graph(model), plan.workload.seq)
    for name, every in (
        ("save-every", save_every),
        ("evaluate-every", evaluate_every),
        ("evaluate-batches", evaluate_batches),
    ):
        if every is not None and every < 1:
            raise UserError(f"--{name} must be at least 1, got {every}")
    if evaluate_all and evaluate_batches is not None:
        raise UserError(
            f"--evaluate-all and --evaluate-batches {evaluate_batches} exclude each other\ngive one of them"
        )
    check_rampup(recipe, plan)
    recipe.check_layout(plan.layout)
    watching.check_packages()
    if not started_by_launcher():
        launcher.check(plan.layout.world)
        check_host_memory(plan)
    if weights is not None:
        check_other_folder(weights, folder)
    check_folder(folder)
    saved = latest(folder, fingerprint=plan.fingerprint)  # refuse another model's or a damaged one before any work
    steps = steps_of_run(folder, steps, continues=saved is not None)
    check_labels(graph(model), data.sources, loaded_steps(steps))
    if data.epochs is None:
        watching.check_steps(saved.manifest.step if saved else 0, recipe.steps)
    if weights is not None and saved is None:
        open_weights(weights).check(model)
    corpus = open_data(data, maker, folder / "data")
    if saved is not None:
        check_tokenizer(corpus, data.sources, folder / TOKENIZER_NAME, f"the run in {folder}")
    elif weights is not None:
        check_tokenizer(corpus, data.sources, tokenizer_folder(weights), f"--from {weights}")
    check_keep_best(corpus, data.split, retention.best)
    if data.epochs is not None:
        recipe = evolve(
            recipe, steps=steps_of(data.epochs, corpus, of_corpus(maker, corpus), recipe, plan.workload.batch)
        )
        watching.check_steps(saved.manifest.step if saved else 0, recipe.steps)
    if corpus.tokenizer:
        shutil.copytree(corpus.tokenizer, folder / TOKENIZER_NAME, dirs_exist_ok=True)
    own = config_of(plan.model)
    config = own if weights is None else config_beside(weights) or own
    fields = config_fields(plan.model) if config and own and config.resolve() == own.resolve() else None
    other = corpus.ids == BYTE_IDS and config is not None and tokenizer_of((config.parent,)) != BYTE_IDS.name
    keep_files(folder, config, corpus.tokenizer, fields=fields, beside=not other)
    options = {
        "data": [_absolute(word) for word in data.sources],
        "split": data.split,
        "save_every": save_every,
        "evaluate_every": evaluate_every,
        "evaluate_batches": evaluate_batches,
        "evaluate_all": evaluate_all or None,
        "keep_last": retention.last,
        "keep_best": retention.best,
        "async_save": asynchronous_saves,
        **{name: value or None for name, value in asdict(evaluation).items()},
        **saved_ends(data.ends),
        "tensorboard": watching.tensorboard or None,
        "tensorboard_dir": None if watching.tensorboard_dir is None else str(watching.tensorboard_dir.resolve()),
        "wandb": watching.wandb,
        **options_of_steps(steps),
    }
    if corpus.ids != BYTE_IDS and corpus.tokenizer is None and corpus.kind.image is None:
        options[TOKENIZER_OPTION] = UNKNOWN_TOKENIZER
    before = load_options(folder) if is_run(folder) else None
    if saved is None:  # else ranks save it once they have loaded the checkpoint
        save_run(folder, plan, model, recipe, options)
    return TrainingRun(
        plan=plan,
        recipe=recipe,
        corpus=corpus,
        folder=folder,
        save_every=save_every,
        evaluate_every=evaluate_every,
        evaluate_batches=evaluate_batches,
        evaluate_all=evaluate_all,
        retention=retention,
        asynchronous_saves=bool(device.gpu_count()) if asynchronous_saves is None else asynchronous_saves,
        steps=steps,
        weights=weights,
        evaluation=evaluation,
        ends=data.ends,
        watching=watching,
        options_before=before,
        options=options,
    )


def _absolute(word: str) -> str:
    """Return the absolute path of a file, a folder or an indexed dataset; other words as they are."""
    return str(Path(word).resolve()) if Path(word).exists() or Path(f"{word}.idx").exists() else word


def check_model(plan: Plan) -> Model:
    """Return the plan's model. Raise UserError if it has changed since, or cannot be trained."""
    model = planned_model(plan)
    check_plan(plan, model)
    check_trainable(plan, model)
    return model


def on_rank(run: TrainingRun) -> Summary:
    """Train on this rank, and return the summary, which is equal on all ranks."""
    from .loop import train_on_rank  # imports megatron-core, which the process that only starts ranks does not need

    with memory_and_disk_advice(run):
        return train_on_rank(run)


def locked(folder: Path) -> AbstractContextManager[None]:
    """Return a context that holds the lock of a run folder, so that no second run writes there.

    Entering raises UserError if another run holds it, or the folder cannot be created. A run that is refused before
    its first step leaves nothing.
    """
    return locked_folder(folder, **lock_messages(folder), kept=(folder / METRICS_NAME).exists)


def lock_messages(folder: Path) -> dict[str, str]:
    """Return the messages for a run folder that another run holds or that cannot be written."""
    held = f"another run is training in {folder}\nwait until it ends, or choose another folder with --out"
    return {"held": held, "choose": "choose a writable folder with --out"}


def _train_as_rank(prepared: Callable[[], TrainingRun], folder: Path) -> Summary:
    """Train on this rank, which torchrun or srun has started, once the ranks have compared their inputs."""
    first = dist.get_rank() == 0
    with ExitStack() as stack:
        agreed(lambda: stack.enter_context(locked(folder)) if first else None, names_rank=False)
        check_shared_folder(folder)
        run = [agreed(lambda: prepared() if first else None, names_rank=False)]
        dist.broadcast_object_list(run)
        assert run[0]
        check_same_data(run[0].corpus)
        return on_rank(run[0])
