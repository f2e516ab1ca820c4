"""The names of the tensors in the safetensors files of a folder, from their headers alone."""

from __future__ import annotations

from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json, read_json

SHARD_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH = 8  # bytes of the length of a header, before it
LARGEST_HEADER = 100_000_000  # bytes, as in the library safetensors


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors of a folder; none if it has no safetensors files.

    Raises UserError for a damaged file.
    """
    index, single = folder / SHARD_INDEX, folder / SINGLE
    file = index if index.is_file() else single
    try:
        if index.is_file():
            return frozenset(map(str, dict(read_json(index)["weight_map"])))
        return frozenset(_header(single)) - {"__metadata__"} if single.is_file() else frozenset()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the names of the tensors in {file}: {error!r:.80}") from None


def _header(file: Path) -> dict[str, object]:
    """Return the header of a safetensors file. Raises ValueError if it has none."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH), "little")
        if length > LARGEST_HEADER:
            raise ValueError("it has no header of safetensors")
        header = parse_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("it has no header of safetensors")
    return header
