"""The tokenizer that a user names: "bytes", a file or folder of any format, or a name on the Hugging Face hub.

`opened_tokenizer` alone resolves names, so that every command takes the same ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megaloom.dsl.errors import UserError, did_you_mean

from .token_ids import BYTE_IDS
from .tokenizer import load_tokenizer
from .tokenizer_files import (
    CASED,
    CONFIG_NAME,
    FORMAT_FILES,
    LOWER_CASE,
    MERGES,
    MODEL_CONFIG,
    SETTINGS_FILES,
    TOKENIZER_FILE_NAMES,
    TYPE_SETTINGS,
    VOCAB_JSON,
    WHOLE,
    TokenizerFormat,
    format_of,
    special_tokens,
)

HUB_NAMES = {
    "megatron-gpt-345m": "gpt2",
    "megatron-bert-345m-uncased": "bert-large-uncased",
    "megatron-bert-345m-cased": "bert-large-cased",
    "megatron-bert-uncased": "bert-large-uncased",
    "megatron-bert-cased": "bert-large-cased",
}
"""Names of tokenizers in NeMo and megatron-core, with those on the hub: megatron-core's MEGATRON_CONFIG_MAP.

Its biomegatron tokenizers have vocabularies that are not on the hub.
"""
REFUSED_TYPES = {
    "HuggingFaceTokenizer": "omit it: --tokenizer takes a Hugging Face folder, or a name on the hub",
    "Llama2Tokenizer": "omit it: --tokenizer takes a tokenizer.model, and --add-bos begins texts as Llama 2 does",
    "TikTokenizer": "omit it, and give --tokenizer the tokenizer.json of the same model",
    "NullTokenizer": "omit it: train on indexed datasets, which need no tokenizer",
    "PreTrainedTokenizerFast": "omit it, and give --tokenizer the tokenizer.json",
    "TokenizersBackend": "omit it, and give --tokenizer the tokenizer.json",
}
"""Names that users of Megatron-LM and transformers may give, with what to do instead."""


@contextmanager
def opened_tokenizer(source: str, kind: str | None = None) -> Iterator[str]:
    """Yield what `load_tokenizer` reads for the tokenizer that a user names: "bytes", a file or a folder.

    kind: how the files are used, if they do not say so: a tokenizer of Megatron-LM, such as BertWordPieceLowerCase, or
    a class of transformers. Files of a vocabulary, and those of the hub, are copied into a folder, which is removed at
    the end; messages of a UserError name the files that the user knows. Raise UserError if there is no such tokenizer,
    or if `kind` does not fit it.
    """
    path = Path(source).expanduser()
    if kind is not None and source == BYTE_IDS.name:
        raise UserError(f"--tokenizer-type {kind} has no effect with --tokenizer {source}\nomit it")
    if source == BYTE_IDS.name or (kind is None and (path.is_dir() or (path.exists() and format_of(path) in WHOLE))):
        yield source
        return
    files = _files(path) if path.exists() else _hub_files(source)
    with TemporaryDirectory(prefix="megaloom-") as temporary:
        folder = Path(temporary) / "tokenizer"
        folder.mkdir()
        for name, file in files.items():
            _copy(file, folder / name)
        try:
            if kind is not None:
                _write_settings(folder, kind)
            load_tokenizer(str(folder))
            yield str(folder)
        except UserError as error:
            if str(folder) not in str(error):
                raise
            raise UserError(_in_words_of_the_user(str(error), source, folder, files)) from None


@contextmanager
def opened_if_named(source: str | None, kind: str | None) -> Iterator[str | None]:
    """Yield what `opened_tokenizer` yields for the options --tokenizer and --tokenizer-type; None without the first."""
    if source is not None:
        with opened_tokenizer(source, kind) as name:
            yield name
    elif kind is not None:
        raise UserError(f"--tokenizer-type {kind} has no effect without --tokenizer\nadd --tokenizer")
    else:
        yield None


def _in_words_of_the_user(message: str, source: str, folder: Path, files: Mapping[str, Path]) -> str:
    """Return a message on a folder of copies that names the files which were copied."""
    for name, file in files.items():
        message = message.replace(str(folder / name), str(file))
    return message.replace(str(folder), source)


def _files(path: Path) -> dict[str, Path]:
    """Return the files of a tokenizer by their usual names: those of a folder, or a file and what belongs to it."""
    if path.is_dir():
        return _present(path, (*TOKENIZER_FILE_NAMES, MODEL_CONFIG))
    kind = format_of(path)
    assert kind is not None, "a file has a format"
    if kind is TokenizerFormat.BPE:
        named = VOCAB_JSON if path.name.endswith(VOCAB_JSON) else MERGES
        start = path.name.removesuffix(named)
        files = {name: path.with_name(start + name) for name in FORMAT_FILES[kind]}
        if missing := next((file for file in files.values() if not file.is_file()), None):
            raise UserError(f"{path} is a part of {kind.value}, and {missing} is missing\ncopy that file too")
    else:
        start, files = "" if path.name in FORMAT_FILES[kind] else path.name, {FORMAT_FILES[kind][0]: path}
    return files if start else files | _present(path.parent, (*SETTINGS_FILES, MODEL_CONFIG))


def _copy(file: Path, to: Path) -> None:
    try:
        shutil.copyfile(file, to)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer's file {file}: {error.strerror or error}") from None


def _present(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}


def _hub_files(source: str) -> dict[str, Path]:
    """Return the files of a tokenizer of the Hugging Face hub, from its cache if they are there.

    Raise UserError if the name is not one of the hub, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, advice = HUB_NAMES.get(source, source), "give a file, a folder, a name on the Hugging Face hub, or 'bytes'"
    shown = source if name == source else f"{source} ({name} on the Hugging Face hub)"
    if Path(name).suffix in (".json", ".model", ".txt"):
        raise UserError(f"no tokenizer {source}: there is no such file\n{advice}")
    try:
        folder = snapshot_download(name, allow_patterns=[*TOKENIZER_FILE_NAMES, MODEL_CONFIG])
    except HFValidationError:
        reason = "there is no such file or folder"
    except GatedRepoError:
        reason, advice = "the hub asks for a login", "accept its terms on its page, and run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "there is no such file or folder, and the hub has no such repository, or a private one"
    except Exception as error:  # of the network, of the cache
        why = (str(error) or type(error).__name__).splitlines()[0].removeprefix("Got: ")
        reason = f"there is no such file or folder, and the hub cannot be reached: {why}"
        advice = (
            "give the folder of its files, copied from elsewhere, or a vocabulary: "
            f"--tokenizer vocab.txt --tokenizer-type {LOWER_CASE}"
        )
    else:
        return _files(Path(folder))
    raise UserError(f"no tokenizer {shown}: {reason}\n{advice}")


def _write_settings(folder: Path, kind: str) -> None:
    """Write how a vocabulary is used into the settings of its folder. Raise UserError if that does not fit."""
    form, option = format_of(folder), f"--tokenizer-type {kind}"
    if kind in REFUSED_TYPES:
        raise UserError(f"{option} is not supported\n{REFUSED_TYPES[kind]}")
    if form is None:
        raise UserError(f"no tokenizer in {folder}\ngive --tokenizer a folder with a vocabulary")
    if form is TokenizerFormat.JSON:
        raise UserError(f"{option} has no effect: {folder} has a tokenizer.json, which says how text is split\nomit it")
    wanted, settings = TYPE_SETTINGS.get(kind) or (form, _class_settings(kind, form))
    if wanted is not form:
        fitting = " or ".join(name for name, (other, _) in TYPE_SETTINGS.items() if other is form)
        raise UserError(f"{option} is for {wanted.value}, and {folder} is {form.value}\ngive {fitting or 'no type'}")
    known = special_tokens(folder)
    for field in ("tokenizer_class", "do_lower_case"):
        if field in known and str(known[field]).removesuffix("Fast") != str(settings.get(field, known[field])):
            raise UserError(
                f"{option} contradicts {folder / CONFIG_NAME}, which has {field} {json.dumps(known[field])}\nomit it"
            )
    path = folder / CONFIG_NAME
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | settings, indent=2))


def _class_settings(kind: str, form: TokenizerFormat) -> dict[str, Any]:
    """Return the settings that name a class of transformers. Raise UserError if there is none of this name."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    found = tokenizer_class_from_name(kind)
    if not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
        hint = did_you_mean(kind, [*TYPE_SETTINGS, *REFUSED_TYPES])
        raise UserError(
            f"--tokenizer-type {kind!r} is unknown{hint}give {', '.join(TYPE_SETTINGS)}, or a class of transformers"
        )
    if form is TokenizerFormat.WORDPIECE:
        raise UserError(
            f"--tokenizer-type {kind} does not say whether text is put in lower case\ngive {LOWER_CASE} or {CASED}, or "
            f'"tokenizer_class" and "do_lower_case" in {CONFIG_NAME} beside the vocabulary'
        )
    return {"tokenizer_class": kind}
