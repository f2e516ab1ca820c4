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
from attrs import evolve

from megaloom.dsl.errors import UserError

from .chunk_workers import tokenized
from .description import TOKENIZER_SUFFIX, Description, read_description, write_description
from .documents import Chunk, DocumentSource, class_names, open_images, open_source
from .encoding import ChunkTask, cached_tokenizer, forget_tokenizers
from .folder_lock import locked_folder, named_write_errors
from .images import PIXEL_IDS
from .indexed import (
    INDEX_SUFFIX,
    MASK,
    TARGET_SUFFIX,
    TOKENS,
    is_indexed,
    open_indexed,
    path_of,
    smallest_token_type,
    unfinished_path,
    write_index,
)
from .integrity import check_described, tokenizer_digest, tokens_digest
from .labels import Labels, join_labels
from .preprocess_options import Preprocessing
from .rows import Keys, texts_of_chunk
from .token_ids import BYTE_IDS
from .tokenizer import load_tokenizer, save_tokenizer, train_bpe
from .tokenizer_source import opened_if_named

PARTS_SUFFIX = ".parts"
TRAINED_NBYTES = 256 * 2**20
"""Most text that a tokenizer is trained on. It comes from everywhere in the sources."""

Sources = list[DocumentSource]
ShowProgress = Callable[[str, int, int], None]  # text, bytes done, bytes in all


def preprocess(request: Preprocessing, show: ShowProgress) -> tuple[Description, bool]:
    """Tokenize sources into an indexed dataset with its description and its tokenizer beside it.

    Return the description, and whether an earlier call had already made this dataset. Raise UserError for bad input,
    and then leave nothing behind.
    """
    request.check()
    forget_tokenizers()
    with opened_if_named(request.tokenizer, request.tokenizer_type) as tokenizer:
        if tokenizer is not None:
            load_tokenizer(tokenizer)
        return _preprocess(evolve(request, tokenizer=tokenizer, tokenizer_type=None), show)


def _preprocess(request: Preprocessing, show: ShowProgress) -> tuple[Description, bool]:
    """Return what `preprocess` returns, for a tokenizer that `load_tokenizer` reads."""
    sources = [(open_images if request.image else open_source)(name) for name in request.sources]
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
    bos = "bos" if request.add_bos else None
    keys, more = request.keys, [x for x in (request.image, request.sentences, bos) if x is not None]
    key = keys.text if keys.has_text_only else keys
    parts = (tokenizer, key, request.append_eos, [s.digest for s in sources], *more)
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
    if request.tokenizer == BYTE_IDS.name or request.image is not None:
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
        train_bpe(_texts(chosen, request.keys, show), request.train_vocab, unfinished)
    unfinished.rename(folder)
    return str(folder)


def _texts(chunks: list[Chunk], keys: Keys, show: ShowProgress) -> Iterator[str]:
    """Yield the texts of chunks: of conversations the text of each message."""
    done, total = 0, sum(chunk.nbytes for chunk in chunks)
    for chunk in chunks:
        yield from texts_of_chunk(chunk, keys)
        done += chunk.nbytes
        show("training the tokenizer", done, total)


def _tokenize(
    request: Preprocessing, tokenizer: str, parts: Path, sources: list[DocumentSource], show: ShowProgress
) -> None:
    """Tokenize the chunks that have no part yet."""
    _check_ends(request, tokenizer)
    chunks = [chunk for source in sources for chunk in source.chunks]
    framed = (request.append_eos, request.add_bos)
    tasks = [
        ChunkTask(chunk, _part(parts, i), tokenizer, request.keys, *framed, request.image, request.sentences)
        for i, chunk in enumerate(chunks)
    ]
    left = [task for task in tasks if not path_of(task.out, INDEX_SUFFIX).exists()]
    total = sum(chunk.nbytes for chunk in chunks)
    done = total - sum(task.chunk.nbytes for task in left)
    show("tokenizing", done, total)
    for nbytes in tokenized(left, request.workers):
        done += nbytes
        show("tokenizing", done, total)


def _check_ends(request: Preprocessing, tokenizer: str) -> None:
    """Raise UserError for a tokenizer without the tokens that are to begin and end documents."""
    ids = BYTE_IDS if request.image is not None else cached_tokenizer(tokenizer).ids
    for wanted, id_, flag, what, name in (
        (request.append_eos, ids.eos, "--append-eos", "ends", "eos_token"),
        (request.add_bos, ids.bos, "--add-bos", "begins", "bos_token"),
    ):
        if wanted and id_ is None:
            raise UserError(
                f"the tokenizer {request.tokenizer} names no token that {what} a document, which {flag} needs\n"
                f"give its folder with a tokenizer_config.json that has {name}"
            )


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
    if True in chats and request.sentences is not None:
        raise UserError("--split-sentences is for texts, and the documents are conversations\nomit it")
    if True in chats and not any(each.mask is not None and each.mask.any() for each in datasets):
        raise UserError(
            f"no message in {', '.join(request.sources)} has the role 'assistant', whose tokens training predicts\n"
            "name the roles system, user and assistant"
        )
    ids, prefix = PIXEL_IDS if request.image else cached_tokenizer(tokenizer).ids, request.prefix
    if tokenizer != BYTE_IDS.name:
        ids = evolve(ids, name=path_of(prefix, TOKENIZER_SUFFIX).name)
    suffixes = (TOKENS, MASK) if True in chats else (TOKENS,)
    for suffix in suffixes:
        _concatenate([path_of(each.prefix, suffix) for each in datasets], path_of(prefix, suffix))
    if request.keys.target is not None:
        _join_targets([path_of(each.prefix, TARGET_SUFFIX) for each in datasets], path_of(prefix, TARGET_SUFFIX))
    if tokenizer != BYTE_IDS.name:
        shutil.rmtree(path_of(prefix, TOKENIZER_SUFFIX), ignore_errors=True)
        shutil.copytree(tokenizer, path_of(prefix, TOKENIZER_SUFFIX))
    lengths = np.concatenate([each.sequence_lengths for each in datasets])
    ends = np.cumsum([0, *(each.sequences for each in datasets)])
    firsts = [each.first_sequences[:-1] + start for each, start in zip(datasets, ends, strict=False)]
    labels = _join_labels(request, [each.prefix for each in datasets], sources)
    pairs = request.keys.target is not None
    description = Description(
        digest=digest,
        sources=request.sources,
        documents=sum(each.documents for each in datasets),
        tokens=int(lengths.sum()),
        ids=ids,
        tokenizer=tokenizer_digest(tokenizer),
        chat=True in chats,
        labels=labels,
        pairs=pairs,
        image=request.image,
        tokens_digest=tokens_digest(prefix, labels=labels is not None, pairs=pairs),
    )
    write_description(description, prefix)
    write_index(lengths, prefix, smallest_token_type(ids.vocab), np.concatenate([*firsts, ends[-1:]]))
    return description


def _join_targets(parts: list[Path], prefix: Path) -> None:
    """Join the targets of parts in order."""
    datasets = [open_indexed(part) for part in parts]
    _concatenate([path_of(part, TOKENS) for part in parts], path_of(prefix, TOKENS))
    write_index(np.concatenate([each.lengths for each in datasets]), prefix, datasets[0].token_type)


def _join_labels(request: Preprocessing, parts: list[Path], sources: Sources) -> Labels | None:
    """Join the labels of parts in order, and return their classes; None if there are no labels."""
    if (key := request.keys.label) is None:
        return None
    declared = {class_names(source.chunks[0], key) for source in sources}
    return join_labels(parts, request.prefix, declared.pop() if len(declared) == 1 else ())


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
