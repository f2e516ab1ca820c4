"""`megaloom data`: tokenize sources into an indexed dataset, with a progress bar on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.data.description import TOKENIZER_SUFFIX, Description
from megaloom.runtime.data.indexed import TOKENS, path_of
from megaloom.runtime.data.preprocess import Preprocessing, ShowProgress, preprocess
from megaloom.runtime.data.token_ids import BYTE_IDS


def run_data(
    sources: tuple[str, ...],
    output: Path,
    tokenizer: str | None,
    train_vocab: int | None,
    key: str,
    workers: int | None,
    append_eos: bool,
) -> None:
    """Make a dataset and print its size."""
    request = Preprocessing(
        sources=sources,
        prefix=output,
        tokenizer=tokenizer,
        train_vocab=train_vocab,
        key=key,
        append_eos=append_eos,
        workers=len(os.sched_getaffinity(0)) if workers is None else workers,
    )
    with _progress_bar() as show:
        description, was_there = preprocess(request, show)
    print_on_first_rank(_summary(description, output, was_there, train_vocab))


def _summary(description: Description, prefix: Path, was_there: bool, train_vocab: int | None) -> str:
    done = "is complete already" if was_there else "is written"
    tokenizer = "" if description.is_bytes else f", tokenizer {path_of(prefix, TOKENIZER_SUFFIX)}"
    kind = "conversations" if description.chat else "documents"
    fewer = ""
    if train_vocab is not None and description.ids.vocab < train_vocab:
        fewer = f"the tokenizer has fewer tokens than --train-vocab {train_vocab}: the text has no more pairs to join\n"
    return (
        f"{path_of(prefix, TOKENS)} {done}: {description.documents:,} {kind}, {description.tokens:,} tokens, "
        f"vocabulary {description.ids.vocab:,}{tokenizer}\n{fewer}"
        f"train on it with: {_train_command(description, prefix)}"
    )


def _train_command(description: Description, prefix: Path) -> str:
    """Return the command that trains on a dataset: the default model with as many ids, if they are more than bytes."""
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
