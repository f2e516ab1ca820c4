"""Saving and loading the state of all ranks, through megatron.core.dist_checkpointing.

`checkpoint_folder` describes a checkpoint on disk. Only ranks import this file: `device.prepare` must run before.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import evolve
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException  # from any rank; a BaseException, not an Exception

from megaloom.runtime.megatron import device

from .checkpoint_folder import (
    MANIFEST_NAME,
    Checkpoint,
    CheckpointError,
    Manifest,
    Retention,
    SavedFile,
    Space,
    cannot_save,
    first_sentence,
    manifest_to_json,
    unusable,
)

DEFAULT_RETENTION = Retention()


class Stateful(Protocol):
    """Training state that is sharded over all ranks, under names that do not depend on the layout."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return this rank's shards; with `loading`, uninitialized tensors to load into."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the tensors that were loaded into `sharded_state(loading=True)`."""


def save(engine: Stateful, run: Path, manifest: Manifest, retention: Retention = DEFAULT_RETENTION) -> Path:
    """Save the state of all ranks as run/step-…, then remove what is not kept. Every rank calls it.

    Raise CheckpointError if the checkpoint cannot be written. A save that was killed leaves a .tmp folder; the next
    save removes it.
    """
    folder = run / manifest.folder_name
    unfinished = folder.with_name(f"{folder.name}.tmp")
    first = dist.get_rank() == 0
    state = engine.sharded_state()
    space = Space(_saved_nbytes(state), shutil.disk_usage(run).free if run.exists() else 0)

    def message(error: BaseException) -> str:
        return cannot_save(f"step {manifest.step}", run, error, space)

    with _checkpoint_errors(message), _removed_on_failure(unfinished) if first else nullcontext():
        if first:
            for leftover in run.glob("step-*.tmp"):
                shutil.rmtree(leftover)
            unfinished.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(unfinished), RankFileWriter())
        dist.barrier()
        checksums = _checksums(unfinished)
        if first:  # other ranks do not touch the folder again: it may already be renamed
            _publish(unfinished, folder, manifest, checksums)
            _remove_old(run, retention)
        dist.barrier()
    return folder


def load(engine: Stateful, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, saved under any layout, into the engine's own layout. Every rank calls it.

    Raise CheckpointError if its bytes differ from those saved, or its tensors from those of the engine.
    """
    folder = checkpoint.folder
    # Without a comparable fingerprint, the checkpoint must have exactly the tensors of this model.
    comparable = checkpoint.manifest.has_comparable_fingerprint
    strict = StrictHandling.ASSUME_OK_UNEXPECTED if comparable else StrictHandling.RAISE_ALL

    def message(error: BaseException) -> str:
        return unusable(folder, f"cannot be loaded: {first_sentence(error)}")

    with _checkpoint_errors(message), warnings.catch_warnings():
        checksums = _checksums(folder)
        for name, file in checkpoint.manifest.files.items():
            if checksums.get(name) != file.crc32:
                raise CheckpointError(unusable(folder, f"is damaged: the contents of {name} have changed"))
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron-core calls torch by an old name
        state = dist_checkpointing.load(engine.sharded_state(loading=True), str(folder), strict=strict)
    engine.load_state(state)


class RankFileWriter(mcore.TorchDistSaveShardedStrategy):
    """Save strategy in which each rank writes its own file of the torch_dist format, and returns when it is on disk.

    megatron-core's own strategy (`filesystem_async`) forks writers and spawns a server that runs the user's script
    again. With it a save of a few KB took seconds, and one in fifteen failed or hung.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's shards. Every rank calls it."""
        shards, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore.mcore_to_pyt_state_dict(shards),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=mcore.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _saved_nbytes(state: dict[str, Any]) -> int:
    """Return the bytes that all ranks together write for a sharded state. Every rank calls it."""
    shards = [s for s in nested_values(state) if hasattr(s, "replica_id") and is_main_replica(s.replica_id)]
    here = sum(s.data.numel() * s.data.element_size() for s in shards if s.data is not None and not s.data.is_meta)
    total = torch.tensor(here, dtype=torch.int64, device=device.current())
    dist.all_reduce(total)
    return int(total)


@contextmanager
def _removed_on_failure(unfinished: Path) -> Iterator[None]:
    """Remove the unfinished folder if saving fails: the space may be what was missing."""
    try:
        yield
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def _checkpoint_errors(message: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn errors of torch's and megatron-core's checkpointing, and of the disk, into CheckpointError."""
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError) as error:
        failures = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        cause, *_ = [*failures, error]
        raise CheckpointError(message(cause)) from error


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC of each file but the manifest, on every rank. Each rank reads some of the files."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_NAME)
    mine = {name: crc32_of(folder / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    gathered: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: crc32 for part in gathered for name, crc32 in part.items()}


def crc32_of(path: Path) -> int:
    """Return the CRC of a file. torch stores CRCs in its files but does not check them on loading."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def _publish(unfinished: Path, folder: Path, manifest: Manifest, checksums: dict[str, int]) -> None:
    """Write the manifest, flush everything to disk, and give the folder its final name."""
    files = {name: SavedFile((unfinished / name).stat().st_size, crc32) for name, crc32 in checksums.items()}
    (unfinished / MANIFEST_NAME).write_text(manifest_to_json(evolve(manifest, files=files)))
    for path in [*unfinished.iterdir(), unfinished]:
        _flush(path)
    if folder.exists():  # a damaged one, which this run has skipped
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    unfinished.rename(folder)
    _flush(folder.parent)


def _remove_old(run: Path, retention: Retention) -> None:
    """Remove the checkpoints that are not kept; each is renamed first, so that no half of one has a valid name."""
    for old in retention.superseded(run):
        shutil.rmtree(old.rename(old.with_name(f"{old.name}.tmp")))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
