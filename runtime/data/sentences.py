"""Sentences of a text, by the library `sentencex`: the sequences of a document in Megatron-LM's datasets for BERT."""

from __future__ import annotations

from megaloom.dsl.errors import UserError


def check_language(language: str) -> None:
    """Raise UserError unless a language has the form of an ISO code, such as en, and sentences can be split."""
    if not (language.isascii() and language.islower() and language.isalpha() and len(language) in (2, 3)):
        raise UserError(f"--split-sentences {language} is not a language\ngive its ISO code, such as en")
    try:
        import sentencex  # noqa: F401
    except ImportError:
        raise UserError("--split-sentences needs the package sentencex\npip install 'megaloom[sentences]'") from None


def sentences_of(text: str, language: str) -> list[str]:
    """Return the sentences of a text in order, each with the space after it: together they are the text.

    sentencex splits a language for which it has no rules by those of a related one, or of English.
    """
    from sentencex import segment

    out: list[str] = []
    for part in segment(language, text):
        if part.strip() or not out:
            out.append(part)
        else:
            out[-1] += part
    return out if "".join(out) == text else [text]
