"""The second phase of a run: data, tokenizer, model, plan and options are written into its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from attrs import evolve

from megaloom.dsl.catalog import config_fields, config_of
from megaloom.dsl.graph import graph
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.data.corpus import Corpus
from megaloom.runtime.data.folder_lock import named_write_errors
from megaloom.runtime.data.token_ids import BYTE_IDS
from megaloom.runtime.data.tokenizer import tokenizer_of
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.weights.hugging_face_files import copy_to_run

from .check import Start
from .initial_weights import config_beside, tokenizer_folder
from .run_data import check_keep_best, check_tokenizer, of_corpus, open_data, steps_of
from .run_folder import TOKENIZER_NAME, UNKNOWN_TOKENIZER, file_of_run, write_run
from .run_options import RunOptions
from .steps_reference import with_steps
from .training_run import TrainingRun


def prepare_run(plan: Plan, options: RunOptions, start: Start) -> TrainingRun:
    """Check the data, write what the folder of a run has before its first step, and return the run.

    The model, plan and options of a run that is continued stay as they are until its checkpoint is loaded.
    """
    folder, maker = options.folder, SampleMaker.of(graph(start.model), plan.workload.seq)
    with named_write_errors(folder, "free some space, or choose another folder with --out"):
        corpus = open_data(options.data, options.ends, maker, folder / "data")
        _check_corpus(corpus, options, start)
        if options.data.epochs is not None:
            steps = steps_of(options.data.epochs, corpus, of_corpus(maker, corpus), options.recipe, plan.workload.batch)
            options = options.changed(steps=steps)
            options.monitoring.check_steps(start.done, steps)
        _keep_tokenizer(plan, corpus, options)
        file, before = with_steps(_absolute(options), start.steps), file_of_run(folder)
        if corpus.ids != BYTE_IDS and corpus.tokenizer is None and corpus.kind.image is None:
            file = evolve(file, tokenizer=UNKNOWN_TOKENIZER)
        if start.saved is None:  # else ranks write it once they have loaded the checkpoint
            write_run(folder, plan, start.model, file)
    return TrainingRun(plan=plan, corpus=corpus, folder=folder, file=file, steps=start.steps, before=before)


def _check_corpus(corpus: Corpus, options: RunOptions, start: Start) -> None:
    """Raise UserError for data of another tokenizer than the weights', or without a part that is asked for."""
    folder, weights, words = options.folder, options.start.weights, options.data.data
    if start.saved is not None:
        check_tokenizer(corpus, words, folder / TOKENIZER_NAME, f"the run in {folder}")
    elif weights is not None:
        check_tokenizer(corpus, words, tokenizer_folder(weights), f"--from {weights}")
    check_keep_best(corpus, options.data.split, options.saving.keep_best)


def _keep_tokenizer(plan: Plan, corpus: Corpus, options: RunOptions) -> None:
    """Copy into the folder of a run the tokenizer of its data, and the Hugging Face files of its model."""
    folder, weights = options.folder, options.start.weights
    if corpus.tokenizer:
        shutil.copytree(corpus.tokenizer, folder / TOKENIZER_NAME, dirs_exist_ok=True)
    own = config_of(plan.model)
    config = own if weights is None else config_beside(weights) or own
    fields = config_fields(plan.model) if config and own and config.resolve() == own.resolve() else None
    other = corpus.ids == BYTE_IDS and config is not None and tokenizer_of((config.parent,)) != BYTE_IDS.name
    copy_to_run(folder, config, corpus.tokenizer, fields=fields, beside=not other)


def _absolute(options: RunOptions) -> RunOptions:
    """Return options whose files and folders any folder can name."""
    tracked = options.monitoring.tensorboard_dir
    return options.changed(
        data=[_absolute_word(word) for word in options.data.data], tensorboard_dir=tracked and tracked.resolve()
    )


def _absolute_word(word: str) -> str:
    """Return the absolute path of a file, a folder or an indexed dataset; other words as they are."""
    return str(Path(word).resolve()) if Path(word).exists() or Path(f"{word}.idx").exists() else word
