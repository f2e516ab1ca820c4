"""Checkpoints: saved under one plan, loaded under any other of the same model.

    run/step-000200/        whole, or not there at all: written as step-000200.tmp and renamed by rank 0 when every
        checkpoint.json     rank is done. This note is written last; it lists all other files with their sizes.
        ...                 megatron.core.dist_checkpointing's own (torch_dist)

A run folder belongs to one model: checkpoints of another are neither loaded nor overwritten.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import cattrs
from attrs import evolve, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.json_form import is_current

VERSION = 1
NOTE = "checkpoint.json"
KEEP = 2  # the last ones; the one before the last is for when the last was damaged
NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(UserError):
    """A checkpoint that is damaged or not this model's."""


class Stateful(Protocol):
    """What has a state over all ranks, under names that do not depend on the layout."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """This rank's shards; `loading`: as a place to load into."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was loaded for `sharded_state(loading=True)`."""


@frozen
class File:
    """What a file must be to be whole."""

    nbytes: int
    crc32: int


@frozen(kw_only=True)
class Note:
    """What a checkpoint is of."""

    version: int = VERSION
    step: int
    samples: int  # consumed, of training text
    model: str
    fingerprint: str
    data: str  # digest of the corpus
    recipe: dict[str, float]
    layout: str  # that it was saved under
    libraries: dict[str, str] = field(factory=lambda: {name: version(name) for name in ("torch", "megatron-core")})
    files: dict[str, File] = field(factory=dict)  # by name; filled in when it is saved


@frozen
class Checkpoint:
    """A checkpoint that lies whole in its folder."""

    folder: Path
    note: Note


def latest(run: Path, *, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint of a run folder, None if it has none.

    CheckpointError if that one is damaged or of another model: going on from an older one without a word would lose
    work, and starting anew would overwrite it.
    """
    there = folders(run)
    if not there:
        return None
    found = read(there[-1])
    if not is_current(found.note.fingerprint):
        raise CheckpointError(
            f"the checkpoints in {run} were saved by another version of megaloom, which identified models differently "
            f"(fingerprint {found.note.fingerprint[:12]}, this model's is {fingerprint[:12]})\n"
            "go on with the version that saved them, or start a new run in another folder (--out)"
        )
    if found.note.fingerprint != fingerprint:
        raise CheckpointError(
            f"{run} holds checkpoints of another model: {found.note.model} "
            f"(fingerprint {found.note.fingerprint[:12]}, this model's is {fingerprint[:12]})\n"
            "give this run a folder of its own (--out), or remove that one"
        )
    return found


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; CheckpointError if it is not all there."""
    try:
        note = cattrs.structure(json.loads((folder / NOTE).read_text()), Note)
        if note.version != VERSION:
            raise CheckpointError(_damaged(folder, f"has format {note.version}, this program reads {VERSION}"))
        wrong = [name for name, file in note.files.items() if not _has_size(folder / name, file.nbytes)]
    except OSError as error:
        raise CheckpointError(_damaged(folder, f"has no readable {NOTE} ({error.strerror})")) from None
    except (ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_damaged(folder, f"has a {NOTE} that cannot be read")) from None
    if wrong:
        raise CheckpointError(_damaged(folder, f"is damaged: {wrong[0]} is missing or not of its size"))
    return Checkpoint(folder, note)


def save(engine: Stateful, run: Path, note: Note) -> Path:
    """Save all ranks' state and `note` as run/step-…, then drop all but the last KEEP. Every rank calls it.

    CheckpointError if it cannot be written. A save that was killed leaves a .tmp folder, which the next clears away.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megaloom.runtime.megatron.checkpoint_writer import Writer

    folder = run / f"step-{note.step:06d}"
    aside = folder.with_name(f"{folder.name}.tmp")
    first = dist.get_rank() == 0
    failed = f"step {note.step} cannot be saved in {run}: "
    with _telling(lambda cause: f"{failed}{cause}\n{remains(run)}"), _no_half(aside) if first else nullcontext():
        if first:
            for left in run.glob("step-*.tmp"):
                shutil.rmtree(left)
            aside.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(engine.sharded_state(), str(aside), Writer())
        dist.barrier()
        checksums = _checksums(aside)
        if first:  # the others look no more: it may have been renamed by then
            files = {name: File((aside / name).stat().st_size, crc32) for name, crc32 in checksums.items()}
            _publish(aside, folder, evolve(note, files=files))
            for old in folders(run)[:-KEEP]:
                left = old.rename(old.with_name(f"{old.name}.tmp"))  # never a half of a checkpoint under its own name
                shutil.rmtree(left)
        dist.barrier()
    return folder


def load(engine: Stateful, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, saved under whatever layout, into the engine's own. Every rank calls it.

    CheckpointError if its bytes are not those that were saved, or are not what this engine has.
    """
    from megatron.core import dist_checkpointing

    folder = checkpoint.folder
    with _telling(lambda cause: _damaged(folder, f"cannot be loaded: {cause}")), warnings.catch_warnings():
        found = _checksums(folder)
        for name, file in checkpoint.note.files.items():
            if found.get(name) != file.crc32:
                raise CheckpointError(_damaged(folder, f"is damaged: the bytes of {name} are not what was saved"))
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron-core calls torch by an old name
        state = dist_checkpointing.load(engine.sharded_state(loading=True), str(folder))
    engine.load_state(state)


@contextmanager
def _no_half(aside: Path) -> Iterator[None]:
    """What a failure leaves is removed: it takes room, which may be what was lacking."""
    try:
        yield
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def _telling(message: Callable[[str], str]) -> Iterator[None]:
    """Failures of torch's and megatron-core's checkpoints, and of the disk, as CheckpointError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException  # what failed on any rank; it is no Exception

    try:
        yield
    except (CheckpointException, CheckpointingException, OSError) as error:
        failed = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        cause, *_ = [*failed, error]
        said = f"{type(cause).__name__}: {cause}".partition(". ")[0].splitlines()[0]
        raise CheckpointError(message(said)) from error


def _checksums(folder: Path) -> dict[str, int]:
    """The CRC of each file but the note, on every rank; the work is shared out."""
    import torch.distributed as dist

    names = sorted(path.name for path in folder.iterdir() if path.name != NOTE)
    mine = {name: _crc32(folder / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {name: crc32 for part in everyones for name, crc32 in part.items()}


def _crc32(path: Path) -> int:
    """torch keeps a CRC within its files and does not look at it when it loads them."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def _publish(aside: Path, folder: Path, note: Note) -> None:
    """Rename only what has reached the disk."""
    (aside / NOTE).write_text(json.dumps(cattrs.unstructure(note), indent=1))
    for path in [*aside.iterdir(), aside]:
        _sync(path)
    aside.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folders(run: Path) -> list[Path]:
    """The step-… folders, oldest first; what is still being written has another name."""
    found = [(int(match[1]), path) for path in run.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def remains(run: Path) -> str:
    """What there still is of a run."""
    there = folders(run)
    return (
        f"{there[-1]} is whole; make room, and the same command goes on from it" if there else "nothing was saved yet"
    )


def _damaged(folder: Path, what: str) -> str:
    """The message for a checkpoint that cannot be used."""
    older = [path for path in folders(folder.parent) if path < folder]
    start = f"go on from {older[-1].name}" if older else "start anew"
    return f"checkpoint {folder} {what}\nremove that folder to {start}, or give another one with --out"
