"""Integrity of a dataset: its tokens, index, description and tokenizer belong together."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from megaloom.dsl.errors import UserError

from .description import SUFFIX, TOKENIZER_SUFFIX, Description
from .indexed import INDEX_SUFFIX, LABELS_SUFFIX, MASK, TARGET_SUFFIX, TOKENS, IndexedDataset, path_of
from .token_ids import BYTE_IDS, TokenIds
from .tokenizer import load_tokenizer

WHOLE_NBYTES = 64 * 2**20
"""Files up to this size are read whole for their digest; of larger ones, as many bytes in blocks."""
DIGEST_BLOCKS = 1024
TOKENIZER_FILES = (".json", ".model", ".jinja", ".txt")
_FIX = "copy all files of the dataset again, or write it again"


def tokenizer_digest(tokenizer: str) -> str:
    """Return a digest of the files of a tokenizer: "bytes", a file or a folder."""
    path = Path(tokenizer).expanduser()
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    digest = blake2b(tokenizer.encode() if tokenizer == BYTE_IDS.name else b"", digest_size=16)
    for file in files:
        if file.suffix in TOKENIZER_FILES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def tokens_digest(prefix: Path, *, labels: bool = False, pairs: bool = False) -> str:
    """Return a digest of the tokens of a dataset and their mask, and of its labels and the targets of its pairs.

    It is that of all bytes, or of blocks of a large file.
    """
    digest = blake2b(digest_size=16)
    others = [LABELS_SUFFIX] * labels + [TARGET_SUFFIX] * pairs
    beside = (f"{suffix}{kind}" for suffix in others for kind in (TOKENS, INDEX_SUFFIX))
    for path in (path_of(prefix, suffix) for suffix in (TOKENS, MASK, *beside)):
        if not path.is_file():
            continue
        size = path.stat().st_size
        count, block = (1, size) if size <= WHOLE_NBYTES else (DIGEST_BLOCKS, WHOLE_NBYTES // DIGEST_BLOCKS)
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for i in range(count):
                file.seek((size - block) * i // max(1, count - 1))
                digest.update(file.read(block))
    return digest.hexdigest()


def check_described(dataset: IndexedDataset, description: Description) -> None:
    """Raise UserError unless a dataset and its tokenizer are those that its description was written for."""
    index, about = path_of(dataset.prefix, INDEX_SUFFIX), path_of(dataset.prefix, SUFFIX)
    for word in ("tokens", "documents"):
        found, said = getattr(dataset, word), getattr(description, word)
        if found != said:
            raise UserError(
                f"{index} has {found:,} {word}, its description says {said:,}\nthe files are of two datasets: {_FIX}"
            )
    found = tokens_digest(dataset.prefix, labels=description.labels is not None, pairs=description.pairs)
    if description.tokens_digest and description.tokens_digest != found:
        raise UserError(f"{path_of(dataset.prefix, TOKENS)} has changed since {about.name} was written\n{_FIX}")
    _check_tokenizer(dataset.prefix, description)


def _check_tokenizer(prefix: Path, description: Description) -> None:
    """Raise UserError unless the tokenizer beside a dataset is the one that made it."""
    if description.image is not None:
        return
    folder, about = path_of(prefix, TOKENIZER_SUFFIX), path_of(prefix, SUFFIX)
    if not description.is_bytes and not folder.is_dir():
        raise UserError(f"{folder} is missing: the tokenizer that made {prefix}\n{_FIX}")
    name = BYTE_IDS.name if description.is_bytes else str(folder)
    if tokenizer_digest(name) != description.tokenizer:
        what = f"{folder} is not the tokenizer" if not description.is_bytes else f"{about} does not name the tokenizer"
        raise UserError(f"{what} that made {prefix}: its files have changed\n{_FIX}")
    if not description.checksum and not _alike(load_tokenizer(name).ids, description.ids):
        raise UserError(f"{about} has other ids than the tokenizer {name}\n{_FIX}")


def _alike(a: TokenIds, b: TokenIds) -> bool:
    """Return whether two tokenizers have equal ids, whatever their names."""
    return (a.vocab, a.eos, a.pad, a.mask, a.sentinels) == (b.vocab, b.eos, b.pad, b.mask, b.sentinels)
