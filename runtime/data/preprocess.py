"""Tokenization of sources into an indexed dataset, by several processes, chunk by chunk.

Each chunk becomes a file in PREFIX.parts, complete or absent. A command that was killed goes on with the chunks that
are missing; at the end the parts are joined in order. So the dataset does not depend on the number of processes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from megaloom.dsl.errors import UserError

from .chunk_workers import ChunkTask, cached_tokenizer, tokenized
from .description import TOKENIZER_SUFFIX, Description, read_description, write_description
from .documents import DEFAULT_KEY, Chunk, DocumentSource, open_source, read_chunk
from .folder_lock import locked_folder, named_write_errors
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
)
from .integrity import check_described, tokenizer_digest, tokens_digest
from .token_ids import BYTE_IDS
from .tokenizer import load_tokenizer, save_tokenizer, train_bpe

PARTS_SUFFIX = ".parts"
TRAINED_NBYTES = 256 * 2**20
"""Most text that a tokenizer is trained on. It comes from everywhere in the sources."""

Sources = list[DocumentSource]
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
        if self.prefix.is_char_device() or self.prefix.is_block_device():
            raise UserError(f"-o {self.prefix} is a device\ngive a prefix of files, such as -o text")
        if self.prefix.is_dir():
            raise UserError(f"-o {self.prefix} is a folder\ngive a prefix: -o {self.prefix / 'text'}")


def preprocess(request: Preprocessing, show: ShowProgress) -> tuple[Description, bool]:
    """Tokenize sources into an indexed dataset with its description and its tokenizer beside it.

    Return the description, and whether an earlier call had already made this dataset. Raise UserError for bad input,
    and then leave nothing behind.
    """
    request.check()
    if request.tokenizer is not None:
        load_tokenizer(request.tokenizer)
    sources = [open_source(name) for name in request.sources]
    digest = _digest(request, sources)
    if is_indexed(request.prefix):
        return _finished(request.prefix, digest), True
    parts = path_of(request.prefix, PARTS_SUFFIX)
    held = f"another `megaloom data` is writing {parts}\nwait until it ends"
    goes_on = "free some space and run the same command again: it continues where it stopped"
    with named_write_errors(parts.parent, goes_on), locked_folder(parts, held=held, choose="choose another -o"):
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
    tokenizer = f"bpe {request.train_vocab}" if request.tokenizer is None else tokenizer_digest(request.tokenizer)
    parts = (tokenizer, request.key, request.append_eos, [s.digest for s in sources])
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _finished(prefix: Path, digest: str) -> Description:
    """Return the description of a dataset that is there. Raise UserError if it was made of something else."""
    dataset = open_indexed(prefix)
    if (known := read_description(prefix)) and known.digest == digest:
        check_described(dataset, known)
        return known
    raise UserError(
        f"{path_of(prefix, INDEX_SUFFIX)} exists, made of other sources or with other options\n"
        "choose another -o, or remove that dataset"
    )


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
    loaded = cached_tokenizer(tokenizer)
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
    for nbytes in tokenized(left, request.workers):
        done += nbytes
        show("tokenizing", done, total)


def _join(request: Preprocessing, tokenizer: str, parts: Path, sources: Sources, digest: str) -> Description:
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
    if True in chats and not any(each.mask is not None and each.mask.any() for each in datasets):
        raise UserError(
            f"no message in {', '.join(request.sources)} has the role 'assistant', whose tokens training predicts\n"
            "name the roles system, user and assistant"
        )
    ids, prefix = cached_tokenizer(tokenizer).ids, request.prefix
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
        tokenizer=tokenizer_digest(tokenizer),
        chat=True in chats,
        tokens_digest=tokens_digest(prefix),
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
