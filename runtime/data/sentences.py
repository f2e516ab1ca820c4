"""Sentences of a text, by the library `pysbd`: the sequences of a document in Megatron-LM's datasets for BERT."""

from __future__ import annotations

from functools import cache
from typing import Any

from megaloom.dsl.errors import UserError


@cache
def _segmenter(language: str) -> Any:
    """Return the segmenter of a language. Raise UserError if there is none, or the library is not installed."""
    try:
        from pysbd import Segmenter
        from pysbd.languages import LANGUAGE_CODES
    except ImportError:
        raise UserError("--split-sentences needs the package pysbd\npip install 'megaloom[sentences]'") from None
    if language not in LANGUAGE_CODES:
        raise UserError(
            f"--split-sentences {language} is not a language that pysbd splits\n"
            f"give {', '.join(sorted(LANGUAGE_CODES))}"
        )
    return Segmenter(language=language, clean=False)


def check_language(language: str) -> None:
    """Raise UserError unless sentences of a language, such as en, can be split."""
    _segmenter(language)


def sentences_of(text: str, language: str) -> list[str]:
    """Return the sentences of a text in order, each with the space after it: together they are the text."""
    sentences: list[str] = _segmenter(language).segment(text)
    return sentences if "".join(sentences) == text else [text]
