"""Chunks tokenized by several processes, each into an indexed dataset of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

from .chat_template import ChatTemplate, load_chat_template
from .documents import Chunk, Document, read_chunk
from .indexed import MASK, path_of, smallest_token_type, write_index, write_tokens
from .token_ids import BYTE_IDS
from .tokenizer import TextTokenizer, Tokens, load_tokenizer

BATCH_CHARACTERS = 2**20
"""Characters that a tokenizer encodes in one call."""


@frozen
class ChunkTask:
    """One chunk to tokenize, and the options that decide its tokens."""

    chunk: Chunk
    out: Path  # prefix of the part
    tokenizer: str
    key: str
    append_eos: bool


def tokenized(tasks: list[ChunkTask], workers: int) -> Iterator[int]:
    """Yield the bytes of each task that is done, in any order. With one worker, this process does the work."""
    if workers == 1 or len(tasks) < 2:
        yield from map(tokenize_chunk, tasks)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _start_worker, (os.getpid(),))
    try:
        for future in as_completed([pool.submit(tokenize_chunk, task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@cache
def cached_tokenizer(source: str) -> TextTokenizer:
    """Return a tokenizer; a process loads it once."""
    return load_tokenizer(source)


@cache
def _cached_chat_template(source: str) -> ChatTemplate:
    """Return the chat template of a tokenizer; a process loads it once."""
    return load_chat_template(source)


def tokenize_chunk(task: ChunkTask) -> int:
    """Write the documents of a chunk as an indexed dataset, with a mask if they are conversations. Return its bytes."""
    token_type = smallest_token_type(cached_tokenizer(task.tokenizer).ids.vocab)
    masks: list[npt.NDArray[np.bool_]] = []

    def tokens() -> Iterator[Tokens]:
        for each, counted in _encoded(task):
            if len(each):
                if counted is not None:
                    masks.append(counted)
                yield each

    lengths = write_tokens(tokens(), task.out, token_type)
    if masks:
        np.concatenate(masks).tofile(path_of(task.out, MASK))
    write_index(lengths, task.out, token_type)
    return task.chunk.nbytes


def _encoded(task: ChunkTask) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_] | None]]:
    """Yield the tokens of each document, and of a conversation the tokens that training predicts."""
    tokenizer = cached_tokenizer(task.tokenizer)
    end = np.array([tokenizer.ids.eos] if task.append_eos else [], np.int64)
    kinds = set()
    for batch in _batches(read_chunk(task.chunk, task.key, raw=task.tokenizer == BYTE_IDS.name)):
        texts = [document for document in batch if isinstance(document, str)]
        kinds |= {isinstance(document, str) for document in batch}
        if len(kinds) > 1:
            raise UserError(f"{task.chunk.files[0]} has texts and conversations under {task.key!r}: split the file")
        if texts:
            yield from ((np.append(each, end), None) for each in tokenizer.encode(texts))
        else:
            template = _cached_chat_template(task.tokenizer)
            yield from (template.encode(document) for document in batch if not isinstance(document, str))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents of about BATCH_CHARACTERS."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document) if isinstance(document, str) else BATCH_CHARACTERS // 64
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
