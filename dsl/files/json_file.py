"""Read files and JSON of any origin. Their size, their encoding and their nesting are checked here, for all readers.

An OSError says that a file cannot be read, a ValueError that its contents are no JSON.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from .yaml_file import YAML

LARGEST = 1 << 28  # bytes of a file that is read whole


def read_whole(path: str | os.PathLike[str], largest: int = LARGEST) -> bytes:
    """Return the bytes of a file. Raises OSError for a device, which may never end, and beyond `largest` bytes."""
    with open(path, "rb") as file:
        at = os.fstat(file.fileno())
        if stat.S_ISCHR(at.st_mode) or stat.S_ISBLK(at.st_mode):
            raise OSError(errno.ENXIO, "it is a device, not a file")
        if at.st_size > largest or len(data := file.read(largest + 1)) > largest:
            raise OSError(errno.EFBIG, f"it has more than {largest:,} bytes")
        return data


def read_text(path: str | os.PathLike[str], largest: int = LARGEST) -> str:
    """Return the text of a file in UTF-8, without a byte order mark. Raises OSError, or ValueError for other bytes."""
    return read_whole(path, largest).decode("utf-8-sig").replace("\r\n", "\n")


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return the value of JSON text, in UTF-8. hooks: those of `json.loads`. Raises ValueError for other text."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], **hooks: Any) -> Any:
    """Return the value in a JSON file. Raises OSError or ValueError."""
    return parse_json(read_text(path), **hooks)


MEGATRON_SIZES = {"hidden_size", "num_layers", "num_attention_heads"}
"""Fields by which a configuration of Megatron-LM or NeMo is known, which says no architecture."""


class Content(Enum):
    """The kinds of JSON files, which their fields tell apart."""

    PLAN = "a plan"
    MODEL = "a model"
    CONFIG = "a config.json"
    OTHER = "other JSON, or none"


def content_of(path: str | os.PathLike[str]) -> Content:
    """Return what a file is for. Its name, white space and order of fields do not count; YAML is a config.

    A file that is no JSON any more counts as a model if it begins as one that we wrote.
    """
    try:
        at = os.stat(path)
    except (OSError, ValueError):
        return Content.OTHER
    if not stat.S_ISREG(at.st_mode):  # a pipe can be read only once
        return Content.OTHER
    return _content_of(Path(path), at.st_size, at.st_mtime_ns)


@lru_cache(maxsize=32)
def _content_of(path: Path, nbytes: int, mtime_ns: int) -> Content:
    del nbytes, mtime_ns  # parts of the key: a file that changes is read again
    if path.suffix in YAML:
        return Content.CONFIG
    try:
        data = read_whole(path)
    except OSError:
        return Content.OTHER
    try:
        raw = parse_json(data)
    except ValueError:
        return Content.MODEL if data.startswith(b'{"version":') and b'"fingerprint":' in data[:200] else Content.OTHER
    if not isinstance(raw, dict):
        return Content.OTHER
    if not raw.keys().isdisjoint(("architectures", "model_type")) or MEGATRON_SIZES <= {
        k.replace("-", "_") for k in raw
    }:
        return Content.CONFIG
    if "stages" in raw or {"layout", "predicted"} <= raw.keys():
        return Content.PLAN
    return Content.MODEL if "values" in raw or {"fingerprint", "ops"} <= raw.keys() else Content.OTHER
