"""Vocabularies of tokenizers as they lie in files, and why a file is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json, read_whole

UNKNOWN_PIECE = "[UNK]"
_POINTER = b"version https://git-lfs"
_RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a line of tiktoken: a token in base 64 and its rank


def check_whole(path: Path) -> None:
    """Raise UserError for a file that is empty or only a pointer of Git LFS."""
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if not start:
        raise UserError(f"{path} is empty\ncopy the file again")
    if start == _POINTER:
        raise UserError(f"{path} is a pointer of Git LFS, not the file itself\nrun `git lfs pull` where it comes from")


def word_pieces(path: Path) -> dict[str, int]:
    """Return the tokens of a vocab.txt with their ids. Raise UserError unless each line is a token, and one [UNK]."""
    check_whole(path)
    try:
        lines = read_whole(path).decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8, so it is no WordPiece vocabulary\ncopy the file again") from None
    tokens = {line: i for i, line in enumerate(lines) if line.strip()}
    if wrong := next((line for line in tokens if " " in line.strip()), None):
        shown = wrong if len(wrong) <= 40 else f"{wrong[:40]}…"
        raise UserError(
            f"line {tokens[wrong] + 1} of {path} has several words, {shown!r}, so it is no WordPiece vocabulary, which "
            "has one token a line\ngive the vocab.txt of the tokenizer"
        )
    if UNKNOWN_PIECE not in tokens:
        raise UserError(
            f"{path} has {len(tokens):,} tokens, and {UNKNOWN_PIECE} is not one of them\n"
            f"give the vocab.txt of a BERT: a WordPiece vocabulary has {UNKNOWN_PIECE} for words that it lacks"
        )
    return tokens


def byte_pairs(path: Path) -> dict[str, int]:
    """Return the tokens of a vocab.json with their ids. Raise UserError if it is another file."""
    check_whole(path)
    fields = _json(path)
    if not _is_vocabulary(fields):
        raise UserError(f"{path} is not a vocabulary: it {_kind(fields)}\ngive the vocab.json of a BPE")
    return dict(fields)


def sentence_pieces(path: Path) -> Any:
    """Return a SentencePiece model, of the library `sentencepiece`. Raise UserError for another file."""
    from sentencepiece import SentencePieceProcessor

    check_whole(path)
    with path.open("rb") as file:
        start = file.read(200)
    if _RANK.match(start):
        raise UserError(
            f"{path} is a vocabulary of tiktoken (as Llama 3's), not a SentencePiece model, and no file says how text "
            "is split before it\ngive the tokenizer.json of the same model, which transformers writes"
        )
    try:
        return SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # RuntimeError, OSError
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is not a SentencePiece model: {reason}\ncopy the file again, or give a tokenizer.json"
        ) from None


def why_no_tokenizer(path: Path) -> str | None:
    """Return what a JSON file is instead of a tokenizer.json, and what to do; None if it looks like one."""
    check_whole(path)
    fields = _json(path)
    if isinstance(fields, dict) and "model" in fields:
        return None
    if _is_vocabulary(fields):
        return "is a vocabulary\nname it vocab.json, put its merges.txt beside it, and give --tokenizer that folder"
    advice = "give its folder, or its tokenizer.json" if isinstance(fields, dict) else "give a tokenizer.json"
    return f"{_kind(fields)}\n{advice}"


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}\ncopy the file again") from None


def _is_vocabulary(fields: Any) -> bool:
    return isinstance(fields, dict) and bool(fields) and all(type(id_) is int for id_ in fields.values())


def _kind(fields: Any) -> str:
    """Return what a JSON file is or has, as the rest of a sentence."""
    if isinstance(fields, list):
        return "is a list (as the vocabularies of Megatron-LM's TikTokenizer)"
    if not isinstance(fields, dict):
        return f"is a single {type(fields).__name__}"
    if not fields:
        return "has no fields"
    if "model" in fields:
        return "is a tokenizer.json"
    if "model_type" in fields or "architectures" in fields:
        return "is the config.json of a model"
    return f"has fields such as {next(iter(fields))!r}, and no 'model'"
