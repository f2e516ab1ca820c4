"""The tensors of a checkpoint (megatron-core's torch_dist format) as views, without torch.distributed.

Each rank has written chunks of each tensor. A view reads the chunks that its part lies in, and nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.megatron.optimizer_state import AVERAGE
from megaloom.runtime.weights.safe_pickle import read_metadata
from megaloom.runtime.weights.views import Box, View, source


def tensor_views(folder: Path) -> dict[str, View]:
    """Return the tensors of a folder in the torch_dist format by name. Raise UserError if it is unsafe to read."""
    metadata = read_metadata(folder)
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    return {name: _view(folder, metadata, name, it) for name, it in tensors.items()}


def checkpoint_tensors(checkpoint: Checkpoint, *, averaged: bool = False) -> dict[str, View]:
    """Return the tensors of a checkpoint of a run by name.

    averaged: those of trained parameters are the averages that a loop of one's own has kept. Raise UserError if there
    are none.
    """
    tensors = tensor_views(checkpoint.folder)
    if not averaged:
        return tensors
    checkpoint.check_averaged()
    prefix = f"{AVERAGE}."
    return tensors | {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def _view(folder: Path, metadata: Metadata, name: str, stored: TensorStorageMetadata) -> View:
    assert metadata.storage_data is not None

    def reader(box: Box) -> Tensor:
        out = torch.empty([len(r) for r in box], dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            whole = [range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, whole, strict=True)]
            if all(map(len, common)):
                values = _chunk(folder, metadata, MetadataIndex(name, chunk.offsets))
                out[_inside(common, list(box))] = values[_inside(common, whole)]
        return out

    return source(tuple(stored.size), stored.properties.dtype, reader)


def _inside(part: list[range], of: list[range]) -> tuple[slice, ...]:
    """Return the indices of a part of a box, counted from the begin of the box."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(part, of, strict=True))


def _chunk(folder: Path, metadata: Metadata, index: MetadataIndex) -> Tensor:
    """Return a chunk, which a rank has written with `torch.save` into its file."""
    place = metadata.storage_data[index]  # type: ignore[index]
    path = folder / place.relative_path
    return _read(path, path.stat().st_mtime_ns, place.offset, place.length)


@lru_cache(maxsize=1)  # the experts of a mixture, and the matrices of an attention, are parts of one chunk
def _read(path: Path, changed_at: int, offset: int, length: int) -> Tensor:
    """Return the tensor at this place of a file. changed_at: nanoseconds."""
    with path.open("rb") as file:
        file.seek(offset)
        values = torch.load(BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    assert isinstance(values, Tensor)
    return values
