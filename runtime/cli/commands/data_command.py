"""`megaloom data`: tokenize sources into an indexed dataset, with a progress bar on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megaloom.dsl.errors import UserError
from megaloom.runtime.cli.command_groups import DatasetOptions
from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.data.description import TOKENIZER_SUFFIX, Description
from megaloom.runtime.data.documents import DEFAULT_KEY
from megaloom.runtime.data.images import parse_image_size
from megaloom.runtime.data.indexed import TOKENS, path_of
from megaloom.runtime.data.labels import LabelUnit
from megaloom.runtime.data.preprocess import ShowProgress, preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.rows import Keys
from megaloom.runtime.data.token_ids import BYTE_IDS

IMAGE_KEY, IMAGE_LABEL_KEY = "image", "label"  # of the library `datasets`
SHOWN_NAMES = 8
"""Names of classes that the summary lists."""


def run_data(sources: tuple[str, ...], output: Path, options: DatasetOptions) -> None:
    """Make a dataset and print its size."""
    images = options.image_size is not None
    request = Preprocessing(
        sources=sources,
        prefix=output,
        keys=text_keys(options.key, options.label_key, options.source_key, options.target_key, images=images),
        image=None if options.image_size is None else parse_image_size(options.image_size),
        workers=len(os.sched_getaffinity(0)) if options.workers is None else options.workers,
        tokenizer=options.tokenizer,
        tokenizer_type=options.tokenizer_type,
        train_vocab=options.train_vocab,
        sentences=options.split_sentences,
        append_eos=options.append_eos,
        add_bos=options.add_bos,
    )
    with _progress_bar() as show:
        description, was_there = preprocess(request, show)
    print_on_first_rank(_summary(description, output, was_there, request.train_vocab))


def text_keys(
    key: str | None, label: str | None, source: str | None, target: str | None, *, images: bool = False
) -> Keys:
    """Return the keys of --key, --label-key, --source-key and --target-key. Raise UserError if they do not fit."""
    if (source is None) != (target is None):
        given, missing = ("--source-key", "--target-key") if target is None else ("--target-key", "--source-key")
        raise UserError(f"{given} needs {missing}\ngive the keys of both texts of a pair")
    if source is not None and key is not None:
        raise UserError(f"--key {key} and --source-key {source} exclude each other\ngive --source-key for pairs")
    if images:
        return Keys(key or IMAGE_KEY, label or IMAGE_LABEL_KEY)
    return Keys(source or key or DEFAULT_KEY, label, target)


def _summary(description: Description, prefix: Path, was_there: bool, train_vocab: int | None) -> str:
    done = "is complete already" if was_there else "is written"
    tokenizer = "" if description.is_bytes else f", tokenizer {path_of(prefix, TOKENIZER_SUFFIX)}"
    if description.image is not None:
        return _images_summary(description, prefix, done)
    kind = "conversations" if description.chat else "pairs" if description.pairs else "documents"
    fewer = ""
    if train_vocab is not None and description.ids.vocab < train_vocab:
        fewer = f"the tokenizer has fewer tokens than --train-vocab {train_vocab}: the text has no more pairs to join\n"
    return (
        f"{path_of(prefix, TOKENS)} {done}: {description.documents:,} {kind}, {description.tokens:,} tokens, "
        f"vocabulary {description.ids.vocab:,}{tokenizer}{_classes(description)}\n{fewer}"
        f"train on it with: {_train_command(description, prefix)}"
    )


def _images_summary(description: Description, prefix: Path, done: str) -> str:
    """Return the size of a dataset of images, and the command that trains on it."""
    assert description.image is not None
    size = f"{description.image.height} x {description.image.width} pixels"
    return (
        f"{path_of(prefix, TOKENS)} {done}: {description.documents:,} images of {size}{_classes(description)}\n"
        f"train on it with: megaloom train MODEL --data {prefix}"
    )


def _classes(description: Description) -> str:
    """Return the number of classes of the labels, and the first of their names."""
    if (labels := description.labels) is None:
        return ""
    shown = ", ".join([*labels.names[:SHOWN_NAMES], *["…"] * (len(labels.names) > SHOWN_NAMES)])
    each = f"{labels.classes:,} classes{' of tokens' if labels.unit is LabelUnit.TOKEN else ''}"
    return f", {each}" + (f": {shown}" if shown else "")


def _train_command(description: Description, prefix: Path) -> str:
    """Return the command that trains on a dataset: the default model with as many ids, if they are more than bytes."""
    if description.labels is not None or description.pairs:
        return f"megaloom train MODEL --data {prefix}, a MODEL with a vocabulary of {description.ids.vocab:,} or more"
    if description.ids.vocab <= BYTE_IDS.vocab:
        return f"megaloom train --data {prefix}"
    vocab = f"--set vocab={description.ids.vocab}"
    return f"megaloom train {vocab} --data {prefix}, or a MODEL with a vocabulary of {description.ids.vocab:,} or more"


@contextmanager
def _progress_bar() -> Iterator[ShowProgress]:
    """Return a function that shows progress: a bar on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
