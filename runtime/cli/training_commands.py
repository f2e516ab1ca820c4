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
from megaloom.runtime.training.run_options import RunOptions

from .option_groups import DEFAULT_OPTIONS, DEFAULT_WORKLOAD, OPTIONS_OF_RUN, PlanOptions, WorkloadOptions
from .packages import require_training_packages


@unwrap_help
def train_by_plan(
    model: str | None = None,
    /,
    *,
    options: Annotated[RunOptions, OPTIONS_OF_RUN] = DEFAULT_OPTIONS,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    workload: Annotated[WorkloadOptions, Parameter(name="*")] = DEFAULT_WORKLOAD,
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
    """
    require_training_packages("train")
    from .commands.train_command import run_train

    return run_train(model, model_arguments(words, settings), PlanOptions(workload, fixed, adapters), options)


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
