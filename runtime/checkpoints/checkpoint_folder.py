"""Checkpoints on disk: how they are found, read and checked, and the messages about them. Free of torch.

    run/step-000200/        complete, or absent: ranks write step-000200.tmp, and rank 0 renames it when all are done
        checkpoint.json     the manifest (`manifest.py`), written last
        ...                 files of megatron.core.dist_checkpointing (torch_dist format)

A run folder belongs to one model. Checkpoints of another model are neither loaded nor overwritten.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cattrs
from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json

from .manifest import CONVERTER, MANIFEST_NAME, VERSION, Manifest, SavedFile, manifest_checksum, manifest_to_json

FOLDER_NAME = re.compile(r"step-(\d{6,})(?:-epoch-\d+)?(?:-loss-(\d+\.\d+|inf|nan))?")
NO_SPACE = {errno.ENOSPC: "no space left on the device", errno.EDQUOT: "disk quota exceeded"}
REPLACE = "copy it again from where it was saved, or choose another one"
NONE_INTACT = "no other checkpoint of this run is undamaged"
NONE_DAMAGED: Mapping[str, str] = {}
ALL_FILES = slice(None)


class CheckpointError(UserError):
    """A checkpoint that is damaged, belongs to another model, or cannot be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is incomplete, or whose files have changed."""


@frozen
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()  # messages about newer ones that cannot be used

    @property
    def notes(self) -> list[str]:
        """Return lines about newer checkpoints that cannot be used, and the one that is used instead."""
        return [f"skipped: {problem}; using {self.folder.name}" for problem in self.skipped]

    def check_averaged(self) -> None:
        """Raise UserError if it has no averaged weights."""
        if not self.manifest.averaged:
            raise UserError(
                f"{self.folder} has no averaged weights\nomit --averaged, or train with shard(…, average=0.999)"
            )


@frozen
class Retention:
    """Checkpoints that a run keeps: the newest ones, and those with the least validation loss."""

    last: int = 2  # the newest, and one more in case the newest is damaged
    best: int = 0

    def __attrs_post_init__(self) -> None:
        if self.last < 1 or self.best < 0:
            name, least, value = ("last", 1, self.last) if self.last < 1 else ("best", 0, self.best)
            raise UserError(f"--keep-{name} must be at least {least}, got {value}")

    def superseded(self, run: Path, saved: Path) -> list[Path]:
        """Return the whole checkpoints of a run that are not kept, oldest first. The one just saved is always kept.

        Later steps than the one just saved are of a checkpoint that could not be loaded: they neither count nor go.
        """
        folders = [folder for folder in checkpoint_folders(run) if _step(folder) <= _step(saved)]
        whole = [c for folder in folders if isinstance(c := _read_or_problem(folder), Checkpoint)]
        by_loss = [(c.manifest.validation_loss, c) for c in whole if c.manifest.validation_loss is not None]
        best = [c for _, c in sorted(by_loss, key=lambda pair: (pair[0] != pair[0], pair[0], -pair[1].manifest.step))]
        kept = {c.folder for c in (*whole[-self.last :], *best[: self.best])}
        return [c.folder for c in whole if c.folder not in kept]


def latest(run: Path, *, fingerprint: str, damaged: Mapping[str, str] = NONE_DAMAGED) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run folder, or None if there is none. Its `skipped` names damaged ones.

    Sizes of files are checked, contents are not. damaged: by name of a folder, a file whose contents have changed.

    Raise CheckpointError if all are damaged, or it belongs to another model: a run from step 0 would overwrite it.
    A fingerprint of an older form is not compared here; then `load` compares the names and shapes of all weights.
    """
    problems: list[CheckpointError] = []
    checkpoint = None
    for folder in reversed(checkpoint_folders(run)):
        found = _read_or_problem(folder)
        if folder.name in damaged and isinstance(found, Checkpoint):
            found = DamagedCheckpointError(
                unusable(folder, f"is damaged: the contents of {damaged[folder.name]} have changed")
            )
        if isinstance(found, Checkpoint):
            checkpoint = evolve(found, skipped=tuple(str(p).partition("\n")[0] for p in problems))
            break
        problems.append(found)
    if checkpoint is None:
        if problems:
            raise _none_usable(problems)
        return None
    manifest = checkpoint.manifest
    if manifest.has_comparable_fingerprint and manifest.fingerprint != fingerprint:
        raise CheckpointError(
            f"{run} holds checkpoints of another model: {manifest.model} "
            f"(fingerprint {manifest.fingerprint[:12]}, this model has {fingerprint[:12]})\n"
            "choose another folder with --out, or remove that one"
        )
    return checkpoint


def changed_files(checkpoint: Checkpoint, share: slice = ALL_FILES) -> list[str]:
    """Return the files whose contents are not those that were saved. share: those that are read, by order of names."""
    files = sorted(checkpoint.manifest.files.items())[share]
    try:
        return [name for name, file in files if crc32_of(checkpoint.folder / name) != file.crc32]
    except OSError as error:
        raise DamagedCheckpointError(unusable(checkpoint.folder, f"cannot be read: {error.strerror}")) from None


def newest_intact(
    run: Path,
    *,
    fingerprint: str,
    find: Callable[..., Checkpoint | None] = latest,
    changed: Callable[[Checkpoint], Sequence[str]] = changed_files,
) -> Checkpoint | None:
    """Return the newest checkpoint whose files have the contents that were saved; the rest is as for `latest`.

    find, changed: `latest` and `changed_files`, or what stands for them where several ranks share the work.
    """
    damaged: dict[str, str] = {}
    while found := find(run, fingerprint=fingerprint, damaged=damaged):
        files = changed(found)
        if not files:
            return found
        damaged[found.folder.name] = files[0]
    return None


def _none_usable(problems: Sequence[CheckpointError]) -> CheckpointError:
    """Return the error of a run none of whose checkpoints can be used. Only damaged ones may be removed."""
    if other := next((p for p in problems if not isinstance(p, DamagedCheckpointError)), None):
        return other
    which = "that folder" if len(problems) == 1 else f"the {len(problems)} step-… folders"
    fix = f"{NONE_INTACT}: remove {which} to start at step 0, or choose another folder with --out"
    return DamagedCheckpointError(f"{str(problems[0]).splitlines()[0]}\n{fix}")


def _read_or_problem(folder: Path) -> Checkpoint | CheckpointError:
    try:
        return read(folder)
    except CheckpointError as problem:
        return problem


def read(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raise CheckpointError if it is incomplete or changed."""
    try:
        contents = read_json(folder / MANIFEST_NAME)
        saved_version = contents.get("version") if isinstance(contents, dict) else None
        if isinstance(saved_version, int) and not 1 <= saved_version <= VERSION:
            known = f"formats 1 to {VERSION}"
            fix = "install the megaloom that wrote it, or choose another folder with --out"
            raise CheckpointError(unusable(folder, f"has format {saved_version}; this megaloom reads {known}", fix))
        checksum = contents.pop("checksum", None) if isinstance(contents, dict) else None
        if saved_version != 1 and checksum != manifest_checksum(contents):
            raise ValueError("checksum")
        manifest = CONVERTER.structure(contents, Manifest)
        if manifest.samples < 0 or not manifest.files or any(Path(name).name != name for name in manifest.files):
            raise ValueError("samples or files")
        if manifest.step != _step(folder):
            fix = f"rename it to {manifest.folder_name}"
            raise CheckpointError(
                unusable(folder, f"is that of step {manifest.step}: its folder has another name", fix)
            )
        wrong = [name for name, file in manifest.files.items() if not _has_size(folder / name, file.nbytes)]
    except OSError as error:
        raise DamagedCheckpointError(unusable(folder, f"has no readable {MANIFEST_NAME} ({error.strerror})")) from None
    except (ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(unusable(folder, f"has an invalid {MANIFEST_NAME}")) from None
    if wrong:
        raise DamagedCheckpointError(unusable(folder, f"is damaged: {wrong[0]} is missing or has the wrong size"))
    return Checkpoint(folder, manifest)


def crc32_of(path: Path) -> int:
    """Return the CRC of a file. torch stores CRCs in its files but does not check them on loading."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def publish(unfinished: Path, folder: Path, manifest: Manifest, checksums: Mapping[str, int]) -> None:
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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@frozen
class Space:
    """Bytes that a checkpoint needs, and bytes that are free on its device."""

    needed: int
    free: float  # infinity if unknown

    def __str__(self) -> str:
        size, unit = next(((n, u) for n, u in ((2**30, "GiB"), (2**20, "MiB")) if self.needed >= n), (2**10, "KiB"))
        free = "" if math.isinf(self.free) else f", {self.free / size:.1f} free"
        return f"needs {self.needed / size:.1f} {unit}{free}"


def cannot_save(what: str, run: Path, error: BaseException, space: Space | None = None) -> str:
    """Return the message for a failed write in a run folder: cause, what is saved, what to do."""
    # torch's writer does not pass on the reason, only its own "[enforce fail at inline_container.cc…".
    from_torch = isinstance(error, RuntimeError) and ("inline_container" in str(error) or "StreamWriter" in str(error))
    full = from_torch and space is not None and space.free < space.needed
    if full or (isinstance(error, OSError) and error.errno in NO_SPACE):
        reason = NO_SPACE[errno.ENOSPC if full else error.errno]  # type: ignore[attr-defined]
        reason, remedy = reason + (f" ({space})" if space else ""), "free some space"
    elif isinstance(error, OSError) and error.strerror:
        reason, remedy = error.strerror[0].lower() + error.strerror[1:], "make the folder writable"
    else:
        reason = "torch failed to write a file" if from_torch else first_sentence(error)
        remedy = "check the disk"
    return f"cannot save {what} in {run}: {reason}. {saved_step(run)}; {remedy} and run the same command again"


def saved_step(run: Path) -> str:
    """Return a sentence that names the last saved step of a run."""
    folders = checkpoint_folders(run)
    return f"Step {_step(folders[-1])} is saved" if folders else "No step is saved yet"


def first_sentence(error: BaseException) -> str:
    """Return the type and the first sentence of an error, on one line."""
    return f"{type(error).__name__}: {error}".partition(". ")[0].splitlines()[0]


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the step-… folders of a run, oldest first; unfinished ones have another name."""
    folders = (path for path in run.glob("step-*") if FOLDER_NAME.fullmatch(path.name))
    return sorted(folders, key=lambda path: (_step(path), path.name))


def _step(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    assert match, f"{folder} is not the folder of a checkpoint"
    return int(match[1])


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def unusable(folder: Path, problem: str, fix: str = REPLACE) -> str:
    """Return the message for a checkpoint that cannot be used."""
    return f"checkpoint {folder} {problem}\n{fix}"


def other_tensors(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    """Return the error for a whole checkpoint that has other tensors than the model. Its advice removes nothing."""
    fix = "give the model that it was saved from, or choose another folder with --out"
    saved = f"; it was saved from {checkpoint.manifest.model} under {checkpoint.manifest.layout}"
    return CheckpointError(unusable(checkpoint.folder, f"cannot be loaded: {problem}{saved}", fix))


def damaged_contents(checkpoint: Checkpoint, problem: str) -> DamagedCheckpointError:
    """Return the error for a checkpoint whose files have their checksums but cannot be read."""
    folder = checkpoint.folder
    older = (path for path in reversed(checkpoint_folders(folder.parent)) if path < folder)
    intact = next((path.name for path in older if _is_intact(path)), None)
    start = f"continue from {intact}, the newest undamaged one" if intact else f"start at step 0: {NONE_INTACT}"
    fix = f"remove that folder to {start}; or choose another one with --out"
    return DamagedCheckpointError(unusable(folder, f"is damaged: {problem}", fix))


def _is_intact(folder: Path) -> bool:
    found = _read_or_problem(folder)
    return isinstance(found, Checkpoint) and not changed_files(found)
