"""Files of a tokenizer: the format of a file or folder, and what a format lacks to be read.

`format_of` alone decides whether a folder has a tokenizer: no command takes a folder with one for bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json

from .vocabulary_files import byte_pairs, sentence_pieces, word_pieces

JSON_NAME, MODEL_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
MODEL_NAMES = (MODEL_NAME, "spiece.model", "sentencepiece.bpe.model")
VOCAB_JSON, MERGES, VOCAB_TXT, TEKKEN = "vocab.json", "merges.txt", "vocab.txt", "tekken.json"
MODEL_CONFIG = "config.json"  # of the model, whose kind implies a class of tokenizers


class TokenizerFormat(Enum):
    """The format of a tokenizer's files."""

    JSON = JSON_NAME
    SENTENCEPIECE = "a SentencePiece model"
    BPE = f"a byte-level BPE ({VOCAB_JSON}, {MERGES})"
    WORDPIECE = f"a WordPiece vocabulary ({VOCAB_TXT})"
    TEKKEN = f"a tekken vocabulary ({TEKKEN})"
    SETTINGS = f"settings without a vocabulary ({CONFIG_NAME})"


FORMAT_FILES = {
    TokenizerFormat.JSON: (JSON_NAME,),
    TokenizerFormat.SENTENCEPIECE: MODEL_NAMES,
    TokenizerFormat.BPE: (VOCAB_JSON, MERGES),
    TokenizerFormat.WORDPIECE: (VOCAB_TXT,),
    TokenizerFormat.TEKKEN: (TEKKEN,),
    TokenizerFormat.SETTINGS: (CONFIG_NAME,),
}
"""Names of the files of each format. A folder has the first format of which it has a file."""
WHOLE = (TokenizerFormat.JSON, TokenizerFormat.SENTENCEPIECE)
"""Formats of one file that says by itself how text is split."""
SETTINGS_FILES = (CONFIG_NAME, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
TOKENIZER_FILE_NAMES = tuple(dict.fromkeys((*(n for names in FORMAT_FILES.values() for n in names), *SETTINGS_FILES)))
"""Names of all files that a tokenizer may have."""
LOWER_CASE, CASED, GPT2 = "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer"
"""Megatron-LM's names of its tokenizers of a WordPiece vocabulary and of a byte-level BPE."""
TYPE_SETTINGS: dict[str, tuple[TokenizerFormat, dict[str, Any]]] = {
    LOWER_CASE: (TokenizerFormat.WORDPIECE, {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
    CASED: (TokenizerFormat.WORDPIECE, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    GPT2: (TokenizerFormat.BPE, {"tokenizer_class": "GPT2Tokenizer"}),
    "SentencePieceTokenizer": (TokenizerFormat.SENTENCEPIECE, {}),
    "GPTSentencePieceTokenizer": (TokenizerFormat.SENTENCEPIECE, {}),
}
"""Tokenizers of Megatron-LM: the format that each reads, and the tokenizer_config.json that says how."""


def format_of(path: Path) -> TokenizerFormat | None:
    """Return the format of the tokenizer in a folder, None without one; of a file by its name, tokenizer.json if none.

    A config.json alone is no tokenizer. The names of Megatron-LM's vocabularies may begin with that of a model, as
    gpt2-vocab.json and gpt2-merges.txt.
    """
    if path.is_dir():
        return next((kind for kind, names in FORMAT_FILES.items() if any((path / n).is_file() for n in names)), None)
    if path.suffix == ".model":
        return TokenizerFormat.SENTENCEPIECE
    if path.name.endswith((VOCAB_JSON, MERGES)):
        return TokenizerFormat.BPE
    if path.suffix == ".txt":
        return TokenizerFormat.WORDPIECE
    return next((kind for kind, names in FORMAT_FILES.items() if path.name in names), TokenizerFormat.JSON)


def sentencepiece_file(path: Path) -> Path:
    """Return the SentencePiece model that a path is, or that lies in a folder."""
    return next(path / name for name in MODEL_NAMES if (path / name).is_file()) if path.is_dir() else path


def check_readable(path: Path, kind: TokenizerFormat) -> None:
    """Raise UserError for files that are a part of a tokenizer, or that do not say how they are used."""
    if path.is_file() and kind not in WHOLE:
        raise UserError(f"{path} is one file of {kind.value}\ngive its folder: --tokenizer {path.parent}")
    if kind not in (TokenizerFormat.BPE, TokenizerFormat.WORDPIECE):
        return
    if missing := [name for name in FORMAT_FILES[kind] if not (path / name).is_file()]:
        raise UserError(f"the tokenizer {path} is {kind.value}, and {missing[0]} is missing\ncopy that file too")
    if not class_name(path):
        raise _untold(path, kind)


def _untold(path: Path, kind: TokenizerFormat) -> UserError:
    """Return the error for a folder with a vocabulary and not a word on how it is used."""
    unsaid, types = "how text is split before it", [GPT2]
    if kind is TokenizerFormat.WORDPIECE:
        unsaid, types = "whether text is put in lower case", [LOWER_CASE, CASED]
        if (token := upper_case(word_pieces(path / VOCAB_TXT))) is not None:
            unsaid, types = f"{unsaid} (the token {token!r} means that it is not)", [CASED]
    else:
        byte_pairs(path / VOCAB_JSON)
    return UserError(
        f"the tokenizer {path} is {kind.value}, and no file says {unsaid}\n"
        f"give --tokenizer-type {' or '.join(types)} (`data` and `generate`), or a folder of its files with a "
        f"{CONFIG_NAME} such as {json.dumps(TYPE_SETTINGS[types[0]][1])}"
    )


def upper_case(tokens: Iterable[str]) -> str | None:
    """Return the first token with an upper-case letter, special tokens aside; None if there is none."""
    return next((t for t in tokens if t != t.lower() and not (t.startswith("[") and t.endswith("]"))), None)


def class_name(folder: Path) -> str | None:
    """Return the class that the files of a folder give its tokenizer, or the kind of the model, which implies one."""
    named = special_tokens(folder).get("tokenizer_class") or _fields(folder / MODEL_CONFIG).get("model_type")
    return None if named is None else str(named)


def special_tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens of a Hugging Face folder by role, and the other settings of its tokenizer."""
    merged = {**_fields(folder / "special_tokens_map.json"), **_fields(folder / CONFIG_NAME)}
    return {k: v["content"] if isinstance(v, dict) and "content" in v else v for k, v in merged.items()}


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; none if there is no such file. Raise UserError if it has no fields."""
    if not path.is_file():
        return {}
    try:
        fields = read_json(path)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object\ncopy the file again")
    return fields


def transformers_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a Hugging Face folder as transformers reads it. It runs no code of that folder."""
    from transformers import AutoTokenizer  # takes seconds

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def checked_tokenizer(path: Path, kind: TokenizerFormat) -> Any:
    """Return the tokenizer of a Hugging Face folder that has no tokenizer.json, as transformers reads it.

    Raise UserError if transformers cannot read it as the class that the folder names, or reads another vocabulary than
    the folder's, or puts text in lower case that the vocabulary has in upper case.
    """
    known = _vocabulary(path, kind)
    try:
        found = transformers_tokenizer(path)
        read = found.backend_tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # the libraries raise errors of many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot read the tokenizer {path}, {kind.value}, as that of {class_name(path) or 'a known class'}: "
            f"{reason}\nname its class in {path / CONFIG_NAME}, or save it as {JSON_NAME} with transformers"
        ) from None
    if wrong := next((t for t, id_ in known.items() if t not in read or id_ not in (None, read[t])), None):
        raise UserError(
            f"the tokenizer {path} is {kind.value}, of which transformers' {type(found).__name__} (for "
            f"{class_name(path)}) does not know the token {wrong!r}\nname its class in {path / CONFIG_NAME}"
        )
    normalizer = found.backend_tokenizer.normalizer
    lower = normalizer is not None and normalizer.normalize_str("A") == "a"
    if kind is TokenizerFormat.WORDPIECE and lower and (token := upper_case(known)) is not None:
        raise UserError(
            f"the tokenizer {path} puts text in lower case, and its {VOCAB_TXT} has the token {token!r}\n"
            f'give --tokenizer-type {CASED}, or "do_lower_case": false in its {CONFIG_NAME}'
        )
    return found


def _vocabulary(path: Path, kind: TokenizerFormat) -> Mapping[str, int | None]:
    """Return the tokens of a vocabulary file with their ids.

    Of a SentencePiece model only the pieces of text, without ids, which some classes of transformers shift.
    """
    if kind is TokenizerFormat.BPE:
        return byte_pairs(path / VOCAB_JSON)
    if kind is TokenizerFormat.WORDPIECE:
        return word_pieces(path / VOCAB_TXT)
    if kind is TokenizerFormat.SENTENCEPIECE:
        model = sentence_pieces(sentencepiece_file(path))
        special = (model.is_unknown, model.is_control, model.is_unused, model.is_byte)
        return {model.id_to_piece(i): None for i in range(model.vocab_size()) if not any(is_(i) for is_ in special)}
    return {}
