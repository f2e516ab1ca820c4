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
from attrs import astuple, evolve, frozen

from megaloom.dsl.errors import UserError

from .chunk_workers import tokenized
from .description import TOKENIZER_SUFFIX, Description, read_description, write_description
from .documents import Chunk, DocumentSource, class_names, open_images, open_source
from .encoding import ChunkTask, cached_tokenizer
from .folder_lock import locked_folder, named_write_errors
from .images import PIXEL_IDS, ImageSize, require_pillow
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
from .rows import TEXT_KEYS, Keys, texts_of_chunk
from .sentences import check_language
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
    keys: Keys = TEXT_KEYS
    image: ImageSize | None = None  # the size of images; None: documents are texts
    append_eos: bool = False
    sentences: str | None = None  # the language by which texts are split into sentences
    workers: int = 1

    def check(self) -> None:
        """Raise UserError for options that contradict each other."""
        if self.image is not None:
            self._check_images()
        elif (self.tokenizer is None) == (self.train_vocab is None):
            raise UserError("give one of --tokenizer FILE_OR_FOLDER, --tokenizer bytes, and --train-vocab 8192")
        if self.workers < 1:
            raise UserError(f"--workers must be at least 1, got {self.workers}")
        if self.prefix.is_char_device() or self.prefix.is_block_device():
            raise UserError(f"-o {self.prefix} is a device\ngive a prefix of files, such as -o text")
        if self.prefix.is_dir():
            raise UserError(f"-o {self.prefix} is a folder\ngive a prefix: -o {self.prefix / 'text'}")
        if self.sentences is not None:
            if not self.keys.has_text_only or self.image is not None:
                raise UserError("--split-sentences is for text without labels, pairs and images\nomit it")
            check_language(self.sentences)
        if len(self.keys.flags) != sum(key is not None for key in astuple(self.keys)):
            raise UserError(f"{' and '.join(self.keys.flags.values())} must be different keys")

    def _check_images(self) -> None:
        """Raise UserError for options that images do not have."""
        given = {"--tokenizer": self.tokenizer, "--train-vocab": self.train_vocab, "--target-key": self.keys.target}
        given["--append-eos"] = self.append_eos or None
        if wrong := next((flag for flag, value in given.items() if value is not None), None):
            raise UserError(f"--image-size is for images, which have no {wrong}\nomit {wrong}")
        require_pillow()


def preprocess(request: Preprocessing, show: ShowProgress) -> tuple[Description, bool]:
    """Tokenize sources into an indexed dataset with its description and its tokenizer beside it.

    Return the description, and whether an earlier call had already made this dataset. Raise UserError for bad input,
    and then leave nothing behind.
    """
    request.check()
    if request.tokenizer is not None:
        load_tokenizer(request.tokenizer)
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
    keys, more = request.keys, [x for x in (request.image, request.sentences) if x is not None]
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
    if request.append_eos and cached_tokenizer(tokenizer).ids.eos is None:
        raise UserError(
            f"the tokenizer {request.tokenizer} names no token that ends a document, which --append-eos needs\n"
            "give its folder with a tokenizer_config.json that has an eos_token"
        )
    chunks = [chunk for source in sources for chunk in source.chunks]
    tasks = [
        ChunkTask(chunk, _part(parts, i), tokenizer, request.keys, request.append_eos, request.image, request.sentences)
        for i, chunk in enumerate(chunks)
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
