"""Options of `megaloom data`: all that decides the contents of a dataset."""

from __future__ import annotations

from pathlib import Path

from attrs import astuple, frozen

from megaloom.dsl.errors import UserError

from .images import ImageSize, require_pillow
from .rows import TEXT_KEYS, Keys
from .sentences import check_language


@frozen(kw_only=True)
class Preprocessing:
    """All that decides the contents of a dataset, and the number of processes that make it."""

    sources: tuple[str, ...]
    prefix: Path
    tokenizer: str | None = None
    tokenizer_type: str | None = None  # how a bare vocabulary is used, as in `opened_tokenizer`
    train_vocab: int | None = None
    keys: Keys = TEXT_KEYS
    image: ImageSize | None = None  # the size of images; None: documents are texts
    append_eos: bool = False
    add_bos: bool = False
    sentences: str | None = None  # the language by which texts are split into sentences
    workers: int = 1

    def check(self) -> None:
        """Raise UserError for options that contradict each other."""
        if self.image is not None:
            self._check_images()
        elif (self.tokenizer is None) == (self.train_vocab is None):
            raise UserError("give one of --tokenizer FILE_OR_FOLDER, --tokenizer bytes, and --train-vocab 8192")
        plain = self.keys.has_text_only and self.image is None and self.sentences is None
        if self.add_bos and not plain:
            raise UserError(
                "--add-bos is for whole texts without labels, pairs and sentences: samples of others get the "
                "tokenizer's special tokens in training\nomit it"
            )
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
