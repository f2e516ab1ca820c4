"""The tensors of a checkpoint (megatron-core's torch_dist format) as views, without torch.distributed.

Each rank has written chunks of each tensor. A view reads the chunks that its part lies in, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from io import BytesIO
from math import prod
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megaloom.dsl import UserError
from megaloom.runtime.weights.safe_pickle import METADATA, read_metadata
from megaloom.runtime.weights.views import View, boxes_reader, source


def tensor_views(folder: Path) -> dict[str, View]:
    """Return the tensors of a folder in the torch_dist format by name. Raise UserError if it is unsafe to read."""
    metadata = read_metadata(folder)
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    return {name: _view(folder, metadata, name, it) for name, it in tensors.items()}


def of_kind(tensors: Mapping[str, View], kind: str) -> dict[str, View]:
    """Return the tensors of a kind of state, such as a moment of the optimizer, by the names of the parameters."""
    return {k.removeprefix(f"{kind}."): x for k, x in tensors.items() if k.startswith(f"{kind}.")}


def _view(folder: Path, metadata: Metadata, name: str, stored: TensorStorageMetadata) -> View:
    """Return a tensor that ranks have written in chunks. Raise UserError if they are not the whole tensor."""
    assert metadata.storage_data is not None
    ends = [(o + n, size) for c in stored.chunks for o, n, size in zip(c.offsets, c.sizes, stored.size, strict=True)]
    whole = sum(prod(chunk.sizes) for chunk in stored.chunks) == prod(stored.size)
    if not whole or any(end > size for end, size in ends):
        raise damaged(folder / METADATA)
    chunks = [
        (
            tuple(range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)),
            partial(_chunk, folder, metadata, MetadataIndex(name, chunk.offsets), chunk.sizes),
        )
        for chunk in stored.chunks
    ]
    return source(tuple(stored.size), stored.properties.dtype, boxes_reader(chunks, stored.properties.dtype))


def damaged(path: Path) -> UserError:
    """Return the error for a file of a checkpoint that does not hold what it should."""
    return UserError(f"{path} is damaged: it does not hold the tensors of its checkpoint\ncopy the checkpoint again")


def _chunk(folder: Path, metadata: Metadata, index: MetadataIndex, sizes: torch.Size) -> Tensor:
    """Return a chunk, which a rank has written with `torch.save` into its file."""
    place = metadata.storage_data.get(index)  # type: ignore[union-attr]
    if place is None:
        raise damaged(folder / METADATA)
    path = folder / place.relative_path
    values = _read(path, path.stat().st_mtime_ns, place.offset, place.length)
    if values.shape != sizes:
        raise damaged(path)
    return values


@lru_cache(maxsize=1)  # the experts of a mixture, and the matrices of an attention, are parts of one chunk
def _read(path: Path, changed_at: int, offset: int, length: int) -> Tensor:
    """Return the tensor at this place of a file. changed_at: nanoseconds. Raise UserError if it is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            values = torch.load(BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, RuntimeError, UnpicklingError) as error:
        raise damaged(path) from error
    if not isinstance(values, Tensor):
        raise damaged(path)
    return values
