"""Chunks tokenized by several processes, each into an indexed dataset of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from .encoding import ChunkTask, cached_tokenizer, encoded
from .images import PIXEL_IDS
from .indexed import MASK, TARGET_SUFFIX, path_of, smallest_token_type, write_index, write_indexed, write_tokens
from .labels import CollectedLabels
from .tokenizer_kinds import Tokens


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


def tokenize_chunk(task: ChunkTask) -> int:
    """Write the documents of a chunk as an indexed dataset, with what it has beside them. Return its bytes.

    Beside the tokens are a mask if the documents are conversations, their labels, and the targets of pairs.
    """
    vocab = PIXEL_IDS.vocab if task.image else cached_tokenizer(task.tokenizer).ids.vocab
    token_type, keys = smallest_token_type(vocab), task.keys
    masks: list[npt.NDArray[np.bool_]] = []
    targets: list[Tokens] = []
    sentences: list[tuple[int, ...]] = []
    labels = None if keys.label is None else CollectedLabels(keys.label)

    def tokens() -> Iterator[Tokens]:
        for each in encoded(task):
            if each.counted is not None:
                masks.append(each.counted)
            if each.target is not None:
                targets.append(each.target)
            if each.sentences:
                sentences.append(each.sentences)
            if labels is not None and each.row is not None:
                labels.add(each.label, each.row.where)
            yield each.tokens

    lengths = write_tokens(tokens(), task.out, token_type)
    if masks:
        np.concatenate(masks).tofile(path_of(task.out, MASK))
    if labels is not None:
        labels.write(task.out)
    if keys.target is not None:
        write_indexed(targets, path_of(task.out, TARGET_SUFFIX), token_type)
    if sentences:
        lengths, firsts = np.concatenate(sentences).astype(np.int64), np.cumsum([0, *map(len, sentences)])
        write_index(lengths, task.out, token_type, firsts)
    else:
        write_index(lengths, task.out, token_type)
    return task.chunk.nbytes
