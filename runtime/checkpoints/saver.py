"""Saving of checkpoints, with or without stopping the training meanwhile.

`Saver.start` plans a checkpoint and writes it as run/step-….tmp, in a thread if saves are asynchronous. `Saver.finish`
gives the folder its name once all ranks have written. Only ranks import this file: `device.prepare` must run before.
"""

from __future__ import annotations

import errno
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica

from megaloom.dsl.graph import Graph
from megaloom.runtime.launch.agreement import agreed
from megaloom.runtime.megatron import device

from .checkpoint_folder import (
    Retention,
    Space,
    cannot_save,
    crc32_of,
    publish,
)
from .errors import checkpoint_errors
from .manifest import Manifest
from .shard_writer import PlannedSave, ShardWriter


class Stateful(Protocol):
    """Training state that is sharded over all ranks, under names that do not depend on the layout."""

    @property
    def graph(self) -> Graph:
        """Return the graph of the model, by whose weights checkpoints of versions 1 and 2 are read."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return this rank's shards; with `loading`, uninitialized tensors to load into."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the tensors that were loaded into `sharded_state(loading=True)`."""


@frozen
class Saved:
    """A checkpoint that is whole on disk, and the seconds that it took."""

    folder: Path
    manifest: Manifest
    stall_seconds: float  # for which training stopped
    seconds: float  # from the start to the folder's final name


@frozen(eq=False)
class Pending:
    """A checkpoint that is being written into a folder with another name."""

    manifest: Manifest
    unfinished: Path
    space: Space
    started: float  # time.monotonic()
    writer: ShardWriter
    save: PlannedSave
    written: Future[None]
    stall_seconds: float


@define(eq=False)
class Saver:
    """Saves the checkpoints of one run, one at a time. Every rank has one, and calls it at the same steps."""

    run: Path
    retention: Retention = field(factory=Retention)
    asynchronous: bool = False
    thread: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    pending: Pending | None = field(default=None, init=False)
    removal: Future[None] | None = field(default=None, init=False)  # of checkpoints that are not kept
    validated: bool = field(default=False, init=False)  # that the shards of all ranks are each tensor once

    @property
    def is_writing(self) -> bool:
        """Return whether this rank has yet to write its part of a checkpoint."""
        return self.pending is not None and not self.pending.written.done()

    def start(self, engine: Stateful, manifest: Manifest) -> None:
        """Begin to save the state of all ranks as run/step-…, and go on writing in a thread if saves are asynchronous.

        `finish` must have been called for the checkpoint before. Raise CheckpointError on all ranks if the folder
        cannot be written. A save that was killed leaves a .tmp folder; the next save removes it.
        """
        assert self.pending is None, "a checkpoint is being saved already"
        started, unfinished = time.monotonic(), self.run / f"{manifest.folder_name}.tmp"
        state = engine.sharded_state()
        space = Space(_saved_nbytes(state), _free_nbytes(self.run))
        writer = ShardWriter(asynchronous=self.asynchronous)
        with self._removed_on_failure(unfinished):
            self._agreed(manifest, space, lambda: self._prepare(unfinished, space))
            with checkpoint_errors(lambda error: self._message(manifest, space, error)):
                save = writer.plan(state, unfinished, validate=not self.validated)  # its outcome is equal for all steps
        self.validated = True
        written = self.thread.submit(save.write) if self.asynchronous else _called(save.write)
        stall = time.monotonic() - started
        self.pending = Pending(manifest, unfinished, space, started, writer, save, written, stall)

    def finish(self) -> Saved | None:
        """Wait until all ranks have written, give the folder its name, and remove checkpoints that are not kept.

        Return the checkpoint, or None if none is being saved. Raise CheckpointError on all ranks if a rank could not
        write its part; then the unfinished folder is removed, because space may be what was missing.
        """
        if self.pending is None:
            return None
        waited, pending, self.pending = time.monotonic(), self.pending, None
        manifest, space = pending.manifest, pending.space
        folder = pending.unfinished.with_name(manifest.folder_name)
        with self._removed_on_failure(pending.unfinished):
            self._agreed(manifest, space, pending.written.result)
            with checkpoint_errors(lambda error: self._message(manifest, space, error)):
                pending.save.finish()
            checksums = _gathered(pending.writer.checksums)
            self._agreed(manifest, space, lambda: self._publish(pending.unfinished, folder, manifest, checksums))
        now = time.monotonic()
        stall = pending.stall_seconds + now - waited
        return Saved(folder, manifest, stall, now - pending.started)

    def close(self) -> None:
        """Wait until this rank's thread has ended. Call `finish` before."""
        self.thread.shutdown(wait=True)

    def remove_unfinished(self) -> None:
        """On rank 0, remove what interrupted saves and removals have left."""
        if dist.get_rank() == 0:
            if self.removal:
                self.removal.exception()  # waits; what it could not remove goes here
            _remove(list(self.run.glob("step-*.tmp")))

    def _prepare(self, unfinished: Path, space: Space) -> None:
        """On rank 0, create the folder to write in."""
        if dist.get_rank():
            return
        if self.removal is None or self.removal.done() or _free_nbytes(self.run) < space.needed:
            self.remove_unfinished()  # else its thread is at it, and training need not wait
        unfinished.mkdir(parents=True)
        if _free_nbytes(self.run) < space.needed:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _publish(self, unfinished: Path, folder: Path, manifest: Manifest, checksums: dict[str, int]) -> None:
        """On rank 0, write the manifest, give the folder its final name, and remove what is not kept."""
        if dist.get_rank():
            return
        others = {p.name for p in unfinished.iterdir()} - checksums.keys()
        checksums |= {name: crc32_of(unfinished / name) for name in others}
        publish(unfinished, folder, manifest, checksums)
        aside = [old.rename(old.with_name(f"{old.name}.tmp")) for old in self.retention.superseded(self.run, folder)]
        remove = partial(_remove, aside)
        self.removal = self.thread.submit(remove) if self.asynchronous else _called(remove)

    def _agreed(self, manifest: Manifest, space: Space, do: Callable[[], None]) -> None:
        """Call a function on every rank. If it fails on any, raise CheckpointError on all."""

        def attempt() -> None:
            with checkpoint_errors(lambda error: self._message(manifest, space, error)):
                do()

        agreed(attempt, names_rank=False)

    def _message(self, manifest: Manifest, space: Space, error: BaseException) -> str:
        return cannot_save(f"step {manifest.step}", self.run, error, space)

    @contextmanager
    def _removed_on_failure(self, unfinished: Path) -> Iterator[None]:
        """On rank 0, remove the unfinished folder if saving fails."""
        try:
            yield
        except BaseException:
            if not dist.get_rank():
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _called(function: Callable[[], None]) -> Future[None]:
    """Call a function now, and return its outcome as a future."""
    future = Future[None]()
    try:
        function()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)
    return future


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _free_nbytes(run: Path) -> float:
    """Return the free bytes of a folder's device; infinity if the folder is not there, or the device does not say."""
    usage = shutil.disk_usage(run) if run.exists() else None
    return usage.free if usage and usage.total else math.inf


def _saved_nbytes(state: dict[str, Any]) -> int:
    """Return the bytes that all ranks together write for a sharded state. Every rank calls it."""
    shards = [s for s in nested_values(state) if hasattr(s, "replica_id") and is_main_replica(s.replica_id)]
    here = sum(s.data.numel() * s.data.element_size() for s in shards if s.data is not None and not s.data.is_meta)
    total = torch.tensor(here, dtype=torch.int64, device=device.current())
    dist.all_reduce(total)
    return int(total)


def _gathered(own: dict[str, int]) -> dict[str, int]:
    """Return the entries of all ranks."""
    parts: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in part.items()}
