"""A run in one file: a zip of model, plan, options, tokenizer and newest checkpoint. Packing and unpacking run no code.

The file begins with artefact.json, which has the version. Only names that a run folder may have are unpacked. Commands
that use a run take the file as well: `opened` unpacks it for as long as they run.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json
from megaloom.runtime.checkpoints.checkpoint_folder import newest_intact
from megaloom.runtime.launch.rendezvous import started_by_launcher
from megaloom.runtime.weights.hugging_face_files import HF_FOLDER

from .run_folder import MODEL_FILE, OPTIONS_NAME, PLAN_NAME, TOKENIZER_NAME, load_run

ARTEFACT_VERSION = 1
HEAD_NAME = "artefact.json"
PACKED_SUFFIX = ".megaloom"
PACKED = re.compile(
    r"[A-Za-z0-9_][\w.-]*|(tokenizer|hugging-face|step-\d{6,}(-epoch-\d+)?(-loss-[\w.]+)?)/\.?[A-Za-z0-9_][\w.-]*",
    re.ASCII,
)
LARGEST_HEAD = 1 << 16  # bytes
COPIED_NBYTES = 1 << 24  # bytes at a time


def pack(run: Path, output: Path, say: Callable[[str], object] = str) -> Path:
    """Write model, plan, options, metrics and newest intact checkpoint of a run into one file, and return it.

    say: gets a line about each newer checkpoint that is damaged.
    Raise UserError if the folder is no run, or the file exists or cannot be written.
    """
    loaded = load_run(run)
    if output.exists():
        raise UserError(f"{output} exists\nremove it, or give another file with -o")
    checkpoint = newest_intact(run, fingerprint=loaded.plan.fingerprint)
    for note in checkpoint.notes if checkpoint else ():
        say(note)
    files = [run / name for name in (MODEL_FILE, PLAN_NAME, OPTIONS_NAME, "metrics.jsonl") if (run / name).is_file()]
    files += sorted(path for name in (TOKENIZER_NAME, HF_FOLDER) for path in (run / name).glob("*") if path.is_file())
    files += sorted(checkpoint.folder.iterdir()) if checkpoint else []
    unfinished = output.with_name(f".{output.name}.tmp")
    head = {"version": ARTEFACT_VERSION, "fingerprint": loaded.plan.fingerprint}
    try:
        with zipfile.ZipFile(unfinished, "w") as archive:
            archive.writestr(HEAD_NAME, json.dumps(head))
            for path in files:
                archive.write(path, path.relative_to(run).as_posix())
        unfinished.replace(output)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise UserError(f"cannot write {output}: {error.strerror}\ngive another file with -o") from None
    return output


@contextmanager
def opened(run: Path) -> Iterator[Path]:
    """Give the folder of a run; of a packed one, a temporary folder that is removed at the end of the context.

    Raise UserError for a packed run that cannot be read, and on ranks of torchrun or srun, which share no such folder.
    """
    if not is_packed(run):
        yield run
        return
    if started_by_launcher():
        raise UserError(
            f"{run} is a packed run, which ranks of torchrun or srun do not unpack\n"
            f"unpack it into a folder that they share: megaloom unpack {run} -o FOLDER"
        )
    with TemporaryDirectory(prefix="megaloom-") as temporary:
        folder = Path(temporary) / run.stem
        yield unpack(run, folder, f"set TMPDIR to a folder with room, or unpack it: megaloom unpack {run} -o FOLDER")


def is_packed(path: Path) -> bool:
    """Return whether a file is a packed run by its name or contents."""
    return path.is_file() and (path.suffix == PACKED_SUFFIX or zipfile.is_zipfile(path))


def unpack(artefact: Path, folder: Path, advice: str = "give another folder") -> Path:
    """Write the run in a file into a new folder, and return the folder. advice: for a folder that cannot be written.

    Raise UserError if the file is damaged, of another version, or has a name that no run folder has, such as one with
    "..". Nothing is written then.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists\nremove it, or give another folder with -o")
    if not artefact.is_file():
        raise UserError(f"no file {artefact}\ngive a file that `megaloom pack` wrote")
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with zipfile.ZipFile(artefact) as archive:
            _check_head(artefact, archive)
            entries = [_checked(artefact, info) for info in archive.infolist() if info.filename != HEAD_NAME]
            if len({info.filename for info in entries}) < len(entries):
                raise UserError(f"{artefact} has two files of one name\nget the file again from where it was packed")
            unfinished.mkdir(parents=True)
            for info in entries:
                target = unfinished / info.filename
                target.parent.mkdir(exist_ok=True)
                with archive.open(info) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, COPIED_NBYTES)
        load_run(unfinished)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{artefact} is damaged or no artefact: {error}\npack the run again") from None
    except OSError as error:
        raise UserError(f"cannot unpack {artefact} into {folder}: {error.strerror}\n{advice}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _check_head(artefact: Path, archive: zipfile.ZipFile) -> None:
    """Raise UserError unless the archive is an artefact of this version."""
    try:
        with archive.open(HEAD_NAME) as file:
            head = parse_json(file.read(LARGEST_HEAD))
    except (KeyError, ValueError):
        head = None
    if not isinstance(head, dict):
        raise UserError(f"{artefact} is a zip, but no artefact: it has no {HEAD_NAME}\npack a run: megaloom pack RUN")
    if head.get("version") != ARTEFACT_VERSION:
        raise UserError(
            f"{artefact} has version {head.get('version')!r}; this megaloom reads version {ARTEFACT_VERSION}\n"
            "unpack it with the megaloom that packed it, and pack it again"
        )


def _checked(artefact: Path, info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Return an entry of the archive. Raise UserError for a link, or a name that no run folder has."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or not PACKED.fullmatch(info.filename) or info.orig_filename != info.filename:
        raise UserError(
            f"{artefact} has an entry that no run folder has: {info.orig_filename!r:.80}\n"
            "do not use this file; get it again from where it was packed"
        )
    return info
