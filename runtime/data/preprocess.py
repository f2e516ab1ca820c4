"""Tokenization of sources into an indexed dataset, by several processes, chunk by chunk.

Each chunk becomes a file in PREFIX.parts, complete or absent. A command that was killed goes on with the chunks that
are missing; at the end the parts are joined in order. So the dataset does not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from megaloom.dsl.errors import UserError

from .chat_template import ChatTemplate, load_chat_template
from .description import TOKENIZER_SUFFIX, Description, read_description, write_description
from .documents import DEFAULT_KEY, Chunk, Document, DocumentSource, open_source, read_chunk
from .indexed import (
    INDEX_SUFFIX,
    MASK,
    TOKENS,
    is_indexed,
    open_indexed,
    path_of,
    smallest_token_type,
    unfinished_path,
    write_index,
    write_tokens,
)
from .token_ids import BYTE_IDS
from .tokenizer import TextTokenizer, Tokens, load_tokenizer, save_tokenizer, train_bpe

PARTS_SUFFIX = ".parts"
TRAINED_NBYTES = 256 * 2**20
"""Most text that a tokenizer is trained on. It comes from everywhere in the sources."""
BATCH_CHARACTERS = 2**20
"""Characters that a tokenizer encodes in one call."""

ShowProgress = Callable[[str, int, int], None]  # text, bytes done, bytes in all


@frozen(kw_only=True)
class Preprocessing:
    """All that decides the contents of a dataset, and the number of processes that make it."""

    sources: tuple[str, ...]
    prefix: Path
    tokenizer: str | None = None
    train_vocab: int | None = None
    key: str = DEFAULT_KEY
    append_eos: bool = False
    workers: int = 1

    def check(self) -> None:
        """Raise UserError for options that contradict each other."""
        if (self.tokenizer is None) == (self.train_vocab is None):
            raise UserError("give one of --tokenizer FILE_OR_FOLDER, --tokenizer bytes, and --train-vocab 8192")
        if self.workers < 1:
            raise UserError(f"--workers must be at least 1, got {self.workers}")
        if self.prefix.is_dir():
            raise UserError(f"-o {self.prefix} is a folder\ngive a prefix: -o {self.prefix / 'text'}")


@frozen
class ChunkTask:
    """One chunk to tokenize, and the options that decide its tokens."""

    chunk: Chunk
    out: Path  # prefix of the part
    tokenizer: str
    key: str
    append_eos: bool


def preprocess(request: Preprocessing, show: ShowProgress) -> tuple[Description, bool]:
    """Tokenize sources into an indexed dataset with its description and its tokenizer beside it.

    Return the description, and whether an earlier call had already made this dataset. Raise UserError for bad input,
    and then leave nothing behind.
    """
    request.check()
    if request.tokenizer:
        load_tokenizer(request.tokenizer)
    sources = [open_source(name) for name in request.sources]
    digest = _digest(request, sources)
    if is_indexed(request.prefix):
        return _finished(request.prefix, digest), True
    parts = path_of(request.prefix, PARTS_SUFFIX)
    with _locked(parts):
        _discard_others(parts, repr((digest, [source.chunks for source in sources])))
        try:
            tokenizer = _tokenizer_of(request, parts, sources, show)
            _tokenize(request, tokenizer, parts, sources, show)
            description = _join(request, tokenizer, parts, sources, digest)
        except UserError:
            shutil.rmtree(parts)
            raise
        shutil.rmtree(parts)
    return description, False


def _digest(request: Preprocessing, sources: list[DocumentSource]) -> str:
    """Return a digest of all that decides the contents of the dataset."""
    tokenizer = f"bpe {request.train_vocab}" if request.tokenizer is None else _contents(request.tokenizer)
    parts = (tokenizer, request.key, request.append_eos, [s.digest for s in sources])
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _contents(tokenizer: str) -> str:
    """Return a digest of the files of a tokenizer."""
    path = Path(tokenizer).expanduser()
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    digest = blake2b(tokenizer.encode() if tokenizer == BYTE_IDS.name else b"", digest_size=16)
    for file in files:
        if file.suffix in (".json", ".model", ".jinja", ".txt"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _finished(prefix: Path, digest: str) -> Description:
    """Return the description of a dataset that is there. Raise UserError if it was made of something else."""
    open_indexed(prefix)
    if (known := read_description(prefix)) and known.digest == digest:
        return known
    raise UserError(
        f"{path_of(prefix, INDEX_SUFFIX)} exists, made of other sources or with other options\n"
        "choose another -o, or remove that dataset"
    )


@contextlib.contextmanager
def _locked(parts: Path) -> Iterator[None]:
    """Hold the lock of the folder of parts, which is made. It ends with the process."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
        file = (parts / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}\nchoose another -o") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `megaloom data` is writing {parts}\nwait until it ends") from None
        yield


def _discard_others(parts: Path, contents: str) -> None:
    """Remove parts that another command has left. contents: all that decides the parts of this one."""
    digest = blake2b(contents.encode(), digest_size=16).hexdigest()
    name = parts / "digest"
    if name.exists() and name.read_text() == digest:
        return
    for path in parts.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()
    name.write_text(digest)


def _tokenizer_of(request: Preprocessing, parts: Path, sources: list[DocumentSource], show: ShowProgress) -> str:
    """Return "bytes" or the folder of the tokenizer, which is copied or trained unless an earlier call did so."""
    if request.tokenizer == BYTE_IDS.name:
        return BYTE_IDS.name
    folder, unfinished = parts / "tokenizer", parts / f"tokenizer.{os.getpid()}.tmp"
    if folder.exists():
        return str(folder)
    if request.tokenizer:
        save_tokenizer(request.tokenizer, unfinished)
    else:
        assert request.train_vocab
        chunks = [chunk for source in sources for chunk in source.chunks]
        total = sum(chunk.nbytes for chunk in chunks)
        chosen = chunks[:: 1 + total // TRAINED_NBYTES]
        show("training the tokenizer", 0, sum(chunk.nbytes for chunk in chosen))
        train_bpe(_texts(chosen, request.key, show), request.train_vocab, unfinished)
    unfinished.rename(folder)
    return str(folder)


def _texts(chunks: list[Chunk], key: str, show: ShowProgress) -> Iterator[str]:
    """Yield the texts of chunks, and of conversations the text of each message."""
    done, total = 0, sum(chunk.nbytes for chunk in chunks)
    for chunk in chunks:
        for document in read_chunk(chunk, key):
            yield from [document] if isinstance(document, str) else (str(m.get("content", "")) for m in document)
        done += chunk.nbytes
        show("training the tokenizer", done, total)


def _tokenize(
    request: Preprocessing, tokenizer: str, parts: Path, sources: list[DocumentSource], show: ShowProgress
) -> None:
    """Tokenize the chunks that have no part yet."""
    loaded = _cached_tokenizer(tokenizer)
    if request.append_eos and loaded.ids.eos is None:
        raise UserError(
            f"the tokenizer {request.tokenizer} names no token that ends a document, which --append-eos needs\n"
            "give its folder with a tokenizer_config.json that has an eos_token"
        )
    chunks = [chunk for source in sources for chunk in source.chunks]
    tasks = [
        ChunkTask(chunk, _part(parts, i), tokenizer, request.key, request.append_eos) for i, chunk in enumerate(chunks)
    ]
    left = [task for task in tasks if not path_of(task.out, INDEX_SUFFIX).exists()]
    total = sum(chunk.nbytes for chunk in chunks)
    done = total - sum(task.chunk.nbytes for task in left)
    show("tokenizing", done, total)
    for nbytes in _results(left, request.workers):
        done += nbytes
        show("tokenizing", done, total)


def _results(tasks: list[ChunkTask], workers: int) -> Iterator[int]:
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
def _cached_tokenizer(source: str) -> TextTokenizer:
    """Return a tokenizer; a process loads it once."""
    return load_tokenizer(source)


@cache
def _cached_chat_template(source: str) -> ChatTemplate:
    """Return the chat template of a tokenizer; a process loads it once."""
    return load_chat_template(source)


def tokenize_chunk(task: ChunkTask) -> int:
    """Write the documents of a chunk as an indexed dataset, with a mask if they are conversations. Return its bytes."""
    token_type = smallest_token_type(_cached_tokenizer(task.tokenizer).ids.vocab)
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
    tokenizer = _cached_tokenizer(task.tokenizer)
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


def _join(
    request: Preprocessing, tokenizer: str, parts: Path, sources: list[DocumentSource], digest: str
) -> Description:
    """Join the parts in order, write the tokenizer and the description beside them, and the index last."""
    count = sum(len(source.chunks) for source in sources)
    datasets = [each for i in range(count) if (each := open_indexed(_part(parts, i))).tokens]
    chats = {each.has_mask for each in datasets}
    if len(chats) != 1:
        raise UserError(
            "some documents are texts and others are conversations\nmake a dataset of each kind"
            if chats
            else f"no text in {', '.join(request.sources)}: every document is empty"
        )
    ids, prefix = _cached_tokenizer(tokenizer).ids, request.prefix
    if tokenizer != BYTE_IDS.name:
        ids = evolve(ids, name=path_of(prefix, TOKENIZER_SUFFIX).name)
    suffixes = (TOKENS, MASK) if True in chats else (TOKENS,)
    for suffix in suffixes:
        _concatenate([path_of(each.prefix, suffix) for each in datasets], path_of(prefix, suffix))
    if tokenizer != BYTE_IDS.name:
        shutil.rmtree(path_of(prefix, TOKENIZER_SUFFIX), ignore_errors=True)
        shutil.copytree(tokenizer, path_of(prefix, TOKENIZER_SUFFIX))
    lengths = np.concatenate([each.lengths for each in datasets])
    description = Description(
        digest=digest,
        sources=request.sources,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        ids=ids,
        tokenizer=_contents(tokenizer),
        chat=True in chats,
    )
    write_description(description, prefix)
    write_index(lengths, prefix, smallest_token_type(ids.vocab))
    return description


def _concatenate(paths: list[Path], out: Path) -> None:
    unfinished = unfinished_path(out)
    with unfinished.open("wb") as file:
        for path in paths:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file, 2**22)
    unfinished.replace(out)


def _part(parts: Path, index: int) -> Path:
    """Return the prefix of the part of a chunk."""
    return parts / f"{index:06d}"
