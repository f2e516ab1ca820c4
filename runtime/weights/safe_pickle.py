"""Pickled files from outside, read without running code: only the classes named here are unpickled.

`read_metadata` reads the `.metadata` of a torch_dist checkpoint, `load_tensors` a file of `torch.save`. A file with any
other class is refused by name. `only_weights` makes calls of `torch.load` in libraries as strict.
"""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct as reconstruct
from torch.distributed.checkpoint.metadata import Metadata

from megaloom.dsl.errors import UserError

METADATA = ".metadata"
COMMON = "common.pt"  # what is not sharded
CHECKPOINT = "torch.distributed.checkpoint"
METADATA_CLASSES = frozenset(
    {
        (f"{CHECKPOINT}.metadata", "Metadata"),
        (f"{CHECKPOINT}.metadata", "StorageMeta"),
        (f"{CHECKPOINT}.metadata", "MetadataIndex"),
        (f"{CHECKPOINT}.metadata", "TensorStorageMetadata"),
        (f"{CHECKPOINT}.metadata", "BytesStorageMetadata"),
        (f"{CHECKPOINT}.metadata", "ChunkStorageMetadata"),
        (f"{CHECKPOINT}.metadata", "TensorProperties"),
        (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
        (f"{CHECKPOINT}.planner", "SavePlan"),  # megatron-core keeps the plans of all ranks
        (f"{CHECKPOINT}.planner", "WriteItem"),
        (f"{CHECKPOINT}.planner", "WriteItemType"),
        (f"{CHECKPOINT}.planner", "TensorWriteData"),
        (f"{CHECKPOINT}.planner", "BytesIOWriteData"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("collections", "OrderedDict"),
    }
)
SAFE_GLOBALS: tuple[type, ...] = (BytesIO, Namespace)
OF_ARRAYS: tuple[Any, ...] = (
    *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    type(np.dtype(np.uint32)),
)
"""Classes and functions of the arrays of uint32 in the files of Megatron-LM's ranks, the state of numpy's generator."""
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
ADVICE = "do not use it; get the file again from where it was saved"


class _Unpickler(pickle.Unpickler):
    """Unpickles the classes of a torch_dist checkpoint's metadata, and nothing else."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or raise UserError."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise unsafe(self.path, f"{module}.{name}")


def unsafe(path: Path, name: str) -> UserError:
    """Return the error for a file that holds something which is no part of a checkpoint."""
    return UserError(f"{path} holds {name}, which no checkpoint needs and which could run code\n{ADVICE}")


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a torch_dist checkpoint. Raise UserError if it is damaged, or unsafe to read."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        places = [place.relative_path for place in metadata.storage_data.values()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}\ngive the folder of a torch_dist checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # of a damaged pickle, any
        raise UserError(f"{path} is damaged: {type(error).__name__}\n{ADVICE}") from None
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path} is not the metadata of a checkpoint\n{ADVICE}")
    for place in places:
        if not isinstance(place, str) or Path(place).name != place:
            raise UserError(f"{path} names the file {str(place)!r:.80}, which is outside of its folder\n{ADVICE}")
    return metadata


def load_tensors(path: Path, classes: Iterable[type] = SAFE_GLOBALS) -> Any:
    """Return what `torch.save` has written: tensors, containers, numbers, and values of `classes`, on CPU.

    Tensors are mapped into memory where the file allows it. Raise UserError for a file with another class.
    """
    safe = [*SAFE_GLOBALS, *OF_ARRAYS, *classes]
    try:
        with _allowed(safe):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if _is_zip(path) else []
            if names:
                raise unsafe(path, sorted(names)[0])
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise unsafe(path, _named(str(error))) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}\ncopy the file again") from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or was not written by torch.save: {error!s:.80}\n{ADVICE}") from None


def check_files(folder: Path) -> None:
    """Raise UserError unless the pickled files of a torch_dist checkpoint are safe to unpickle."""
    read_metadata(folder)
    if (folder / COMMON).is_file():
        load_tensors(folder / COMMON)


@contextmanager
def only_weights() -> Iterator[None]:
    """Let every `torch.load` inside the context unpickle tensors and plain values only, whatever the caller asks."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with _allowed(SAFE_GLOBALS):
            yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


@contextmanager
def _allowed(classes: Sequence[Any]) -> Iterator[None]:
    """Let torch unpickle these classes as well. torch would then forget those among them that were allowed before."""
    before = torch.serialization.get_safe_globals()
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _named(text: str) -> str:
    """Return the name of the class in the message of torch."""
    _, _, rest = text.partition("GLOBAL ")
    return rest.split(" ")[0] if rest else "something other than tensors"
