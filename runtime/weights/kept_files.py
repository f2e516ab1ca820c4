"""Files of a Hugging Face folder that a run keeps, so that its weights can be given back with them.

run/hugging-face/   config.json, generation and tokenizer files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

KEPT = "hugging-face"
"""Folder of a run for these files."""

CONFIG = "config.json"
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)
"""Files of a Hugging Face folder that are copied unchanged."""


def copy_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and generation files of a Hugging Face folder, those that it has."""
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def keep_files(
    run: Path,
    config: Path | None,
    tokenizer: Path | None,
    *,
    fields: Mapping[str, object] | None = None,
    beside: bool = True,
) -> None:
    """Copy into a run folder a config.json with the files beside it, and the files of a tokenizer's folder.

    A model that has no config.json keeps nothing: its tokenizer has a folder of its own.
    fields: those of the config.json, if they are not those of its file. beside: False if the files beside it are of a
    tokenizer that the data do not have. A run that has files already keeps them.
    """
    kept = run / KEPT
    if kept.exists() or config is None:
        return
    kept.mkdir()
    if fields is None:
        shutil.copyfile(config, kept / CONFIG)
    else:
        (kept / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if beside:
        copy_files(config.parent, kept)
    if tokenizer is not None:
        copy_files(tokenizer, kept)
