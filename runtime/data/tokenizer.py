"""Tokenizers: bytes, a tokenizer.json, a Hugging Face folder, a SentencePiece model, or BPE trained on the spot.

`save_tokenizer` copies one into a folder of its own, and `load_tokenizer` reads that folder, so that whoever has the
data has its tokenizer too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_text

from .token_ids import BYTE_IDS, Template, TokenIds
from .tokenizer_files import (
    CONFIG_NAME,
    JSON_NAME,
    MODEL_NAME,
    SETTINGS_FILES,
    TokenizerFormat,
    check_readable,
    checked_tokenizer,
    class_name,
    format_of,
    sentencepiece_file,
    special_tokens,
    transformers_tokenizer,
)
from .tokenizer_kinds import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, TextTokenizer
from .vocabulary_files import check_whole, sentence_pieces, why_no_tokenizer

COPIED = (JSON_NAME, MODEL_NAME, *SETTINGS_FILES)
END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of the token that ends a document, if a tokenizer.json comes without a tokenizer_config.json."""
BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", END_OF_TEXT)  # GPT-2 begins and ends texts with one token
MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")


def load_tokenizer(source: str) -> TextTokenizer:
    """Return the tokenizer "bytes", of a file tokenizer.json or *.model, or of a folder. Raise UserError if none is.

    `opened_tokenizer` turns other names, those of vocabularies and of the hub, into these.
    """
    if source == BYTE_IDS.name:
        return ByteTokenizer()
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"no tokenizer {source}\ngive --tokenizer a tokenizer.json, a *.model of SentencePiece, a Hugging Face "
            f"folder, or {BYTE_IDS.name!r}"
        )
    try:
        return _load(path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise bare Exception, RuntimeError, OSError, ValueError and more
        reason, kind = " ".join(str(error).split()) or type(error).__name__, format_of(path)
        what = f" as {kind.value}" if kind else ""
        raise UserError(f"cannot read the tokenizer {source}{what}: {reason}\ncopy its files again") from None


def tokenizer_of(folders: Sequence[Path]) -> str:
    """Return the first of these folders that has a tokenizer of any format, or "bytes"."""
    return next((str(f) for f in folders if f.is_dir() and format_of(f)), BYTE_IDS.name)


def _load(path: Path) -> TextTokenizer:
    kind = format_of(path)
    if kind is None:
        raise UserError(f"no tokenizer in {path}\ngive --tokenizer a folder with {JSON_NAME} or {MODEL_NAME}")
    check_readable(path, kind)
    if kind is TokenizerFormat.JSON:
        file, config = (path / JSON_NAME, special_tokens(path)) if path.is_dir() else (path, {})
        return _json(_json_backend(file), path.name, config)
    if _is_plain(path, kind):
        return _sentencepiece(sentencepiece_file(path))
    found = checked_tokenizer(path, kind)
    config = {**found.special_tokens_map, **special_tokens(path)}
    return _json(found.backend_tokenizer, path.name, config)


def _is_plain(path: Path, kind: TokenizerFormat) -> bool:
    """Return whether files are a SentencePiece model as it is, without a class of transformers."""
    if kind is not TokenizerFormat.SENTENCEPIECE or path.is_file():
        return kind is TokenizerFormat.SENTENCEPIECE
    named = "tokenizer_class" in special_tokens(path)
    return not named and (sentencepiece_file(path).name == MODEL_NAME or class_name(path) is None)


def _json_backend(file: Path) -> Any:
    """Return the tokenizer of a tokenizer.json, of the library `tokenizers`. Raise UserError if it is another file."""
    from tokenizers import Tokenizer

    check_whole(file)
    text = read_text(file)
    try:
        return Tokenizer.from_str(text)
    except Exception:  # the library raises bare Exception
        if (what := why_no_tokenizer(file)) is not None:
            raise UserError(f"{file} is not a tokenizer.json: it {what}") from None
        raise


def _json(backend: Any, name: str, config: Mapping[str, Any]) -> JsonTokenizer:
    backend.no_truncation()
    backend.no_padding()
    known: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    _check_ids(known, name)

    def named(key: str, *guesses: str) -> int | None:
        names = [config[key]] if isinstance(config.get(key), str) else [] if config else guesses
        return next((known[n] for n in names if n in known), None)

    eos = named("eos_token", *END_NAMES)
    spans = (known.get(f"<extra_id_{k}>") for k in range(len(known)))
    sentinels = []
    for id_ in spans:
        if id_ is None:
            break
        sentinels.append(id_)
    ids = TokenIds(
        max(known.values()) + 1,
        eos=named("sep_token") if eos is None else eos,
        bos=named("bos_token", *BEGIN_NAMES),
        pad=named("pad_token", *PAD_NAMES),
        mask=named("mask_token", *MASK_NAMES),
        sentinels=tuple(sentinels),
        name=name,
        template=_template(backend),
    )
    return JsonTokenizer(backend, ids)


def _template(backend: Any) -> Template:
    """Return the special tokens that a tokenizer puts around the text "a" and the pair "a", "a"."""
    single, pair = _special(backend.encode("a")), _special(backend.encode("a", "a"))
    if len(single) != 2 or len(pair) != 3 or not any(single):
        return Template()  # a tokenizer without the letter, or without special tokens
    ids = [tuple(id_ for id_, _ in part) for part in (*single, *pair)]
    encoded = backend.encode("a", "a")
    texts = [encoded.type_ids[encoded.sequence_ids.index(i)] for i in (0, 1)]
    types = [[kind for _, kind in part] for part in pair]
    return Template(ids[0], ids[1], (ids[2], ids[3], ids[4]), (*types[0], texts[0], *types[1], texts[1], *types[2]))


def _special(encoded: Any) -> list[list[tuple[int, int]]]:
    """Return the special tokens, with their types, before, between and after the texts of an encoding."""
    parts: list[list[tuple[int, int]]] = [[]]
    for i, (id_, kind, text) in enumerate(zip(encoded.ids, encoded.type_ids, encoded.sequence_ids, strict=True)):
        if text is None:
            parts[-1].append((id_, kind))
        elif i == 0 or encoded.sequence_ids[i - 1] != text:
            parts.append([])
    return parts


def _check_ids(known: Mapping[str, int], name: str) -> None:
    """Raise UserError for a vocabulary without tokens, or with two tokens of one id."""
    if not known:
        raise UserError(f"the tokenizer {name} has no tokens\ncopy its files again")
    tokens: dict[int, str] = {}
    for token, id_ in known.items():
        if (other := tokens.setdefault(id_, token)) is not token:
            first, second = sorted((other, token))
            raise UserError(
                f"the tokenizer {name} has two tokens of the id {id_}: {first!r} and {second!r}\n"
                "give each token an id of its own, or copy the tokenizer's files again"
            )


def _sentencepiece(path: Path) -> SentencePieceTokenizer:
    backend = sentence_pieces(path)

    def given(id_: int) -> int | None:
        return id_ if id_ >= 0 else None

    eos, bos, pad = (given(id_) for id_ in (backend.eos_id(), backend.bos_id(), backend.pad_id()))
    return SentencePieceTokenizer(backend, TokenIds(backend.vocab_size(), eos=eos, bos=bos, pad=pad, name=path.name))


def save_tokenizer(source: str, folder: Path) -> None:
    """Copy a tokenizer that `load_tokenizer` reads into `folder`, as transformers reads it too."""
    path, tokenizer = Path(source).expanduser(), load_tokenizer(source)
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        for name in COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
    if isinstance(tokenizer, SentencePieceTokenizer):
        shutil.copyfile(sentencepiece_file(path), folder / MODEL_NAME)
    if isinstance(tokenizer, JsonTokenizer) and not (folder / JSON_NAME).exists():
        if path.is_dir():
            transformers_tokenizer(path).save_pretrained(folder)
        else:
            tokenizer.backend.save(str(folder / JSON_NAME))
    if isinstance(tokenizer, JsonTokenizer) and not (folder / CONFIG_NAME).exists():
        _write_config(tokenizer, folder)


def _write_config(tokenizer: JsonTokenizer, folder: Path) -> None:
    """Write a tokenizer_config.json with the special tokens of a bare tokenizer.json."""
    ids = tokenizer.ids
    special = {"bos_token": ids.bos, "eos_token": ids.eos, "pad_token": ids.pad, "mask_token": ids.mask}
    named = {key: tokenizer.backend.id_to_token(id_) for key, id_ in special.items() if id_ is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2))


def train_bpe(texts: Iterable[str], vocab: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `vocab` tokens on texts, and save it in `folder`.

    Every text can be encoded. Token 0 is `<|endoftext|>`, which ends a document. Raise UserError for too small a vocab.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = BYTE_IDS.vocab + 1
    if vocab < least:
        raise UserError(f"--train-vocab {vocab} is too small: the bytes and {END_OF_TEXT} are {least} tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / JSON_NAME))
    _write_config(_json(backend, folder.name, {}), folder)
