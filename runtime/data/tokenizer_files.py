"""Files of a tokenizer: the format of a file or folder, and what a format lacks to be read.

`format_of` alone decides whether a folder has a tokenizer: no command takes a folder with one for bytes.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json

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
CLASSES = {
    TokenizerFormat.BPE: ('{"tokenizer_class": "GPT2Tokenizer"}', "how text is split before it"),
    TokenizerFormat.WORDPIECE: (
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}',
        "whether its text is in lower case",
    ),
}
"""Contents of a tokenizer_config.json that names a usual class, and what the vocabulary alone does not say."""


def format_of(path: Path) -> TokenizerFormat | None:
    """Return the format of the tokenizer in a folder, None without one; of a file by its name, tokenizer.json if none.

    A config.json alone is no tokenizer.
    """
    if path.is_dir():
        return next((kind for kind, names in FORMAT_FILES.items() if any((path / n).is_file() for n in names)), None)
    if path.suffix == ".model":
        return TokenizerFormat.SENTENCEPIECE
    return next((kind for kind, names in FORMAT_FILES.items() if path.name in names), TokenizerFormat.JSON)


def sentencepiece_file(path: Path) -> Path:
    """Return the SentencePiece model that a path is, or that lies in a folder."""
    return next(path / name for name in MODEL_NAMES if (path / name).is_file()) if path.is_dir() else path


def check_readable(path: Path, kind: TokenizerFormat) -> None:
    """Raise UserError for files that are a part of a tokenizer, or that do not say how they are used."""
    if path.is_file():
        if kind in (TokenizerFormat.JSON, TokenizerFormat.SENTENCEPIECE):
            return
        raise UserError(f"{path} is one file of {kind.value}\ngive its folder: --tokenizer {path.parent}")
    missing = [name for name in FORMAT_FILES[kind] if not (path / name).is_file()]
    if kind is TokenizerFormat.BPE and missing:
        raise UserError(f"the tokenizer {path} is {kind.value}, and {missing[0]} is missing\ncopy that file too")
    if kind in CLASSES and not class_name(path):
        contents, unsaid = CLASSES[kind]
        raise UserError(
            f"the tokenizer {path} is {kind.value}, and no file says {unsaid}\n"
            f"add {path / CONFIG_NAME}, such as {contents}"
        )


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


def transformers_json(path: Path, kind: TokenizerFormat) -> str:
    """Return the tokenizer of a Hugging Face folder as the text of a tokenizer.json.

    Raise UserError if transformers cannot read it as the class that the folder names, or reads another vocabulary than
    the folder's.
    """
    try:
        found = transformers_tokenizer(path)
        backend = found.backend_tokenizer
    except Exception as error:  # the libraries raise errors of many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot read the tokenizer {path}, {kind.value}, as that of {class_name(path) or 'a known class'}: "
            f"{reason}\nname its class in {path / CONFIG_NAME}, or save it as {JSON_NAME} with transformers"
        ) from None
    known = backend.get_vocab(with_added_tokens=True)
    if wrong := next((t for t, i in _vocabulary(path, kind).items() if known.get(t) != i), None):
        raise UserError(
            f"the tokenizer {path} is {kind.value}, of which transformers' {type(found).__name__} (for "
            f"{class_name(path)}) does not know the token {wrong!r}\nname its class in {path / CONFIG_NAME}"
        )
    return str(backend.to_str())


def _vocabulary(path: Path, kind: TokenizerFormat) -> dict[str, int]:
    """Return the tokens of a vocabulary file with their ids; none of other formats."""
    if kind is TokenizerFormat.BPE:
        return {str(token): int(id_) for token, id_ in _fields(path / VOCAB_JSON).items()}
    if kind is TokenizerFormat.WORDPIECE:
        lines = (path / VOCAB_TXT).read_text(encoding="utf-8").split("\n")
        return {line: i for i, line in enumerate(lines) if line.strip()}
    return {}
