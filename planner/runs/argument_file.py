"""Argument files: flags of Megatron-LM and their values, without the command that reads them."""

from __future__ import annotations

import shlex

from megaloom.dsl.errors import UserError

from .words import Origin, Word


def is_argument_file(text: str) -> bool:
    """Return whether the first line that is neither empty nor a comment begins with a flag."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "").startswith("--")


def argument_words(text: str, path: str) -> tuple[Word, ...]:
    """Return the words of an argument file. Quotes and comments are those of a shell; nothing is expanded."""
    words: list[Word] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parts = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            raise UserError(f"{path}:{number}: a quote has no end on this line") from None
        words += [Word(part, Origin(path, number)) for part in parts]
    return tuple(words)
