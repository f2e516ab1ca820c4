"""Files of a Hugging Face folder that a run copies, to write them beside its weights again.

run/hugging-face/   config.json, generation and tokenizer files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

HF_FOLDER = "hugging-face"
"""Folder of a run for these files."""

CONFIG = "config.json"
COPIED_FILES = (
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
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def copy_to_run(
    run: Path,
    config: Path | None,
    tokenizer: Path | None,
    *,
    fields: Mapping[str, object] | None = None,
    beside: bool = True,
) -> None:
    """Copy into a run folder a config.json with the files beside it, and the files of a tokenizer's folder.

    Without a config.json nothing is copied: the model's tokenizer has a folder of its own. Existing files stay.
    fields: those of the config.json, if they are not those of its file. beside: False skips files of a tokenizer other
    than the data's.
    """
    folder = run / HF_FOLDER
    if folder.exists() or config is None:
        return
    folder.mkdir()
    if fields is None:
        shutil.copyfile(config, folder / CONFIG)
    else:
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if beside:
        copy_files(config.parent, folder)
    if tokenizer is not None:
        copy_files(tokenizer, folder)
