"""Options of the commands that train or prepare training: train, data, verify, measure.

Each imports its code when it runs: `megaloom --help` must be quick, and only some commands need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from megaloom.planner.cli.adapter_options import ADAPTERS, NO_ADAPTERS, AdapterOptions
from megaloom.planner.cli.arguments import SEARCH_ALL, TrainedLayout, unwrap_help
from megaloom.planner.cli.settings import SetOption, SettingsOption, model_arguments
from megaloom.runtime.metrics.watching import Watching
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.end_of_document import NO_ENDS, EndOfDocument
from megaloom.runtime.training.evaluation_options import DEFAULT_EVALUATION, EvaluationOptions

from .defaults import (
    DEFAULT_RECIPE,
    EVALUATE_EVERY,
    KEEP_BEST,
    KEEP_LAST,
    NO_WATCHING,
    SAVE_EVERY,
    STANDARD_LIBRARY,
    TrainedPrecision,
)
from .packages import require_training_packages


@unwrap_help
def train_by_plan(
    model: str | None = None,
    /,
    *,
    data: Annotated[list[str], Parameter(consume_multiple=True, negative="")] = [STANDARD_LIBRARY],  # noqa: B006
    split: str | None = None,
    epochs: float | None = None,
    weights: Annotated[Path | None, Parameter(name="--from")] = None,
    steps_from: str | None = None,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    seq: int | None = None,
    batch: int | None = None,
    precision: TrainedPrecision | None = None,
    devices: int | None = None,
    out: Path | None = None,
    save_every: int = SAVE_EVERY,
    evaluate_every: int = EVALUATE_EVERY,
    evaluate_batches: int | None = None,
    evaluate_all: bool = False,
    keep_last: int = KEEP_LAST,
    keep_best: int = KEEP_BEST,
    async_save: bool | None = None,
    distributed_timeout_minutes: float = 10.0,
    evaluation: Annotated[EvaluationOptions, Parameter(name="*", group="Evaluation")] = DEFAULT_EVALUATION,
    ends: Annotated[EndOfDocument, Parameter(name="*", group="End of document")] = NO_ENDS,
    watching: Annotated[Watching, Parameter(name="*", group="Watching")] = NO_WATCHING,
    recipe: Annotated[Recipe, Parameter(name="*", group="Recipe")] = DEFAULT_RECIPE,
    adapters: Annotated[AdapterOptions, ADAPTERS] = NO_ADAPTERS,
    fixed: TrainedLayout = SEARCH_ALL,
) -> int:
    """Plan a model for this machine, or take a plan, and train it on text. Repeat the command to continue the run.

    Parameters
    ----------
    model
        The folder of a run, which continues; a plan.json; or a model: file.py:name, a file.py with one model,
        package.module:name, one of the examples, or a Hugging Face config.json. [default: that of --from, else
        stdlib-gpt]
    data
        "stdlib" (the text of Python's standard library), a file or a folder of text, or prefixes of indexed datasets:
        A B, or with weights 0.3 A 0.7 B. Or "synthetic": made-up tokens, labels and images, for trials.
    split
        Shares of training, validation and test of indexed datasets. [default: 969,30,1]
    epochs
        Passes over the training text, instead of --steps.
    weights
        The initial weights: a run or a packed run, whose model is trained anew; a Hugging Face folder with config.json
        and safetensors; or a checkpoint of Megatron-LM. [default: random weights]
    steps_from
        A class with steps of your own, file.py:Class, or with arguments, 'file.py:Class(alpha=0.25)'. "none" is the
        loss of the model. [default: that of the run that continues, else none]
    seq
        Tokens per sequence. [default: 128]
    batch
        Sequences per step, over all devices. [default: 32]
    precision
        Precision of activations and matrix products. [default: bf16 on GPUs, fp32 on CPU]
    devices
        Number of devices. [default: all GPUs; on CPU a process for each core]
    out
        Folder for checkpoints and metrics. [default: the run's, runs/MODEL, or runs/from-RUN with --from RUN alone]
    save_every
        Steps between checkpoints.
    evaluate_every
        Steps between evaluations on held-out text.
    evaluate_batches
        Global batches of held-out text that each evaluation reads. [default: 65,536 tokens, and at the end as many as
        the run has trained on]
    evaluate_all
        Read all held-out text in the evaluation at the end, however long it takes.
    keep_last
        Number of newest checkpoints to keep.
    keep_best
        Number of checkpoints with the lowest validation loss to keep as well. Each is evaluated when it is saved, and
        its folder is named after the loss.
    async_save
        Train on while a checkpoint is written, from a copy in host memory. [default: on GPUs]
    distributed_timeout_minutes
        Minutes that ranks wait for one another before the run ends with an error.
    """
    require_training_packages("train")
    from .commands.train_command import run_train

    load = {"seq": seq, "batch": batch, "precision": precision, "devices": devices}
    options = {"data": tuple(data), "split": split, "epochs": epochs, "out": out, "weights": weights}
    options["steps_from"] = steps_from
    options |= {"save_every": save_every, "evaluate_every": evaluate_every, "evaluate_batches": evaluate_batches}
    options["evaluate_all"] = evaluate_all
    options |= {"keep_last": keep_last, "keep_best": keep_best, "async_save": async_save}
    options["distributed_timeout_minutes"] = distributed_timeout_minutes
    arguments = model_arguments(words, settings)
    groups = {"evaluation": evaluation, "ends": ends, "watching": watching}
    return run_train(model, arguments, load, {**options, **groups}, recipe, fixed, adapters)


@unwrap_help
def make_dataset(
    sources: Annotated[tuple[str, ...], Parameter(name="source", negative="")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    tokenizer: str | None = None,
    tokenizer_type: str | None = None,
    train_vocab: int | None = None,
    key: str | None = None,
    label_key: str | None = None,
    source_key: str | None = None,
    target_key: str | None = None,
    image_size: str | None = None,
    split_sentences: str | None = None,
    workers: int | None = None,
    append_eos: bool = False,
    add_bos: bool = False,
) -> None:
    """Tokenize text into an indexed dataset, OUTPUT.bin and OUTPUT.idx, that `megaloom train --data OUTPUT` reads.

    After an interruption, repeat the command: it continues where it stopped.

    Parameters
    ----------
    sources
        Text files, JSONL, Parquet, folders of them, folders that the library `datasets` has saved, or "stdlib".
    output
        Prefix of the dataset. Its tokenizer is saved as OUTPUT-tokenizer.
    tokenizer
        A Hugging Face folder, a tokenizer.json, a SentencePiece *.model, a vocab.txt, a vocab.json with its merges.txt,
        a name on the Hugging Face hub, or "bytes".
    tokenizer_type
        How a bare vocab.txt or vocab.json is used: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer, or a
        tokenizer class of transformers.
    train_vocab
        Train a BPE tokenizer with this number of tokens on the sources.
    key
        Key of the text, of the messages of a conversation, or of the words of a text, in JSONL, Parquet and datasets.
        [default: text; image with --image-size]
    label_key
        Key of the labels: one class for each document, or a list with one for each word or token. A class is a name or
        a number. In folders of images the folders are the classes.
    source_key
        Key of the first text of a pair, with --target-key, instead of --key.
    target_key
        Key of the second text of a pair.
    image_size
        Read images, not text, and resize them: 224, or height and width as 160x240. The source is a folder with a
        folder of images for each class, or has a column of images.
    split_sentences
        Split texts of this language, such as en, into sentences: the sequences of a document, as Megatron-LM stores
        them for BERT and T5.
    workers
        Processes. [default: the number of cores]
    append_eos
        End each document with the tokenizer's end-of-text token.
    add_bos
        Begin each document with the tokenizer's beginning-of-text token.
    """
    require_training_packages("data")
    from .commands.data_command import run_data, text_keys

    keys = text_keys(key, label_key, source_key, target_key, images=image_size is not None)
    run_data(
        sources,
        output,
        keys,
        image_size,
        workers,
        tokenizer=tokenizer,
        tokenizer_type=tokenizer_type,
        train_vocab=train_vocab,
        sentences=split_sentences,
        append_eos=append_eos,
        add_bos=add_bos,
    )


@unwrap_help
def verify(plan: Path, /, *, steps: int = 3, seed: int = 1234) -> int:
    """Run a plan and a single process on identical tokens, and compare losses. Exit code 1 if they differ.

    Parameters
    ----------
    plan
        A plan.json.
    steps
        Optimizer steps.
    seed
        Seed of the initial weights and the tokens.
    """
    require_training_packages("verify")
    from .commands.train_command import run_verify

    return run_verify(plan, steps, seed)


@unwrap_help
def measure(
    *,
    gpus: int | None = None,
    output: Annotated[Path, Parameter(name=["-o", "--output"])] = Path("profile.json"),
) -> None:
    """Measure matrix products, attention, memory and collectives on this machine, and write a device profile.

    `plan MODEL --gpus profile.json` plans with it; 64xprofile.json stands for 64 such devices.

    Parameters
    ----------
    gpus
        Number of devices, which all work at once. [default: all GPUs; on CPU a process for each core]
    output
        The file for the profile.
    """
    require_training_packages("measure")
    from .commands.measure_command import run_measure

    run_measure(gpus, output)


TRAINING_COMMANDS: dict[str, Callable[..., object]] = {
    "train": train_by_plan,
    "data": make_dataset,
    "verify": verify,
    "measure": measure,
}
